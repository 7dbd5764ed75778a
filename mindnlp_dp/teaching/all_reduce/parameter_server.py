"""A synchronous parameter server: servers hold shards of the parameters; workers pull, compute and push.

::

    worker ── pull ──▶ parameters ── compute ──▶ gradient ── push ──▶ servers add up, and update their shards

Every rank is a worker, and the first ``num_servers`` ranks serve a shard each, besides. A server sends its shard to
every other rank and receives as much from each: with one server, C(N-1) bytes in either direction for C bytes of
parameters; with as many servers as ranks, each carries a N-th of that. Li et al., "Scaling distributed machine
learning with the parameter server", OSDI 2014.
"""

from __future__ import annotations

from typing import Callable

import numpy as np

from .endpoint import Endpoint, parts_of

# From a shard and the sum of the gradients of it, the new shard.
Update = Callable[[np.ndarray, np.ndarray], np.ndarray]


class ParameterServer:
    """The parameters of a model, held by its servers. Every rank makes one, and calls pull and push in turns.

    Args:
        parameters: their first values, flat; only the servers' own shards of them count.
        num_servers: from 1 to the number of ranks.
    """

    def __init__(self, endpoint: Endpoint, parameters: np.ndarray, num_servers: int = 1) -> None:
        if not 1 <= num_servers <= endpoint.world_size:
            raise ValueError(f"num_servers must be from 1 to {endpoint.world_size}, the world size, got {num_servers}")
        self._endpoint = endpoint
        self._like = parts_of(parameters, num_servers)
        self._num_servers = num_servers
        # What this rank serves, if it does.
        self._shard = self._like[endpoint.rank].copy() if endpoint.rank < num_servers else None

    def pull(self) -> np.ndarray:
        """The parameters as they are, from all servers."""
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
        """Send every server its shard of this rank's gradient; servers ``update`` when they have those of all."""
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
    """The sum over the ranks, for every rank: push it to servers that begin at zero and add, and pull."""
    server = ParameterServer(endpoint, np.zeros_like(array), num_servers)
    server.push(array, np.add)
    return server.pull()
