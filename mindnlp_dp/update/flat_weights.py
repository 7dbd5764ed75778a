"""Weights in one flat array, bucket by bucket as gradients are, that a host's ranks may share.

Goes in: parameters, wherever they are. Comes out: the same parameter objects, which point into that array from then on:
what is written there is what every model sees. A forward or backward pass must not be under way meanwhile, on any rank
that shares it, for nothing tells MindSpore that a weight was changed.

A parameter leaves its place when it is assigned to (``load_state_dict``, ``from_pretrained``); where it is, is looked
at in every update.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.arrays.conversion import copy_of, set_weight
from mindnlp_dp.communication.collectives import ProcessGroup
from mindnlp_dp.gradients.buckets.layout import BucketLayout
from mindnlp_dp.replicas.digests import weight_digest
from mindnlp_dp.replicas.weights import ReplicaMismatchError
from mindnlp_dp.versions import mindspore_is_before

# Memory of weights that several ranks write to, for as long as anybody has it.
_shared: list[weakref.ref[np.ndarray]] = []


def make_private(parameters: Sequence[Any]) -> None:
    """Take parameters out of memory that ranks share, for an optimizer that every rank runs on all of them."""
    _shared[:] = [array for array in _shared if array() is not None]
    for parameter in parameters:
        if any(_is_in(array(), parameter) for array in _shared):
            set_weight(parameter, copy_of(parameter))


def _is_in(memory: Optional[np.ndarray], parameter: Any) -> bool:
    if memory is None or not math.prod(parameter.shape):
        return False
    return 0 <= parameter.data_ptr() - memory.ctypes.data < memory.nbytes


class FlatWeights:
    """Parameters of float32 in ``memory``, where ``layouts`` say, one bucket behind the other.

    Whoever makes it waits for all ranks that share the memory; :meth:`adopt` is called behind that.

    Attributes:
        memory: flat, float32.
        bases: where each bucket begins in it.
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

    def take_over(self) -> None:
        """Copy the parameters' values into the memory."""
        for index, view in self._views.items():
            np.copyto(view, self._parameters[index].asnumpy())

    def adopt(self) -> None:
        """Let the parameters point into the memory."""
        for index in self._views:
            self._point(index)

    def make_private(self) -> None:
        """Give the parameters that still point into memory that ranks share memory of this rank's alone."""
        if self._is_shared:
            for index in self._views:
                if _is_in(self.memory, self._parameters[index]):
                    set_weight(self._parameters[index], copy_of(self._parameters[index]))

    def _point(self, index: int) -> None:
        import mindspore

        view = self._views[index]
        if view.size and view.ndim:
            set_weight(self._parameters[index], mindspore.Tensor.from_numpy(view))
            # Versions: MindSpore 2.7. Cause: a tensor over an array has no address before an operator has read it, and
            # moves to memory of its own when the first to read it takes a slice. Goes when: 2.7 is not supported.
            if mindspore_is_before("2.8"):
                (-self._parameters[index]).asnumpy()

    def hand_out_scalars(self) -> None:
        """What has no dimension cannot point anywhere: its parameter gets a copy behind every update."""
        import mindspore

        for index, view in self._views.items():
            if not view.ndim:
                set_weight(self._parameters[index], mindspore.Tensor(view.copy()))

    def moved(self) -> list[int]:
        """The parameters that are not in their places any more, on this rank."""
        return [index for index in sorted(self._views) if self._has_moved(index)]

    def _has_moved(self, index: int) -> bool:
        parameter, view = self._parameters[index], self._views[index]
        if not view.ndim:
            # As bytes: NaN stays where it is.
            return parameter.asnumpy().tobytes() != view.tobytes()
        return bool(view.size) and parameter.data_ptr() != self._addresses[index]

    def put_back(self, group: ProcessGroup, *, writes: bool, wait: Any) -> None:
        """Take over parameters that have left their places, with their new values; a collective.

        ``writes`` says who writes to the memory, ``wait`` is the barrier of those who share it.

        Raises:
            ReplicaMismatchError: on every rank, when they did not move alike, or have another shape now.
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
                    "there; assign the same values on every rank, or call broadcast_parameters(model) behind it"
                )
        if writes:
            # All are looked at before the first is written: one may have been assigned another one's memory.
            values = {index: self._parameters[index].asnumpy().copy() for index in moved}
            for index, value in values.items():
                np.copyto(self._views[index], value)
        wait()
        for index in moved:
            self._point(index)
