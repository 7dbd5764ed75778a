"""oneDNN's single precision matrix product, from the library that MindSpore brings along.

MindSpore calls oneDNN's primitives, which repack what they are given at every call; ``dnnl_sgemm``, a function of C, is
as fast as any BLAS, and finds its instructions by what a core can do, whoever made it. It runs on the thread that calls
it (MindSpore's oneDNN is built for thread pools), and does not hold Python's lock meanwhile. It adds up in the order in
which MindSpore's own products do, so that results are equal on as many machines.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

# What BLAS calls a matrix: whether it is transposed, and how far its rows are apart, in elements.
Layout = tuple[bytes, int]
# Multiplies the matrices at two addresses into a third one.
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
    """Whether MindSpore has a oneDNN with this function, as versions 1 to 3 of it do."""
    return _sgemm() is not None


def multiplication(sizes: tuple[int, int, int], a: Layout, b: Layout, out_stride: int, *, add: bool) -> Multiply:
    """``out = a @ b``, or ``out += a @ b``, of row-major matrices with the ``sizes`` (rows, inner, columns).

    What comes back is one thread's: its calls differ in three addresses, and all else is made ready once, for a call of
    a small product takes longer to prepare than to compute.
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
