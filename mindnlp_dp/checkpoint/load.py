"""This module loads a checkpoint to resume a run: rank 0 reads it, and every rank gets it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .read import read_state
from .state_tree import PackedState, broadcast_state, unpack_state
from .whole_model import WholeModel


def load_checkpoint(path: Path, model: WholeModel) -> dict[str, Any]:
    """Load the weights into ``model``, each rank its shards, and return the run's state. A collective.

    Raises:
        CheckpointError: on every rank, if the folder is not complete, or not a checkpoint of this model.
    """
    world = model.world
    packed = world.call_where(world.is_main, lambda: read_state(path), "reading a checkpoint")
    model.read_weights(path)
    # A rank may need only its part of the optimizer state, so those arrays are sent one by one, later.
    return unpack_state(broadcast_state(packed or PackedState(None), world, later="optimizer/state/"))
