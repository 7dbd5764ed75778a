"""This module implements a synchronous parameter server: workers pull parameters, compute, and push gradients.

::

    worker ── pull ──▶ parameters ── compute ──▶ gradient ── push ──▶ servers add up, and update their shards

Every rank is a worker, and each of the first ``num_servers`` ranks also serves one shard of the parameters. A server
sends its shard to every other rank and receives as much from each: with one server, C(N-1) bytes in each direction for
C bytes of parameters; with as many servers as ranks, each server transfers 1/N of that. Li et al., "Scaling distributed
machine learning with the parameter server", OSDI 2014.
"""

from __future__ import annotations

from typing import Callable

import numpy as np

from .endpoint import Endpoint, parts_of

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
