"""This module stores a rank's shard of the optimizer state: flat arrays for the pieces of parameters that it updates.

It also gathers the full state of a parameter, for checkpoints and for a new split of the work among the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.lazy_arrays import materialize
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.data_parallel.buckets.bucket_layout import ParameterSlice
from mindnlp_dp.runtime.arrays import aligned_zeros, from_host, number_of, to_host
from mindnlp_dp.runtime.sharded_array import FlatLayout, ShardedArray

# Ranks gather a parameter's state in messages of this many elements: larger ones need more memory and are not faster.
MESSAGE_NUMEL = 1 << 20


def gather_array(
    parts: Sequence[tuple[ParameterSlice, np.ndarray]], numel: int, dtype: Any, group: ProcessGroup
) -> np.ndarray:
    """Gather a flat array from all ranks' pieces of it. A collective of ``group``."""
    kind = np.dtype(f"u{np.dtype(dtype).itemsize}")
    full = np.zeros(numel, kind)
    for piece, array in parts:
        full[piece.start : piece.stop] = array.astype(dtype, copy=False).view(kind)
    for start in range(0, numel, MESSAGE_NUMEL):
        # The other ranks have 0, so the maximum of the bits as unsigned integers is the value of the rank that has the
        # element, even if it is a negative zero.
        message = full[start : start + MESSAGE_NUMEL]
        # HCCL and NCCL have no unsigned types.
        message[:] = group.all_reduce(message.astype(np.int64) if group.on_device else message, op="max")
    return full.view(dtype)


class StateShards:
    """Holds this rank's optimizer state in float32 arrays, each as long as the weights that this rank updates.

    Args:
        names: The names of the arrays that each parameter has.
        pieces: The pieces that this rank updates, with their offsets in the arrays, which have ``numel`` elements.
        is_full: Whether every rank has all of the state.

    Attributes:
        arrays: The arrays by name, such as "exp_avg".
        steps: The number of updates of each parameter; the same on every rank.
    """

    def __init__(
        self,
        names: Sequence[Sequence[str]],
        shapes: Sequence[tuple[int, ...]],
        pieces: Sequence[ParameterSlice],
        numel: int,
        group: ProcessGroup,
        *,
        is_full: bool,
    ) -> None:
        self.names, self._numel = names, numel
        self.arrays = {name: self._zeros(name) for name in sorted({name for each in names for name in each})}
        self.steps = [0] * len(shapes)
        self.shapes = shapes
        self._group = group
        self._is_full = is_full
        self._pieces: dict[int, list[ParameterSlice]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.index, []).append(piece)

    def _zeros(self, name: str) -> np.ndarray:
        # What is not written of zeros takes no memory: only some parameters may have this array.
        has_gaps = any(name not in each for each in self.names)
        return np.zeros(self._numel, np.float32) if has_gaps else aligned_zeros(self._numel, np.float32)

    @property
    def has_sharded_moments(self) -> bool:
        return not self._is_full and bool(self.arrays) and any(self.steps)

    def put(self, index: int, name: str, full: np.ndarray) -> None:
        """Store this rank's pieces of a parameter's full state."""
        flat = full.reshape(-1)
        for piece in self._pieces.get(index, ()):
            self.arrays[name][piece.flat] = flat[piece.start : piece.stop]

    def full(self, index: int, name: str) -> np.ndarray:
        """Return a parameter's full state, in its shape. A collective of all ranks if they have pieces of it.

        If this rank has all of it, the array is a view: the next update changes it.
        """
        if self._is_full:
            return self._flat(index, name).reshape(self.shapes[index])
        numel = math.prod(self.shapes[index])
        return gather_array(self._parts(index, name), numel, np.float32, self._group).reshape(self.shapes[index])

    def _flat(self, index: int, name: str) -> np.ndarray:
        pieces = self._pieces.get(index, [])
        begin = pieces[0].offset if pieces else 0
        return self.arrays[name][begin : begin + math.prod(self.shapes[index])]

    def pieces(self, index: int, name: str) -> ShardedArray:
        """Return this rank's pieces of a parameter's state; they are views, valid until the next update."""
        pieces = [(piece.start, array) for piece, array in self._parts(index, name)]
        return ShardedArray(FlatLayout(tuple(self.shapes[index])), "float32", pieces)

    def _parts(self, index: int, name: str) -> list[tuple[ParameterSlice, np.ndarray]]:
        return [(piece, self.arrays[name][piece.flat]) for piece in self._pieces.get(index, ())]

    def view(self, index: int, name: str) -> Any:
        """Return a parameter's full state as a tensor in the array's memory; valid if this rank has all of it."""
        import mindspore

        flat = self._flat(index, name)
        if not len(flat):
            return mindspore.Tensor(flat)
        if shape := self.shapes[index]:
            return mindspore.from_numpy(flat.reshape(shape))
        return mindspore.from_numpy(flat).reshape(())

    def reset(self, index: int, state: Mapping[str, Any]) -> None:
        """Replace a parameter's state by its entry in an optimizer's ``state``, which may be empty. A collective."""
        found = {name: state[name] for name in self.names[index] if state.get(name) is not None}
        if self.steps[index] and not found:
            self.clear(index)
        for name, array in found.items():
            self.put(index, name, to_host(materialize(array)))
        self.steps[index] = int(number_of(materialize(state.get("step", 1)))) if found else 0

    def clear(self, index: int) -> None:
        self.steps[index] = 0
        for piece in self._pieces.get(index, ()):
            for name in self.names[index]:
                self.arrays[name][piece.flat] = 0

    def forget(self, name: str) -> None:
        """Free the memory of an array; the new array gets memory only when it is written to."""
        self.arrays[name] = self._zeros(name)


