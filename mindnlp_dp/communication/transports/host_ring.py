"""This module reduces and gathers arrays between hosts in a ring: every host sends to its right neighbour only.

Shared-memory exchanges call it with an mpi4py communicator and a flat array of the same length on every rank. It works
in place (all-reduce with the same bits on every rank, reduce-scatter, all-gather), and returns the number of bytes
sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, Optional

import numpy as np

from mindnlp_dp.communication.transports.half_wire import HalfWire
from mindnlp_dp.communication.transports.patience import Patience
from mindnlp_dp.runtime.partition import even_edges


def reduce_round_ring(
    peers: Any,
    array: np.ndarray,
    reduce: Callable[..., Any] = np.add,
    *,
    wire: Optional[HalfWire] = None,
    patience: Optional[Patience] = None,
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
    pieces = _pieces(array, edges or even_edges(len(array), size))
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
        _pass_on(peers, outgoing, incoming, patience)
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


def _pass_on(peers: Any, outgoing: np.ndarray, incoming: np.ndarray, patience: Optional[Patience]) -> None:
    """Send to the right neighbour and receive from the left one."""
    right, left = (peers.rank + 1) % peers.size, (peers.rank - 1) % peers.size
    if patience is None:
        peers.Sendrecv(outgoing, dest=right, recvbuf=incoming, source=left)
    else:
        requests = [peers.Irecv(incoming, source=left), peers.Isend(outgoing, dest=right)]
        patience.wait(requests, outgoing, incoming)
