"""Test mistakes that appear only at run time: the terminal shows one sentence for each."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from conftest import CORE_UNDER_MPI, ROOT, run_one_after_another

NO_INIT = """
import mindspore, mindnlp_dp as dp
print("trained something")
"""

STOCK_TRAINER = """
import mindnlp_dp as dp
dp.init_process_group()
from mindnlp.engine import Trainer, TrainingArguments
from mindspore.dataset import GeneratorDataset
from models import Rows, tiny_roberta
source = [(row.input_ids[0], row.labels[0]) for row in [Rows(1)] * 4]
args = TrainingArguments("out", max_steps=1, disable_tqdm=True)
Trainer(tiny_roberta(), args, train_dataset=GeneratorDataset(source, ["input_ids", "labels"])).train()
"""

OTHER_MODEL = """
import mindnlp_dp as dp
group = dp.init_process_group()
from models import Rows, tiny_roberta
dp.DataParallelTrainer(tiny_roberta(num_layers=1 + group.rank), dp.DataParallelArguments("out"), train_dataset=Rows(4))
"""

SHUFFLED_BY_RANK = """
import mindnlp_dp as dp
group = dp.init_process_group()
from models import Rows, tiny_roberta, train
train(tiny_roberta(), Rows(40, seed=group.rank), "out")
"""

SMALL_EVALUATION = """
import mindnlp_dp as dp
group = dp.init_process_group()
from models import Rows, tiny_roberta
args = dp.DataParallelArguments("out", disable_tqdm=True)
metrics = dp.DataParallelTrainer(tiny_roberta(), args, eval_dataset=Rows(1)).evaluate()
print(metrics["eval_loss"] > 0)
"""


@pytest.mark.parametrize("backend", CORE_UNDER_MPI)
def test_a_script_without_init_process_group_gives_a_warning(launch, backend):
    job = launch(NO_INIT, backend=backend)
    assert job.exit_code == 0
    assert job.output == (
        "trained something\n"
        "warning: this script never called mindnlp_dp.init_process_group(): 2 processes did the same work "
        "independently\n"
    )


@pytest.fixture(scope="module")
def backend_and_ends(request, tmp_path_factory):
    """Run the mistakes that raise on every rank, in one job for each backend."""
    folder = tmp_path_factory.mktemp("mistakes")
    runs = {}
    for name, text in {"stock": STOCK_TRAINER, "other model": OTHER_MODEL, "shuffled": SHUFFLED_BY_RANK}.items():
        (folder / f"{name}.py").write_text(text)
        runs[name] = [folder / f"{name}.py"]
    return request.param, run_one_after_another(folder, runs, backend=request.param)


@pytest.mark.parametrize("backend_and_ends", CORE_UNDER_MPI, indirect=True)
def test_the_trainer_of_mindnlp_is_refused_with_two_ranks(backend_and_ends):
    backend, ends = backend_and_ends
    by = {"mpi": "mpirun", "mindspore": "msrun"}[backend]
    for rank in ends["stock"]:
        assert rank.exit_code == 1
        assert (
            f"RuntimeError: {by} started 2 processes, and MindNLP's own Trainer would train 2 separate models; call "
            "mindnlp_dp.init_process_group() and use mindnlp_dp.DataParallelTrainer"
        ) in rank.output


@pytest.mark.parametrize("backend_and_ends", CORE_UNDER_MPI, indirect=True)
def test_models_that_differ_between_ranks_are_refused(backend_and_ends):
    for rank in backend_and_ends[1]["other model"]:
        assert rank.exit_code == 1
        assert "models differ by construction: rank 0 has 'classifier.dense.weight'" in rank.output
        assert "build the same model on every rank" in rank.output


@pytest.mark.parametrize("backend_and_ends", CORE_UNDER_MPI, indirect=True)
def test_data_sets_that_differ_between_ranks_are_refused(backend_and_ends):
    for rank in backend_and_ends[1]["shuffled"]:
        assert rank.exit_code == 1
        assert "sample 0 of rank 1 is not that of rank 0: its column 'input_ids' holds int64 (8,) [" in rank.output
        assert (
            "; the data set was shuffled or built with a seed that differs by rank; give every rank the same one"
            in rank.output
        )


def test_evaluation_accepts_fewer_samples_than_ranks(launch):
    job = launch(SMALL_EVALUATION, nproc=3)
    assert job.exit_code == 0, job.output
    assert job.output.endswith("True\n")


def test_more_ranks_than_devices_are_refused(launch):
    job = launch(NO_INIT, nproc=3, DEVICE_TARGET="GPU", CUDA_VISIBLE_DEVICES="0,1")
    assert job.exit_code == 2
    assert job.output == "mindnlp-dp run: 3 workers, but this host has 2 GPU devices to use; start at most 2\n"


def run_msrun_script(name, *arguments, **environ):
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / name), *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
    )


def test_the_msrun_script_refuses_a_master_port_in_use():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        done = run_msrun_script("launch_msrun.sh", DEVICE="CPU", MASTER_PORT=str(port))
    assert done.returncode == 2
    assert done.stderr == f"error: port {port} is in use; set MASTER_PORT to another one, such as {port + 100}\n"


HOSTS = {"MASTER_ADDR": "127.0.0.1", "NNODES": "2", "NODE_RANK": "0", "DEVICE": "CPU"}


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "environ", "message"),
    [
        ("launch_msrun.sh", {"WORKER_NUM": "0"}, "WORKER_NUM must be at least 1, got '0'"),
        ("launch_msrun.sh", {"WORKER_NUM": "two"}, "WORKER_NUM must be at least 1, got 'two'"),
        ("launch_msrun.sh", {"DEVICE": "TPU"}, "DEVICE must be Ascend, GPU or CPU, got 'TPU'"),
        ("launch_msrun.sh", {"MASTER_PORT": "x"}, "MASTER_PORT must be at least 1, got 'x'"),
        (
            "launch_msrun.sh", {"DEVICE": "GPU", "CUDA_VISIBLE_DEVICES": "0"},
            "2 workers, but this host has 1 GPU devices to use; start at most that many, or try DEVICE=CPU",
        ),
        (
            "launch_msrun.sh", {"DEVICE": "Ascend", "ASCEND_RT_VISIBLE_DEVICES": ""},
            "2 workers, but this host has 0 Ascend devices to use; start at most that many, or try DEVICE=CPU",
        ),
        (
            "launch_msrun.sh", {"DEVICE": "Ascend", "ASCEND_RT_VISIBLE_DEVICES": "1, 2,3"},
            "ASCEND_RT_VISIBLE_DEVICES='1, 2,3' is not a list for CANN, which takes ascending ids and commas, without "
            "spaces; write, for example, ASCEND_RT_VISIBLE_DEVICES=1,2,3",
        ),
        pytest.param(
            "launch_msrun.sh", {"DEVICE": "Ascend"},
            "2 workers, but this host has 0 Ascend devices to use; start at most that many, or try DEVICE=CPU",
            marks=pytest.mark.skipif(os.path.exists("/dev/davinci0"), reason="there are Ascend NPUs here"),
        ),
        (
            "launch_msrun_multi_node.sh", {**HOSTS, "MASTER_ADDR": ""},
            "MASTER_ADDR is not set; see the head of scripts/launch_msrun_multi_node.sh",
        ),
        ("launch_msrun_multi_node.sh", {**HOSTS, "NODE_RANK": "2"}, "NODE_RANK must be from 0 to 1, got 2"),
        (
            "launch_msrun_multi_node.sh", HOSTS,
            "which script? bash scripts/launch_msrun_multi_node.sh SCRIPT ARGS...",
        ),
        (
            "launch_mpi_hosts.sh", {"HOSTS": "a:2,b"}, "HOSTS: 'b' has no number of processes; write b:2",
        ),
        (
            "launch_mpi_hosts.sh", {"HOSTS": ""},
            "HOSTS is not set; HOSTS=10.0.0.1:2,10.0.0.2:2 bash scripts/launch_mpi_hosts.sh SCRIPT ARGS...",
        ),
    ],
)  # fmt: skip
def test_launch_scripts_refuse_invalid_environment_variables(name, environ, message):
    done = run_msrun_script(name, **{"DEVICE": "CPU", **environ})
    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "scripts").glob("homework_*.sh")))
@pytest.mark.parametrize(
    ("flags", "got"),
    [
        (["--output-dir="], ""),
        (["--output-dir", ""], ""),
        (["--output-dir", "somewhere", "--output-dir="], ""),
        (["--model", "tiny", "--output-dir"], ""),
        (["--output-dir", "--model=tiny"], "--model=tiny"),
    ],
)
def test_homework_scripts_refuse_an_empty_output_dir_before_any_command(tmp_path, name, flags, got):
    """A fake rm prints what would be removed, for example a report in the root folder."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in ("rm", "msrun", "mindnlp-dp"):
        (programs / program).write_text(f'#!/bin/sh\necho {program} "$@"\n')
        (programs / program).chmod(0o755)
    done = run_msrun_script(
        name, *flags, PATH=f"{programs}:{os.environ['PATH']}", LOG_DIR=str(tmp_path / "logs"),
        # A script that reaches the set-up of its environment finds no Python for it, and installs nothing.
        VENV=str(tmp_path / "venv"), PYTHON="/bin/false", VIRTUAL_ENV=sys.prefix,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, f"error: --output-dir must name a folder, got '{got}'\n")
    assert done.stdout == ""
    assert not (tmp_path / "logs").exists()


def test_the_msrun_script_refuses_a_missing_training_script():
    done = run_msrun_script("launch_msrun.sh", "nowhere.py", DEVICE="CPU")
    assert (done.returncode, done.stderr) == (2, "error: the script nowhere.py does not exist\n")
