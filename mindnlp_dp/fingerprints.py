"""What one look at an array tells: whether it is finite, and a hash that changes when it is changed in place.

Goes in: an array of floating point numbers. Comes out: a truth, or bytes that differ when its values do. An address
says nothing about that, a copy would cost memory, a cryptographic hash more time than the exchange that it guards:
these read the array once, at the speed of memory.
"""

from __future__ import annotations

import numpy as np
import xxhash


def fingerprint(array: np.ndarray) -> bytes:
    """A hash of an array's bytes, in the order in which they lie in memory (xxHash's XXH3)."""
    flat = array if array.flags.c_contiguous else array.ravel(order="K")
    return xxhash.xxh3_128_digest(flat.data)


def is_finite(array: np.ndarray) -> bool:
    """Whether an array holds neither NaN nor infinity."""
    with np.errstate(invalid="ignore", over="ignore"):
        # Their sum is finite, or it has to be looked at more closely: large numbers may add up to infinity.
        return bool(np.isfinite(array.sum())) or bool(np.isfinite(array).all())
