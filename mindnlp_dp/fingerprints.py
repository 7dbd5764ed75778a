"""What one look at an array tells: whether it is finite, and a few numbers that change when it is changed in place.

Goes in: an array of floating point numbers. Comes out: a truth, or bytes that differ when its values do. An address
says nothing about that, a copy would cost memory, a cryptographic hash more time than the exchange that it guards:
this reads the array once, at the speed of memory.
"""

from __future__ import annotations

import numpy as np

# Elements of a block that stays in a core's own cache while it is read twice.
_BLOCK = 1 << 16


def fingerprint(array: np.ndarray) -> bytes:
    """Two sums of every block of a floating point array: of its bits as integers, and of its values.

    The first one sees any change of one element, be it far below the precision of the other sum; the second one sees
    what cancels in the first, such as a change of all signs. A block whose elements only change places looks the same.
    """
    flat = array.reshape(-1) if array.flags.c_contiguous else array.ravel(order="K")
    bits = flat.view(f"u{flat.itemsize}")
    sums = []
    with np.errstate(invalid="ignore", over="ignore"):
        for begin in range(0, len(flat), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            sums += [bits[block].sum(dtype=bits.dtype).tobytes(), flat[block].sum().tobytes()]
    return b"".join(sums)


def is_finite(array: np.ndarray) -> bool:
    """Whether an array holds neither NaN nor infinity."""
    with np.errstate(invalid="ignore", over="ignore"):
        # Their sum is finite, or it has to be looked at more closely: large numbers may add up to infinity.
        return bool(np.isfinite(array.sum())) or bool(np.isfinite(array).all())
