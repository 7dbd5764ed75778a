"""Arrays of more than 2 GiB under MPI, which counts in 32 bits."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("large_arrays.py")
NEEDED_GIB = 17


def available_gib():
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20


@pytest.mark.skipif(available_gib() < NEEDED_GIB, reason=f"needs {NEEDED_GIB} GiB of memory")
def test_more_than_two_gib(launch):
    job = launch(SCRIPT)
    assert job.exit_code == 0, job.output
    assert job.output.splitlines() == ["broadcast", "all_gather", "send and recv", "all_reduce", "broadcast_object"]
