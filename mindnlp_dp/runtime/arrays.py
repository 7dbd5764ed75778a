"""This module treats NumPy arrays and MindSpore tensors alike: type names, conversion, checks and fingerprints.

Conversion does not copy where memory can be shared.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mindnlp_dp.runtime import heartbeat

_CACHE_LINE_BYTES = 64

# Float32 sums of the same numbers differ by less than this fraction of the sum of their absolute values.
_SAME_SUM = 1e-5


def to_host(x: Any) -> np.ndarray:
    """Return a NumPy array with the values of a tensor or an array, sharing its memory if possible.

    bfloat16 becomes float32, which holds all of its values: neither NumPy nor MPI supports bfloat16. The result has
    the byte order of this machine.
    """
    is_bfloat16 = dtype_name(x) == "bfloat16"
    if isinstance(x, np.ndarray):
        if is_bfloat16:
            return x.astype(np.float32)
        return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
    if is_bfloat16:
        import mindspore

        x = x.astype(mindspore.float32)
    return x.asnumpy()


def from_host(x: np.ndarray, dtype: str) -> Any:
    """Return a MindSpore tensor of type ``dtype`` that uses the memory of ``x`` if the type allows it."""
    import mindspore

    tensor = mindspore.from_numpy(np.ascontiguousarray(x)) if x.ndim and x.size else mindspore.Tensor(x)
    return tensor if dtype_name(tensor) == dtype else tensor.astype(getattr(mindspore, dtype))


class HostTensor(NamedTuple):
    """A tensor in the form in which it is sent as an object."""

    array: np.ndarray
    dtype: str

    @classmethod
    def of(cls, value: Any) -> Any:
        """Return a tensor in this form, and other values as they are."""
        return cls(to_host(value), dtype_name(value)) if hasattr(value, "asnumpy") else value

    @staticmethod
    def back(value: Any) -> Any:
        """Return what :meth:`of` was called with."""
        return from_host(*value) if isinstance(value, HostTensor) else value


def read(x: Any) -> np.ndarray:
    """Return the values of a tensor like :func:`to_host`; the launcher sees that this rank waits for its device.

    On a device, a host read waits until all work on all of its streams is done, so also for collectives that other
    ranks have not started. (MindSpore 2.7's ``Tensor.asnumpy`` synchronizes the default stream, that of communication
    and all others.)
    """
    import mindspore

    if mindspore.get_context("device_target") == "CPU":
        return to_host(x)
    with heartbeat.waiting("the device"):
        return to_host(x)


def number_of(x: Any) -> float:
    """Return a number, or the only element of a tensor, as a float; MindNLP 0.5's own ``float(tensor)`` rounds it."""
    if hasattr(x, "asnumpy"):
        return read(x).item()
    return x.item() if isinstance(x, np.ndarray) else float(x)


def aligned_zeros(numel: int, dtype: Any) -> np.ndarray:
    """Return a flat array of zeros that begins at a cache line, as MindSpore's own memory does."""
    item_bytes = np.dtype(dtype).itemsize
    # NumPy asks the system for huge pages for empty arrays only.
    memory = np.empty(numel * item_bytes + _CACHE_LINE_BYTES, np.uint8)
    memory.fill(0)
    begin = -memory.ctypes.data % _CACHE_LINE_BYTES
    return memory[begin : begin + numel * item_bytes].view(dtype)


def copy_of(x: Any) -> Any:
    """Return a copy of a tensor, made by one operator; ``Tensor.copy()`` runs three for floats.

    On Ascend, ``ops.deepcopy`` compiles a graph for each shape and copies a view twice; ``mint.clone`` does neither,
    but MindSpore 2.8 and 2.10 have no kernel of it for CPUs. On a CPU, a bfloat16 tensor needs ``Tensor.copy()``,
    because MindSpore 2.8's Identity operator does not support it.
    """
    import mindspore

    if mindspore.get_context("device_target") == "Ascend":
        return mindspore.mint.clone(x)
    return x.copy() if x.dtype == mindspore.bfloat16 else mindspore.ops.deepcopy(x)


def set_weight(weight: Any, value: Any) -> None:
    """Overwrite a parameter or buffer with a tensor of the same shape and type."""
    # Not MindSpore's Assign operator: a buffer may be a view (BERT's position_ids is one).
    weight.set_data(value) if hasattr(weight, "set_data") else weight.assign_value(value)


