"""One set of weights on every rank, and the proof of it.

Goes in: a model a rank, built from whatever seed. Comes out: rank 0's weights
and buffers on every rank. Later, a digest of all weights tells whether the
replicas still agree, to the bit.

Buffers that a forward pass changes, such as the running statistics of a batch normalisation, see the samples of their
own rank, and drift apart: rank 0's are taken over wherever a model is looked at, saved or evaluated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Optional

import numpy as np

from .backends.dtypes import dtype_name
from .process_group import ProcessGroup, get_process_group

DIGEST_BYTES = 8


class ReplicaMismatchError(RuntimeError):
    """Ranks hold models that differ."""


def named_weights(model: Any) -> list[tuple[str, Any]]:
    """Parameters, frozen ones too, then buffers: ``(name, tensor)``, each tensor once.

    Takes a MindNLP module, a ``mindspore.nn.Cell``, or such pairs.
    """
    return _each_once(_pairs(model))


def named_buffers(model: Any) -> list[tuple[str, Any]]:
    """What a forward pass may change: the buffers of a MindNLP module; what does not train of a ``mindspore.nn.Cell``.

    A Cell knows no buffers: the running statistics of its batch normalisation are parameters that do not train.
    """
    if hasattr(model, "named_parameters"):
        return _each_once(getattr(model, "named_buffers", tuple)())
    return _each_once((name, w) for name, w in _pairs(model) if not getattr(w, "requires_grad", True))


def _pairs(model: Any) -> list[tuple[str, Any]]:
    if hasattr(model, "named_parameters"):
        return [*model.named_parameters(), *getattr(model, "named_buffers", tuple)()]
    return list(model.parameters_and_names() if hasattr(model, "parameters_and_names") else model)


def _each_once(pairs: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    seen: set[int] = set()
    return [(name, w) for name, w in pairs if w is not None and not (id(w) in seen or seen.add(id(w)))]  # type: ignore[func-returns-value]


def all_names(model: Any) -> dict[str, Any]:
    """Every name of every parameter and buffer, those that share one tensor too."""
    if not hasattr(model, "named_parameters"):
        return dict(named_weights(model))
    pairs = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: weight for name, weight in pairs if weight is not None}


def broadcast_parameters(model: Any, group: Optional[ProcessGroup] = None) -> None:
    """Give every rank rank 0's parameters and buffers, in place.

    Raises:
        ReplicaMismatchError: on every rank, before anything is sent, when ranks disagree
            about a name, a shape or a type.
    """
    group = group or get_process_group()
    weights = named_weights(model)
    check_same_structure(weights, group)
    if group.world_size == 1:
        return
    for _, weight in weights:
        if weight.size:
            set_weight(weight, group.broadcast(weight, src=0))


def broadcast_buffers(model: Any, group: Optional[ProcessGroup] = None) -> None:
    """Give every rank rank 0's buffers, where they differ, in place; a collective.

    As PyTorch's DistributedDataParallel does with ``broadcast_buffers``. It is called before a model's replicas are
    compared, saved or evaluated, by the Trainer and by :class:`~mindnlp_dp.FunctionalRun`; a loop of one's own that
    does neither calls it itself.
    """
    group = group or get_process_group()
    buffers = named_buffers(model)
    if group.world_size == 1 or not buffers:
        return
    digests = group.all_gather_object([_weight_digest(name, buffer) for name, buffer in buffers])
    for (_, buffer), *theirs in zip(buffers, *digests):
        if len(set(theirs)) > 1:
            set_weight(buffer, group.broadcast(buffer, src=0))


def set_weight(weight: Any, value: Any) -> None:
    """Overwrite a parameter or buffer with a tensor of its own shape and type."""
    # assign_value, and not ops.assign, for a buffer may be a view (BERT's position_ids is one).
    weight.set_data(value) if hasattr(weight, "set_data") else weight.assign_value(value)


def check_same_structure(weights: Iterable[tuple[str, Any]], group: ProcessGroup) -> None:
    """Raise on every rank unless all ranks list the same names, shapes and types in the same order."""
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
                f"models differ by construction: rank {longer} has {_show(extra)}, which rank {shorter} lacks; "
                "build the same model on every rank"
            )


def _show(entry: tuple[str, tuple[int, ...], str]) -> str:
    name, shape, dtype = entry
    return f"{name!r} of shape {shape} ({dtype})"


def replica_digest(model: Any) -> str:
    """A hash of every weight's name, type, shape and bits, as 16 hexadecimal digits."""
    total = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, weight in named_weights(model):
        total.update(_weight_digest(name, weight))
    return total.hexdigest()


def _weight_digest(name: str, weight: Any) -> bytes:
    import mindspore

    dtype = dtype_name(weight)
    # NumPy has no bfloat16; every bfloat16 is a float32, so no difference gets lost.
    array = weight.astype(mindspore.float32).asnumpy() if dtype == "bfloat16" else weight.asnumpy()
    digest = hashlib.blake2b(f"{name}:{dtype}:{array.shape}".encode(), digest_size=DIGEST_BYTES)
    digest.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    return digest.digest()


def replicas_in_sync(model: Any, group: Optional[ProcessGroup] = None) -> bool:
    """Whether all ranks hold the same weights, to the bit; the same answer on every rank."""
    group = group or get_process_group()
    return len(set(group.all_gather_object(replica_digest(model)))) == 1


def assert_replicas_in_sync(model: Any, group: Optional[ProcessGroup] = None) -> str:
    """Return the digest that all ranks share.

    Raises:
        ReplicaMismatchError: on every rank, naming the first weight that differs from rank
            0's, the rank, and by how much.
    """
    group = group or get_process_group()
    digest = replica_digest(model)
    if replicas_in_sync(model, group):
        return digest
    weights = named_weights(model)
    check_same_structure(weights, group)
    digests = group.all_gather_object([_weight_digest(name, weight) for name, weight in weights])
    index, rank = next(
        (index, rank)
        for index in range(len(weights))
        for rank in range(group.world_size)
        if digests[rank][index] != digests[0][index]
    )
    name, weight = weights[index]
    values = group.all_gather_object(weight.asnumpy().astype(np.float64))
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
