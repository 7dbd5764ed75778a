"""This module reduces and gathers arrays between hosts in a ring: every host sends to its right neighbor only.

Shared-memory exchanges call it with an mpi4py communicator and a flat array of the same length on every rank. It works
in place (all-reduce with the same bits on every rank, reduce-scatter, all-gather), and returns the number of bytes
sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, Optional

import numpy as np

from mindnlp_dp.communication.transports.polling_wait import PollingWait, all_reduce_in_place
from mindnlp_dp.runtime.shard_bounds import shard_bounds


def reduce_round_ring(
    peers: Any,
    array: np.ndarray,
    reduce: Callable[..., Any] = np.add,
    *,
    wire: Optional[HalfPrecisionCodec] = None,
    waiter: Optional[PollingWait] = None,
    edges: Optional[Sequence[int]] = None,
    scatter: bool = False,
) -> int:
    """Reduce ``array`` in place over a communicator, in a ring; return the number of bytes that this rank sent.

    Each of N ranks sends N-1 pieces to be summed and N-1 sums, each 1/N of the array: 2(N-1)/N of it, for any N
    (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). Pieces are even,
    or begin at ``edges``. With ``scatter``, only the first half runs, the reduce-scatter: rank r gets the sum of
    piece r, and its other pieces have no meaning.
    With a half-precision ``wire``, every hop rounds the partial sum, and every rank ends with the same rounded sum; the
    scales, two bytes per message, are not counted.
    """
    rank, size = peers.rank, peers.size
    pieces = _pieces(array, edges or shard_bounds(len(array), size))
    longest = max(len(piece) for piece in pieces)
    # Two buffers, because the last message is forwarded while the next one arrives.
    scratch = [wire.scratch(longest) for _ in range(2)] if wire else [np.empty(longest, array.dtype)]
    extra = 1 if wire else 0
    sent = 0
    outgoing = pieces[(rank - 1) % size]
    outgoing = wire.encode(outgoing) if wire else outgoing
    for step in range(size - 1 if scatter else 2 * (size - 1)):
        target, is_sum = pieces[(rank - step - 2) % size], step < size - 1
        incoming = scratch[step % len(scratch)][: len(target) + extra] if wire or is_sum else target
        _pass_on(peers, outgoing, incoming, waiter)
        sent += outgoing[extra:].nbytes
        if is_sum:
            reduce(target, wire.decode(incoming) if wire else incoming, out=target)
            outgoing = wire.encode(target) if wire else target
        else:
            outgoing = incoming
        if wire and step >= size - 2:
            # The owner of a sum also keeps the rounded values that the others receive.
            target[:] = wire.decode(outgoing)
    return sent


def gather_round_ring(peers: Any, array: np.ndarray, edges: Sequence[int]) -> int:
    """All-gather the pieces of ``array`` in place (rank r has piece r); return the number of bytes that it sent."""
    rank, size, sent = peers.rank, peers.size, 0
    pieces = _pieces(array, edges)
    for step in range(size - 1):
        outgoing = pieces[(rank - step) % size]
        _pass_on(peers, outgoing, pieces[(rank - step - 1) % size], None)
        sent += outgoing.nbytes
    return sent


def _pieces(array: np.ndarray, edges: Sequence[int]) -> list[np.ndarray]:
    return [array[begin:end] for begin, end in zip(edges, edges[1:])]


def _pass_on(peers: Any, outgoing: np.ndarray, incoming: np.ndarray, waiter: Optional[PollingWait]) -> None:
    """Send to the right neighbor and receive from the left one."""
    right, left = (peers.rank + 1) % peers.size, (peers.rank - 1) % peers.size
    if waiter is None:
        peers.Sendrecv(outgoing, dest=right, recvbuf=incoming, source=left)
    else:
        requests = [peers.Irecv(incoming, source=left), peers.Isend(outgoing, dest=right)]
        waiter.wait(requests, outgoing, incoming)


# The largest number of a float16 message is below 2 to the power of this; float16 ends at 65,504.
_LARGEST_EXPONENT = 15

# The largest exponent of a scale, well within the range of float32.
_LARGEST_SCALE = 120


# Half precision for the network between hosts.


class HalfPrecisionCodec:
    """Encodes numbers as float16 or bfloat16, sent as 16-bit integers, which MPI supports, and summed in float32.

    A float16 message is scaled by a power of two, whose exponent is its first number, so that its largest number almost
    fills float16's range: gradients lie where float16 has few bits left, and their sum may be beyond its range.
    """

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)

    @staticmethod
    def scratch(numel: int) -> np.ndarray:
        """Return memory for a message of at most ``numel`` numbers."""
        return np.empty(numel + 1, np.uint16)

    def encode(self, array: np.ndarray) -> np.ndarray:
        message = self.scratch(len(array))
        exponent = self._exponent(array)
        message[:1].view(np.int16)[0] = exponent
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            np.multiply(array, np.float32(2.0**exponent), out=message[1:].view(self.dtype), casting="unsafe")
        return message

    def _exponent(self, array: np.ndarray) -> int:
        if self.dtype != np.float16 or not len(array):
            return 0
        peak = max(array.max(), -array.min())
        if not np.isfinite(peak) or peak == 0:
            return 0
        return min(_LARGEST_EXPONENT - int(np.frexp(peak)[1]), _LARGEST_SCALE)

    def decode(self, message: np.ndarray) -> np.ndarray:
        numbers = message[1:].view(self.dtype).astype(np.float32)
        exponent = int(message[:1].view(np.int16)[0])
        return np.multiply(numbers, np.float32(2.0**-exponent), out=numbers) if exponent else numbers


def wire_for(compression: Optional[str], dtype: np.dtype) -> Optional[HalfPrecisionCodec]:
    """Return the encoder for arrays of type ``dtype``; None to send them unchanged: only float32 is ever compressed."""
    if compression not in ("fp16", "bf16") or dtype != np.float32:
        return None
    import ml_dtypes

    return HalfPrecisionCodec(np.float16 if compression == "fp16" else ml_dtypes.bfloat16)


# Elements of a block, which is sent completely or not at all: 256 bytes of float32, or one bit.
BLOCK_ELEMENTS = 64

# Packing is worth its cost if it leaves out more than this fraction of the blocks.
_WORTH_PACKING = 0.1


# Sums between hosts without sending blocks of zeros, for exchanges in shared memory. They work in place on a flat
# array of the same length on every rank, and give the same bits on every rank.
#
#     array ── which blocks hold anything? ── packed ── encoded ──▶ right neighbor
#              (one bit for 64 elements,                 (float32, fp16 or bf16)
#               "or" over the ranks)


def sum_over_hosts(
    peers: Any,
    array: np.ndarray,
    wire: Optional[HalfPrecisionCodec],
    waiter: Optional[PollingWait],
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
    edges = edges or shard_bounds(len(array), peers.size, BLOCK_ELEMENTS)
    if not skip_zeros or num_blocks == 0:
        return reduce_round_ring(peers, array, wire=wire, waiter=waiter, edges=edges, scatter=scatter)
    from mpi4py import MPI

    blocks = array[: num_blocks * BLOCK_ELEMENTS].reshape(num_blocks, BLOCK_ELEMENTS)
    # Compare as integers, because a negative zero must be sent.
    holds_anything = blocks.view(f"u{array.itemsize}").any(axis=1)
    bits = np.packbits(holds_anything)
    all_reduce_in_place(peers, bits, MPI.BOR, waiter)
    sent_blocks = np.flatnonzero(np.unpackbits(bits, count=num_blocks))
    if len(sent_blocks) > (1 - _WORTH_PACKING) * num_blocks:
        return reduce_round_ring(peers, array, wire=wire, waiter=waiter, edges=edges, scatter=scatter)
    tail = array[num_blocks * BLOCK_ELEMENTS :]
    packed = np.concatenate([blocks[sent_blocks].reshape(-1), tail])
    of_packed = np.searchsorted(sent_blocks, [edge // BLOCK_ELEMENTS for edge in edges[:-1]]) * BLOCK_ELEMENTS
    packed_edges = [*of_packed.tolist(), len(packed)]
    sent = reduce_round_ring(peers, packed, wire=wire, waiter=waiter, edges=packed_edges, scatter=scatter)
    blocks[sent_blocks] = packed[: len(packed) - len(tail)].reshape(-1, BLOCK_ELEMENTS)
    tail[:] = packed[len(packed) - len(tail) :]
    return sent
