"""This module combines the updaters of several synchronizers into one, for models with expert parallelism.

All of them have the same optimizer, and gradients are clipped by one norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindnlp_dp.data_parallel.multi_group_synchronizer import MultiGroupSynchronizer
from mindnlp_dp.optim.updater import Updater


class MultiGroupUpdater(Updater):
    """Runs one updater for each synchronizer; its ``gradients`` are a list with those of each updater."""

    def __init__(self, optimizer: Any, synchronizer: MultiGroupSynchronizer, updaters: Sequence[Updater]) -> None:
        super().__init__(optimizer, synchronizer.parameters)
        self._updaters = updaters
        self.scheduler = updaters[0].scheduler
        self.reads_buckets = [bool(updater.reads_buckets) for updater in updaters]

    def receive(self, gradients: Any, synchronizer: Any) -> Any:
        triples = zip(self._updaters, gradients, synchronizer.synchronizers)
        return [updater.receive(mine, each) for updater, mine, each in triples]

    def call_with_gradients(self, gradients: Any, before_update: Callable[[], None]) -> Any:
        results: list[Any] = []

        def nested(number: int) -> None:
            if number == len(self._updaters):
                before_update()
                return
            mine = self._updaters[number].call_with_gradients(gradients[number], lambda: nested(number + 1))
            results.insert(0, mine)

        nested(0)
        return results

    def norm(self, gradients: Any) -> float:
        return math.hypot(*(updater.norm(mine) for updater, mine in zip(self._updaters, gradients)))

    def scale(self, gradients: Any, factor: float) -> Any:
        return [updater.scale(mine, factor) for updater, mine in zip(self._updaters, gradients)]

    def are_finite(self, gradients: Any) -> bool:
        return math.isfinite(self.norm(gradients))

    def update(self, gradients: Any) -> None:
        for updater, mine in zip(self._updaters, gradients):
            updater.update(mine)

    def finish(self) -> None:
        for updater in self._updaters:
            updater.finish()

    def follows_optimizer(self) -> bool:
        return all(updater.follows_optimizer() for updater in self._updaters)

    def unshare(self) -> None:
        for updater in self._updaters:
            updater.unshare()

    def release(self) -> None:
        for updater in self._updaters:
            updater.release()

    def parameter_names(self, model: Any) -> list[list[str]]:
        return self._updaters[0].parameter_names(model)

    def optimizer_state(self, *, keep: bool = True, sharded: bool = False) -> dict[str, Any]:
        states = [updater.optimizer_state(keep=keep, sharded=sharded) for updater in self._updaters]
        return {**states[0], "state": {number: s for state in states for number, s in state["state"].items()}}

    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        for updater in self._updaters:
            updater.load_optimizer_state(saved)
