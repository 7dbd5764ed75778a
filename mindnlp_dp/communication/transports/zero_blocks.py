"""Sums between hosts, for which blocks of zeros stay at home.

Goes in: an mpi4py communicator and a flat array, of the same length on every rank. Comes out: the
sum over the ranks, in place, with the same bits everywhere, and how many bytes it took.

::

    array ── which blocks hold anything? ── packed ── encoded ──▶ right neighbour
             (one bit for 64 elements,                 (float32, fp16 or bf16)
              "or" over the ranks)
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from .half_wire import HalfWire
from .host_ring import reduce_round_ring
from .patience import Patience, all_reduce_in_place

# Elements of a block that is sent whole or not at all: 256 bytes of float32, one bit on the wire.
BLOCK_ELEMENTS = 64
# Packing pays when it leaves out more than this share of the blocks.
_WORTH_PACKING = 0.1


def sum_over_hosts(
    peers: Any, array: np.ndarray, wire: Optional[HalfWire], patience: Optional[Patience], skip_zeros: bool = True
) -> int:
    """Sum ``array`` in place over the hosts; blocks that are zero on all of them are not sent. Returns bytes sent.

    The gradient of an embedding has few rows that are not zero, and is often half of the model
    (Fei et al., "Efficient sparse collective communication and its application to accelerate distributed deep
    learning", SIGCOMM 2021, send non-zero blocks only, too). Nothing is rounded by that. The bits that say which
    blocks are sent, a 2,048th of float32, are not counted.
    """
    num_blocks = len(array) // BLOCK_ELEMENTS
    if not skip_zeros or num_blocks == 0:
        return reduce_round_ring(peers, array, wire=wire, patience=patience)
    from mpi4py import MPI

    blocks = array[: num_blocks * BLOCK_ELEMENTS].reshape(num_blocks, BLOCK_ELEMENTS)
    # As integers: a negative zero is something.
    holds_anything = blocks.view(f"u{array.itemsize}").any(axis=1)
    bits = np.packbits(holds_anything)
    all_reduce_in_place(peers, bits, MPI.BOR, patience)
    sent_blocks = np.flatnonzero(np.unpackbits(bits, count=num_blocks))
    if len(sent_blocks) > (1 - _WORTH_PACKING) * num_blocks:
        return reduce_round_ring(peers, array, wire=wire, patience=patience)
    tail = array[num_blocks * BLOCK_ELEMENTS :]
    packed = np.concatenate([blocks[sent_blocks].reshape(-1), tail])
    sent = reduce_round_ring(peers, packed, wire=wire, patience=patience)
    blocks[sent_blocks] = packed[: len(packed) - len(tail)].reshape(-1, BLOCK_ELEMENTS)
    tail[:] = packed[len(packed) - len(tail) :]
    return sent
