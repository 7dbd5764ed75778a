"""oneDNN's single precision matrix product, from the library that MindSpore brings along.

MindSpore calls oneDNN's primitives, which repack what they are given at every call; ``dnnl_sgemm``, a function of C, is
as fast as any BLAS and finds its instructions by what a core can do, whoever made it. It runs on the thread that calls
it (MindSpore's oneDNN is built for thread pools), and does not hold Python's lock meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Optional

# (transpose a, transpose b, rows, columns, inner, alpha, a, its row stride, b, its, beta, c, its): oneDNN 1 to 3.
Sgemm = Callable[[bytes, bytes, int, int, int, float, int, int, int, int, float, int, int], int]


@functools.cache
def sgemm() -> Optional[Sgemm]:
    """oneDNN's product of row-major matrices; None where MindSpore has no oneDNN, or one without it."""
    import mindspore

    for path in sorted((Path(mindspore.__file__).parent / "lib").glob("libdnnl.so*")):
        try:
            function = ctypes.CDLL(str(path)).dnnl_sgemm
        except (OSError, AttributeError):
            continue
        size, pointer = ctypes.c_int64, ctypes.c_void_p
        function.argtypes = [
            ctypes.c_char, ctypes.c_char, size, size, size,
            ctypes.c_float, pointer, size, pointer, size, ctypes.c_float, pointer, size,
        ]  # fmt: skip
        return function
    return None
