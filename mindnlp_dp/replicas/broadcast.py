"""This module copies rank 0's weights and buffers to all ranks, whatever seed each rank built its model from.

Buffers that a forward pass changes, such as the running statistics of batch normalisation, depend on the samples of
one rank, so they drift apart. Rank 0's buffers are broadcast before a model is compared, saved or evaluated.
"""

from __future__ import annotations

import math
from typing import Any, Optional

from mindnlp_dp.communication.collectives import ProcessGroup
from mindnlp_dp.communication.process_group import get_data_group
from mindnlp_dp.replicas.weights import check_same_structure
from mindnlp_dp.runtime.arrays import dtype_name, set_weight
from mindnlp_dp.runtime.named_weights import named_buffers, named_weights, transient_buffers

from .digests import weight_digest


def broadcast_parameters(model: Any, group: Optional[ProcessGroup] = None, *, src: int = 0) -> None:
    """Copy the parameters and buffers of rank ``src`` to every rank, in place.

    Non-persistent buffers whose shape or type differs between ranks, because it depends on the samples that a rank has
    read, are not changed.

    Raises:
        ReplicaMismatchError: Raised on every rank, before anything is sent, if ranks disagree about a name, a shape or
            a type.
    """
    group = group or get_data_group()
    weights = named_weights(model)
    check_same_structure(weights, group)
    if group.world_size == 1:
        return
    for _, weight in [*weights, *_of_one_shape(transient_buffers(model), group)]:
        if math.prod(weight.shape):
            set_weight(weight, group.broadcast(weight, src=src))


def _of_one_shape(buffers: list[tuple[str, Any]], group: ProcessGroup) -> list[tuple[str, Any]]:
    """Return the buffers that all ranks have in the same shape and type. A collective."""
    shapes = [(name, tuple(buffer.shape), dtype_name(buffer)) for name, buffer in buffers]
    everyone = group.all_gather_object(shapes)
    common = set(everyone[0]).intersection(*everyone[1:])
    return [pair for pair, shape in zip(buffers, shapes) if shape in common]


def broadcast_buffers(model: Any, group: Optional[ProcessGroup] = None) -> None:
    """Copy rank 0's buffers to every rank where they differ, in place; a collective.

    PyTorch's DistributedDataParallel does the same with ``broadcast_buffers``. The Trainer and
    :class:`~mindnlp_dp.FunctionalRun` call it before they compare, save or evaluate replicas; a custom loop that uses
    neither must call it itself.

    Raises:
        ReplicaMismatchError: Raised on every rank if ranks have a buffer in different shapes; names the buffer.
    """
    group = group or get_data_group()
    buffers = named_buffers(model)
    if group.world_size == 1 or not buffers:
        return
    check_same_structure(buffers, group)
    digests = group.all_gather_object([weight_digest(name, buffer) for name, buffer in buffers])
    for (_, buffer), *theirs in zip(buffers, *digests):
        if len(set(theirs)) > 1:
            set_weight(buffer, group.broadcast(buffer, src=0))
