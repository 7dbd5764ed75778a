"""Test arrays of more than 2 GiB under MPI, which counts in 32 bits."""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("large_arrays.py")
NEEDED_GIB = 17


@pytest.fixture
def memory():
    """Skip the test if two ranks lack memory; make other test runs on this machine wait."""
    with open(Path(tempfile.gettempdir()) / "mindnlp-dp-large-arrays.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20
        if available < NEEDED_GIB:
            pytest.skip(f"needs {NEEDED_GIB} GiB of memory, and {available:.1f} are available")
        yield


@pytest.mark.usefixtures("memory")
def test_mpi_collectives_handle_arrays_of_more_than_2_gib(launch):
    job = launch(SCRIPT)
    assert job.exit_code == 0, job.output
    # The launcher adds a line if a rank ends, and frees its memory, long after the other.
    said = [line for line in job.output.splitlines() if not line.startswith("rank ")]
    assert said == ["broadcast", "all_gather", "send and recv", "all_reduce", "broadcast_object"]
