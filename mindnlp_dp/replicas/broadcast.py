"""One set of weights and buffers on every rank.

Goes in: a model a rank, built from whatever seed. Comes out: rank 0's weights and buffers on every rank.

Buffers that a forward pass changes, such as the running statistics of a batch normalisation, see the samples of their
own rank, and drift apart: rank 0's are taken over wherever a model is looked at, saved or evaluated.
"""

from __future__ import annotations

import math
from typing import Any, Optional

from mindnlp_dp.arrays.conversion import set_weight
from mindnlp_dp.arrays.types import dtype_name
from mindnlp_dp.communication.collectives import ProcessGroup
from mindnlp_dp.communication.process_group import get_data_group

from .digests import weight_digest
from .weights import check_same_structure, named_buffers, named_weights, transient_buffers


def broadcast_parameters(model: Any, group: Optional[ProcessGroup] = None, *, src: int = 0) -> None:
    """Give every rank rank ``src``'s parameters and buffers, in place.

    Buffers that are not persistent, and follow what a rank has read in their shape, stay as they are there.

    Raises:
        ReplicaMismatchError: on every rank, before anything is sent, when ranks disagree
            about a name, a shape or a type.
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
    """Those that all ranks have in the same shape and type. A collective."""
    shapes = [(name, tuple(buffer.shape), dtype_name(buffer)) for name, buffer in buffers]
    everyone = group.all_gather_object(shapes)
    common = set(everyone[0]).intersection(*everyone[1:])
    return [pair for pair, shape in zip(buffers, shapes) if shape in common]


def broadcast_buffers(model: Any, group: Optional[ProcessGroup] = None) -> None:
    """Give every rank rank 0's buffers, where they differ, in place; a collective.

    As PyTorch's DistributedDataParallel does with ``broadcast_buffers``. It is called before a model's replicas are
    compared, saved or evaluated, by the Trainer and by :class:`~mindnlp_dp.FunctionalRun`; a loop of one's own that
    does neither calls it itself.

    Raises:
        ReplicaMismatchError: on every rank, when ranks have a buffer in different shapes; it is named.
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
