"""The states of a Trainer's callbacks, as a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# MindNLP's EarlyStoppingCallback counts in it, and has no other way to tell its state.
_COUNTER = "early_stopping_patience_counter"


def callback_states(callbacks: Iterable[Any]) -> list[tuple[str, Any]]:
    """The state of every callback that has one: by ``state_dict()``, or an early stopper's patience."""
    states = []
    for callback in callbacks:
        if hasattr(callback, "state_dict"):
            states.append((type(callback).__name__, callback.state_dict()))
        elif hasattr(callback, _COUNTER):
            states.append((type(callback).__name__, getattr(callback, _COUNTER)))
    return states


def load_callback_states(callbacks: Iterable[Any], states: Iterable[tuple[str, Any]]) -> None:
    """Give every callback the first saved state of its class that is left; one without keeps its own.

    Raises:
        TypeError: a callback that was saved has no ``load_state_dict``.
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
    """Whether an early stopper has stopped the run, by the names that MindNLP and Transformers give its counters."""
    patience = getattr(callback, "early_stopping_patience", None)
    return patience is not None and getattr(callback, _COUNTER, 0) >= patience
