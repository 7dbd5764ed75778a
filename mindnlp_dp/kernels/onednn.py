"""This module calls oneDNN, from the library that MindSpore ships: matrix products and element-wise primitives.

MindSpore builds a primitive at every call. Here primitives and their memory objects are kept by shape, for each thread,
and a call only sets the addresses. The calling thread computes (MindSpore's oneDNN is built for thread pools, and gets
none here), and ctypes releases Python's GIL. oneDNN selects its instructions by the features of the core, not by its
vendor.

The constants are those of oneDNN 3 (include/oneapi/dnnl/dnnl_types.h); with another version only ``dnnl_sgemm`` is
called, which versions 1 to 3 have.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Optional

# BLAS's description of a matrix: b"T" if transposed, else b"N"; and the distance between rows, in elements.
Layout = tuple[bytes, int]
# Shape and strides of an array, in elements.
Strided = tuple[tuple[int, ...], tuple[int, ...]]
# A function that multiplies the matrices at the first two addresses into the one at the third.
Multiply = Callable[[int, int, int], None]

_FLOAT32, _FORWARD, _BACKWARD = 3, 64, 128
_ACCURATE_SOFTMAX = 0x30000
_BFLOAT16_MODE = 1
# Flags of normalization.
_SCALE, _SHIFT, _RMS = 0x2, 0x4, 0x20
# The arguments of a primitive.
_SOURCE, _RESULT, _WEIGHTS, _BIAS = 1, 17, 33, 41
_MEAN, _VARIANCE, _SCALES, _SHIFTS = 49, 50, 51, 52
_OF_SOURCE, _OF_RESULT, _OF_SCALES, _OF_SHIFTS = 129, 145, 255, 256

# The activations that oneDNN computes, and the values of their first parameter.
ACTIVATIONS = {"gelu": (0x31, 0.0), "gelu_tanh": (0x2B, 0.0), "gelu_quick": (0x2C, 1.702), "silu": (0x2C, 1.0)}

# The bits of AVX-512 and of AMX's bfloat16 products in dnnl_cpu_isa_t. Without AVX-512 oneDNN computes tanh and the
# gradient of a softmax element by element. Without AMX it ignores its bfloat16 mode for float32 arrays, also on a core
# with AVX512-BF16.
_AVX512, _AMX_BFLOAT16 = 0x20, 0x800

# Primitives that a thread keeps; the batches of a data set with rows of many lengths have many shapes.
_MOST_KEPT = 256


@functools.cache
def _library() -> Optional[Any]:
    import mindspore

    for path in sorted((Path(mindspore.__file__).parent / "lib").glob("libdnnl.so*")):
        try:
            library = ctypes.CDLL(str(path))
            _ = library.dnnl_sgemm
        except (OSError, AttributeError):
            continue
        return library
    return None


def is_available() -> bool:
    """Return whether MindSpore's oneDNN has a matrix product, as its versions 1 to 3 do."""
    return _library() is not None


class _Version(ctypes.Structure):
    _fields_ = [("major", ctypes.c_int)]


@functools.cache
def has_primitives() -> bool:
    """Return whether this is oneDNN 3, whose constants this module knows."""
    library = _library()
    if library is None or not hasattr(library, "dnnl_layer_normalization_forward_primitive_desc_create"):
        return False
    library.dnnl_version.restype = ctypes.POINTER(_Version)
    return bool(library.dnnl_version().contents.major == 3)


@functools.cache
def effective_isa() -> int:
    """Return the instructions that oneDNN uses on this core, as bits of dnnl_cpu_isa_t; 0 if it is not oneDNN 3."""
    library: Any = _library()
    return int(library.dnnl_get_effective_cpu_isa()) if has_primitives() else 0


def has_fast_exponentials() -> bool:
    """Return whether oneDNN computes tanh, and the gradient of a softmax, in vectors on this core."""
    return bool(effective_isa() & _AVX512)


def has_bfloat16() -> bool:
    """Return whether oneDNN can round the factors of float32 products to bfloat16 on this core, which needs AMX."""
    return bool(effective_isa() & _AMX_BFLOAT16)


