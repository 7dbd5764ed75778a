"""A few of the stops and kills that interrupt_and_resume.py makes by the hundred."""

from __future__ import annotations

import interrupt_and_resume
import pytest


# Each of its jobs is watched by itself, and ended when it makes no progress.
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("backend", "stops", "lines", "kills"), [("mpi", 2, 3, 2), ("mindspore", 1, 1, 1)])
def test_a_job_that_is_stopped_or_killed_at_random_ends_as_if_it_had_not_been(backend, stops, lines, kills, capsys):
    numbers = ["--stops", str(stops), "--lines", str(lines), "--kills", str(kills), "--seed", "7"]
    interrupt_and_resume.main([*numbers, "--backend", backend])
    assert "every run ended as one that was not stopped" in capsys.readouterr().out
