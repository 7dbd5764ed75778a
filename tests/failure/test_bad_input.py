"""A user's mistakes with the training script: one message on the terminal, and an untouched output folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from conftest import BACKENDS, ROOT

FINETUNE = ROOT / "scripts" / "finetune.py"
GOOD = "text,label\n" + "".join(f"this is text {i},{'even' if i % 2 == 0 else 'odd'}\n" for i in range(6))

# name: training file, test file, further flags, the message.
MISTAKES = {
    "missing file": (None, GOOD, [], r"train.csv: there is no such file"),
    "malformed line": (GOOD + "one,two,three\n", GOOD, [], "train.csv, line 8: 3 fields, but the header has 2"),
    "unknown label": (
        GOOD, GOOD + "a,new\n", [], "test.csv, row 7: the label 'new' does not occur in the training split",
    ),
    "empty split": (GOOD, "text,label\n", [], "test.csv: there are no rows below the header"),
    "one label": ("text,label\na,x\nb,x\n", GOOD, [], "all rows have the label 'x'; there is nothing to tell apart"),
    "batch does not divide": (
        GOOD, GOOD, ["--global-batch-size", "30", "--micro-batch-size", "4"],
        "global_batch_size (30) must be divisible by micro_batch_size (4) * world_size (2) = 8; use 32 or 24",
    ),
    "batch does not divide among ranks": (
        GOOD, GOOD, ["--global-batch-size", "5"],
        "global_batch_size (5) must be divisible by the 2 ranks; use 6 or 4",
    ),
}  # fmt: skip


def run(launch, tmp_path, train, test, flags, **options):
    for name, content in (("train.csv", train), ("test.csv", test)):
        if content is not None:
            (tmp_path / name).write_text(content)
    output = tmp_path / "out"
    job = launch(
        FINETUNE, "--train-file", "train.csv", "--test-file", "test.csv", "--output-dir", output, *flags, **options
    )
    return job, output


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_message_and_nothing_written(launch, tmp_path, mistake):
    train, test, flags, message = MISTAKES[mistake]
    job, output = run(launch, tmp_path, train, test, flags)
    assert job.exit_code == 1
    assert job.output.count("error:") == 1, job.output
    assert f"{message}\n" in job.output
    assert "Traceback" not in job.output
    assert not output.exists()


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_ranks_than_samples(launch, tmp_path, backend):
    two = "text,label\nyes,a\nno,b\n"
    job, output = run(launch, tmp_path, two, two, ["--global-batch-size", "3"], nproc=3, backend=backend)
    assert job.exit_code == 1
    assert (
        "error: 2 training samples for 3 ranks: every rank needs at least one; start at most 2 processes" in job.output
    )
    assert not output.exists()


def test_an_unknown_config_key(launch, tmp_path):
    (tmp_path / "c.yaml").write_text("epochs: 3\n")
    job = launch(FINETUNE, "--config", "c.yaml")
    assert job.exit_code == 1
    assert "error: c.yaml: unknown key 'epochs'" in job.output


@pytest.mark.parametrize("path", [FINETUNE, ROOT / "homework" / "train_data_parallel.py"], ids=lambda path: path.name)
def test_no_name_for_the_results(launch, tmp_path, path):
    job = launch(path, "--model", "tiny", "--output-dir=")
    assert job.exit_code == 1
    assert job.output.count("error:") == 1, job.output
    assert "error: output_dir must name a folder, got ''\n" in job.output
    assert "Traceback" not in job.output
    assert sorted(os.listdir(tmp_path)) == ["logs"]


def test_results_that_cannot_be_written_leave_no_half(launch, tmp_path):
    """The plot's place is taken by a folder: the error is every rank's, and no report claims success."""
    (tmp_path / "out" / "training.png").mkdir(parents=True)
    job, output = run(launch, tmp_path, GOOD, GOOD, ["--max-steps", "1", "--global-batch-size", "4"])
    assert job.exit_code == 1
    assert "IsADirectoryError" in job.output
    assert not (output / "report.json").exists()
    assert not [name for name in os.listdir(output) if name.startswith(".")]


def test_a_run_goes_on_from_its_checkpoints(launch, tmp_path):
    """Three updates, then the same command for five; the report is that of five at once. Then they are damaged."""
    flags = ["--global-batch-size", "4", "--save-steps", "1", "--dropout", "0.1", "--resume", "true"]
    _, whole = run(launch, tmp_path, GOOD, GOOD, [*flags, "--num-epochs", "3"])
    expected = json.loads((whole / "report.json").read_text())
    assert expected["steps"] == 6
    shutil.rmtree(whole / "checkpoint-6")
    os.remove(whole / "report.json")
    job, output = run(launch, tmp_path, GOOD, GOOD, [*flags, "--num-epochs", "3"])
    assert job.exit_code == 0, job.output
    report = json.loads((output / "report.json").read_text())
    assert (report["replica_digest"], report["steps"]) == (expected["replica_digest"], 6)

    for checkpoint in output.glob("checkpoint-*"):
        (checkpoint / "model.safetensors").write_bytes(b"")
    job, output = run(launch, tmp_path, GOOD, GOOD, flags)
    assert job.exit_code == 1
    assert "error: no complete checkpoint in" in job.output
    assert "is damaged: model.safetensors has 0 bytes" in job.output
    assert "Traceback" not in job.output


def test_the_scripts_say_which_python_they_need():
    done = subprocess.run(
        ["bash", "-c", f"source {ROOT}/scripts/environment.sh && ensure_environment mpi"],
        env={**os.environ, "PYTHON": "/bin/false", "VENV": "/tmp/mindnlp-dp-no-such-venv"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == "error: Python 3.9 to 3.12 is needed, and /bin/false is not; set PYTHON=/path/to/python3.11\n"
