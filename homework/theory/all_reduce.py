"""The textbook algorithms of all-reduce, over ``send`` and ``recv`` of an endpoint; training does not use them.

Each one is a function of an endpoint and a flat array, and returns the sum over all ranks on every rank.
"""

from __future__ import annotations

from typing import Callable, Optional

import numpy as np

from theory.endpoint import Endpoint, parts_of

# Ring all-reduce: every rank sends only to its right neighbor, all ranks at once.
#
# The array is split into N chunks. In the scatter-reduce, each chunk travels round the ring and every rank adds its
# own values; after N-1 steps each rank holds the full sum of one chunk. In the all-gather, these sums travel round
# again.
#
#     N = 3        chunk 0   chunk 1   chunk 2            chunk 0   chunk 1   chunk 2
#     rank 0         a0        a1        a2     ───▶                  Σ1
#     rank 1         b0        b1        b2    scatter-                         Σ2        ───▶   Σ0  Σ1  Σ2
#     rank 2         c0        c1        c2    reduce        Σ0                         all-gather  on all
#
# Each rank sends 2(N-1) messages of 1/N of the array each: 2(N-1)K/N bytes, less than 2K for any N. Patarasuk and
# Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of Parallel and Distributed
# Computing, 2009.


def ring_all_reduce(endpoint: Endpoint, array: np.ndarray) -> np.ndarray:
    """Return the sum over the ranks, on every rank."""
    result = array.copy()
    chunks = parts_of(result, endpoint.world_size)
    scatter_reduce(endpoint, chunks)
    all_gather(endpoint, chunks)
    return result


def scatter_reduce(endpoint: Endpoint, chunks: list[np.ndarray]) -> None:
    """Compute the full sum of chunk ``rank + 1`` (modulo N) on every rank, in place; other chunks hold partial sums."""
    _go_round(endpoint, chunks, endpoint.rank, "scatter-reduce", np.add)


def all_gather(endpoint: Endpoint, chunks: list[np.ndarray]) -> None:
    """Distribute the full sums of all chunks to every rank, in place."""
    _go_round(endpoint, chunks, endpoint.rank + 1, "all-gather", lambda mine, received: received)


def _go_round(
    endpoint: Endpoint, chunks: list[np.ndarray], first: int, phase: str, combine: Callable[..., np.ndarray]
) -> None:
    """N-1 times, send a chunk to the right, beginning with ``first``, and combine the one received from the left."""
    rank, size = endpoint.rank, endpoint.world_size
    for step in range(size - 1):
        sent, received = (first - step) % size, (first - step - 1) % size
        incoming = endpoint.sendrecv(
            chunks[sent], (rank + 1) % size, chunks[received], (rank - 1) % size,
            phase=f"{phase} {step + 1} of {size - 1}", part=f"chunk {sent}",
        )  # fmt: skip
        chunks[received][:] = combine(chunks[received], incoming)


# What PyTorch's nn.DataParallel does at every step: one process owns the parameters.
#
#     every rank computes ── gradients ──▶ rank 0 adds them up and updates ── parameters ──▶ every rank's next copy
#
# The other ranks keep no state: they discard their copies of the model after each step, so the parameters are sent
# again before the next. Rank 0 receives K bytes from each of the others, updates alone while they wait, and sends K
# bytes to each. (DataParallel also scatters the batch and gathers the outputs; this is not counted here.)


def data_parallel_step(
    endpoint: Endpoint, parameters: np.ndarray, gradient: np.ndarray, learning_rate: float
) -> np.ndarray:
    """Do one step of gradient descent on rank 0's ``parameters``; return a copy of the new ones on every rank."""
    total = reduce(endpoint, gradient)
    if total is not None:
        parameters = parameters - learning_rate * total
    return broadcast(endpoint, parameters)


def data_parallel_all_reduce(endpoint: Endpoint, array: np.ndarray) -> np.ndarray:
    """Return the sum over the ranks, on every rank: the parameters after a step from zero at learning rate -1."""
    return data_parallel_step(endpoint, np.zeros_like(array), array, -1)


# A synchronous parameter server: workers pull parameters, compute, and push gradients.
#
#     worker ── pull ──▶ parameters ── compute ──▶ gradient ── push ──▶ servers add up, and update their shards
#
# Every rank is a worker, and each of the first num_servers ranks also serves one shard of the parameters. A server
# sends its shard to every other rank and receives as much from each: with one server, C(N-1) bytes in each direction
# for C bytes of parameters; with as many servers as ranks, each server transfers 1/N of that. Li et al., "Scaling
# distributed machine learning with the parameter server", OSDI 2014.