class OptimizerStateRegistry:
    """Records which shards have the state of each parameter, because several train steps may use one optimizer.

    Attributes:
        last: The shards that received state last.
    """

    def __init__(self) -> None:
        self.last: Optional[StateShards] = None
        self._seen: Any = None
        self._owners: dict[int, tuple[StateShards, int]] = {}
        self._loaded: dict[int, Mapping[str, Any]] = {}

    def is_held_by(self, shards: StateShards, parameters: Sequence[Any]) -> bool:
        """Return whether the state of all these parameters is in ``shards``."""
        return all((owner := self._owners.get(id(p))) is not None and owner[0] is shards for p in parameters)

    def load_if_replaced(self, optimizer: Any) -> None:
        """Load the optimizer's ``state`` if the user has replaced it.

        Raises:
            ValueError: If the new state is empty, although the ranks have sharded moments, which would be lost.
        """
        if optimizer.state is not self._seen:
            if not optimizer.state and self.last is not None and self.last.has_sharded_moments:
                raise ValueError(
                    "the optimizer was given a state without moments, which are sharded over the ranks "
                    "(zero_stage): its own state_dict() has none, so this would lose them; to start again, make a new "
                    "optimizer; to continue from saved ones, load a state that has them"
                )
            self.load(optimizer, {id(p): state for p, state in optimizer.state.items()})
            optimizer.state.clear()

    def load(self, optimizer: Any, states: dict[int, Mapping[str, Any]]) -> None:
        """Replace all recorded state by ``states``, by the parameters' ids."""
        self._seen, self.last = optimizer.state, None
        self._owners.clear()
        self._loaded.clear()
        self.adopt(states)

    def return_state(self, optimizer: Any, parameters: Sequence[Any], step_of: Callable[[int], Any]) -> None:
        """Put the full state of these parameters into the optimizer's own ``state``, for its own code. A collective.

        ``step_of`` makes a number of updates what the optimizer's code takes.
        """
        for parameter in parameters:
            entry = dict(self._loaded.pop(id(parameter), {}))
            shards, index = self._owners.pop(id(parameter), (None, 0))
            if shards is not None and shards.steps[index]:
                entry = {name: from_host(shards.full(index, name).copy(), "float32") for name in shards.names[index]}
                entry["step"] = step_of(shards.steps[index])
            if entry:
                optimizer.state[parameter].update(entry)

    def adopt(self, states: dict[int, Mapping[str, Any]]) -> None:
        """Replace the recorded state of some parameters by ``states``, by the parameters' ids."""
        self._loaded.update(states)
        for parameter in states:
            self._owners.pop(parameter, None)

    def transfer(self, parameters: Sequence[Any], shards: StateShards) -> None:
        """Move the state of these parameters, which are in the order of ``shards``, to ``shards``. A collective."""
        taken: dict[int, tuple[StateShards, int]] = {}
        for index, parameter in enumerate(parameters):
            owner = self._owners.get(id(parameter))
            if owner is None or owner[0].shapes[owner[1]] != shards.shapes[index]:
                shards.reset(index, self._loaded.pop(id(parameter), {}))
            elif owner[0] is not shards:
                if shards.steps[index]:
                    shards.clear(index)
                taken[index] = owner
            self._owners[id(parameter)] = shards, index
        busy = {id(owner) for owner, _ in self._owners.values()}
        idle = {id(old): old for old, _ in taken.values() if id(old) not in busy}
        for name in shards.arrays:
            for index, (old, place) in taken.items():
                if old.steps[place] and name in old.names[place] and name in shards.names[index]:
                    shards.put(index, name, old.full(place, name))
            # Old arrays are freed one by one, so that at most one array exists twice.
            for old in idle.values():
                old.forget(name)
        for index, (old, place) in taken.items():
            shards.steps[index] = old.steps[place]
        self.last = shards
