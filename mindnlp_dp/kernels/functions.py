"""This module wraps the kernels in MindSpore's autograd; the patches call it in place of MindNLP's functions.

Each function takes float32 MindSpore tensors on CPU in PyNative mode and returns a tensor that MindSpore
differentiates with our backward pass. A graph keeps about as much memory as with MindSpore's own operators. All large
arrays that a backward pass needs are saved as tensors, so that recomputation can drop them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Optional

import numpy as np
from mindspore import Tensor
from mindspore.common._grad_function import _Function

from mindnlp_dp.dropout.dropout_masks import dropout_mask, next_key
from mindnlp_dp.kernels import activations
from mindnlp_dp.kernels import cross_entropy as cross_entropy_of_arrays
from mindnlp_dp.kernels.embedding import scatter_rows
from mindnlp_dp.kernels.linear_cross_entropy import losses_and_gradients
from mindnlp_dp.kernels.masked import masked
from mindnlp_dp.kernels.matmul import add_product, column_sums, product
from mindnlp_dp.kernels.matmul import matmul as matmul_arrays
from mindnlp_dp.kernels.memory_pool import array_of, empty_like, tensor_of
from mindnlp_dp.kernels.normalization import normalize, normalize_backward
from mindnlp_dp.kernels.rotary import rotate as rotate_array
from mindnlp_dp.kernels.rotary import rotate_backward
from mindnlp_dp.kernels.softmax import softmax_backward, softmax_of_rows
from mindnlp_dp.runtime.once_differentiable import once_differentiable
from mindnlp_dp.runtime.pynative_executor import pynative_executor

GELU = {"none": "gelu", "tanh": "gelu_tanh", "quick": "gelu_quick"}


def linear(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """Return ``x @ weight.T + bias``, of shape (..., N), for shapes (..., K), (N, K) and (N,)."""
    return _Linear.apply(x, weight, bias)


def lora_linear(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], adapters: tuple[Tensor, Tensor], scale: float
) -> Tensor:
    """Return ``x @ weight.T + bias + scale * x @ a.T @ b.T`` for ``adapters`` (a, b) of LoRA (arXiv 2106.09685).

    The result is (..., N), for shapes (..., K), (N, K), (N,), (R, K) and (N, R).
    """
    return _LoraLinear.apply(x, weight, bias, *adapters, scale)


def add(x: Tensor, other: Tensor) -> Tensor:
    """Return ``x + other``, of the shape of ``x``, to which ``other`` is broadcast, such as a bias or a mask."""
    return _Add.apply(x, other)


def divide(x: Tensor, number: float) -> Tensor:
    """Return ``x / number``."""
    return _Divide.apply(x, number)


def where(condition: Tensor, x: Tensor, number: float) -> Tensor:
    """Return ``x`` where ``condition``, which is broadcast to its shape, is true, and ``number`` elsewhere."""
    return _Where.apply(condition, x, number)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` for tensors of two or more dimensions; all but the last two are broadcast."""
    return _MatMul.apply(a, b)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return the GELU of ``x``: exact ("none"), or approximated with a "tanh" or with a sigmoid ("quick")."""
    return _Activation.apply(x, GELU[approximate])


def silu(x: Tensor) -> Tensor:
    """Return ``x sigmoid(x)``."""
    return _Activation.apply(x, "silu")


def softmax(x: Tensor) -> Tensor:
    """Return the softmax of ``x`` over its last dimension."""
    return _Softmax.apply(x)


def layer_norm(x: Tensor, num_axes: int, weight: Optional[Tensor], bias: Optional[Tensor], epsilon: float) -> Tensor:
    """Normalize ``x`` over its last ``num_axes`` dimensions; ``weight`` and ``bias`` have the shape of these."""
    return _Norm.apply(x, weight, bias, _Kind(num_axes, epsilon, True))


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + epsilon) * weight``, with the mean over the dimensions of ``weight``."""
    return _Norm.apply(x, weight, None, _Kind(weight.ndim, epsilon, False))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return rotary embeddings of ``x``: ``x * cos + rotate_half(x) * sin``, of the shape (batch, heads, length, D).

    ``cos`` and ``sin`` have the shape (batch or 1, length, D), and get no gradient.
    """
    return _Rotate.apply(x, cos, sin)


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero elements of ``x`` with probability ``p`` and scale the others by ``1 / (1 - p)``.

    In a training step the mask of a sample depends on its position in the global batch, otherwise on the state of
    MindSpore's generator (:func:`~mindnlp_dp.dropout.dropout_masks.dropout_mask`).
    """
    return _Dropout.apply(x, p)