# Checks for NaN and infinity, and fingerprints that show changes made in place, for overlap and updaters.
#
# An address does not show a change, a copy would cost memory, and a cryptographic hash would take longer than the
# exchange that it protects. So host arrays are read once, at memory speed. Device arrays stay on the device, and all
# answers are fetched together.


def fingerprint(array: np.ndarray) -> bytes:
    """Return a hash (xxHash's XXH3) of an array's bytes in memory order."""
    # Imported here: the launcher and the doctor, which import this module, work without it.
    import xxhash

    flat = array if array.flags.c_contiguous else array.ravel(order="K")
    return xxhash.xxh3_128_digest(flat.data)


def is_finite(array: np.ndarray) -> bool:
    """Return whether an array contains neither NaN nor infinity."""
    with np.errstate(invalid="ignore", over="ignore"):
        # A finite sum is sufficient. An infinite one is not a proof: large numbers may add up to infinity.
        return bool(np.isfinite(array.sum())) or bool(np.isfinite(array).all())


def is_uninitialized(tensor: Any) -> bool:
    """Return whether a tensor has no memory yet, such as one that ``initializer`` returned."""
    if getattr(tensor, "has_init", False) is True:
        return True
    import mindspore

    # On a device, a tensor whose values are still on the host has no address either.
    return math.prod(tensor.shape) > 0 and not tensor.data_ptr() and mindspore.get_context("device_target") == "CPU"


class Inspection:
    """Checks and fingerprints gradients in host memory."""

    def are_finite(self, arrays: Sequence[Any]) -> bool:
        """Return whether the arrays contain neither NaN nor infinity."""
        return all(map(is_finite, map(to_host, arrays)))

    def fingerprint(self, gradient: Any) -> Any:
        """Return the fingerprint that :meth:`have_changed` compares with a later one of the same gradient."""
        return fingerprint(to_host(gradient))

    def have_changed(self, before: Sequence[Any], after: Sequence[Any]) -> Any:
        """Return whether any fingerprint has changed: a bool, or on a device a tensor that is nonzero if one has."""
        return list(before) != list(after)


class DeviceInspection(Inspection):
    """Checks and fingerprints gradients on a device; fingerprints and their comparison stay on the device."""

    def are_finite(self, arrays: Sequence[Any]) -> bool:
        if not arrays:
            return True
        from mindspore import float32, ops

        bad = [ops.logical_not(ops.isfinite(x)).astype(float32).sum() for x in arrays]
        return not number_of(ops.stack(bad).sum())

    def fingerprint(self, gradient: Any) -> Any:
        from mindspore import float32, ops

        wide = gradient.astype(float32)
        return ops.stack([wide.sum(), wide.abs().sum()])

    def have_changed(self, before: Sequence[Any], after: Sequence[Any]) -> Any:
        if not before:
            return super().have_changed(before, after)
        from mindspore import float32, ops

        old, new = ops.stack(list(before)), ops.stack(list(after))
        # A device that is not deterministic may add the same numbers to other last bits; the second of each pair is the
        # sum of absolute values.
        is_same = (new - old).abs() <= _SAME_SUM * old[:, 1:]
        # NaN that was NaN before has not changed. NaN is the only value that is not equal to itself.
        is_same = ops.logical_or(is_same, ops.logical_or(old == new, ops.logical_and(old != old, new != new)))  # noqa: PLR0124
        return ops.logical_not(is_same).astype(float32).sum().reshape(1)


def inspection(on_device: bool) -> Inspection:
    """Return the inspection for gradients that are exchanged on a device, or in host memory."""
    return DeviceInspection() if on_device else Inspection()


HALF_TYPES = ("float16", "bfloat16")


def dtype_name(x: Any) -> str:
    """Return the type of a NumPy array or a MindSpore tensor: ``"float32"``, ``"int64"``, ``"bool"``, ..."""
    return _name_of(x.dtype)


@functools.cache
def _name_of(dtype: Any) -> str:
    if isinstance(dtype, np.dtype):
        # The name does not depend on the byte order.
        return dtype.name
    # MindSpore prints Float32, or mindspore.float32 once MindNLP is imported.
    return str(dtype).lower().rpartition(".")[2].rstrip("_")
