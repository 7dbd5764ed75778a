"""This module updates flat arrays on the host: clipping, a rule, new weights; replicated or sharded (ZeRO 1 and 2).

It reads the sums in the buckets, and writes to the flat array that the parameters point into (flat_weights.py). The
diagram shows which part each rank has, on a host with two ranks (``zero_stage`` 1 and 2)::

                bucket 0            bucket 1
    gradients │ 0 0 0 │ 1 1 1 │   │ 0 0 │ 1 1 1 │     slice r of each sum is in row r of shared memory
    weights   │ 0 0 0 │ 1 1 1 │   │ 0 0 │ 1 1 1 │     one array of the host
    state     │ 0 0 0   0 0 │ and │ 1 1 1   1 1 1 │   one array per rank, in its own memory

Only the exchange writes to gradients. No rank writes to weights before all ranks have finished their backward passes
(the header of the exchange ensures it), and no rank reads them before all have written (the barrier after the update).
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.transports.channel import HostChannel
from mindnlp_dp.data_parallel.buckets.bucket_layout import BLOCK_NUMEL
from mindnlp_dp.data_parallel.model_scope import ModelScope
from mindnlp_dp.data_parallel.synchronizer import GradientSynchronizer
from mindnlp_dp.optim.fused.block_sums import BlockSums
from mindnlp_dp.optim.fused.rules import Rule, Segment, UpdateContext
from mindnlp_dp.optim.updater import MindNLPUpdater, Updater, is_untouched
from mindnlp_dp.optim.zero.owners import MatrixOwners
from mindnlp_dp.optim.zero.partition import SEGMENT_NUMEL, Partition
from mindnlp_dp.optim.zero.state_registry import OptimizerStateRegistry, StateShards
from mindnlp_dp.runtime.arrays import aligned_zeros, from_host
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api
from mindnlp_dp.runtime.versions import mindnlp_series

# State belongs to the optimizer, so that it survives when the optimizer gets another updater.
_owners_of: weakref.WeakKeyDictionary[Any, OptimizerStateRegistry] = weakref.WeakKeyDictionary()


class FlatUpdater(MindNLPUpdater):
    """Updates float32 weights in host memory, for MindNLP optimizers that have a rule.

    The ``gradients`` that :meth:`receive` returns and :meth:`update` takes are a mask of the parameters that were used.

    Args:
        zero_stage: The ZeRO stage: 0, 1 or 2.
        shard_scope: The ranks that shard the update in stages 1 and 2: those of each "host", so that every host has all
            of the state, or all of the "world".
    """

    reads_buckets = True

    def __init__(
        self,
        optimizer: Any,
        synchronizer: GradientSynchronizer,
        rule: Rule,
        zero_stage: int,
        scheduler: Any = None,
        *,
        may_share: bool = True,
        shard_scope: str = "world",
        scope: Optional[ModelScope] = None,
    ) -> None:
        super().__init__(optimizer, synchronizer.parameters, scheduler)
        self.zero_stage = zero_stage
        self._scope = scope or ModelScope()
        self._sync = synchronizer
        self._group = synchronizer.group
        self._may_share = may_share and zero_stage > 0
        self._shard_scope = shard_scope if zero_stage else None
        self._shapes = [tuple(p.shape) for p in self.parameters]
        self._blocks = BlockSums([math.prod(shape) for shape in self._shapes])
        # The block sums of this rank's slices of the gradients only.
        self._sums = self._blocks.zeros()
        self._rule = rule
        self._scale = 1.0
        self._scratch = aligned_zeros(SEGMENT_NUMEL + BLOCK_NUMEL, np.float32)
        self._num_moved = 0
        self._owners = _owners_of.setdefault(optimizer, OptimizerStateRegistry())
        self._shards: Optional[StateShards] = None
        self._runs: Optional[tuple[int, ...]] = None
        self._kept_segments: list[Segment] = []
        synchronizer.scatter = (
            zero_stage == 2 and shard_scope == "world" and isinstance(synchronizer.channel, HostChannel)
        )
        synchronizer.before_packing = self._release_views
        self._arrange()

    def _release_views(self) -> None:
        """Drop every view of the bucket memory before the buckets are repacked."""
        self.partition.release_views()
        self._runs, self._kept_segments = None, []

    def _arrange(self) -> None:
        """Arrange weights and state for the current buckets. A collective."""
        self.partition = Partition(self._sync, shard_scope=self._shard_scope, may_share=self._may_share)
        self._sums.fill(0)
        self.partition.sums_view(functools.partial(self._blocks.put, self._sums))
        self._adopt_state(self._new_shards())
        self._matrices = self._new_owners()

    def _state_names(self) -> list[tuple[str, ...]]:
        return [self._rule.names_of(group) for group in self._groups()]

    def _new_shards(self) -> StateShards:
        return StateShards(
            self._state_names(), self._shapes, self.partition.updated, self.partition.state_numel, self._group,
            is_full=self.zero_stage == 0,
        )  # fmt: skip

    def _new_owners(self) -> MatrixOwners:
        if not self.zero_stage:
            return MatrixOwners([self.partition.updated], self._shapes, 0, lambda mine: [mine])
        everyone = self._group.all_gather_object(self.partition.updated)
        return MatrixOwners(everyone, self._shapes, self._group.rank, self._group.all_gather)

    # The update.

    def receive(self, gradients: Optional[np.ndarray], synchronizer: Any) -> Optional[np.ndarray]:
        self._scale = 1.0
        # A matrix may have joined a group that AdamW or Muon updates.
        if self._sync.buckets is not self.partition.buckets or self._state.names != self._state_names():
            self._arrange()
            self.partition.read_sums()
        return gradients

    def clip(self, gradients: Any, max_norm: float) -> tuple[Any, float]:
        return Updater.clip(self, gradients, max_norm)

    def call_with_gradients(self, gradients: Any, before_update: Callable[[], None]) -> Any:
        # The gradients are in the buckets, and on several ranks each has a part of them.
        return Updater.call_with_gradients(self, gradients, before_update)

    def scale(self, gradients: Any, factor: float) -> Any:
        self._scale = factor
        return gradients

    def are_finite(self, gradients: Any) -> bool:
        return math.isfinite(self.norm(gradients))

    def norm(self, gradients: Any) -> float:
        """Return the norm of all gradients; every rank sums its own blocks.

        The same all-reduce counts the parameters that have moved, and the ranks whose optimizer was changed.

        Raises:
            RuntimeError: Raised on every rank if the optimizer of any rank was changed and now computes something else.
        """
        # A bucket that no rank used in this update still has the sums of an earlier one.
        mine = np.where(gradients[self._blocks.owners], self._sums, 0)
        notes = [float(len(self.partition.weights.moved())), float(not self.follows_optimizer())]
        everyone = self._group.all_reduce(np.append(mine, notes), every_step=True)
        sums, self._num_moved, num_changed = everyone[:-2], int(everyone[-2]), int(everyone[-1])
        if num_changed:
            raise RuntimeError(
                f"{type(self.optimizer).__name__} was changed on {num_changed} of {self._group.world_size} ranks after "
                "its update had been arranged, and would not be followed: its step was replaced or got hooks, or a "
                "group has maximize or amsgrad. Do that on every rank before training begins: in on_train_begin at "
                "the latest, or before make_train_step"
            )
        if self._scope.is_full:
            return math.sqrt(sums.sum())
        by_parameter = np.bincount(self._blocks.owners, weights=sums, minlength=len(self.parameters))
        return math.sqrt(self._scope.total(by_parameter))

    def follows_optimizer(self) -> bool:
        return is_untouched(self.optimizer)

    def update(self, gradients: Any) -> None:
        if self._num_moved:
            self.partition.weights.write_back(self._group, writes=self.partition.writes, wait=self.partition.wait)
        self._reload_if_replaced()
        steps = self._state.steps
        for index in np.flatnonzero(gradients):
            steps[index] += 1
        segments = self._segments(gradients)
        update = UpdateContext(
            self._scale, self._scratch, self._groups(), steps, self._blocks, self._add, gradients, self._shapes,
            self._matrices.apply,
        )  # fmt: skip
        self._rule.apply(segments, update)
        if self.zero_stage:
            self.partition.publish(self._group.all_gather)
        self.partition.weights.broadcast_scalars()
        self._show_state()
        # A scheduler checks this attribute.
        self.optimizer._opt_called = True

    def release(self) -> None:
        self.partition.release()

    def unshare(self) -> None:
        self.partition.weights.unshare()

    def _groups(self) -> list[Any]:
        """Return the optimizer's group of every parameter; None for a parameter that it does not update."""
        by_id = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        return [by_id.get(id(p)) for p in self.parameters]

    def _add(self, sums: np.ndarray) -> np.ndarray:
        # A block has the same sum on every host that computed it, and 0 on ranks that did not.
        return self._group.all_reduce(sums, op="max", every_step=True) if self.zero_stage else sums

    def _segments(self, used: np.ndarray) -> list[Segment]:
        """Return the segments to update, split where hyperparameters change; reused if the split is the same."""
        numbers: dict[Any, int] = {}
        runs = []
        for index, group in enumerate(self._groups()):
            if used[index] and group is not None:
                key = self._rule.key(group, self._state.steps[index])
                runs.append(numbers.setdefault(key, len(numbers)))
            else:
                runs.append(-1)
        if tuple(runs) != self._runs:
            self._runs, self._kept_segments = tuple(runs), self.partition.segments(runs, self._state.arrays)
        return self._kept_segments

    # The optimizer's state.

    @property
    def _state(self) -> StateShards:
        assert self._shards is not None, "made by _arrange"
        return self._shards

    def _adopt_state(self, shards: StateShards) -> None:
        """Move the optimizer's state into ``shards``, from its own ``state`` or from other steps. A collective."""
        self._owners.load_if_replaced(self.optimizer)
        # The optimizer's own state is the newest: it shows our arrays, or its own code has created it since.
        own = {id(p): state for p in self.parameters if (state := self.optimizer.state.pop(p, None))}
        self._owners.adopt(own)
        self._owners.transfer(self.parameters, shards)
        self._shards, self._runs = shards, None
        self._show_state()

    def _reload_if_replaced(self) -> None:
        """Adopt the state again if a state was loaded or another step of this optimizer had it. A collective."""
        self._owners.load_if_replaced(self.optimizer)
        if not self._owners.is_held_by(self._state, self.parameters):
            self._adopt_state(self._state)

    def _show_state(self) -> None:
        """Let the optimizer's own ``state`` point to the same memory, if this rank has all of the state."""
        if self.zero_stage:
            return
        groups = self._groups()
        for index, steps in enumerate(self._state.steps):
            if steps and groups[index] is not None:
                entry = self.optimizer.state[self.parameters[index]]
                # A tensor without a dimension may be a copy (MindSpore 2.7).
                if not entry or not self._state.shapes[index]:
                    for name in self._state.names[index]:
                        entry[name] = self._state.view(index, name)
                if self._rule.counts_steps:
                    entry["step"] = _new_step(steps)

    def optimizer_state(self, *, keep: bool = True, sharded: bool = False) -> dict[str, Any]:
        self._reload_if_replaced()
        state: dict[int, dict[str, Any]] = {}
        places = {id(p): index for index, p in enumerate(self.parameters)}
        everything = [p for group in self.optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(everything):
            index = places.get(id(parameter))
            if index is None or not self._state.steps[index]:
                continue
            state[number] = {"step": self._state.steps[index]} if self._rule.counts_steps else {}
            for name in self._state.names[index]:
                if sharded and self.zero_stage:
                    state[number][name] = self._state.pieces(index, name)
                    continue
                full = self._state.full(index, name)
                if keep:
                    state[number][name] = from_host(full, "float32")
        groups = self.optimizer.state_dict()["param_groups"]
        return {"state": state, "param_groups": groups}

    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        if self._sync.buckets is not self.partition.buckets:
            self._arrange()
        self.optimizer.load_state_dict({"state": {}, "param_groups": saved["param_groups"]})
        everything = [p for group in self.optimizer.param_groups for p in group["params"]]
        states = {id(everything[int(number)]): state for number, state in saved["state"].items()}
        self._owners.load(self.optimizer, states)
        self._adopt_state(self._state)


def return_state(optimizer: Any, parameters: Sequence[Any]) -> None:
    """Give an optimizer that had a :class:`FlatUpdater` the full state of these parameters. A collective."""
    registry = _owners_of.get(optimizer)
    if registry is not None:
        registry.return_state(optimizer, parameters, _new_step)


def _new_step(steps: int) -> Any:
    # Optimizers of MindNLP 0.5 increment the step in place.
    return mindnlp_api().tensor(float(steps)) if mindnlp_series() == "0.5" else steps
