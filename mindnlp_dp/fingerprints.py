"""What one look at an array tells: whether it is finite, and a few numbers that change when it is changed in place.

Goes in: an array of floating point numbers. Comes out: a truth, or bytes that differ when its values do. An address
says nothing about that, a copy would cost memory, a cryptographic hash more time than the exchange that it guards:
this reads the array once, at the speed of memory.
"""

from __future__ import annotations

import functools

import numpy as np

# Words of 64 bits in a block that stays, with its weights, in a core's own cache.
_BLOCK = 1 << 15


@functools.cache
def _weights() -> np.ndarray:
    """An odd number for every place in a block."""
    return np.random.default_rng(0).integers(0, 2**63, _BLOCK, np.uint64) * np.uint64(2) + np.uint64(1)


def fingerprint(array: np.ndarray) -> bytes:
    """A sum over the bits of every block of an array, each 64 of them multiplied by a number for their place.

    Multilinear hashing (Dietzfelbinger, "Universal hashing and k-wise independent random variables via integer
    arithmetic without primes", STACS 1996), modulo 2 to the 64. An odd factor lets no change of one word pass; of
    others, changed places among them, one in many billions would. Bits are spread first, for a change of all
    signs is one of highest bits, which an even number of cancels in such a sum, whatever its factors.
    """
    flat = array.reshape(-1) if array.flags.c_contiguous else array.ravel(order="K")
    data = flat.view(np.uint8)
    rest = len(data) % 8
    words = data[: len(data) - rest].view(np.uint64)
    spread, sums = np.empty(min(_BLOCK, len(words)), np.uint64), []
    for begin in range(0, len(words), _BLOCK):
        block = words[begin : begin + _BLOCK]
        mixed = spread[: len(block)]
        np.right_shift(block, 29, out=mixed)
        np.bitwise_xor(mixed, block, out=mixed)
        np.multiply(mixed, _weights()[: len(block)], out=mixed)
        sums.append(mixed.sum().tobytes())
    return b"".join([*sums, data[len(data) - rest :].tobytes()])


def is_finite(array: np.ndarray) -> bool:
    """Whether an array holds neither NaN nor infinity."""
    with np.errstate(invalid="ignore", over="ignore"):
        # Their sum is finite, or it has to be looked at more closely: large numbers may add up to infinity.
        return bool(np.isfinite(array.sum())) or bool(np.isfinite(array).all())
