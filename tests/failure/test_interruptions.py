"""Test that jobs stopped or killed at random resume: a few of the hundreds of cases of interrupt_and_resume.py."""

from __future__ import annotations

import interrupt_and_resume
import pytest


# The script monitors each of its jobs itself, and ends a job that makes no progress.
@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_jobs_stopped_or_killed_at_random_resume_and_end_with_equal_weights(capsys, number):
    kinds = [word for kind in ("--stops", "--lines", "--kills") for word in (kind, str(number))]
    interrupt_and_resume.main([*kinds, "--seed", "7", "--backend", "mpi"])
    assert "every run ended as one that was not stopped" in capsys.readouterr().out
