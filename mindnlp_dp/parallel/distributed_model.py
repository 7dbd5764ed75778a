"""Gives training loops and checkpoints one interface to a model, replicated or sharded, and loads a checkpoint into it.

Of the two kinds, :class:`ReplicatedModel` is here. A model that :func:`~mindnlp_dp.parallelize` has sharded has a
:class:`~.sharded_model.ShardedModel` in its attribute ``parallel``.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, Optional, TypeVar, Union

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
from mindnlp_dp.data_parallel.model_scope import ModelScope
from mindnlp_dp.data_parallel.synchronizer import GradientSynchronizer
from mindnlp_dp.data_parallel.synchronizer_base import Synchronizer

T = TypeVar("T")


class DistributedModel(abc.ABC):
    """The interface of a model on all ranks to training loops and checkpoints; all ranks of the job call every method.

    Attributes:
        group: the ranks among which samples are split.
        world: all ranks of the job.
        seed_rank: the rank number that, with the step, seeds the randomness inside the model.
        loss_replication: the number of ranks with the same shard of the model that split the samples of each
            micro-batch.
        is_sharded: whether ranks hold shards of the model.
        pipeline: this rank's stage (:class:`~.pipeline_parallel.runner.Pipeline`); None without stages.
    """

    model: Any
    group: ProcessGroup
    world: ProcessGroup
    seed_rank: int
    loss_replication = 1
    is_sharded = False
    pipeline: Any = None

    # Training.

    @abc.abstractmethod
    def check_optimizer(self, optimizer: Any, parameters: Sequence[Any]) -> None:
        """Raise ValueError if the optimizer has trainable parameters that are not among those whose gradients it gets.

        They would be trained on each rank by itself, or not at all, and no checkpoint would hold them.
        """

    def zero_stage(self, asked_for: Union[int, str]) -> Union[int, str]:
        """Return the ZeRO stage of the update; raise ValueError if this model cannot be trained with it."""
        if asked_for == 3:
            if self.world.world_size > 1:
                raise ValueError(
                    "zero_stage=3 needs a model whose weights are sharded: call model = mindnlp_dp.fully_shard(model) "
                    "before its optimizer is made"
                )
            return 0
        return asked_for

    @abc.abstractmethod
    def scope(self, parameters: Sequence[Any]) -> ModelScope:
        """Return the scope that tells which of these parameters this rank adds to a norm over the full model."""

    @abc.abstractmethod
    def make_synchronizer(self, named: Sequence[tuple[str, Any]], **options: Any) -> Synchronizer:
        """Return the synchronizer of these parameters, each over the ranks that have it."""

    def micro_step(self, weight: float) -> contextlib.AbstractContextManager[None]:
        """Return a context for the forward and backward pass of a micro-step. A collective if there are experts."""
        return contextlib.nullcontext()

    def num_micro_steps(self, mine: int) -> int:
        """Return how many micro-steps this rank joins in an update in which it has ``mine`` itself.

        It is more if ranks that must run them together, as with experts, have more. A collective of those.
        """
        return mine

    def dummy_batch_for(self, batch: Optional[T]) -> Optional[T]:
        """Return the batch to run: this rank's, or a dummy batch of weight 0 if other ranks need this rank's experts.

        Returns None if there is nothing to run.
        """
        return batch

    def has_nonfinite_peer(self, loss: float) -> bool:
        """Return whether a loss of another rank that uses the same experts is not finite, and so their gradients."""
        return False

    def resync_tied_weights(self) -> None:  # noqa: B027
        """Make tied weights bitwise equal on all stages; called after every update."""

    # Weights.

    @abc.abstractmethod
    def broadcast_weights(self) -> None:
        """Give every rank the weights of rank 0."""

    @abc.abstractmethod
    def broadcast_buffers(self) -> None:
        """Give every rank the buffers of rank 0."""

    @abc.abstractmethod
    def assert_in_sync(self) -> str:
        """Return the digest of the weights; raise ReplicaMismatchError if the ranks' weights differ."""

    @abc.abstractmethod
    def digest(self) -> str:
        """Return the digest that one process with the same weights would compute."""

    @abc.abstractmethod
    def read_weights(self, folder: Path) -> None:
        """Load the weights in a folder into the model; raise CheckpointError if they are not this model's."""

    @abc.abstractmethod
    def model_writer(
        self, workspace: Path, write_full: Callable[[Path], None], beside: Sequence[Any] = ()
    ) -> Callable[[Path], None]:
        """Return a function that writes the model into a folder; only the ranks that write call it.

        For a replicated model it is ``write_full``, which writes all files. For a sharded model it writes the weights,
        which this call has gathered into a file in ``workspace``, and calls ``save_pretrained`` of the objects in
        ``beside``.
        """

    # The conversion between the optimizer state of one process and that of this rank.

    @abc.abstractmethod
    def full_optimizer_state(self, own: dict[str, Any], *, keep: bool, sharded: bool = False) -> dict[str, Any]:
        """Return the optimizer state of one process; on ranks that do not ``keep`` it, without arrays."""

    @abc.abstractmethod
    def local_optimizer_state(self, full: Mapping[str, Any], names: Sequence[Sequence[str]]) -> Mapping[str, Any]:
        """Return this rank's part of a full optimizer state; ``names`` are its parameters, by parameter group."""


