"""This module handles a model as one set of weights, replicated or sharded, and loads a checkpoint into it.

:class:`ReplicatedModel` is for a replicated model; a model that :mod:`mindnlp_dp.parallel` has sharded has an instance
of a subclass in its attribute ``parallel``. To resume a run, rank 0 reads the checkpoint, and every rank gets it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, Optional

from mindnlp_dp.checkpoint.reader import read_state, read_weights
from mindnlp_dp.checkpoint.state_tree import PackedState, broadcast_state, unpack_state
from mindnlp_dp.communication.default_group import get_data_group, get_process_group
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.communication.replicas import (
    assert_replicas_in_sync,
    broadcast_buffers,
    broadcast_parameters,
    replica_digest,
)


class ReplicatedModel:
    """Gives checkpoints and training loops access to a replicated model; all ranks of the job call every method.

    Attributes:
        group: the ranks among which samples are split.
        world: all ranks of the job.
        seed_rank: the rank number that, with the step, seeds the randomness inside the model.
        loss_replication: the number of ranks with the same shard of the model that split the samples of each
            micro-batch.
    """

    # Whether ranks hold shards of the model.
    is_sharded = False

    def __init__(self, model: Any, group: ProcessGroup) -> None:
        self.model = model
        self.group = group
        self.world = group
        self.seed_rank = group.rank
        self.loss_replication = 1

    def broadcast_weights(self) -> None:
        """Give every rank the weights of rank 0."""
        broadcast_parameters(self.model, self.group)

    def broadcast_buffers(self) -> None:
        broadcast_buffers(self.model, self.group)

    def assert_in_sync(self) -> str:
        """Return the digest of the weights; raise ReplicaMismatchError if the ranks' weights differ."""
        return assert_replicas_in_sync(self.model, self.group)

    def digest(self) -> str:
        return replica_digest(self.model)

    def read_weights(self, folder: Path) -> None:
        """Load the weights in a folder into the model; raise CheckpointError if they are not this model's."""
        self.world.run_on(self.world.is_main, lambda: read_weights(self.model, folder), "reading a checkpoint")
        self.broadcast_weights()

    def model_writer(
        self, folder: Path, write_whole: Callable[[Path], None], beside: Sequence[Any] = ()
    ) -> Callable[[Path], None]:
        """Return a function that writes the model into a folder; only the ranks that write call it.

        For a replicated model it is ``write_whole``, which writes all files. For a sharded model it writes the weights,
        which this call has gathered into a file in ``folder``, and calls ``save_pretrained`` of the objects in
        ``beside``.
        """
        return write_whole

    # The conversion between the optimizer state of one process and that of this rank.

    def full_optimizer_state(self, own: dict[str, Any], *, keep: bool) -> dict[str, Any]:
        return own

    def local_optimizer_state(self, whole: Mapping[str, Any], names: Sequence[Sequence[str]]) -> Mapping[str, Any]:
        """Return this rank's part of a full optimizer state; ``names`` are its parameters, by parameter group."""
        return whole


def data_group(parts: Optional[ReplicatedModel]) -> ProcessGroup:
    """Return the ranks among which a model's samples are split: those of the mesh of ``parts`` if it is sharded.

    Raises:
        ValueError: the model is replicated, but the job's mesh has ranks that would train it on the same samples.
    """
    if parts is not None:
        return parts.group
    group, world = get_data_group(), get_process_group()
    if group.world_size != world.world_size:
        raise ValueError(
            "this model is replicated on each rank, and the mesh that was made last shards models: of "
            f"{world.world_size} ranks {group.world_size} read samples, and the others would do the same work again. "
            "Call mindnlp_dp.parallelize(model) before training, or "
            f'mindnlp_dp.init_device_mesh({{"dp": {world.world_size}}}) to train it on all ranks'
        )
    return group


def as_replicated(model: Any, group: Optional[ProcessGroup] = None) -> ReplicatedModel:
    """Return the ``ParallelModel`` of a sharded model, else a :class:`ReplicatedModel` on the ranks of ``group``."""
    parts = getattr(model, "parallel", None)
    found: ReplicatedModel = ReplicatedModel(model, group or get_process_group()) if parts is None else parts
    return found


def load_checkpoint(path: Path, model: ReplicatedModel) -> dict[str, Any]:
    """Load the weights into ``model``, each rank its shards, and return the run's state. A collective.

    Raises:
        CheckpointError: on every rank, if the folder is not complete, or not a checkpoint of this model.
    """
    world = model.world
    packed = world.run_on(world.is_main, lambda: read_state(path), "reading a checkpoint")
    model.read_weights(path)
    # A rank may need only its part of the optimizer state, so those arrays are sent one by one, later.
    return unpack_state(broadcast_state(packed or PackedState(None), world, later="optimizer/state/"))
