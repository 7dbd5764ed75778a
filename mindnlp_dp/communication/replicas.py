"""This module gives every rank the weights of rank 0, and checks that the replicas of a model are bitwise identical.

A digest of all weights is compared. If it differs, a message says which weight differs, on which rank, and by how much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Optional

import numpy as np
import xxhash

from mindnlp_dp.communication.default_group import get_data_group
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.runtime.adapters import has_adapters
from mindnlp_dp.runtime.arrays import dtype_name, read, set_weight, to_host
from mindnlp_dp.runtime.named_weights import named_buffers, named_weights, transient_buffers

# The names that MindNLP 0.4 and PEFT give to frozen copies of fully trained modules, such as a new head: no computation
# uses these copies, and no checkpoint contains them.
_UNUSED_COPIES = (".original_cell.", ".original_module.")


def replica_digest(model: Any) -> str:
    """Return a hash of every weight's name, type, shape and bits, as 16 hexadecimal digits."""
    skips_copies = has_adapters(model)
    return digest_of(
        (name, weight) for name, weight in named_weights(model) if not (skips_copies and is_unused_copy(name))
    )


def digest_of(weights: Iterable[tuple[str, Any]]) -> str:
    """Return a hash of these weights, as :func:`replica_digest` does; they are fetched one by one."""
    total = xxhash.xxh3_64()
    for name, weight in weights:
        total.update(weight_digest(name, weight))
    return total.hexdigest()


def is_unused_copy(name: str) -> bool:
    """Return whether a weight of a model with adapters is in an unused copy, and so in no digest and no checkpoint."""
    return any(copy in name for copy in _UNUSED_COPIES)


def weight_digest(name: str, weight: Any) -> bytes:
    """Return a hash of one weight's name, type, shape and bits."""
    # bfloat16 is hashed as float32, which keeps every difference.
    array = to_host(weight)
    # Replicas differ by accident, and not by an attack, and a checkpoint waits for this hash.
    digest = xxhash.xxh3_64(f"{name}:{dtype_name(weight)}:{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    return digest.digest()


def replicas_in_sync(model: Any, group: Optional[ProcessGroup] = None) -> bool:
    """Return whether all ranks hold bitwise identical weights; the same answer on every rank. A collective."""
    group = group or get_data_group()
    return len(set(group.all_gather_object(replica_digest(model)))) == 1


def assert_replicas_in_sync(model: Any, group: Optional[ProcessGroup] = None) -> str:
    """Return the digest if it is the same on all ranks. A collective.

    Raises:
        ReplicaMismatchError: Raised on every rank if replicas differ; names the first weight that differs from rank
            0's, the rank, and the largest difference.
    """
    group = group or get_data_group()
    everyone = group.all_gather_object(replica_digest(model))
    if len(set(everyone)) == 1:
        return everyone[0]
    weights = named_weights(model)
    check_same_structure(weights, group)
    digests = group.all_gather_object([weight_digest(name, weight) for name, weight in weights])
    index, rank = next(
        (index, rank)
        for index in range(len(weights))
        for rank in range(group.world_size)
        if digests[rank][index] != digests[0][index]
    )
    name, weight = weights[index]
    values = group.all_gather_object(read(weight).astype(np.float64))
    distance = float(np.max(np.abs(values[rank] - values[0])))
    way_out = (
        "It is a buffer, which every rank's own samples change: call broadcast_buffers(model) first"
        if any(buffer is weight for _, buffer in named_buffers(model))
        else "Call broadcast_parameters(model) after building the model, and let every rank apply the same update"
    )
    raise ReplicaMismatchError(
        f"replicas are out of sync: {name!r} on rank {rank} differs from rank 0 (largest difference {distance:.3g}). "
        f"{way_out}"
    )


# Copy rank 0's weights and buffers to all ranks, whatever seed each rank built its model from.
#
# Buffers that a forward pass changes, such as the running statistics of batch normalization, depend on the samples of
# one rank, so they drift apart. Rank 0's buffers are broadcast before a model is compared, saved or evaluated.


def broadcast_parameters(model: Any, group: Optional[ProcessGroup] = None) -> None:
    """Copy the parameters and buffers of rank 0 to every rank, in place.

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
            set_weight(weight, group.broadcast(weight))


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


class ReplicaMismatchError(RuntimeError):
    """Raised if the models on the ranks differ."""


def check_same_structure(weights: Iterable[tuple[str, Any]], group: ProcessGroup) -> None:
    """Raise ReplicaMismatchError on every rank unless all ranks list the same names, shapes and types in order."""
    mine = [(name, tuple(weight.shape), dtype_name(weight)) for name, weight in weights]
    structures = group.all_gather_object(mine)
    for rank, theirs in enumerate(structures):
        for ours, other in zip(structures[0], theirs):
            if ours != other:
                raise ReplicaMismatchError(
                    f"models differ by construction: rank 0 has {_show(ours)} where rank {rank} has {_show(other)}; "
                    "build the same model on every rank"
                )
        if len(theirs) != len(structures[0]):
            longer, shorter = (0, rank) if len(structures[0]) > len(theirs) else (rank, 0)
            extra = structures[longer][len(structures[shorter])]
            raise ReplicaMismatchError(
                f"models differ by construction: rank {longer} has {_show(extra)}, which rank {shorter} does not have; "
                "build the same model on every rank"
            )


def _show(entry: tuple[str, tuple[int, ...], str]) -> str:
    name, shape, dtype = entry
    return f"{name!r} of shape {shape} ({dtype})"
