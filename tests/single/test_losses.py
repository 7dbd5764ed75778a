"""Tests how the launcher decides whether a job continues in place after it has lost ranks."""

from __future__ import annotations

import dataclasses

import pytest

from mindnlp_dp.launch.monitor.recovery import PATIENCE_SECONDS, Losses
from mindnlp_dp.launch.processes.exit_status import Status
from mindnlp_dp.runtime.heartbeat import Progress

WORKS = Progress(changes=9, pid=1, has_joined=True)
WAITS = dataclasses.replace(WORKS, blocked_in="all_reduce of 3 ranks")
TWO = dataclasses.replace(WORKS, members=2)
DONE, FAILED, IN_VAIN = Status(0, 1.0), Status(7, 1.0), Status(1, 2.0, waited=True)


@pytest.fixture
def losses():
    """Return the loss record of three ranks, one of which may be lost."""
    return Losses(3, 2)


def test_nothing_is_lost(losses):
    assert losses.look([WORKS] * 3, {}, [], 0.0) == ""
    # All ranks have finished, and their processes have ended.
    assert losses.look([WORKS] * 3, dict.fromkeys(range(3), DONE), [0, 1, 2], 0.0) == ""
    assert losses.left == [0, 1, 2]
    assert losses.failure is None


@pytest.mark.parametrize(("statuses", "gone", "code"), [({0: FAILED}, [], 7), ({}, [0], 1)])
def test_the_others_go_on(losses, statuses, gone, code):
    assert losses.look([WORKS, WORKS, WAITS], statuses, gone, 0.0) == ""
    assert (losses.failure.rank, losses.failure.exit_code) == (0, code)
    assert losses.look([WORKS, TWO, WAITS], statuses, gone, 1.0) == ""
    assert losses.look([WORKS, TWO, TWO], statuses, gone, 2.0) == "went on"
    assert [failure.rank for failure in losses.new] == [0]
    assert losses.failure is None
    assert losses.look([WORKS, TWO, TWO], statuses, gone, 3.0) == ""
    assert losses.left == [1, 2]


def test_they_had_gone_on_and_finished_when_it_was_seen(losses):
    assert losses.look([TWO, WORKS, TWO], {0: DONE, 2: DONE}, [0, 1, 2], 0.0) == "went on"


def test_they_finished_without_it(losses):
    """Check a rank that failed after the last collective of all ranks."""
    assert losses.look([WORKS] * 3, {0: DONE, 1: FAILED, 2: DONE}, [0, 1, 2], 0.0) == "failed"
    assert losses.failure.rank == 1


def test_too_few_are_left(losses):
    assert losses.look([WORKS] * 3, {}, [1, 2], 0.0) == "failed"
    assert losses.failure.rank == 1


def test_one_that_tried_to_go_on_and_could_not(losses):
    losses.look([WORKS] * 3, {}, [2], 0.0)
    assert losses.look([TWO, TWO, WORKS], {0: IN_VAIN}, [2], 1.0) == "failed"
    assert losses.failure.rank == 2


def test_of_several_the_one_that_was_first_is_named(losses):
    later = Status(1, 2.0)
    assert losses.look([WORKS] * 3, {0: later, 1: FAILED}, [0, 1, 2], 0.0) == "failed"
    assert [failure.rank for failure in losses.new] == [2, 1, 0]


def test_one_is_lost_before_all_have_met(losses):
    assert losses.look([Progress(pid=1), WORKS, WORKS], {}, [2], 0.0) == "failed"


def test_nobody_tells_them(losses):
    """Check that ranks that compute may take their time, but that ranks that all wait may not."""
    losses.look([WAITS, WORKS, WORKS], {}, [2], 0.0)
    assert losses.look([WAITS, WORKS, WORKS], {}, [2], 100.0) == ""
    assert losses.look([WAITS, WAITS, WORKS], {}, [2], 101.0) == ""
    assert losses.look([WAITS, WAITS, WORKS], {}, [2], 101.0 + PATIENCE_SECONDS + 0.1) == "failed"


def test_one_after_the_other():
    losses = Losses(4, 1)
    losses.look([WORKS] * 4, {}, [3], 0.0)
    three = dataclasses.replace(WORKS, members=3)
    assert losses.look([three] * 3 + [WORKS], {}, [3], 1.0) == "went on"
    # Two more ranks are lost; the second loss is seen before any rank has continued.
    assert losses.look([three] * 3 + [WORKS], {}, [2, 3], 2.0) == ""
    assert losses.look([three] * 3 + [WORKS], {}, [1, 2, 3], 2.0) == ""
    assert losses.look([dataclasses.replace(WORKS, members=1), three, three, WORKS], {}, [1, 2, 3], 3.0) == "went on"
    assert [failure.rank for failure in losses.new] == [2, 1]
    losses.end()
    assert losses.failure.rank == 2
