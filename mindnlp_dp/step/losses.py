"""The loss of all ranks: its mean, and what becomes of one that is no number.

Goes in: the loss of every micro batch, with its weight. Comes out: the global mean
since the last log line and of the run; and, when a loss is NaN or infinite on any
rank, the same report on all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindnlp_dp.communication.collectives import ProcessGroup

# How many sample indices a message shows.
_SHOWN = 8


class LossMeter:
    """Sums of loss * weight and of weight."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        # On this rank since the last log line; of the run before it, over all ranks.
        self._since_log = np.zeros(2)
        self._logged = np.zeros(2)

    def add(self, loss: float, weight: float) -> None:
        """One micro batch of this rank."""
        self._since_log += loss * weight, weight

    def mean_since_log(self) -> float:
        """The mean since this was last called, over all ranks; NaN when nothing was added. A collective."""
        sums = self.group.all_reduce(self._since_log)
        self._logged += sums
        self._since_log[:] = 0
        return _mean(sums)

    def mean_of_run(self) -> float:
        """The mean of all that was ever added, on any rank. A collective."""
        return _mean(self._logged + self.group.all_reduce(self._since_log))

    def state(self) -> dict[str, np.ndarray]:
        """This rank's state."""
        return {"since_log": self._since_log.copy(), "logged": self._logged.copy()}

    def load_states(self, states: Sequence[dict[str, np.ndarray]]) -> None:
        """Take over the states of all ranks of a run; another number of ranks gives rank 0 what was not logged yet."""
        self._logged = states[0]["logged"].copy()
        if len(states) == self.group.world_size:
            self._since_log = states[self.group.rank]["since_log"].copy()
        else:
            total = np.sum([state["since_log"] for state in states], axis=0)
            self._since_log = total if self.group.is_main else np.zeros(2)


def _mean(sums: np.ndarray) -> float:
    return float(sums[0] / sums[1]) if sums[1] else float("nan")


@dataclass(frozen=True)
class BadLoss:
    """A loss that is NaN or infinite, and where it came from; no indices where nobody knows them."""

    value: float
    rank: str
    step: int
    indices: tuple[int, ...]

    def __str__(self) -> str:
        shown = "samples " + ", ".join(map(str, self.indices[:_SHOWN])) if self.indices else "a micro batch"
        more = f" and {len(self.indices) - _SHOWN} more" if len(self.indices) > _SHOWN else ""
        return f"the loss of {shown}{more} is {self.value} at step {self.step} on rank {self.rank}"


def settle_bad_losses(mine: Sequence[BadLoss], group: ProcessGroup, go_on: bool) -> bool:
    """Tell every rank about the bad losses of all: a warning when training goes on, else an error. A collective.

    Returns whether there were any.

    Raises:
        FloatingPointError: on every rank, unless ``go_on``.
    """
    reports = [str(bad) for theirs in group.all_gather_object(list(mine)) for bad in theirs]
    if not reports:
        return False
    if not go_on:
        raise FloatingPointError(
            f"{'; '.join(reports)}; look at these samples, lower the learning rate, or leave such micro batches out "
            "with logging_nan_inf_filter=True"
        )
    for report in reports:
        warnings.warn(
            f"{report}; this micro batch is left out of the update and of the log", RuntimeWarning, stacklevel=2
        )
    return True


def warn_of_no_weight(total_weight: float, step: int) -> None:
    """Warn of an update in which nothing counts on any rank, whose loss would be 0 / 0."""
    if total_weight == 0:
        warnings.warn(
            f"the losses of update {step} weigh nothing on any rank, as where all labels are -100; the update is left "
            "out",
            RuntimeWarning,
            stacklevel=2,
        )


def settle_bad_gradient(what: str, step: int, go_on: bool) -> None:
    """Warn of an averaged gradient, the same on every rank, that must not reach the weights.

    Raises:
        FloatingPointError: training does not ``go_on`` without this update.
    """
    report = f"{what} at step {step}, though every loss is finite"
    if not go_on:
        raise FloatingPointError(
            f"{report}; lower the learning rate, or leave out such updates with logging_nan_inf_filter=True"
        )
    warnings.warn(f"{report}; this update is left out", RuntimeWarning, stacklevel=2)
