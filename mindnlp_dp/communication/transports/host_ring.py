"""Sums between hosts: a ring in which every host sends to its right neighbour only.

Goes in: an mpi4py communicator and a flat array, of the same length on every rank. Comes out: the sum over the ranks,
in place, with the same bits everywhere, and how many bytes it took.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import numpy as np

from .half_wire import HalfWire
from .patience import Patience


def reduce_round_ring(
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
