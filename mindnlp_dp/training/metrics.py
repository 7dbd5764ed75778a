"""Averages the losses of all ranks, and measures the training speed and the share of communication in it.

The train step adds the loss and weight of every micro-batch; the Trainer and custom loops log the global mean. A loss
that is NaN or infinite is reported on every rank. The speed counts the samples and tokens of all ranks, and excludes
the time of evaluation and saving; docs/metrics.md defines each metric.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.data.loss_weight import IGNORED
from mindnlp_dp.runtime.devices import peak_memory

# For messages: the settings of the Trainer and of custom loops.
LEAVE_OUT = "logging_nan_inf_filter=True (in make_train_step: leave_out_bad_losses=True)"

# Less lost time is not shown.
_LEAST_SECONDS = 1e-3

# The number of sample indices that a message shows.
_SHOWN = 8


class LossMeter:
    """Averages losses over micro-batches and ranks, from the sums of loss * weight and of weight."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        # The first counts on this rank since the last log line, the second on all ranks before it.
        self._since_log = np.zeros(2)
        self._logged = np.zeros(2)

    def add(self, loss: float, loss_weight: float) -> None:
        """Add the loss of one micro-batch of this rank."""
        self._since_log += loss * loss_weight, loss_weight

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


def report_nonfinite_loss(mine: Sequence[NonFiniteLoss], group: ProcessGroup, continues: bool) -> bool:
    """Report the bad losses of all ranks on every rank, as a warning or an error; return whether there were any.

    A collective.

    Raises:
        FloatingPointError: there is a bad loss and ``continues`` is False; raised on every rank.
    """
    reports = [str(bad) for theirs in group.all_gather_object(list(mine)) for bad in theirs]
    if not reports:
        return False
    if not continues:
        raise FloatingPointError(
            f"{'; '.join(reports)}; look at these samples, lower the learning rate, or leave such micro-batches out "
            f"with {LEAVE_OUT}"
        )
    for report in reports:
        warnings.warn(
            f"{report}; this micro-batch is left out of the update and of the log", RuntimeWarning, stacklevel=2
        )
    return True


def warn_of_no_weight(total_loss_weight: float, step: int) -> None:
    """Warn that an update has a total weight of 0 over all ranks, so that its loss would be 0 / 0."""
    if total_loss_weight == 0:
        warnings.warn(
            f"the losses of update {step} have a total weight of 0 on all ranks, as when all labels "
            "are -100; the update is left out",
            RuntimeWarning,
            stacklevel=2,
        )


def report_nonfinite_gradient(what: str, step: int, continues: bool) -> None:
    """Warn that an update is left out, because the averaged gradient (equal on every rank) is not finite.

    Raises:
        FloatingPointError: ``continues`` is False.
    """
    report = f"{what} at step {step}, though every loss is finite"
    if not continues:
        raise FloatingPointError(f"{report}; lower the learning rate, or leave out such updates with {LEAVE_OUT}")
    warnings.warn(f"{report}; this update is left out", RuntimeWarning, stacklevel=2)


class Activity(enum.Enum):
    """What a run spends its time on; the speed of training is measured over ``TRAINING`` alone."""

    TRAINING = "train"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"


@dataclass
class _Amount:
    """What this rank has done so far; seconds by :class:`Activity`."""

    updates: int = 0
    samples: int = 0
    input_tokens: int = 0
    label_tokens: int = 0
    sync_seconds: float = 0.0
    flos: float = 0.0
    seconds: dict[Activity, float] = field(default_factory=lambda: dict.fromkeys(Activity, 0.0))

    def since(self, before: _Amount) -> _Amount:
        return _Amount(
            self.updates - before.updates,
            self.samples - before.samples,
            self.input_tokens - before.input_tokens,
            self.label_tokens - before.label_tokens,
            self.sync_seconds - before.sync_seconds,
            self.flos - before.flos,
            {activity: seconds - before.seconds[activity] for activity, seconds in self.seconds.items()},
        )


