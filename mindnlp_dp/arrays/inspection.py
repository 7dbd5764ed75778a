"""What one look at an array tells: whether it is finite, and a fingerprint that changes when it is changed in place.

Goes in: arrays of floating point numbers. Comes out: truths, and what :meth:`Inspection.have_changed` compares. An
address says nothing about a change, a copy would cost memory, a cryptographic hash more time than the exchange that it
guards: on the host each array is read once, at the speed of memory. On a device it stays there, and all answers are
fetched at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from .conversion import to_host


def fingerprint(array: np.ndarray) -> bytes:
    """A hash of an array's bytes, in the order in which they lie in memory (xxHash's XXH3)."""
    flat = array if array.flags.c_contiguous else array.ravel(order="K")
    return xxhash.xxh3_128_digest(flat.data)


def is_finite(array: np.ndarray) -> bool:
    """Whether an array holds neither NaN nor infinity."""
    with np.errstate(invalid="ignore", over="ignore"):
        # Their sum is finite, or it has to be looked at more closely: large numbers may add up to infinity.
        return bool(np.isfinite(array.sum())) or bool(np.isfinite(array).all())


def is_uninitialized(tensor: Any) -> bool:
    """Tell whether a tensor was never given memory, as when it was assigned what ``initializer`` returns."""
    if getattr(tensor, "has_init", False) is True:
        return True
    import mindspore

    # On a device, a tensor whose values are still on the host has no address either.
    return math.prod(tensor.shape) > 0 and not tensor.data_ptr() and mindspore.get_context("device_target") == "CPU"


class Inspection:
    """Looks at gradients in host memory."""

    def are_finite(self, arrays: Sequence[Any]) -> bool:
        """Whether they hold neither NaN nor infinity."""
        return all(map(is_finite, map(to_host, arrays)))

    def fingerprint(self, gradient: Any) -> Any:
        """What :meth:`have_changed` compares with a later one of the same gradient."""
        return fingerprint(to_host(gradient))

    def have_changed(self, before: Sequence[Any], after: Sequence[Any]) -> Any:
        """Whether any fingerprint is not what it was: a truth; or, on a device, a tensor that is not zero then."""
        return list(before) != list(after)


class DeviceInspection(Inspection):
    """Looks at gradients on a device. What is only passed on to it stays there."""

    def are_finite(self, arrays: Sequence[Any]) -> bool:
        if not arrays:
            return True
        from mindspore import float32, ops

        bad = [ops.logical_not(ops.isfinite(x)).astype(float32).sum() for x in arrays]
        return not float(ops.stack(bad).sum().asnumpy())

    def fingerprint(self, gradient: Any) -> Any:
        from mindspore import float32, ops

        wide = gradient.astype(float32)
        return ops.stack([wide.sum(), wide.abs().sum()])

    def have_changed(self, before: Sequence[Any], after: Sequence[Any]) -> Any:
        if not before:
            return super().have_changed(before, after)
        from mindspore import float32, ops

        old, new = ops.cat(list(before)), ops.cat(list(after))
        # NaN is no change where it was NaN before: only such numbers are not equal to themselves.
        is_same = ops.logical_or(old == new, ops.logical_and(old != old, new != new))  # noqa: PLR0124
        return ops.logical_not(is_same).astype(float32).sum().reshape(1)


def inspection(on_device: bool) -> Inspection:
    """How to look at gradients that are exchanged on a device, or in host memory."""
    return DeviceInspection() if on_device else Inspection()
