"""This module encodes arrays in half precision for the network between hosts; the ring (host_ring.py) calls it."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

# The largest number of a float16 message is below 2 to the power of this; float16 ends at 65,504.
_LARGEST_EXPONENT = 15
# The largest exponent of a scale, well within the range of float32.
_LARGEST_SCALE = 120


class HalfWire:
    """Encodes numbers as float16 or bfloat16, sent as 16-bit integers, which MPI supports, and summed in float32.

    A float16 message is scaled by a power of two, whose exponent is its first number, so that its largest number almost
    fills float16's range: gradients lie where float16 has few bits left, and their sum may be beyond its range.
    """

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)

    @staticmethod
    def scratch(numel: int) -> np.ndarray:
        """Return memory for a message of at most ``numel`` numbers."""
        return np.empty(numel + 1, np.uint16)

    def encode(self, array: np.ndarray) -> np.ndarray:
        message = self.scratch(len(array))
        exponent = self._exponent(array)
        message[:1].view(np.int16)[0] = exponent
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            np.multiply(array, np.float32(2.0**exponent), out=message[1:].view(self.dtype), casting="unsafe")
        return message

    def _exponent(self, array: np.ndarray) -> int:
        if self.dtype != np.float16 or not len(array):
            return 0
        peak = max(array.max(), -array.min())
        if not np.isfinite(peak) or peak == 0:
            return 0
        return min(_LARGEST_EXPONENT - int(np.frexp(peak)[1]), _LARGEST_SCALE)

    def decode(self, message: np.ndarray) -> np.ndarray:
        numbers = message[1:].view(self.dtype).astype(np.float32)
        exponent = int(message[:1].view(np.int16)[0])
        return np.multiply(numbers, np.float32(2.0**-exponent), out=numbers) if exponent else numbers


def wire_for(compression: Optional[str], dtype: np.dtype) -> Optional[HalfWire]:
    """Return the encoder for arrays of type ``dtype``; None to send them unchanged: only float32 is ever compressed."""
    if compression not in ("fp16", "bf16") or dtype != np.float32:
        return None
    import ml_dtypes

    return HalfWire(np.float16 if compression == "fp16" else ml_dtypes.bfloat16)