class ReplicatedModel(DistributedModel):
    """A model of which every rank has a full copy. Without checkpoints, a train step needs no ``model``: None."""

    def __init__(self, model: Any, group: ProcessGroup) -> None:
        self.model = model
        self.group = self.world = group
        self.seed_rank = group.rank

    def check_optimizer(self, optimizer: Any, parameters: Sequence[Any]) -> None:
        known = set(map(id, parameters))
        others = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"] if id(p) not in known]
        shapes = [tuple(p.shape) for p in others if p.requires_grad]
        if shapes:
            raise ValueError(
                f"the optimizer has {len(shapes)} trainable parameters that are not the model's, of shape "
                f"{', '.join(map(str, shapes[:3]))}{', ...' if len(shapes) > 3 else ''} (rank {self.world.label()}). "
                "Make the module that has them, such as a loss, a part of the model (model.loss_function = loss), so "
                "that they are exchanged and saved; pass those of a custom loop to make_train_step(parameters=); after "
                "the model's parameters were replaced, make a new optimizer"
            )

    def scope(self, parameters: Sequence[Any]) -> ModelScope:
        return ModelScope()

    def make_synchronizer(self, named: Sequence[tuple[str, Any]], **options: Any) -> Synchronizer:
        return GradientSynchronizer(named, self.group, **options)

    def broadcast_weights(self) -> None:
        broadcast_parameters(self.model, self.group)

    def broadcast_buffers(self) -> None:
        broadcast_buffers(self.model, self.group)

    def assert_in_sync(self) -> str:
        return assert_replicas_in_sync(self.model, self.group)

    def digest(self) -> str:
        return replica_digest(self.model)

    def read_weights(self, folder: Path) -> None:
        self.world.run_on(self.world.is_main, lambda: read_weights(self.model, folder), "reading a checkpoint")
        self.broadcast_weights()

    def model_writer(
        self, workspace: Path, write_full: Callable[[Path], None], beside: Sequence[Any] = ()
    ) -> Callable[[Path], None]:
        return write_full

    def full_optimizer_state(self, own: dict[str, Any], *, keep: bool, sharded: bool = False) -> dict[str, Any]:
        return own

    def local_optimizer_state(self, full: Mapping[str, Any], names: Sequence[Sequence[str]]) -> Mapping[str, Any]:
        return full


def replicated_model_on_all_ranks(model: Any) -> ReplicatedModel:
    """Return the :class:`ReplicatedModel` of a model that is trained on all ranks.

    Raises:
        ValueError: the job's mesh has ranks that would train it on the same samples.
    """
    group, world = get_data_group(), get_process_group()
    if group.world_size != world.world_size:
        raise ValueError(
            "this model is replicated on each rank, and the mesh that was made last shards models: of "
            f"{world.world_size} ranks {group.world_size} read samples, and the others would do the same work again. "
            "Call mindnlp_dp.parallelize(model) before training, or "
            f'mindnlp_dp.init_device_mesh({{"dp": {world.world_size}}}) to train it on all ranks'
        )
    return ReplicatedModel(model, group)


def distributed_model_of(model: Any, group: Optional[ProcessGroup] = None) -> DistributedModel:
    """Return the ``ShardedModel`` of a sharded model, else a :class:`ReplicatedModel` on the ranks of ``group``."""
    sharded: Optional[DistributedModel] = getattr(model, "parallel", None)
    return ReplicatedModel(model, group or get_process_group()) if sharded is None else sharded


def load_checkpoint(path: Path, model: DistributedModel) -> dict[str, Any]:
    """Load the weights into ``model``, each rank its shards, and return the run's state. A collective.

    Raises:
        CheckpointError: on every rank, if the folder is not complete, or not a checkpoint of this model.
    """
    world = model.world
    packed = world.run_on(world.is_main, lambda: read_state(path), "reading a checkpoint")
    model.read_weights(path)
    # A rank may need only its part of the optimizer state, so those arrays are sent one by one, later.
    return unpack_state(broadcast_state(packed or PackedState(None), world, later="optimizer/state/"))
