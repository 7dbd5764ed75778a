"""Test launchers other than mindnlp-dp run: their ranks join, or an error names the reason and the command to type."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from conftest import CORE_UNDER_MPI, TIMEOUT_SECONDS
from mindnlp_dp.runtime.threads import split_cores

MEET = """
import mindnlp_dp as dp
group = dp.init_process_group()
print(group.all_gather_object(group.rank), flush=True)
"""
SLURM_STEP = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}


@pytest.fixture
def start(tmp_path):
    """Return a function that runs a script with a command such as mpirun, and waits."""

    def run(script, *before, options=(), **environ):
        path = tmp_path / "script.py"
        path.write_text(script)
        return subprocess.run(
            [*before, sys.executable, *options, str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=tmp_path, env={**os.environ, **environ}, timeout=TIMEOUT_SECONDS,
        )  # fmt: skip

    return run


def mpirun(*options):
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [os.path.join(os.path.dirname(sys.executable), "mpirun"), *root, "--oversubscribe", "-n", "2", *options]


# The variables of PMIx alone, as under srun --mpi=pmix or prun, without those that mpirun adds.
BARE_PMIX = ["env", "-u", "OMPI_COMM_WORLD_SIZE", "-u", "OMPI_COMM_WORLD_RANK"]


@pytest.mark.parametrize(
    "slurm",
    [[], pytest.param([f"{name}={value}" for name, value in SLURM_STEP.items()], marks=pytest.mark.slow)],
    ids=["alone", "srun"],
)
def test_ranks_with_pmix_variables_only_join_over_mpi(start, slurm):
    job = start(MEET, *mpirun(*BARE_PMIX, *slurm))
    assert (job.returncode, job.stdout) == (0, "[0, 1]\n[0, 1]\n")


def test_an_srun_pmi_that_mpi_does_not_support_is_refused(start):
    job = start(MEET, PMI_SIZE="2", PMI_RANK="0", **SLURM_STEP)
    assert job.returncode == 1
    assert "srun --mpi started 2 processes, but mpi sees 1, so that they would train separate models" in job.stdout


@pytest.mark.core
@pytest.mark.parametrize(
    ("environ", "instead"),
    [
        (SLURM_STEP, "srun --mpi=pmix"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "mindnlp-dp run --nproc 2 script.py"),
        ({"RANK_ID": "1", "RANK_SIZE": "2", "RANK_TABLE_FILE": "/x"}, "mindnlp-dp run --nproc 2 script.py"),
    ],
    ids=["srun", "torchrun", "a rank table"],
)
def test_unconnected_processes_of_srun_torchrun_or_a_rank_table_are_refused(start, environ, instead):
    job = start(MEET, **environ)
    assert job.returncode == 1
    assert f"which cannot connect to each other and would train 2 separate models; type {instead}" in job.stdout


def test_a_rank_table_is_refused_after_mindnlp_was_imported(start):
    script = "import mindnlp_dp as dp\nimport mindnlp\ndp.init_process_group()\n"
    job = start(script, RANK_ID="0", RANK_TABLE_FILE="/x")
    assert job.returncode == 1
    assert "started several processes, which cannot connect to each other" in job.stdout


@pytest.mark.parametrize("backend", CORE_UNDER_MPI)
def test_mindnlp_dp_run_ignores_variables_of_other_launchers(launch, backend):
    job = launch(
        MEET, backend=backend, RANK="3", WORLD_SIZE="4", RANK_ID="3", RANK_SIZE="4", RANK_TABLE_FILE="/x",
        SLURM_JOBID="7", SLURM_NODELIST="x[1-2]", **SLURM_STEP,
    )  # fmt: skip
    assert (job.exit_code, job.output) == (0, "[0, 1]\n")


CORES = """
import os
import mindnlp_dp as dp
group = dp.init_process_group()
cores = group.all_gather_object(sorted(os.sched_getaffinity(0)))
if group.is_main:
    print(cores, flush=True)
"""


def test_unbound_ranks_split_the_cpu_cores_of_the_job(start):
    cores = sorted(os.sched_getaffinity(0))
    halves = [list(split_cores(cores, 2, index)) for index in range(2)]
    assert start(CORES, *mpirun("--bind-to", "none")).stdout == f"{halves}\n"
    # A smaller set, as in a container or a batch system; a single core cannot be split.
    job = start(CORES, "taskset", "-c", str(cores[-1]), *mpirun("--bind-to", "none"))
    assert job.stdout == f"{[cores[-1:]] * 2}\n"


# If the user calls mpirun, only the rank itself can end the others.

# The part of init_process_group that matters here, without importing MindSpore, which takes seconds.
MPI_ALONE = """
from mpi4py import MPI
faults.abort_job_on_failure(MPI)
group = MPI.COMM_WORLD
"""
INIT = """
import mindnlp_dp as dp
group = dp.init_process_group()
"""
LEAVE = """
import argparse, sys
from mindnlp_dp.communication.transports.mpi import faults
faults.PATIENCE_SECONDS = 1.0
{init}

if group.rank == 1:
    {leave}
group.{barrier}()
print("reached", flush=True)
"""


def leaving(leave, init=MPI_ALONE):
    return LEAVE.format(init=init, leave=leave, barrier="Barrier" if init is MPI_ALONE else "barrier")


@pytest.mark.parametrize(
    ("leave", "exit_code", "said"),
    [
        ("sys.exit(4)", 4, ""),
        ("raise SystemExit('no such file')", 1, "no such file"),
        ("argparse.ArgumentParser().parse_args(['--epochs'])", 2, "unrecognized arguments: --epochs"),
    ],
)
def test_an_exit_code_under_mpi4py_ends_all_ranks(start, leave, exit_code, said):
    job = start(leaving(leave), *mpirun(), options=["-m", "mpi4py"])
    assert job.returncode == exit_code
    assert said in job.stdout
    assert "reached" not in job.stdout


@pytest.mark.core
@pytest.mark.parametrize("options", [[], ["-m", "mpi4py"]])
def test_an_exception_after_init_process_group_ends_all_ranks(start, options):
    job = start(leaving("raise ValueError('no such file')", INIT), *mpirun(), options=options)
    assert job.returncode == 1
    assert "ValueError: no such file" in job.stdout
    assert "reached" not in job.stdout


def test_a_rank_that_finishes_early_gives_a_warning_and_does_not_end_the_job(start):
    job = start(leaving("sys.exit(0)").replace("group.Barrier()", "import time; time.sleep(3)"), *mpirun())
    assert job.returncode == 0
    assert job.stdout.startswith("rank 1 of 2 reached its end 1 s ago, and others have not. If they wait for it in a")
    assert job.stdout.endswith("reached\n")
