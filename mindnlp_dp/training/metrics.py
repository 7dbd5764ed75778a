"""Averages the losses of all ranks, and measures the training speed and the share of communication in it.

The train step adds the loss and weight of every micro-batch; the Trainer and custom loops log the global mean. A loss
that is NaN or infinite is reported on every rank. Throughput counts the samples of all ranks, and excludes the time of
evaluation and saving.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup

# The number of sample indices that a message shows.
_SHOWN = 8


class LossMeter:
    """Averages losses over micro-batches and ranks, from the sums of loss * weight and of weight."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        # The first counts on this rank since the last log line, the second on all ranks before it.
        self._since_log = np.zeros(2)
        self._logged = np.zeros(2)

    def add(self, loss: float, weight: float) -> None:
        """Add the loss of one micro-batch of this rank."""
        self._since_log += loss * weight, weight

    def mean_since_log(self) -> float:
        """Return the mean over all ranks since the last call of this method; NaN if there was none. A collective."""
        sums = self.group.all_reduce(self._since_log)
        self._logged += sums
        self._since_log[:] = 0
        return _mean(sums)

    def mean_of_run(self) -> float:
        """Return the mean over the whole run and all ranks. A collective."""
        return _mean(self._logged + self.group.all_reduce(self._since_log))

    def state(self) -> dict[str, np.ndarray]:
        """Return this rank's sums, for a checkpoint."""
        return {"since_log": self._since_log.copy(), "logged": self._logged.copy()}

    def load_states(self, states: Sequence[dict[str, np.ndarray]]) -> None:
        """Load the states of all ranks; if the number of ranks has changed, rank 0 gets all unlogged losses."""
        self._logged = states[0]["logged"].copy()
        if len(states) == self.group.world_size:
            self._since_log = states[self.group.rank]["since_log"].copy()
        else:
            total = np.sum([state["since_log"] for state in states], axis=0)
            self._since_log = total if self.group.is_main else np.zeros(2)


def _mean(sums: np.ndarray) -> float:
    return float(sums[0] / sums[1]) if sums[1] else float("nan")


@dataclass(frozen=True)
class NonFiniteLoss:
    """A loss that is NaN or infinite, with its rank, step and sample indices; no indices if they are unknown."""

    value: float
    rank: str
    step: int
    indices: tuple[int, ...]

    def __str__(self) -> str:
        shown = "samples " + ", ".join(map(str, self.indices[:_SHOWN])) if self.indices else "a micro-batch"
        more = f" and {len(self.indices) - _SHOWN} more" if len(self.indices) > _SHOWN else ""
        return f"the loss of {shown}{more} is {self.value} at step {self.step} on rank {self.rank}"


def report_nonfinite_loss(mine: Sequence[NonFiniteLoss], group: ProcessGroup, go_on: bool) -> bool:
    """Report the bad losses of all ranks on every rank, as a warning or an error; return whether there were any.

    A collective.

    Raises:
        FloatingPointError: there is a bad loss and ``go_on`` is False; raised on every rank.
    """
    reports = [str(bad) for theirs in group.all_gather_object(list(mine)) for bad in theirs]
    if not reports:
        return False
    if not go_on:
        raise FloatingPointError(
            f"{'; '.join(reports)}; look at these samples, lower the learning rate, or leave such micro-batches out "
            "with logging_nan_inf_filter=True"
        )
    for report in reports:
        warnings.warn(
            f"{report}; this micro-batch is left out of the update and of the log", RuntimeWarning, stacklevel=2
        )
    return True


def warn_of_no_weight(total_weight: float, step: int) -> None:
    """Warn that an update has a total weight of 0 over all ranks, so that its loss would be 0 / 0."""
    if total_weight == 0:
        warnings.warn(
            f"the losses of update {step} weigh nothing on any rank, as where all labels are -100; the update is left "
            "out",
            RuntimeWarning,
            stacklevel=2,
        )


def report_nonfinite_gradient(what: str, step: int, go_on: bool) -> None:
    """Warn that an update is left out, because the averaged gradient (equal on every rank) is not finite.

    Raises:
        FloatingPointError: ``go_on`` is False.
    """
    report = f"{what} at step {step}, though every loss is finite"
    if not go_on:
        raise FloatingPointError(
            f"{report}; lower the learning rate, or leave out such updates with logging_nan_inf_filter=True"
        )
    warnings.warn(f"{report}; this update is left out", RuntimeWarning, stacklevel=2)


class TrainingTimer:
    """A stopwatch for the training time, which is stopped during evaluation and saving.

    Attributes:
        seconds: the measured time so far.
    """

    def __init__(self) -> None:
        self._total = 0.0
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        running = time.perf_counter() - self._began if self._began is not None else 0.0
        return self._total + running

    def start(self) -> None:
        if self._began is None:
            self._began = time.perf_counter()

    def stop(self) -> None:
        self._total, self._began = self.seconds, None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of this block."""
        self.stop()
        try:
            yield
        finally:
            self.start()


def speed_metrics(
    group: ProcessGroup,
    *,
    seconds: float,
    sync_seconds: float,
    num_samples: int,
    num_updates: int,
    num_tokens: Optional[int] = None,
) -> dict[str, float]:
    """Return the speed of a run: samples are summed over the ranks, seconds are averaged. A collective.

    ``num_tokens`` is the total over all ranks, the same value on each rank.
    """
    samples, total_seconds, total_sync = group.all_reduce(np.array([num_samples, seconds, sync_seconds], np.float64))
    mean_seconds = max(total_seconds / group.world_size, 1e-9)
    speed = {
        "train_seconds": round(mean_seconds, 4),
        "train_samples_per_second": round(samples / mean_seconds, 3),
        "train_steps_per_second": round(num_updates / mean_seconds, 3),
        "gradient_sync_share": round(total_sync / group.world_size / mean_seconds, 4),
    }
    if num_tokens is not None:
        speed["train_tokens_per_second"] = round(num_tokens / mean_seconds, 3)
    return speed
