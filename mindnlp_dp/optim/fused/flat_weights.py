"""This module keeps weights in one flat array, in the order of the buckets, which the ranks of a host may share.

The parameter objects stay the same, but point into that array, so a write to it changes every model. During a write no
rank that shares the array may run a forward or backward pass, because MindSpore does not notice the change.

An assignment (``load_state_dict``, ``from_pretrained``) moves a parameter out of the array; every update checks for it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.communication.replicas import ReplicaMismatchError, weight_digest
from mindnlp_dp.data_parallel.buckets.bucket_layout import BucketLayout
from mindnlp_dp.runtime.arrays import copy_of, set_weight
from mindnlp_dp.runtime.versions import mindspore_is_before

# Weak references to the arrays of weights that several ranks share.
_shared: list[weakref.ref[np.ndarray]] = []


def unshare(parameters: Sequence[Any]) -> None:
    """Move parameters out of shared memory, for an optimizer that every rank runs on all parameters."""
    _shared[:] = [array for array in _shared if array() is not None]
    for parameter in parameters:
        if any(_is_in(array(), parameter) for array in _shared):
            set_weight(parameter, copy_of(parameter))


def _is_in(memory: Optional[np.ndarray], parameter: Any) -> bool:
    if memory is None or not math.prod(parameter.shape):
        return False
    return 0 <= parameter.data_ptr() - memory.ctypes.data < memory.nbytes


class FlatWeights:
    """Places float32 parameters in ``memory``, one bucket of ``layouts`` after another.

    The caller must wait for all ranks that share the memory before it calls :meth:`bind`.

    Attributes:
        memory: The flat float32 array.
        bases: The offset of each bucket in it.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Any],
        layouts: Sequence[BucketLayout],
        memory: np.ndarray,
        *,
        is_shared: bool,
    ) -> None:
        if is_shared:
            _shared.append(weakref.ref(memory))
        self._is_shared = is_shared
        self._names = names
        self._parameters = parameters
        self.memory = memory
        self.bases: list[int] = np.cumsum([0, *(layout.numel for layout in layouts)]).tolist()
        self._views: dict[int, np.ndarray] = {}
        self._addresses: dict[int, int] = {}
        for base, layout in zip(self.bases, layouts):
            for slot in layout.slots:
                begin = base + slot.offset
                self._views[slot.index] = memory[begin : begin + slot.numel].reshape(slot.shape)
                self._addresses[slot.index] = self._views[slot.index].ctypes.data

    def attach(self) -> None:
        """Copy the parameters' values into the memory."""
        for index, view in self._views.items():
            np.copyto(view, self._parameters[index].asnumpy())

    def bind(self) -> None:
        """Make the parameters point into the memory."""
        for index in self._views:
            self._point(index)

    def unshare(self) -> None:
        """Move the parameters that still point into shared memory to private memory of this rank."""
        if self._is_shared:
            for index in self._views:
                if _is_in(self.memory, self._parameters[index]):
                    set_weight(self._parameters[index], copy_of(self._parameters[index]))

    def _point(self, index: int) -> None:
        import mindspore

        view = self._views[index]
        if view.size and view.ndim:
            set_weight(self._parameters[index], mindspore.from_numpy(view))
            # Versions: MindSpore 2.7. Cause: a tensor over an array has no address before an operator has read it, and
            # moves to other memory if the first operator takes a slice. Remove when 2.7 is not supported any more.
            if mindspore_is_before("2.8"):
                (-self._parameters[index]).asnumpy()

    def broadcast_scalars(self) -> None:
        """Copy the values of parameters without a dimension, which cannot point into the array, after every update."""
        import mindspore

        for index, view in self._views.items():
            if not view.ndim:
                set_weight(self._parameters[index], mindspore.Tensor(view.copy()))

    def moved(self) -> list[int]:
        """Return the indices of the parameters that are not in their places any more, on this rank."""
        return [index for index in sorted(self._views) if self._has_moved(index)]

    def _has_moved(self, index: int) -> bool:
        parameter, view = self._parameters[index], self._views[index]
        if not view.ndim:
            # Bytes are compared, because NaN is not equal to itself.
            return parameter.asnumpy().tobytes() != view.tobytes()
        return bool(view.size) and parameter.data_ptr() != self._addresses[index]

    def write_back(self, group: ProcessGroup, *, writes: bool, wait: Any) -> None:
        """Move parameters that have left their places back into the memory, with their new values; a collective.

        ``writes`` tells whether this rank writes to the memory, ``wait`` is the barrier of the ranks that share it.

        Raises:
            ReplicaMismatchError: Raised on every rank if ranks moved different parameters or have different values, or
                if a parameter has another shape now.
        """
        moved = self.moved()
        problem = [
            f"{self._names[i]!r} has shape {tuple(self._parameters[i].shape)}, and had {self._views[i].shape}"
            for i in moved
            if tuple(self._parameters[i].shape) != self._views[i].shape
        ]
        mine = [(self._names[index], weight_digest("", self._parameters[index])) for index in moved]
        everyone = group.all_gather_object((problem, mine))
        for rank, (problems, _) in enumerate(everyone):
            if problems:
                raise ReplicaMismatchError(
                    f"a parameter was replaced by one of another shape on rank {rank}: {problems[0]}; make a new "
                    "optimizer and a new train step, or call train() again"
                )
        for rank, (_, theirs) in enumerate(everyone):
            if theirs != everyone[0][1]:
                name = next(iter(sorted({*theirs} ^ {*everyone[0][1]})))[0]
                raise ReplicaMismatchError(
                    f"{name!r} was assigned to between two updates, and ranks 0 and {rank} do not have the same value "
                    "there; assign the same values on every rank, or call broadcast_parameters(model) after it"
                )
        if writes:
            # All values are read before the first write, because a parameter may point to the memory of another one.
            values = {index: self._parameters[index].asnumpy().copy() for index in moved}
            for index, value in values.items():
                np.copyto(self._views[index], value)
        wait()
        for index in moved:
            self._point(index)