def embedding(ids: np.ndarray, weight: Tensor) -> Tensor:
    """Return the rows ``ids`` of ``weight``: (..., N), for shapes (...) and (V, N); ids are in ``range(V)``."""
    return _Embedding.apply(weight, ids)


def cross_entropy(logits: Tensor, classes: np.ndarray, ignored: int, reduction: str) -> Tensor:
    """Return the cross-entropy of logits (N, C) and classes (N,), reduced by "mean", "sum" or "none" (shape (N,)).

    Rows of the class ``ignored`` do not count; all other classes are in ``range(C)``. The mean over no row is NaN.
    """
    return _CrossEntropy.apply(logits, classes, ignored, reduction)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    classes: np.ndarray,
    ignored: int = -100,
    *,
    is_frozen: bool = False,
) -> Tensor:
    """Return the mean cross-entropy of ``x @ weight.T + bias``, never whole, and classes (N,), a scalar.

    ``x`` is (N, K), ``weight`` (C, K), ``bias`` (C,) or None; they get no gradient if ``is_frozen``. Rows of the class
    ``ignored`` do not count; all other classes are in ``range(C)``. The mean over no row is NaN.
    """
    counted = np.where(classes == ignored, -1, classes)
    # MindSpore does not know in a forward pass whether a parameter is frozen, nor whether there is a backward pass.
    has_gradient = pynative_executor.grad_flag() and pynative_executor.enable_grad()
    return _LinearCrossEntropy.apply(x, weight, bias, counted, (has_gradient, has_gradient and not is_frozen))


def _rows(tensor: Tensor) -> np.ndarray:
    """Return a tensor as a matrix: all dimensions but the last are flattened into the rows."""
    array = array_of(tensor)
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def _is_trained(tensor: Optional[Tensor]) -> bool:
    """Return whether a tensor needs a gradient, as far as its class knows.

    A Parameter of MindNLP 0.4.1 that is frozen does not tell MindSpore, because MindSpore's answer is for good: a
    parameter that was used while it was frozen would have no gradient ever after.
    """
    return tensor is not None and not (type(tensor).__name__ == "Parameter" and not tensor.requires_grad)


