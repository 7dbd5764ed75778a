"""This module checks that the replicas of a model are bitwise identical, by a digest of all weights.

If they are not, it reports which weight differs, on which rank, and by how much.
"""

from __future__ import annotations

import hashlib
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.collectives import ProcessGroup
from mindnlp_dp.communication.process_group import get_data_group
from mindnlp_dp.replicas.weights import ReplicaMismatchError, check_same_structure
from mindnlp_dp.runtime.arrays import dtype_name, to_host
from mindnlp_dp.runtime.named_weights import named_buffers, named_weights

DIGEST_BYTES = 8


# The names that MindNLP 0.4 and PEFT give to frozen copies of fully trained modules, such as a new head: no computation
# uses these copies, and no checkpoint contains them.
_UNUSED_COPIES = (".original_cell.", ".original_module.")


def replica_digest(model: Any) -> str:
    """Return a hash of every weight's name, type, shape and bits, as 16 hexadecimal digits."""
    total = hashlib.blake2b(digest_size=DIGEST_BYTES)
    has_adapters = hasattr(model, "peft_config")
    for name, weight in named_weights(model):
        if not (has_adapters and any(copy in name for copy in _UNUSED_COPIES)):
            total.update(weight_digest(name, weight))
    return total.hexdigest()


def weight_digest(name: str, weight: Any) -> bytes:
    """Return a hash of one weight's name, type, shape and bits."""
    # bfloat16 is hashed as float32, which keeps every difference.
    dtype, array = dtype_name(weight), to_host(weight)
    digest = hashlib.blake2b(f"{name}:{dtype}:{array.shape}".encode(), digest_size=DIGEST_BYTES)
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
    digest = replica_digest(model)
    if replicas_in_sync(model, group):
        return digest
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
