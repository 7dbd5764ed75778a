"""Make a few of the stops and kills of which interrupt_and_resume.py makes hundreds."""

from __future__ import annotations

import interrupt_and_resume
import pytest


# The script monitors each of its jobs itself, and ends a job that makes no progress.
@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_job_that_is_stopped_or_killed_at_random_ends_as_if_it_had_not_been(capsys, number):
    kinds = [word for kind in ("--stops", "--lines", "--kills") for word in (kind, str(number))]
    interrupt_and_resume.main([*kinds, "--seed", "7", "--backend", "mpi"])
    assert "every run ended as one that was not stopped" in capsys.readouterr().out
