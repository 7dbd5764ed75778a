"""This module calls oneDNN's float32 matrix product, from the library that MindSpore ships; matmul.py uses it.

MindSpore calls oneDNN's primitives, which repack their inputs at every call. The C function ``dnnl_sgemm`` is as fast
as any BLAS, and selects its instructions by the features of the core, not by its vendor. It runs on the calling thread
(MindSpore's oneDNN is built for thread pools) and releases Python's GIL. It sums in the same order as MindSpore's own
products, so results are equal on as many machines as MindSpore's are.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

# BLAS's description of a matrix: b"T" if transposed, else b"N"; and the distance between rows, in elements.
Layout = tuple[bytes, int]
# A function that multiplies the matrices at the first two addresses into the one at the third.
Multiply = Callable[[int, int, int], None]


@functools.cache
def _sgemm() -> Optional[Any]:
    import mindspore

    for path in sorted((Path(mindspore.__file__).parent / "lib").glob("libdnnl.so*")):
        try:
            return ctypes.CDLL(str(path)).dnnl_sgemm
        except (OSError, AttributeError):
            continue
    return None


def is_there() -> bool:
    """Return whether MindSpore's oneDNN has this function, as its versions 1 to 3 do."""
    return _sgemm() is not None


def multiplication(sizes: tuple[int, int, int], a: Layout, b: Layout, out_stride: int, *, add: bool) -> Multiply:
    """Return a function for ``out = a @ b``, or ``out += a @ b`` if ``add``.

    The matrices are row-major, with the ``sizes`` (rows, inner, columns). The function takes their three addresses, and
    only one thread may use it. All other arguments are prepared once, because preparing the call of a small product
    takes longer than computing it.
    """
    run: Any = _sgemm()
    rows, inner, columns = map(ctypes.c_int64, sizes)
    at_a, at_b, at_out = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    (a_transposed, a_stride), (b_transposed, b_stride) = a, b
    arguments = (
        ctypes.c_char(a_transposed), ctypes.c_char(b_transposed), rows, columns, inner,
        ctypes.c_float(1.0), at_a, ctypes.c_int64(a_stride), at_b, ctypes.c_int64(b_stride),
        ctypes.c_float(add), at_out, ctypes.c_int64(out_stride),
    )  # fmt: skip

    def multiply(a: int, b: int, out: int) -> None:
        at_a.value, at_b.value, at_out.value = a, b, out
        if status := run(*arguments):
            raise RuntimeError(f"oneDNN's product of (rows, inner, columns) = {sizes} ended with status {status}")

    return multiply