# Takes a shard and the sum of its gradients, and returns the new shard.
Update = Callable[[np.ndarray, np.ndarray], np.ndarray]


class ParameterServer:
    """The parameters of a model, sharded over the servers; every rank creates one, and calls pull and push in turn.

    Args:
        parameters: the initial values, flat; only each server's own shard of its values is used.
        num_servers: the number of servers, from 1 to the number of ranks.
    """

    def __init__(self, endpoint: Endpoint, parameters: np.ndarray, num_servers: int = 1) -> None:
        if not 1 <= num_servers <= endpoint.world_size:
            raise ValueError(f"num_servers must be from 1 to {endpoint.world_size}, the world size, got {num_servers}")
        self._endpoint = endpoint
        self._like = parts_of(parameters, num_servers)
        self._num_servers = num_servers
        # The shard that this rank serves, if it is a server.
        self._shard = self._like[endpoint.rank].copy() if endpoint.rank < num_servers else None

    def pull(self) -> np.ndarray:
        """Fetch the current parameters from all servers."""
        endpoint = self._endpoint
        shards: list[np.ndarray] = []
        if self._shard is not None:
            for worker in range(endpoint.world_size):
                if worker != endpoint.rank:
                    endpoint.send(self._shard, worker, "pull", f"shard {endpoint.rank}")
        for server in range(self._num_servers):
            mine = self._shard if server == endpoint.rank else None
            shards.append(endpoint.recv(self._like[server], server) if mine is None else mine)
        return np.concatenate(shards)

    def push(self, gradient: np.ndarray, update: Update) -> None:
        """Send each server its shard of this rank's gradient; servers call ``update`` with the sum over all ranks."""
        endpoint, parts = self._endpoint, parts_of(gradient, self._num_servers)
        for server, part in enumerate(parts):
            if server != endpoint.rank:
                endpoint.send(part, server, "push", f"shard {server}")
        if self._shard is not None:
            total = np.zeros_like(self._shard)
            for worker in range(endpoint.world_size):
                mine = worker == endpoint.rank
                total = total + (parts[endpoint.rank] if mine else endpoint.recv(self._shard, worker))
            self._shard = update(self._shard, total)


def parameter_server_all_reduce(endpoint: Endpoint, array: np.ndarray, num_servers: int = 1) -> np.ndarray:
    """Return the sum over the ranks, on every rank: push to servers that start at zero and add, then pull."""
    server = ParameterServer(endpoint, np.zeros_like(array), num_servers)
    server.push(array, np.add)
    return server.pull()


# Reduce, Broadcast, and AllReduce as Reduce followed by Broadcast (a star topology).
#
#     Reduce (sum to rank 0)          Broadcast (from rank 0)
#       1 ──┐                           ┌──▶ 1
#       2 ──┼──▶ 0                  0 ──┼──▶ 2
#       3 ──┘                           └──▶ 3
#
# The MPI standard defines the three operations (MPI Forum, "MPI: A Message-Passing Interface Standard", version 4.1,
# chapter 6). Rank 0 sends and receives K bytes for every other rank: its traffic grows with the number of ranks.


def reduce(endpoint: Endpoint, array: np.ndarray, dst: int = 0) -> Optional[np.ndarray]:
    """Return the sum over the ranks, added in rank order, on rank ``dst``; None on the others."""
    if endpoint.rank != dst:
        endpoint.send(array, dst, "reduce")
        return None
    parts = [array if src == dst else endpoint.recv(array, src) for src in range(endpoint.world_size)]
    total = parts[0].copy()
    for part in parts[1:]:
        total = total + part
    return total


def broadcast(endpoint: Endpoint, array: np.ndarray, src: int = 0) -> np.ndarray:
    """Return rank ``src``'s array on every rank; on the others, ``array`` only gives the length and the type."""
    if endpoint.rank != src:
        return endpoint.recv(array, src)
    for dst in range(endpoint.world_size):
        if dst != src:
            endpoint.send(array, dst, "broadcast")
    return array.copy()


def all_reduce(endpoint: Endpoint, array: np.ndarray) -> np.ndarray:
    """Return the sum over the ranks, on every rank: Reduce to rank 0, then Broadcast from it."""
    total = reduce(endpoint, array)
    return broadcast(endpoint, array if total is None else total)


ALGORITHMS = {
    "reduce_broadcast": all_reduce,
    "data_parallel": data_parallel_all_reduce,
    "parameter_server": parameter_server_all_reduce,
    "ring": ring_all_reduce,
}
