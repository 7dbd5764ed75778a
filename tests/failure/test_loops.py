"""Test the training loops of homework/ and two examples: equal results with any number of ranks, and resuming."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mindnlp_dp.launch.processes.environment import free_port
from mindnlp_dp.runtime.versions import mindnlp_series

HOMEWORK = Path(__file__).resolve().parent.parent.parent / "homework"
SHORT_LOOP = str(Path(__file__).with_name("short_loop.py"))
RESULT = re.compile(r"accuracy ([0-9.]+), sum of the weights (-?[0-9.]+)")


def code_of(name):
    """Return a script's lines after its docstring."""
    return (HOMEWORK / name).read_text().rpartition('"""\n')[2].splitlines()


@pytest.mark.core
def test_only_marked_lines_differ_between_the_two_homework_loops():
    changes = list(difflib.ndiff(code_of("loop_mindspore.py"), code_of("loop_mindnlp_dp.py")))
    added = [line[2:] for line in changes if line.startswith("+ ") and line[2:]]
    assert len(added) == 4
    assert all(line.endswith("  # changed") for line in added)
    removed = [line[2:] for line in changes if line.startswith("- ") and line[2:]]
    assert removed == [
        "from mindspore.communication import init",
        "init()",
        'mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)',
        "grad_fn = mindspore.value_and_grad(forward_fn, None, network.trainable_params())",
        "grad_reducer = nn.DistributedGradReducer(optimizer.parameters)",
        "def step(batch):",
        "    loss, gradients = grad_fn(*batch)",
        "    optimizer(grad_reducer(gradients))",
        "    return float(loss.asnumpy())",
    ]


@pytest.mark.skipif(mindnlp_series() != "0.4", reason="the example is for MindNLP 0.4")
@pytest.mark.parametrize("flags", [[], ["--lora"]])
def test_the_preference_example_has_the_same_dpo_loss_with_one_and_two_ranks(launch, tmp_path, flags):
    """The example has DPO's loss, with a second model or the one without its adapters as the reference."""
    found = {}
    for nproc in (1, 2):
        job = launch(HOMEWORK.parent / "examples/preference.py", "--output-dir", "out", *flags, nproc=nproc)
        assert job.exit_code == 0, job.output
        found[nproc] = re.search(r"loss ([0-9.]+), the chosen answer is preferred in (\d+)%", job.output)
        assert found[nproc], job.output
    assert float(found[2][1]) == pytest.approx(float(found[1][1]), abs=2e-6)
    assert found[2][2] == found[1][2]
    assert int(found[1][2]) > 80


@pytest.mark.slow
def test_sentence_embeddings_do_not_depend_on_the_number_of_ranks(tmp_path):
    """The script's model has dropout, and its loss compares the texts of all ranks."""
    script = HOMEWORK.parent / "scripts/sentence_embeddings.py"
    flags = ["--max-steps", "5", "--num-layers", "1", "--batch-size", "21", "--max-length", "12"]
    found = []
    for ranks in (1, 3):
        command = [
            sys.executable,
            "-m",
            "mindnlp_dp",
            "run",
            "--nproc",
            str(ranks),
            "--log-dir",
            str(tmp_path / "logs"),
        ]
        job = subprocess.run(
            [*command, str(script), *flags, "--output-dir", str(tmp_path / str(ranks))],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500,
        )  # fmt: skip
        assert job.returncode == 0, job.stdout
        found.append(re.search(r"mean loss ([0-9.]+) in 5 updates\n.* before, ([0-9.]+) after", job.stdout).groups())
        written = set(os.listdir(tmp_path / str(ranks) / "model"))
        assert {"model.safetensors", "config.json", "tokenizer.json"} <= written
    (loss, accuracy), other = (tuple(map(float, numbers)) for numbers in found)
    assert 0 < loss < 3.05
    assert 0 < accuracy <= 1
    assert other == (pytest.approx(loss, rel=2e-5), pytest.approx(accuracy, abs=0.002))


def run(command, log):
    environment = {**os.environ, "DEVICE_TARGET": "CPU"}
    subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, timeout=200)
    text = log.read_text()
    found = RESULT.findall(text)
    assert len(found) == 1, text
    return tuple(map(float, found[0]))


def with_msrun(folder, name):
    command = [shutil.which("msrun"), "--worker_num=2", "--local_worker_num=2", f"--master_port={free_port()}"]
    return run(
        [*command, f"--log_dir={folder}", "--join=True", SHORT_LOOP, str(HOMEWORK / name)], folder / "worker_0.log"
    )


def with_ours(folder, name):
    command = [sys.executable, "-m", "mindnlp_dp", "run", "--nproc", "2", "--log-dir", str(folder)]
    return run([*command, SHORT_LOOP, str(HOMEWORK / name)], folder / "latest" / "worker_0.log")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return with_msrun(tmp_path_factory.mktemp("theirs"), "loop_mindspore.py")


@pytest.mark.parametrize(
    "launch",
    [pytest.param(with_msrun, marks=pytest.mark.slow), pytest.param(with_ours, marks=pytest.mark.core)],
    ids=["msrun", "mpi"],
)
def test_both_homework_loops_end_with_the_same_accuracy_and_sum_of_weights(tmp_path, theirs, launch):
    mine = launch(tmp_path / "mine", "loop_mindnlp_dp.py")
    assert mine[0] == pytest.approx(theirs[0], abs=0.002)
    assert mine[1] == pytest.approx(theirs[1], rel=1e-4)
    # The model learns from a third of the phrases; guessing one of 29 languages would give 0.03.
    assert mine[0] > 0.4


@pytest.mark.core
def test_a_terminated_custom_loop_resumes_and_ends_with_the_same_weights(tmp_path):
    def command(folder):
        logs = tmp_path / f"{folder}-logs"
        run = [sys.executable, "-m", "mindnlp_dp", "run", "--nproc", "2", "--log-dir", str(logs)]
        return [*run, str(HOMEWORK / "loop_resumable.py"), str(tmp_path / folder)]

    def output(folder):
        return subprocess.run(command(folder), capture_output=True, text=True, timeout=200).stdout

    whole = output("whole").splitlines()[-1]
    assert re.fullmatch(r"accuracy 0\.[0-9]+, loss [0-9.]+, digest [0-9a-f]{16}", whole)
    with subprocess.Popen(command("killed"), stdout=subprocess.PIPE, text=True) as job:
        for line in job.stdout:
            if "update 75" in line:
                # The launcher ends its ranks at once, without output.
                job.terminate()
    resumed = output("killed").splitlines()
    assert "continuing after update " in resumed[0]
    assert resumed[-1] == whole
