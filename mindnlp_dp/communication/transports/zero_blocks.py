"""This module sums arrays between hosts without sending blocks of zeros; shared-memory exchanges call it.

It takes an mpi4py communicator and a flat array of the same length on every rank, and sums in place, with the same
bits on every rank.

::

    array ── which blocks hold anything? ── packed ── encoded ──▶ right neighbour
             (one bit for 64 elements,                 (float32, fp16 or bf16)
              "or" over the ranks)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.transports.host_ring import reduce_round_ring
from mindnlp_dp.runtime.partition import even_edges

from .half_wire import HalfWire
from .patience import Patience, all_reduce_in_place

# Elements of a block, which is sent completely or not at all: 256 bytes of float32, or one bit.
BLOCK_ELEMENTS = 64
# Packing is worth its cost if it leaves out more than this fraction of the blocks.
_WORTH_PACKING = 0.1


def sum_over_hosts(
    peers: Any,
    array: np.ndarray,
    wire: Optional[HalfWire],
    patience: Optional[Patience],
    skip_zeros: bool = True,
    *,
    edges: Optional[Sequence[int]] = None,
    scatter: bool = False,
) -> int:
    """Sum ``array`` in place over the hosts, without the blocks that are zero on all; return the bytes sent.

    ``edges``, at block boundaries, and ``scatter`` are those of :func:`.reduce_round_ring`.

    The gradient of an embedding is often half of the model, and has few rows that are not zero
    (Fei et al., "Efficient sparse collective communication and its application to accelerate distributed deep
    learning", SIGCOMM 2021, also send only nonzero blocks). Skipping blocks rounds nothing, and does not change the
    order of sums. The bits that say which blocks are sent, 1/2048 of the float32 data, are not counted.
    """
    num_blocks = len(array) // BLOCK_ELEMENTS
    edges = edges or even_edges(len(array), peers.size, BLOCK_ELEMENTS)
    if not skip_zeros or num_blocks == 0:
        return reduce_round_ring(peers, array, wire=wire, patience=patience, edges=edges, scatter=scatter)
    from mpi4py import MPI

    blocks = array[: num_blocks * BLOCK_ELEMENTS].reshape(num_blocks, BLOCK_ELEMENTS)
    # Compare as integers, because a negative zero must be sent.
    holds_anything = blocks.view(f"u{array.itemsize}").any(axis=1)
    bits = np.packbits(holds_anything)
    all_reduce_in_place(peers, bits, MPI.BOR, patience)
    sent_blocks = np.flatnonzero(np.unpackbits(bits, count=num_blocks))
    if len(sent_blocks) > (1 - _WORTH_PACKING) * num_blocks:
        return reduce_round_ring(peers, array, wire=wire, patience=patience, edges=edges, scatter=scatter)
    tail = array[num_blocks * BLOCK_ELEMENTS :]
    packed = np.concatenate([blocks[sent_blocks].reshape(-1), tail])
    of_packed = np.searchsorted(sent_blocks, [edge // BLOCK_ELEMENTS for edge in edges[:-1]]) * BLOCK_ELEMENTS
    packed_edges = [*of_packed.tolist(), len(packed)]
    sent = reduce_round_ring(peers, packed, wire=wire, patience=patience, edges=packed_edges, scatter=scatter)
    blocks[sent_blocks] = packed[: len(packed) - len(tail)].reshape(-1, BLOCK_ELEMENTS)
    tail[:] = packed[len(packed) - len(tail) :]
    return sent
