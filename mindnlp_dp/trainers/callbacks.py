"""This module saves and restores the states of a Trainer's callbacks; the training loop calls it for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# MindNLP's EarlyStoppingCallback keeps its state in this attribute only, without a state_dict().
_COUNTER = "early_stopping_patience_counter"


def callback_states(callbacks: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return the state of every callback that has one: its ``state_dict()``, or an early stopper's counter."""
    states = []
    for callback in callbacks:
        if hasattr(callback, "state_dict"):
            states.append((type(callback).__name__, callback.state_dict()))
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
        elif hasattr(callback, _COUNTER):
            setattr(callback, _COUNTER, match[1])
        else:
            raise TypeError(
                f"{type(callback).__name__} has state_dict(), which the checkpoint holds, and no load_state_dict(state)"
            )


def has_lost_patience(callback: Any) -> bool:
    """Tell whether an early stopper has stopped the run, by the counters' names in MindNLP and Transformers."""
    patience = getattr(callback, "early_stopping_patience", None)
    return patience is not None and getattr(callback, _COUNTER, 0) >= patience