class SpeedMeter:
    """Measures the speed of training over all ranks, since the last log line and over the whole run.

    docs/metrics.md defines the metrics. ``group`` are the ranks that split the samples, ``world`` all ranks;
    ``peak_teraflops`` is what one device can do, in TFLOP/s.
    """

    def __init__(self, world: ProcessGroup, group: ProcessGroup, peak_teraflops: Optional[float] = None) -> None:
        self.world, self.group, self._peak_teraflops = world, group, peak_teraflops
        self.total = _Amount()
        self._logged = _Amount()
        self._activity: Optional[Activity] = None
        self._began = 0.0

    def start(self) -> None:
        """Start the clock; training begins."""
        self._switch(Activity.TRAINING)

    def stop(self) -> None:
        self._switch(None)

    @contextlib.contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Count the time of this block as another activity than training."""
        before = self._activity
        self._switch(activity)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, activity: Optional[Activity]) -> None:
        now = time.perf_counter()
        if self._activity is not None:
            self.total.seconds[self._activity] += now - self._began
        self._activity, self._began = activity, now

    def add_update(self, sync_seconds: float) -> None:
        """Count an update; ``sync_seconds`` is the time in which this rank only waited for the exchange."""
        self.total.updates += 1
        self.total.sync_seconds += sync_seconds

    def add_batch(self, num_samples: int, input_tokens: int, label_tokens: int) -> None:
        """Count the samples and tokens of a micro-batch of this rank."""
        self.total.samples += num_samples
        self.total.input_tokens += input_tokens
        self.total.label_tokens += label_tokens

    def set_flos(self, flos: float) -> None:
        """Set the number of floating point operations of all ranks in this run so far; 0 if they are not known."""
        self.total.flos = flos

    def since_log(self) -> dict[str, float]:
        """Return the metrics since the last call of this method. A collective."""
        self._switch(self._activity)
        now = copy.deepcopy(self.total)
        done, self._logged = now.since(self._logged), now
        metrics = self._metrics(done)
        metrics.pop("seconds", None)
        return metrics

    def of_run(self) -> dict[str, float]:
        """Return the metrics of the whole run; names begin with "train_" as Transformers' do. A collective."""
        self._switch(self._activity)
        metrics = self._metrics(self.total)
        metrics.setdefault("seconds", 0.0)
        metrics.setdefault("samples_per_second", 0.0)
        metrics["steps_per_second"] = _rounded(self.total.updates / max(metrics["seconds"], 1e-9))
        own = ("gradient_sync_share", "peak_memory_gib", "evaluation_seconds", "checkpoint_seconds")
        return {name if name in own else f"train_{name}": value for name, value in metrics.items()}

    def _metrics(self, done: _Amount) -> dict[str, float]:
        training = done.seconds[Activity.TRAINING]
        mine = [done.samples, done.input_tokens, done.label_tokens, training, done.sync_seconds]
        samples, inputs, labels, all_seconds, waited = self.group.all_reduce(np.array(mine, np.float64)).tolist()
        tokens = {"input": inputs, "label": labels}
        worst = np.array([*done.seconds.values(), peak_memory()], np.float64)
        *seconds, peak = self.world.all_reduce(worst, op="max").tolist()
        slowest, evaluation, checkpoint = (max(each, 1e-9) for each in seconds)
        metrics = {}
        if done.updates:
            metrics = {
                "seconds": _rounded(slowest),
                "step_seconds": _rounded(slowest / done.updates),
                "samples_per_second": _rounded(samples / slowest),
                **{f"{name}_tokens_per_second": _rounded(count / slowest) for name, count in tokens.items() if count},
            }
            # A model of images or sound has no tokens in its input, and an estimate that takes its numbers for tokens.
            if done.flos and tokens["input"]:
                teraflops = done.flos / slowest / 1e12
                metrics["teraflops_per_second"] = _rounded(teraflops)
                if self._peak_teraflops:
                    metrics["mfu"] = _rounded(teraflops / (self.world.world_size * self._peak_teraflops))
            metrics["gradient_sync_share"] = _rounded(waited / max(all_seconds, 1e-9))
        metrics["peak_memory_gib"] = _rounded(peak / 2**30)
        for activity, lost in ((Activity.EVALUATION, evaluation), (Activity.CHECKPOINT, checkpoint)):
            if lost >= _LEAST_SECONDS:
                metrics[f"{activity.value}_seconds"] = _rounded(lost)
        return metrics


def _rounded(value: float) -> float:
    """Return a value with six significant digits.

    >>> _rounded(1234.56789), _rounded(2.0345678e-6)
    (1234.57, 2.03457e-06)
    """
    return float(f"{value:.6g}")


def count_input_tokens(batch: Mapping[str, Any], main_input: str) -> int:
    """Return the number of tokens of a batch's main input, of shape (rows, length), without those that are masked.

    >>> count_input_tokens({"input_ids": np.ones((2, 3), int), "attention_mask": np.array([[1, 1, 0], [1, 1, 1]])},
    ...                    "input_ids")
    5
    """
    ids, mask = _numbers_of_tokens(batch, main_input), _numbers_of_tokens(batch, "attention_mask")
    if ids is None:
        return 0
    return ids.size if mask is None or mask.shape != ids.shape else int(np.count_nonzero(mask))


def count_label_tokens(batch: Mapping[str, Any], *, shifted: bool = False) -> int:
    """Return the number of labels of tokens that the loss counts: ``labels`` of shape (rows, length), not -100.

    With ``shifted``, the first column is not used, as by causal language models.
    """
    labels = _numbers_of_tokens(batch, "labels")
    return 0 if labels is None else int(np.count_nonzero(labels[:, int(shifted) :] != IGNORED))


def _numbers_of_tokens(batch: Mapping[str, Any], name: str) -> Optional[np.ndarray]:
    """Return a column of integers or booleans of shape (rows, length); None if it is another one, or absent."""
    column = np.asarray(batch.get(name))
    return column if column.ndim == 2 and column.dtype.kind in "iub" else None
