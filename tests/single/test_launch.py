from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from mindnlp_dp.launch.cli import main
from mindnlp_dp.launch.environment import clean_environment, cluster_environment, free_port, launched_rank

STALE = {
    "MS_ROLE": "MS_SCHED", "MS_SCHED_PORT": "8118", "MS_WORKER_NUM": "8", "MS_NODE_ID": "5", "RANK_ID": "5",
    "RANK_TABLE_FILE": "/gone", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1",
}  # fmt: skip


def test_stale_variables_are_left_out():
    environment = clean_environment({**STALE, "HOME": "/root", "GLOG_v": "1"})
    assert environment == {"HOME": "/root", "GLOG_v": "1", "PYTHONUNBUFFERED": "1"}


def test_an_outer_launchers_ranks_are_not_ours():
    slurm = {"SLURM_JOBID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    outer = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", **slurm, "SLURM_JOB_ID": "7"}
    assert clean_environment(outer) == {"SLURM_JOB_ID": "7", "GLOG_v": "3", "PYTHONUNBUFFERED": "1"}


def test_a_cluster_process_knows_its_place():
    environment = cluster_environment(STALE, "MS_WORKER", nproc=2, port=1234, rank=1)
    assert environment["MS_ROLE"] == "MS_WORKER"
    assert (environment["MS_WORKER_NUM"], environment["MS_NODE_ID"], environment["MS_SCHED_PORT"]) == ("2", "1", "1234")
    assert "RANK_TABLE_FILE" not in environment
    assert "MS_NODE_ID" not in cluster_environment(STALE, "MS_SCHED", nproc=2, port=1234)


def test_a_free_port_can_be_bound():
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))


def test_launched_rank():
    assert launched_rank({"OMPI_COMM_WORLD_RANK": "3"}) == 3
    assert launched_rank({"MS_NODE_ID": "2"}) == 2
    with pytest.raises(KeyError, match="mindnlp-dp run"):
        launched_rank({})


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run", "--nproc", "0", "x.py"], "argument --nproc: must be a number of at least 1, got 0"),
        (["run", "--nproc", "two", "x.py"], "argument --nproc: must be a number of at least 1, got two"),
        (["run", "--nproc", "2", "--backend", "gloo", "x.py"], "invalid choice: 'gloo'"),
        (["run", "x.py"], "the following arguments are required: --nproc"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_wrong_words(argv, message, capsys):
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_script(capsys):
    assert main(["run", "--nproc", "2", "nowhere.py"]) == 2
    assert capsys.readouterr().err == "mindnlp-dp run: the script nowhere.py does not exist\n"


def test_python_m_is_the_command():
    done = subprocess.run([sys.executable, "-m", "mindnlp_dp", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "usage: mindnlp-dp" in done.stdout
