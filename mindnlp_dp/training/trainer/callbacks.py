"""This module saves and restores callback states, feeds progress bars, and makes ranks agree on callbacks' flags."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mindnlp_dp.checkpoint.background import WriterStatus
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.training.trainer.trainer_interface import TrainerInterface

# MindNLP's EarlyStoppingCallback keeps its state in this attribute only, without a state_dict().
_COUNTER = "early_stopping_patience_counter"


def is_exportable(callback: Any) -> bool:
    """Tell whether a callback has the ``state()`` and ``from_state()`` of Transformers' ``ExportableState``."""
    return callable(getattr(callback, "state", None)) and callable(getattr(callback, "from_state", None))


def callback_states(callbacks: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return the state of every callback that has one.

    It is its ``state_dict()``, the attributes that it exports to Transformers, or an early stopper's counter.
    """
    states = []
    for callback in callbacks:
        if hasattr(callback, "state_dict"):
            states.append((type(callback).__name__, callback.state_dict()))
        elif is_exportable(callback):
            states.append((type(callback).__name__, callback.state().get("attributes", {})))
        elif hasattr(callback, _COUNTER):
            states.append((type(callback).__name__, getattr(callback, _COUNTER)))
    return states


def load_callback_states(callbacks: Iterable[Any], states: Iterable[tuple[str, Any]]) -> None:
    """Load into every callback the first unused saved state of its class; a callback without one is not changed.

    Raises:
        TypeError: a callback with a saved state has no ``load_state_dict``.
    """
    left = list(states)
    for callback in callbacks:
        match = next((entry for entry in left if entry[0] == type(callback).__name__), None)
        if match is None:
            continue
        left.remove(match)
        if hasattr(callback, "load_state_dict"):
            callback.load_state_dict(match[1])
        elif isinstance(match[1], dict) and is_exportable(callback):
            for name, value in match[1].items():
                setattr(callback, name, value)
        elif hasattr(callback, _COUNTER):
            setattr(callback, _COUNTER, match[1])
        else:
            raise TypeError(
                f"{type(callback).__name__} has state_dict(), which the checkpoint holds, and no load_state_dict(state)"
            )


def has_stopped_early(callback: Any) -> bool:
    """Tell whether an early stopper has stopped the run, by the counters' names in MindNLP and Transformers."""
    patience = getattr(callback, "early_stopping_patience", None)
    return patience is not None and getattr(callback, _COUNTER, 0) >= patience


# The events of Transformers around the optimizer's step, which MindNLP 0.4's callbacks do not have.
BEFORE_OPTIMIZER, AFTER_OPTIMIZER = "on_pre_optimizer_step", "on_optimizer_step"


def takes_event(callback: Any, event: str, base: type) -> bool:
    """Tell whether a callback's class has a method for this event that is not of ``base``, the library's class."""
    own = getattr(type(callback), event, None)
    return own is not None and own is not getattr(base, event, None)


def call_optimizer_event(trainer: TrainerInterface, event: str, base: type) -> None:
    """Call the callbacks of a Trainer that take this event."""
    # A copy, because MindNLP 0.4's other callbacks have no such method.
    handler = copy.copy(trainer.callback_handler)
    handler.callbacks = [callback for callback in handler.callbacks if takes_event(callback, event, base)]
    trainer.control = handler.call_event(event, trainer.args, trainer.state, trainer.control)


# The metrics that a progress bar shows, by their names there.
_SHOWN = {
    "loss": "loss",
    "step_seconds": "s/step",
    "samples_per_second": "samples/s",
    "input_tokens_per_second": "tokens/s",
    "mfu": "MFU",
}


def show_in_progress_bars(callbacks: Iterable[Any], metrics: Mapping[str, float]) -> None:
    """Show the metrics of a log line after the training progress bar, on the rank that has one."""
    shown = {name: f"{metrics[key]:.4g}" for key, name in _SHOWN.items() if key in metrics}
    for callback in callbacks:
        if (bar := getattr(callback, "training_bar", None)) is not None:
            bar.set_postfix(shown, refresh=False)


STOPS = ("should_training_stop", "should_epoch_stop")

ACTIONS = ("should_save", "should_evaluate", "should_log")

FLAGS = (*STOPS, *ACTIONS)


# Agreement on the flags of a Trainer's control. Callbacks, signal handlers and time limits set flags on one rank, and
# a rank that stops or evaluates alone would leave the others blocked in a collective. So all ranks follow the same
# flags at the same update:
#
#     Any rank can stop: should_training_stop and should_epoch_stop hold when any rank sets them.
#     Rank 0 decides the rest: whether to log, evaluate or save. If only another rank asks, one warning names it.


class ControlAgreement:
    """Agrees on the flags with one small all-reduce; every rank calls it between two updates.

    Attributes:
        writer: the status that the last call agreed on of all ranks' threads that write checkpoints.
        agreed: the flags that all ranks agreed on in the last call. Ranks act on these: a rank's own ``control`` may
            be set at any moment, by a signal handler for instance, and counts at the next call.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._has_warned = False
        self.agreed = dict.fromkeys(FLAGS, False)
        self.writer = WriterStatus.IDLE

    def __call__(self, control: Any, *, writer: WriterStatus = WriterStatus.IDLE) -> dict[str, bool]:
        """Agree on the flags, and write them to ``control``, except where it was changed meanwhile.

        ``writer`` is the status of this rank's thread; the attribute, the largest of all ranks'.
        """
        group = self._group
        seen = {flag: bool(getattr(control, flag)) for flag in FLAGS}
        mine = np.array(list(seen.values()), np.int32)
        # Ranks count from 1 here: 0 means that no rank has set a flag, and the maximum names a rank that has.
        set_by = mine * (group.rank + 1)
        of_rank_0 = mine[len(STOPS) :] * group.is_main
        result = group.all_reduce(
            np.concatenate([set_by, of_rank_0, np.array([writer], np.int32)]), op="max", every_step=True
        )
        anybody, actions, self.writer = result[: len(FLAGS)], result[len(FLAGS) : -1], WriterStatus(result[-1])
        self.agreed = {flag: bool(value) for flag, value in zip(FLAGS, [*anybody[: len(STOPS)], *actions])}
        for flag, value in self.agreed.items():
            if value != seen[flag]:
                setattr(control, flag, value)
        dropped = [
            (flag, int(rank) - 1)
            for flag, rank, is_set in zip(ACTIONS, anybody[len(STOPS) :], actions)
            if rank and not is_set
        ]
        if dropped and not self._has_warned:
            self._has_warned = True
            flag, rank = dropped[0]
            warnings.warn(
                f"rank {rank} set {flag} and rank 0 did not: rank 0 decides when to log, evaluate and save, for all "
                "ranks (a stop counts from any rank); set it on every rank",
                RuntimeWarning,
                stacklevel=3,
            )
        return self.agreed
