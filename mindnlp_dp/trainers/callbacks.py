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
    """Give every callback the first saved state of its class that is left; one without keeps its own."""
    left = list(states)
    for callback in callbacks:
        match = next((entry for entry in left if entry[0] == type(callback).__name__), None)
        if match is None:
            continue
        left.remove(match)
        if hasattr(callback, "load_state_dict"):
            callback.load_state_dict(match[1])
        else:
            setattr(callback, _COUNTER, match[1])