def multiplication(sizes: tuple[int, int, int], a: Layout, b: Layout, out_stride: int, *, add: bool) -> Multiply:
    """Return a function for ``out = a @ b``, or ``out += a @ b`` if ``add``.

    The matrices are row-major, with the ``sizes`` (rows, inner, columns). The function takes their three addresses, and
    only one thread may use it. All other arguments are prepared once, because preparing the call of a small product
    takes longer than computing it.
    """
    library: Any = _library()
    run, (rows, inner, columns) = library.dnnl_sgemm, map(ctypes.c_int64, sizes)
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


# Primitives. Only the thread that makes one may run it: they share a thread's scratch memory.

_kept = threading.local()


def _of_this_thread(key: Hashable, make: Callable[[], Primitive]) -> Primitive:
    """Return this thread's primitive for a key; the least recently used one is dropped if there are too many."""
    primitives: OrderedDict[Hashable, Primitive] = _kept.__dict__.setdefault("primitives", OrderedDict())
    if key in primitives:
        primitives.move_to_end(key)
    else:
        primitives[key] = make()
        if len(primitives) > _MOST_KEPT:
            primitives.popitem(last=False)
    return primitives[key]


class _Argument(ctypes.Structure):
    _fields_ = [("number", ctypes.c_int), ("memory", ctypes.c_void_p)]


def _made(function: str, *arguments: Any) -> ctypes.c_void_p:
    """Call one of oneDNN's functions that create an object, and return the object."""
    found = ctypes.c_void_p()
    if status := getattr(_library(), function)(ctypes.byref(found), *arguments):
        raise RuntimeError(f"oneDNN's {function} ended with status {status}")
    return found


_making_engine = threading.Lock()


def _engine() -> ctypes.c_void_p:
    # Two threads may need it first at the same time, and a primitive does not run on another engine's stream.
    with _making_engine:
        return _only_engine()


@functools.cache
def _only_engine() -> ctypes.c_void_p:
    return _made("dnnl_engine_create", 1, ctypes.c_size_t(0))


def _stream() -> ctypes.c_void_p:
    if not hasattr(_kept, "stream"):
        _kept.stream = _made("dnnl_stream_create", _engine(), 1)
    stream: ctypes.c_void_p = _kept.stream
    return stream


