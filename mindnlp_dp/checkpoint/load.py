"""A run taken up: rank 0 reads a checkpoint, and every rank gets it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .read import read_state
from .state_tree import PackedState, broadcast_state, unpack_state
from .whole_model import WholeModel


def load_checkpoint(path: Path, model: WholeModel) -> dict[str, Any]:
    """The weights, in ``model``, on every rank as it has them; and the state, which is returned. A collective.

    Raises:
        CheckpointError: on every rank, when the folder is not complete, or not of this model.
    """
    world = model.world
    packed = world.call_where(world.is_main, lambda: read_state(path), "reading a checkpoint")
    model.read_weights(path)
    # Of the optimizer's state a rank may keep no more than its part.
    return unpack_state(broadcast_state(packed or PackedState(None), world, later="optimizer/state/"))
