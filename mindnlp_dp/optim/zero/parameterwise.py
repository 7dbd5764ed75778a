"""This module shards the update of any optimizer by parameter: each rank runs its code on some full parameters.

Parameters are assigned to ranks by size, as in PyTorch's ZeroRedundancyOptimizer, and matrices of Muon by the cost of
their update. Each rank has the optimizer state of its own parameters only, and sends their new weights to the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.lazy_arrays import materialize
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.data_parallel.model_scope import ModelScope
from mindnlp_dp.optim.newton_schulz import multiplications
from mindnlp_dp.optim.updater import MindNLPUpdater
from mindnlp_dp.runtime.arrays import HostTensor, dtype_name, from_host, set_weight, to_host
from mindnlp_dp.runtime.sharded_array import as_sharded, without_pieces


def assign_parameters(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return the rank of each parameter: the largest first, each to the rank with the smallest load.

    >>> assign_parameters([1, 5, 4, 2], 2)
    [0, 0, 1, 1]
    """
    loads, ranks = [0] * num_ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        ranks[index] = loads.index(min(loads))
        loads[ranks[index]] += sizes[index]
    return ranks


def owners_of(parameters: Sequence[Any], groups: Sequence[Mapping[str, Any]], num_ranks: int) -> dict[int, int]:
    """Return the rank of each parameter, by its id: the matrices that Muon updates by cost, and the others by size."""
    matrices = {id(p): group for group in groups if group.get("use_muon") for p in group["params"]}
    owners: dict[int, int] = {}
    for are_matrices in (True, False):
        found = [p for p in parameters if (id(p) in matrices) == are_matrices]
        costs = [multiplications(p.shape, matrices[id(p)]) if are_matrices else math.prod(p.shape) for p in found]
        owners.update(zip(map(id, found), assign_parameters(costs, num_ranks)))
    return owners


class ParameterwiseZeroUpdater(MindNLPUpdater):
    """Shards by parameter any MindNLP optimizer that updates each parameter independently (ZeRO 1)."""

    def __init__(
        self,
        optimizer: Any,
        parameters: Sequence[Any],
        group: ProcessGroup,
        scheduler: Any = None,
        scope: Optional[ModelScope] = None,
    ) -> None:
        super().__init__(optimizer, parameters, scheduler, scope)
        self._group = group
        self._owners = owners_of(parameters, optimizer.param_groups, group.world_size)

    def update(self, gradients: Sequence[Optional[Any]]) -> None:
        used = [p for p, gradient in zip(self.parameters, gradients) if gradient is not None]
        self._attach(gradients)
        self._step_on([p for p in used if self._owners[id(p)] == self._group.rank])
        for owner in range(self._group.world_size):
            self._send_weights([p for p in used if self._owners[id(p)] == owner], owner)

    def finish(self) -> None:
        # Other ranks own most of the optimizer's state, which a schedule would look for where gradients are.
        self._release_gradients()
        self._step_scheduler()

    def _send_weights(self, parameters: Sequence[Any], owner: int) -> None:
        """Broadcast the weights of one owner, with one message for each data type."""
        by_type: dict[np.dtype, list[tuple[Any, np.ndarray]]] = {}
        for parameter in parameters:
            host = to_host(parameter)
            by_type.setdefault(host.dtype, []).append((parameter, host))
        for pairs in by_type.values():
            sent = self._group.broadcast(np.concatenate([host.reshape(-1) for _, host in pairs]), src=owner)
            if self._group.rank != owner:
                parts = np.split(sent, np.cumsum([host.size for _, host in pairs])[:-1])
                for (parameter, host), part in zip(pairs, parts):
                    set_weight(parameter, from_host(part.reshape(host.shape), dtype_name(parameter)))

    def optimizer_state(self, *, keep: bool = True, sharded: bool = False) -> dict[str, Any]:
        mine = self.optimizer.state_dict()
        everything = [p for group in self.optimizer.param_groups for p in group["params"]]
        state: dict[int, Any] = {}
        for number, parameter in enumerate(everything):
            owner = self._owners.get(id(parameter))
            if owner is None:
                continue
            own = mine["state"].get(number)
            if sharded:
                own = own and {name: as_sharded(value) for name, value in own.items()}
                outline = own and {name: without_pieces(value) for name, value in own.items()}
                theirs = self._group.broadcast_object(outline, src=owner)
                if theirs is not None:
                    state[number] = own if self._group.rank == owner else theirs
                continue
            sent = own and {name: HostTensor.of(value) for name, value in own.items()}
            theirs = self._group.broadcast_object(sent, src=owner)
            if theirs is not None:
                state[number] = {name: HostTensor.back(value) for name, value in theirs.items()} if keep else {}
        return {"state": state, "param_groups": mine["param_groups"]}

    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        everything = [p for group in self.optimizer.param_groups for p in group["params"]]
        mine = {}
        for number, state in saved["state"].items():
            # Every rank must take part in the fetch, which is a collective; only the owner keeps the state.
            full = materialize(state)
            if self._owners.get(id(everything[int(number)])) in (self._group.rank, None):
                mine[number] = full
        self.optimizer.load_state_dict({"state": mine, "param_groups": saved["param_groups"]})
