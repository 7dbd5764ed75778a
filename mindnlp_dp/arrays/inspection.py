"""This module checks arrays for NaN and infinity, and computes fingerprints that show changes made in place.

The overlap of communication with the backward pass, and the updaters, use it. An address does not show a change, a
copy would cost memory, and a cryptographic hash would take longer than the exchange that it protects. So host arrays
are read once, at memory speed. Device arrays stay on the device, and all answers are fetched together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from .conversion import to_host


def fingerprint(array: np.ndarray) -> bytes:
    """Return a hash (xxHash's XXH3) of an array's bytes in memory order."""
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
        # NaN that was NaN before has not changed. NaN is the only value that is not equal to itself.
        is_same = ops.logical_or(old == new, ops.logical_and(old != old, new != new))  # noqa: PLR0124
        return ops.logical_not(is_same).astype(float32).sum().reshape(1)


def inspection(on_device: bool) -> Inspection:
    """Return the inspection for gradients that are exchanged on a device, or in host memory."""
    return DeviceInspection() if on_device else Inspection()