class _ArrayDescription(ctypes.c_void_p):
    """oneDNN's description of a float32 array with strides in elements; memory objects and primitives copy it."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        library: Any = _library()
        dims, self._destroy = ctypes.c_int64 * 12, library.dnnl_memory_desc_destroy
        made = _made("dnnl_memory_desc_create_with_strides", len(shape), dims(*shape), _FLOAT32, dims(*strides))
        super().__init__(made.value)

    def __del__(self) -> None:
        if self:
            self._destroy(self)


_strided = functools.lru_cache(maxsize=1024)(_ArrayDescription)


def strided(array: Any) -> Strided:
    """Return the shape and strides of a float32 array of NumPy whose matrices are row-major or column-major.

    A batch dimension that is broadcast gets the length 1. All dimensions of length 1 get the strides of a row-major or
    column-major array: oneDNN 3.10 recognizes layouts by strides, and with others it reads wrong addresses.
    """
    return _as_layout(array.shape, array.strides, array.itemsize)


@functools.lru_cache(maxsize=1024)
def _as_layout(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Strided:
    (*batch, rows, columns), (*steps, by_row, by_column) = shape, (n // itemsize for n in strides)
    if by_column == 1 or columns == 1:
        matrix = (by_row if rows > 1 else columns, 1)
    else:
        matrix = (1, by_column if columns > 1 else rows)
    extent = max(rows * matrix[0], columns * matrix[1])
    lengths, distances = [rows, columns], list(matrix)
    for length, step in zip(reversed(batch), reversed(steps)):
        is_one = length == 1 or not step
        lengths.insert(0, 1 if is_one else length)
        distances.insert(0, extent if is_one else step)
        extent = max(extent, lengths[0] * distances[0])
    return tuple(lengths), tuple(distances)


def _array(shape: tuple[int, ...]) -> ctypes.c_void_p:
    """Return the description of a row-major array of one or two dimensions."""
    return _strided(shape, (*shape[1:], 1))


class Primitive:
    """A primitive of oneDNN and its memory objects; a call takes the addresses of its arguments, in their order."""

    def __init__(
        self,
        description: ctypes.c_void_p,
        arguments: Sequence[tuple[int, ctypes.c_void_p]],
        forward: Optional[ctypes.c_void_p] = None,
    ) -> None:
        library: Any = _library()
        # Set before anything can fail, because __del__ needs them.
        self._destroy = library.dnnl_primitive_destroy, library.dnnl_memory_destroy
        self._primitive, self._memories = ctypes.c_void_p(), list[ctypes.c_void_p]()
        self._primitive = _made("dnnl_primitive_create", description)
        # The description of a gradient refers to that of the forward pass.
        for used in (description, forward):
            library.dnnl_primitive_desc_destroy(used)
        self._memories = [_made("dnnl_memory_create", array, _engine(), None) for _, array in arguments]
        pairs = [_Argument(number, memory) for (number, _), memory in zip(arguments, self._memories)]
        self._arguments = (_Argument * len(pairs))(*pairs)
        self._set, self._run = library.dnnl_memory_set_data_handle, library.dnnl_primitive_execute
        self._stream = _stream()

    def __call__(self, *addresses: int) -> None:
        for memory, address in zip(self._memories, addresses):
            self._set(memory, ctypes.c_void_p(address))
        if status := self._run(self._primitive, self._stream, len(self._memories), self._arguments):
            raise RuntimeError(f"a primitive of oneDNN ended with status {status}")

    def __del__(self) -> None:
        of_primitive, of_memory = self._destroy
        of_primitive(self._primitive)
        for memory in self._memories:
            of_memory(memory)


def products(a: Strided, b: Strided, out: Strided, *, bias: bool = False, bfloat16: bool = False) -> Primitive:
    """Return the primitive of the products of matrices; arguments: the factors, the results, and the bias if any.

    All factors have the same number of dimensions; where one has the length 1 before the last two, it is broadcast. The
    bias, (N,), is added to every row. With ``bfloat16`` the factors are rounded, and their products summed in float32.

    oneDNN 3.10 reads and writes outside of the arrays for some strides of three batch dimensions, and of two if the
    matrices have one row or column: use it for others.
    """

    def make() -> Primitive:
        arrays = [_strided(*each) for each in (a, b, out)]
        row = _array((1, out[0][-1])) if bias else None
        attributes = _bfloat16_attributes() if bfloat16 else None
        made = _made("dnnl_matmul_primitive_desc_create", _engine(), *arrays[:2], row, arrays[2], attributes)
        arguments = list(zip((_SOURCE, _WEIGHTS, _RESULT), arrays))
        return Primitive(made, arguments if row is None else [*arguments, (_BIAS, row)])

    return _of_this_thread((a, b, out, bias, bfloat16), make)


@functools.cache
def _bfloat16_attributes() -> ctypes.c_void_p:
    attributes = _made("dnnl_primitive_attr_create")
    library: Any = _library()
    if status := library.dnnl_primitive_attr_set_fpmath_mode(attributes, _BFLOAT16_MODE):
        raise RuntimeError(f"oneDNN's fpmath mode bf16 ended with status {status}")
    return attributes


def activation(name: str, size: int) -> Primitive:
    """Return the primitive of one of :data:`ACTIVATIONS`; arguments: input, output, of ``size`` elements each."""
    algorithm, parameter = ACTIVATIONS[name]

    def make() -> Primitive:
        x = _array((size,))
        return Primitive(_activation(algorithm, x, parameter), [(_SOURCE, x), (_RESULT, x)])

    return _of_this_thread((name, size), make)


def activation_backward(name: str, size: int) -> Primitive:
    """Return the primitive of its gradient; arguments: input, gradient of the output, gradient of the input."""
    algorithm, parameter = ACTIVATIONS[name]

    def make() -> Primitive:
        x = _array((size,))
        forward = _activation(algorithm, x, parameter)
        description = _made(
            "dnnl_eltwise_backward_primitive_desc_create", _engine(), algorithm, x, x, x,
            ctypes.c_float(parameter), ctypes.c_float(0), forward, None,
        )  # fmt: skip
        return Primitive(description, [(_SOURCE, x), (_OF_RESULT, x), (_OF_SOURCE, x)], forward)

    return _of_this_thread((name, size, "backward"), make)


def _activation(algorithm: int, x: ctypes.c_void_p, parameter: float) -> ctypes.c_void_p:
    return _made(
        "dnnl_eltwise_forward_primitive_desc_create", _engine(), _FORWARD, algorithm, x, x,
        ctypes.c_float(parameter), ctypes.c_float(0), None,
    )  # fmt: skip


def normalization(rows: int, columns: int, epsilon: float, *, scale: bool, shift: bool, centered: bool) -> Primitive:
    """Return the primitive of layer normalization, or of RMS normalization if not ``centered``, of each row.

    Arguments: input, output (rows, columns); mean if ``centered``, and variance (rows,), which it writes; the weight if
    ``scale`` and the bias if ``shift`` (columns,).
    """
    flags = _SCALE * scale | _SHIFT * shift | _RMS * (not centered)

    def make() -> Primitive:
        x, row, column = _array((rows, columns)), _array((rows,)), _array((columns,))
        arguments = [(_SOURCE, x), (_RESULT, x), *[(_MEAN, row)] * centered, (_VARIANCE, row)]
        arguments += [(_SCALES, column)] * scale + [(_SHIFTS, column)] * shift
        return Primitive(_normalization(x, row, epsilon, flags), arguments)

    return _of_this_thread((rows, columns, epsilon, flags), make)


def normalization_backward(rows: int, columns: int, epsilon: float, *, scale: bool) -> Primitive:
    """Return the primitive of the gradient of layer normalization.

    Arguments: input, gradient of the output, gradient of the input (rows, columns); mean and variance (rows,); if
    ``scale`` the weight and its gradient; gradient of the bias (columns,).
    """
    flags = _SCALE * scale | _SHIFT

    def make() -> Primitive:
        x, row, column = _array((rows, columns)), _array((rows,)), _array((columns,))
        forward = _normalization(x, row, epsilon, flags)
        description = _made(
            "dnnl_layer_normalization_backward_primitive_desc_create", _engine(), _BACKWARD, x, x, x, row,
            ctypes.c_float(epsilon), flags, forward, None,
        )  # fmt: skip
        arguments = [(_SOURCE, x), (_OF_RESULT, x), (_OF_SOURCE, x), (_MEAN, row), (_VARIANCE, row)]
        arguments += [*[(_SCALES, column), (_OF_SCALES, column)] * scale, (_OF_SHIFTS, column)]
        return Primitive(description, arguments, forward)

    return _of_this_thread((rows, columns, epsilon, flags, "backward"), make)


def _normalization(x: ctypes.c_void_p, row: ctypes.c_void_p, epsilon: float, flags: int) -> ctypes.c_void_p:
    return _made(
        "dnnl_layer_normalization_forward_primitive_desc_create", _engine(), _FORWARD, x, x, row,
        ctypes.c_float(epsilon), flags, None,
    )  # fmt: skip


def softmax(rows: int, columns: int) -> Primitive:
    """Return the primitive of the softmax of each row; arguments: input, output."""

    def make() -> Primitive:
        x = _array((rows, columns))
        return Primitive(_softmax(x), [(_SOURCE, x), (_RESULT, x)])

    return _of_this_thread(("softmax", rows, columns), make)


def softmax_backward(rows: int, columns: int) -> Primitive:
    """Return the primitive of its gradient; arguments: output, gradient of the output, gradient of the input."""

    def make() -> Primitive:
        x = _array((rows, columns))
        forward = _softmax(x)
        description = _made(
            "dnnl_softmax_backward_primitive_desc_create", _engine(), _ACCURATE_SOFTMAX, x, x, x, 1, forward, None
        )
        return Primitive(description, [(_RESULT, x), (_OF_RESULT, x), (_OF_SOURCE, x)], forward)

    return _of_this_thread(("softmax", rows, columns, "backward"), make)


def _softmax(x: ctypes.c_void_p) -> ctypes.c_void_p:
    return _made("dnnl_softmax_forward_primitive_desc_create", _engine(), _FORWARD, _ACCURATE_SOFTMAX, x, x, 1, None)
