"""Sums between hosts: a ring, the form that numbers have on its wire, and blocks of zeros that stay at home.

Goes in: an mpi4py communicator and a flat array, of the same length on every rank. Comes out: the
sum over the ranks, in place, with the same bits everywhere, and how many bytes it took.

::

    array ── which blocks hold anything? ── packed ── encoded ──▶ right neighbour
             (one bit for 64 elements,                 (float32, fp16 or bf16)
              "or" over the ranks)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Callable, Optional

import numpy as np

# Elements of a block that is sent whole or not at all: 256 bytes of float32, one bit on the wire.
BLOCK_ELEMENTS = 64
# Packing pays when it leaves out more than this share of the blocks.
_WORTH_PACKING = 0.1
# How long a patient wait sleeps between two looks: at first, and at most.
_SHORTEST_NAP, _LONGEST_NAP = 50e-6, 1e-3
# What an abandoned exchange still writes to, until the process ends.
_abandoned: list[Any] = []


class AbandonedError(RuntimeError):
    """The exchange was given up before its end."""


class Patience:
    """Waits for MPI without burning the core, which another thread of this process computes on.

    MPI's own waits spin. This looks, sleeps and looks again; :meth:`give_up` ends it from another thread.
    """

    def __init__(self) -> None:
        self._gave_up = threading.Event()

    def give_up(self) -> None:
        self._gave_up.set()

    def wait(self, requests: Sequence[Any], *buffers: Any) -> None:
        """Return when all ``requests`` are done. ``buffers`` are what MPI reads and writes for them.

        Raises:
            AbandonedError: :meth:`give_up` was called.
        """
        nap = _SHORTEST_NAP
        while not all(request.Test() for request in requests):
            if self._gave_up.is_set():
                _abandoned.append((requests, buffers))
                raise AbandonedError("the exchange was given up")
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)


def barrier(comm: Any, patience: Optional[Patience]) -> None:
    if comm.size == 1:
        return
    if patience is None:
        comm.Barrier()
    else:
        patience.wait([comm.Ibarrier()])


def all_reduce_in_place(comm: Any, array: np.ndarray, op: Any, patience: Optional[Patience]) -> None:
    """MPI's own all-reduce."""
    from mpi4py import MPI

    if patience is None:
        comm.Allreduce(MPI.IN_PLACE, array, op=op)
    else:
        patience.wait([comm.Iallreduce(MPI.IN_PLACE, array, op=op)], array)


# The largest number of a float16 message lies below 2 to the power of this; float16 ends at 65,504.
_LARGEST_EXPONENT = 15
# Scales stay well within what float32 holds.
_LARGEST_SCALE = 120


class HalfWire:
    """Numbers as float16 or bfloat16, sent as 16-bit integers, which MPI knows; summed in float32.

    A message is scaled by a power of two, its first number, so that its largest number almost fills float16's range:
    gradients lie where float16 has few bits left, and a sum of theirs may lie beyond its end.
    """

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)

    @staticmethod
    def scratch(numel: int) -> np.ndarray:
        """Memory for a message of at most ``numel`` numbers."""
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


def wire_for(compression: Optional[str], dtype: np.dtype) -> Optional[HalfWire]:
    """How an array of type ``dtype`` travels, None for as it is: only float32 is ever compressed."""
    if compression not in ("fp16", "bf16") or dtype != np.float32:
        return None
    import ml_dtypes

    return HalfWire(np.float16 if compression == "fp16" else ml_dtypes.bfloat16)


def ring_all_reduce(
    peers: Any,
    array: np.ndarray,
    reduce: Callable[..., Any] = np.add,
    *,
    wire: Optional[HalfWire] = None,
    patience: Optional[Patience] = None,
) -> int:
    """Reduce ``array`` in place over a communicator, in a ring; returns the bytes that this rank sent.

    Of N ranks each sends N-1 pieces to be summed and N-1 sums, a Nth of the array each: 2(N-1)/N of it, whatever N
    (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
    On a half-precision ``wire`` every hop rounds the sum so far, and every rank ends with the same rounded sum; the
    scales, two bytes a message, are not counted.
    """
    rank, size = peers.rank, peers.size
    right, left = (rank + 1) % size, (rank - 1) % size
    edges = [len(array) * piece // size for piece in range(size + 1)]
    pieces = [array[begin:end] for begin, end in zip(edges, edges[1:])]
    longest = max(len(piece) for piece in pieces)
    # Two, for what came last is sent on while the next comes.
    scratch = [wire.scratch(longest) for _ in range(2)] if wire else [np.empty(longest, array.dtype)]
    extra = 1 if wire else 0
    sent = 0
    outgoing = wire.encode(pieces[rank]) if wire else pieces[rank]
    for step in range(2 * (size - 1)):
        target, is_sum = pieces[(rank - step - 1) % size], step < size - 1
        incoming = scratch[step % len(scratch)][: len(target) + extra] if wire or is_sum else target
        if patience is None:
            peers.Sendrecv(outgoing, dest=right, recvbuf=incoming, source=left)
        else:
            requests = [peers.Irecv(incoming, source=left), peers.Isend(outgoing, dest=right)]
            patience.wait(requests, outgoing, incoming)
        sent += outgoing[extra:].nbytes
        if is_sum:
            reduce(target, wire.decode(incoming) if wire else incoming, out=target)
            outgoing = wire.encode(target) if wire else target
        else:
            outgoing = incoming
        if wire and step >= size - 2:
            # The owner of a sum, too, keeps what the others receive.
            target[:] = wire.decode(outgoing)
    return sent


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
        return ring_all_reduce(peers, array, wire=wire, patience=patience)
    from mpi4py import MPI

    blocks = array[: num_blocks * BLOCK_ELEMENTS].reshape(num_blocks, BLOCK_ELEMENTS)
    # As integers: a negative zero is something.
    holds_anything = blocks.view(f"u{array.itemsize}").any(axis=1)
    bits = np.packbits(holds_anything)
    all_reduce_in_place(peers, bits, MPI.BOR, patience)
    sent_blocks = np.flatnonzero(np.unpackbits(bits, count=num_blocks))
    if len(sent_blocks) > (1 - _WORTH_PACKING) * num_blocks:
        return ring_all_reduce(peers, array, wire=wire, patience=patience)
    tail = array[num_blocks * BLOCK_ELEMENTS :]
    packed = np.concatenate([blocks[sent_blocks].reshape(-1), tail])
    sent = ring_all_reduce(peers, packed, wire=wire, patience=patience)
    blocks[sent_blocks] = packed[: len(packed) - len(tail)].reshape(-1, BLOCK_ELEMENTS)
    tail[:] = packed[len(packed) - len(tail) :]
    return sent
