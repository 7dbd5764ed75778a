"""Tests how the launcher decides whether a job continues in place after it has lost ranks."""

from __future__ import annotations

import dataclasses

import pytest

from mindnlp_dp.launch.monitor.recovery import PATIENCE_SECONDS, LostRanks, Outcome
from mindnlp_dp.runtime.heartbeat import RankHeartbeat, Status

WORKS = RankHeartbeat(changes=9, pid=1, has_joined=True)
WAITS = dataclasses.replace(WORKS, blocked_in="all_reduce of 3 ranks")
TWO = dataclasses.replace(WORKS, members=2)
DONE, FAILED, IN_VAIN = Status(0, 1.0), Status(7, 1.0), Status(1, 2.0, waited=True)


@pytest.fixture
def lost_ranks():
    """Return the loss record of three ranks, one of which may be lost."""
    return LostRanks(3, 2)


def test_nothing_is_lost(lost_ranks):
    assert lost_ranks.poll([WORKS] * 3, {}, [], 0.0) is Outcome.UNCHANGED
    # All ranks have finished, and their processes have ended.
    assert lost_ranks.poll([WORKS] * 3, dict.fromkeys(range(3), DONE), [0, 1, 2], 0.0) is Outcome.UNCHANGED
    assert lost_ranks.left == [0, 1, 2]
    assert lost_ranks.failure is None


@pytest.mark.parametrize(("statuses", "gone", "code"), [({0: FAILED}, [], 7), ({}, [0], 1)])
def test_the_others_go_on(lost_ranks, statuses, gone, code):
    assert lost_ranks.poll([WORKS, WORKS, WAITS], statuses, gone, 0.0) is Outcome.UNCHANGED
    assert (lost_ranks.failure.rank, lost_ranks.failure.exit_code) == (0, code)
    assert lost_ranks.poll([WORKS, TWO, WAITS], statuses, gone, 1.0) is Outcome.UNCHANGED
    assert lost_ranks.poll([WORKS, TWO, TWO], statuses, gone, 2.0) is Outcome.CONTINUED
    assert [failure.rank for failure in lost_ranks.new] == [0]
    assert lost_ranks.failure is None
    assert lost_ranks.poll([WORKS, TWO, TWO], statuses, gone, 3.0) is Outcome.UNCHANGED
    assert lost_ranks.left == [1, 2]


def test_they_had_gone_on_and_finished_when_it_was_seen(lost_ranks):
    assert lost_ranks.poll([TWO, WORKS, TWO], {0: DONE, 2: DONE}, [0, 1, 2], 0.0) is Outcome.CONTINUED


def test_they_finished_without_it(lost_ranks):
    """Check a rank that failed after the last collective of all ranks."""
    assert lost_ranks.poll([WORKS] * 3, {0: DONE, 1: FAILED, 2: DONE}, [0, 1, 2], 0.0) is Outcome.FAILED
    assert lost_ranks.failure.rank == 1


def test_too_few_are_left(lost_ranks):
    assert lost_ranks.poll([WORKS] * 3, {}, [1, 2], 0.0) is Outcome.FAILED
    assert lost_ranks.failure.rank == 1


def test_one_that_tried_to_go_on_and_could_not(lost_ranks):
    lost_ranks.poll([WORKS] * 3, {}, [2], 0.0)
    assert lost_ranks.poll([TWO, TWO, WORKS], {0: IN_VAIN}, [2], 1.0) is Outcome.FAILED
    assert lost_ranks.failure.rank == 2


def test_of_several_the_one_that_was_first_is_named(lost_ranks):
    later = Status(1, 2.0)
    assert lost_ranks.poll([WORKS] * 3, {0: later, 1: FAILED}, [0, 1, 2], 0.0) is Outcome.FAILED
    assert [failure.rank for failure in lost_ranks.new] == [2, 1, 0]


def test_one_is_lost_before_all_have_met(lost_ranks):
    assert lost_ranks.poll([RankHeartbeat(pid=1), WORKS, WORKS], {}, [2], 0.0) is Outcome.FAILED


def test_nobody_tells_them(lost_ranks):
    """Check that ranks that compute may take their time, but that ranks that all wait may not."""
    lost_ranks.poll([WAITS, WORKS, WORKS], {}, [2], 0.0)
    assert lost_ranks.poll([WAITS, WORKS, WORKS], {}, [2], 100.0) is Outcome.UNCHANGED
    assert lost_ranks.poll([WAITS, WAITS, WORKS], {}, [2], 101.0) is Outcome.UNCHANGED
    assert lost_ranks.poll([WAITS, WAITS, WORKS], {}, [2], 101.0 + PATIENCE_SECONDS + 0.1) is Outcome.FAILED


def test_ranks_that_wait_and_get_on_are_not_stuck(lost_ranks):
    for number in range(5):
        recovers = dataclasses.replace(WAITS, changes=WAITS.changes + number)
        assert lost_ranks.poll([recovers, WAITS, WORKS], {}, [2], number * PATIENCE_SECONDS) is Outcome.UNCHANGED


def test_one_after_the_other():
    lost_ranks = LostRanks(4, 1)
    lost_ranks.poll([WORKS] * 4, {}, [3], 0.0)
    three = dataclasses.replace(WORKS, members=3)
    assert lost_ranks.poll([three] * 3 + [WORKS], {}, [3], 1.0) is Outcome.CONTINUED
    # Two more ranks are lost; the second loss is seen before any rank has continued.
    assert lost_ranks.poll([three] * 3 + [WORKS], {}, [2, 3], 2.0) is Outcome.UNCHANGED
    assert lost_ranks.poll([three] * 3 + [WORKS], {}, [1, 2, 3], 2.0) is Outcome.UNCHANGED
    assert (
        lost_ranks.poll([dataclasses.replace(WORKS, members=1), three, three, WORKS], {}, [1, 2, 3], 3.0)
        is Outcome.CONTINUED
    )
    assert [failure.rank for failure in lost_ranks.new] == [2, 1]
    lost_ranks.end()
    assert lost_ranks.failure.rank == 2
