"""A model as a whole, whatever ranks have of it: one set of weights, their digest, their file.

Goes in: a model a rank. Comes out: what a run needs to know and to do about all of it. Here every rank has the whole
model; where it is cut among ranks (:mod:`mindnlp_dp.parallel`), the model brings another one of these with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, Optional

from mindnlp_dp.communication.collectives import ProcessGroup
from mindnlp_dp.communication.process_group import get_data_group, get_process_group
from mindnlp_dp.replicas.broadcast import broadcast_buffers, broadcast_parameters
from mindnlp_dp.replicas.digests import assert_replicas_in_sync, replica_digest

from .read import read_weights


class WholeModel:
    """Every method is a collective of all ranks of the job.

    Attributes:
        group: the ranks that share out the samples.
        world: all ranks.
        seed_rank: what randomness inside the model is a function of, besides the step.
        num_sharers: ranks with the same part of the model that share out the samples of this one's batches.
    """

    # Whether ranks have parts of the model.
    is_parted = False

    def __init__(self, model: Any, group: ProcessGroup) -> None:
        self.model = model
        self.group = group
        self.world = group
        self.seed_rank = group.rank
        self.num_sharers = 1

    def broadcast_weights(self) -> None:
        """One set of weights: rank 0's."""
        broadcast_parameters(self.model, self.group)

    def broadcast_buffers(self) -> None:
        broadcast_buffers(self.model, self.group)

    def assert_in_sync(self) -> str:
        """The digest of the weights; ReplicaMismatchError where ranks have different ones."""
        return assert_replicas_in_sync(self.model, self.group)

    def digest(self) -> str:
        return replica_digest(self.model)

    def read_weights(self, folder: Path) -> None:
        """Take over the weights in a folder. CheckpointError where they are not this model's."""
        self.world.call_where(self.world.is_main, lambda: read_weights(self.model, folder), "reading a checkpoint")
        self.broadcast_weights()

    def model_writer(
        self, folder: Path, write_whole: Callable[[Path], None], beside: Sequence[Any] = ()
    ) -> Callable[[Path], None]:
        """A function that writes the model into a folder; the ranks that write call it, alone.

        ``write_whole`` does, with all that belongs to it, where this process has all of it. Else the weights are
        written, and what ``beside`` them knows ``save_pretrained``; ``folder`` is where they wait until then.
        """
        return write_whole

    # An optimizer's state, by parameter: what one process has, and what it is here.

    def whole_optimizer(self, own: dict[str, Any], *, keep: bool) -> dict[str, Any]:
        return own

    def own_optimizer(self, whole: Mapping[str, Any], names: Sequence[Sequence[str]]) -> Mapping[str, Any]:
        """What is here of a whole state, for an optimizer of parameters with these ``names``, by group, where it is."""
        return whole


def data_group(parts: Optional[WholeModel]) -> ProcessGroup:
    """Return the ranks that share out the samples of a model: those of its own mesh, if it is cut as ``parts`` say.

    Raises:
        ValueError: it is whole, and the job's mesh has ranks that would train the same model on the same samples.
    """
    if parts is not None:
        return parts.group
    group, world = get_data_group(), get_process_group()
    if group.world_size != world.world_size:
        raise ValueError(
            f"this model is whole on each rank, and the mesh that was made last cuts models: of {world.world_size} "
            f"ranks {group.world_size} read samples, and the others would do the same work once more. Call "
            "mindnlp_dp.parallelize(model) before training, or "
            f'mindnlp_dp.init_device_mesh({{"dp": {world.world_size}}}) to train it on all ranks'
        )
    return group


def whole_model(model: Any, group: Optional[ProcessGroup] = None) -> WholeModel:
    """What the model brings with it; else every rank of ``group`` has all of it."""
    parts = getattr(model, "parallel", None)
    found: WholeModel = WholeModel(model, group or get_process_group()) if parts is None else parts
    return found