class _Linear(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.trained = _is_trained(weight), _is_trained(bias)
        out = product(_rows(x), array_of(weight).T, None if bias is None else array_of(bias))
        return tensor_of(out.reshape(*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows, (of_x, of_weight, of_bias) = _rows(gradient), ctx.needs_input_grad
        return (
            tensor_of(product(rows, array_of(weight)).reshape(x.shape)) if of_x else None,
            tensor_of(product(rows.T, _rows(x))) if of_weight and ctx.trained[0] else None,
            tensor_of(column_sums(rows)) if of_bias and ctx.trained[1] else None,
        )


class _LoraLinear(_Function):
    @staticmethod
    def forward(  # noqa: PLR0917, ctx and the operator's inputs
        ctx: Any, x: Tensor, weight: Tensor, bias: Optional[Tensor], a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        rows = _rows(x)
        low = product(rows, array_of(a).T)
        low *= np.float32(scale)
        ctx.save_for_backward(x, weight, a, b, tensor_of(low))
        ctx.scale, ctx.trained = np.float32(scale), (_is_trained(weight), _is_trained(bias))
        out = product(rows, array_of(weight).T, None if bias is None else array_of(bias))
        add_product(low, array_of(b).T, out)
        return tensor_of(out.reshape(*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, a, b, low = ctx.saved_tensors
        of_x, of_weight, of_bias, of_a, of_b, _ = ctx.needs_input_grad
        g, rows = _rows(gradient), _rows(x)
        of_low = product(g, array_of(b))
        of_low *= ctx.scale
        of_rows = product(g, array_of(weight)) if of_x else None
        if of_rows is not None:
            add_product(of_low, array_of(a), of_rows)
        return (
            None if of_rows is None else tensor_of(of_rows.reshape(x.shape)),
            tensor_of(product(g.T, rows)) if of_weight and ctx.trained[0] else None,
            tensor_of(column_sums(g)) if of_bias and ctx.trained[1] else None,
            tensor_of(product(of_low.T, rows)) if of_a else None,
            tensor_of(product(g.T, array_of(low))) if of_b else None,
            None,
        )


class _Add(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward()
        ctx.shape = other.shape
        left = array_of(x)
        return tensor_of(np.add(left, array_of(other), out=empty_like(left.shape, left)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if not ctx.needs_input_grad[1]:
            return gradient, None
        is_bias = len(ctx.shape) == 1 and ctx.shape == gradient.shape[-1:]
        sums = column_sums(_rows(gradient)) if is_bias else _summed(array_of(gradient), ctx.shape)
        return gradient, tensor_of(sums)


class _Divide(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: float) -> Tensor:
        ctx.save_for_backward()
        ctx.number = np.float32(number)
        return tensor_of(_quotient(array_of(x), ctx.number))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return tensor_of(_quotient(array_of(gradient), ctx.number)), None


def _quotient(x: np.ndarray, number: np.float32) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.divide(x, number, out=empty_like(x.shape, x))


class _Where(_Function):
    @staticmethod
    def forward(ctx: Any, condition: Tensor, x: Tensor, number: float) -> Tensor:
        ctx.save_for_backward(condition)
        return tensor_of(_chosen(condition, array_of(x), number))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (condition,) = ctx.saved_tensors
        return None, tensor_of(_chosen(condition, array_of(gradient), 0.0)), None


def _chosen(condition: Tensor, x: np.ndarray, number: float) -> np.ndarray:
    out = empty_like(x.shape, x)
    out[...] = number
    np.copyto(out, x, where=condition.asnumpy())
    return out


class _MatMul(_Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        left, right = array_of(a), array_of(b)
        # Attention's values are often transposed from (batch, length, heads, D). The result then is, too, and MindSpore
        # need not copy it, element by element, to merge the heads.
        is_like_right = left.shape == (*right.shape[:-1], right.shape[-2]) and not right.flags.c_contiguous
        return tensor_of(matmul_arrays(left, right, right if is_like_right and right.ndim > 2 else None))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        left, right = map(array_of, ctx.saved_tensors)
        g, (of_left, of_right) = array_of(gradient), ctx.needs_input_grad
        return (
            tensor_of(_of_left(g, left, right)) if of_left else None,
            tensor_of(_of_right(g, left, right)) if of_right else None,
        )


def _of_left(g: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the gradient of a product's left factor, with the factor's memory layout."""
    needs_no_sum = left.shape[:-2] == g.shape[:-2] and right.ndim > 2
    return _summed(matmul_arrays(g, right.swapaxes(-1, -2), left if needs_no_sum else None), left.shape)


def _of_right(g: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the gradient of a product's right factor, with the factor's memory layout."""
    if right.ndim == 2:
        rows = math.prod(left.shape[:-1])
        return product(left.reshape(rows, left.shape[-1]).T, g.reshape(rows, g.shape[-1]))
    needs_no_sum = right.shape[:-2] == g.shape[:-2]
    return _summed(matmul_arrays(left.swapaxes(-1, -2), g, right if needs_no_sum else None), right.shape)


def _summed(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return ``x`` summed over the dimensions along which an array of ``shape`` was broadcast to the shape of ``x``."""
    if x.shape == shape:
        return x
    x = x.sum(tuple(range(x.ndim - len(shape))), dtype=np.float64)
    axes = tuple(at for at, length in enumerate(shape) if length == 1 != x.shape[at])
    return x.sum(axes, keepdims=True).astype(np.float32)


class _Activation(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        out, slope = activations.forward(name, array_of(x), ctx.needs_input_grad[0])
        ctx.save_for_backward(x, None if slope is None else tensor_of(slope))
        ctx.name = name
        return tensor_of(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, slope = ctx.saved_tensors
        slope = None if slope is None else array_of(slope)
        return tensor_of(activations.backward(ctx.name, array_of(gradient), array_of(x), slope)), None


class _Softmax(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = softmax_of_rows(_rows(x))
        result = tensor_of(out.reshape(x.shape))
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (result,) = ctx.saved_tensors
        return tensor_of(softmax_backward(_rows(gradient), _rows(result)).reshape(result.shape))


class _Kind(NamedTuple):
    """The options of a normalization: its number of dimensions, its epsilon, and whether the mean is subtracted."""

    num_axes: int
    epsilon: float
    centered: bool


class _Norm(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], kind: _Kind) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kind, ctx.columns = kind, math.prod(x.shape[x.ndim - kind.num_axes :])
        rows = array_of(x).reshape(-1, ctx.columns)
        out, ctx.statistics = normalize(rows, _flat(weight), _flat(bias), kind.epsilon, kind.centered)
        return tensor_of(out.reshape(x.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        g, rows = (array_of(each).reshape(-1, ctx.columns) for each in (gradient, x))
        of_rows, *sums = normalize_backward(g, rows, _flat(weight), ctx.statistics, ctx.kind.centered)
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        # Weight and bias have the shape of the normalized dimensions.
        shape = x.shape[x.ndim - ctx.kind.num_axes :]
        return (
            tensor_of(of_rows.reshape(x.shape)) if of_x else None,
            tensor_of(sums[0].reshape(shape)) if of_weight else None,
            tensor_of(sums[1].reshape(shape)) if of_bias else None,
            None,
        )


def _flat(tensor: Optional[Tensor]) -> Optional[np.ndarray]:
    return None if tensor is None else array_of(tensor).reshape(-1)


class _Rotate(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return tensor_of(rotate_array(array_of(x), array_of(cos)[:, None], array_of(sin)[:, None]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        cos, sin = (array_of(each)[:, None] for each in ctx.saved_tensors)
        return tensor_of(rotate_backward(array_of(gradient), cos, sin)), None, None


class _Dropout(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        keep, ctx.scale = dropout_mask(x.shape, p, next_key()), 1 / (1 - p) if p < 1 else 0.0
        ctx.save_for_backward(tensor_of(keep))
        return tensor_of(masked(array_of(x), keep, ctx.scale))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (keep,) = ctx.saved_tensors
        return tensor_of(masked(array_of(gradient), keep.asnumpy(), ctx.scale)), None


class _Embedding(_Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: np.ndarray) -> Tensor:
        ctx.save_for_backward()
        ctx.ids, ctx.num_rows, ctx.is_trained = ids, weight.shape[0], _is_trained(weight)
        return tensor_of(array_of(weight)[ids])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if not ctx.is_trained:
            return None, None
        return tensor_of(scatter_rows(_rows(gradient), ctx.ids.reshape(-1), ctx.num_rows)), None


class _CrossEntropy(_Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, classes: np.ndarray, ignored: int, reduction: str) -> Tensor:
        counts = classes != ignored
        ctx.classes, ctx.weights = np.where(counts, classes, 0), counts.astype(np.float32)
        ctx.save_for_backward(logits)
        losses, ctx.softmax = cross_entropy_of_arrays.losses(array_of(logits), ctx.classes, ctx.needs_input_grad[0])
        with np.errstate(invalid="ignore", divide="ignore"):
            if reduction == "mean":
                ctx.weights /= np.count_nonzero(counts)
            # The loss of an ignored row may be infinite, and infinity times a weight of 0 is NaN.
            losses = np.where(counts, losses * ctx.weights, ctx.weights)
        return tensor_of(losses if reduction == "none" else np.asarray(losses.sum()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradients = array_of(gradient) * ctx.weights
        return tensor_of(cross_entropy_of_arrays.backward(gradients, ctx.softmax, ctx.classes)), None, None, None


class _LinearCrossEntropy(_Function):
    @staticmethod
    def forward(  # noqa: PLR0917, ctx and the operator's inputs
        ctx: Any, x: Tensor, weight: Tensor, bias: Optional[Tensor], classes: np.ndarray, wanted: tuple[bool, bool]
    ) -> Tensor:
        # Rows of the class -1 do not count, and are left out before the product.
        counted = np.flatnonzero(classes >= 0)
        rows, classes = array_of(x), classes[counted]
        # Only so that a second derivative is an error.
        ctx.save_for_backward(x, weight)
        ctx.num_rows, ctx.counted = len(rows), counted if len(counted) < len(rows) else None
        rows = rows if ctx.counted is None else rows[counted]
        weights = np.full(len(counted), 1 / max(len(counted), 1), np.float32)
        losses, ctx.gradients = losses_and_gradients(
            rows, array_of(weight), None if bias is None else array_of(bias), classes, weights=weights,
            wanted=(wanted[0], wanted[1], wanted[1]),
        )  # fmt: skip
        with np.errstate(invalid="ignore"):
            return tensor_of(np.float32(losses.sum(dtype=np.float64)) / np.asarray(len(counted), np.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        scale = np.float32(array_of(gradient))
        of_x, of_weight, of_bias = (g if g is None or scale == 1 else g * scale for g in ctx.gradients)
        if of_x is not None and ctx.counted is not None:
            spread = np.zeros((ctx.num_rows, of_x.shape[1]), np.float32)
            spread[ctx.counted] = of_x
            of_x = spread
        return *(None if g is None else tensor_of(g) for g in (of_x, of_weight, of_bias)), None, None
