"""These patches make MindNLP's PyTorch-like functions use our CPU kernels for calls that the kernels support.

``mindnlp.core`` of MindNLP 0.4.1 and ``mindtorch`` of 0.5.1 have these functions in modules of the same names.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

from mindnlp_dp.compat.import_hook import around
from mindnlp_dp.kernels.dispatch import is_here, not_none, supports
from mindnlp_dp.runtime.devices import is_on_cpu
from mindnlp_dp.runtime.override import override
from mindnlp_dp.runtime.versions import mindnlp_series

_PYTORCH, _TRANSFORMERS = {
    "0.4": ("mindnlp.core", "mindnlp.transformers"),
    "0.5": ("mindtorch", "transformers"),
}[mindnlp_series()]


# Versions: MindNLP 0.4.1 and 0.5.1 on MindSpore 2.7+ on CPU. Cause: MindSpore's kernels of these operators take 2 to 35
# times as long as ours on one core (docs/benchmarks_kernels.md, "The kernels by themselves").
# Remove when: they are as fast.
@around(f"{_PYTORCH}.nn.functional")
def _layers(module: types.ModuleType) -> Iterator[None]:
    yield

    @override(module)
    def linear(input: Any, weight: Any, bias: Any = None) -> Any:
        fits = supports(input, weight, *not_none(bias)) and weight.ndim == 2 and input.shape[-1:] == weight.shape[1:]
        if fits and (bias is None or bias.shape == weight.shape[:1]):
            return kernels().linear(input, weight, bias)
        return NotImplemented

    @override(module)
    def gelu(input: Any, approximate: str = "none") -> Any:
        is_known = supports(input) and approximate in ("none", "tanh")
        return kernels().gelu(input, approximate) if is_known else NotImplemented

    @override(module)
    def silu(input: Any, inplace: bool = False) -> Any:
        return kernels().silu(input) if supports(input) and not inplace else NotImplemented

    override(module)(softmax)

    @override(module)
    def layer_norm(input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
        is_plain = isinstance(normalized_shape, (int, tuple, list)) and isinstance(eps, (int, float))
        if is_plain and supports(input, *not_none(weight, bias)):
            shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
            fits = all(x is None or x.shape == shape for x in (weight, bias)) and input.shape[-len(shape) :] == shape
            if fits and math.prod(shape):
                return kernels().layer_norm(input, len(shape), weight, bias, eps)
        return NotImplemented

    @override(module)
    def embedding(input: Any, weight: Any, *others: Any, **options: Any) -> Any:
        if weight.ndim != 2 or not _is_integer(input) or not _is_in_host_memory(input, weight):
            return NotImplemented
        ids = input.asnumpy()
        if ids.size and not 0 <= ids.min() <= ids.max() < weight.shape[0]:
            # MindSpore counts negative ids from the end.
            raise IndexError(
                f"the ids of an embedding are {ids.min()} to {ids.max()}, and it has rows 0 to {weight.shape[0] - 1}"
            )
        # MindNLP ignores the other arguments on CPU.
        return kernels().embedding(ids, weight) if supports(weight) else NotImplemented

    @override(module)
    def cross_entropy(  # noqa: PLR0917, it is MindNLP's signature
        input: Any,
        target: Any,
        weight: Any = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: Any = 0.0,
    ) -> Any:
        if input.ndim < 2 or not _is_integer(target) or not _is_in_host_memory(input, target):
            return NotImplemented
        classes, num_classes = target.asnumpy(), input.shape[1]
        wrong = classes[((classes < 0) | (classes >= num_classes)) & (classes != ignore_index)]
        if wrong.size:
            raise IndexError(
                f"cross_entropy: {wrong[0]} is not a class, expected 0 to {num_classes - 1}, or {ignore_index} for one "
                "that does not count"
            )
        is_plain = weight is None and label_smoothing == 0 and reduction in ("mean", "sum", "none")
        fits = input.ndim == 2 and target.shape == input.shape[:1] and math.prod(input.shape)
        if is_plain and fits and supports(input):
            return kernels().cross_entropy(input, classes, ignore_index, reduction)
        return NotImplemented

    stock = module.binary_cross_entropy_with_logits

    @override(module)
    def binary_cross_entropy_with_logits(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        # MindNLP broadcasts them, and a classifier whose labels are floats would compute a loss of its class numbers.
        if input.shape != target.shape:
            raise ValueError(
                f"binary_cross_entropy_with_logits: the targets are {tuple(target.shape)}, expected the shape of the "
                f"logits, {tuple(input.shape)}. One class per sample must be an integer"
            )
        if target.dtype != input.dtype and _is_in_host_memory(input, target) and mindnlp_series() == "0.4":
            # MindSpore 2.10's gradient for integers is of another batch size now and then.
            import mindspore

            return stock(input, mindspore.Tensor(target.asnumpy().astype("float32")).to(input.dtype), *args, **kwargs)
        return NotImplemented


# Versions: all. Cause: a table of relative positions, which is dropped, has a shape that rows of samples may have.
# Remove when: a model says which tensors all samples share.
@around(f"{_TRANSFORMERS}.models.deberta.modeling_deberta")
@around(f"{_TRANSFORMERS}.models.deberta_v2.modeling_deberta_v2")
def _dropout_of_tables(module: types.ModuleType) -> Iterator[None]:
    yield
    from mindnlp_dp.runtime.random_state import shared_by_samples

    stock = module.DisentangledSelfAttention.__init__

    class TableDropout(module.nn.Dropout):  # type: ignore[misc, name-defined]
        def forward(self, input: Any) -> Any:
            with shared_by_samples():
                return super().forward(input)

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if hasattr(self, "pos_dropout"):
            self.pos_dropout = TableDropout(self.pos_dropout.p)

    module.DisentangledSelfAttention.__init__ = init


@around(f"{_PYTORCH}.ops.pointwise")
def _pointwise(module: types.ModuleType) -> Iterator[None]:
    yield
    override(module)(softmax)


def softmax(input: Any, dim: Any = -1, *, dtype: Any = None) -> Any:
    """Return the softmax over the last dimension, or NotImplemented for another one."""
    is_last = supports(input) and input.ndim > 0 and dim in (-1, input.ndim - 1)
    if is_last and dtype in (None, input.dtype):
        return kernels().softmax(input)
    return NotImplemented


@around(f"{_PYTORCH}.ops.blas")
def _matrix_products(module: types.ModuleType) -> Iterator[None]:
    yield

    @override(module)
    def matmul(input: Any, other: Any) -> Any:
        return kernels().matmul(input, other) if _multiply(input, other) else NotImplemented

    @override(module)
    def bmm(input: Any, other: Any) -> Any:
        is_batch = _multiply(input, other) and input.ndim == other.ndim == 3 and input.shape[0] == other.shape[0]
        return kernels().matmul(input, other) if is_batch else NotImplemented

    @override(module)
    def addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
        if beta == alpha == 1 and supports(input) and _multiply(mat1, mat2) and mat1.ndim == mat2.ndim == 2:
            return input + kernels().matmul(mat1, mat2)
        return NotImplemented


# Models with their own RMS normalization, composed of six operators: the name of the class for each module.
_RMS_NORMS = {
    "llama": "LlamaRMSNorm",
    "mistral": "MistralRMSNorm",
    "mixtral": "MixtralRMSNorm",
    "phi3": "Phi3RMSNorm",
    "qwen2": "Qwen2RMSNorm",
    "qwen2_moe": "Qwen2MoeRMSNorm",
    "t5": "T5LayerNorm",
}


def _rms_norm_of(class_name: str) -> Callable[[types.ModuleType], Iterator[None]]:
    def patch(module: types.ModuleType) -> Iterator[None]:
        yield

        @override(getattr(module, class_name))
        def forward(self: Any, hidden_states: Any) -> Any:
            if supports(hidden_states, self.weight) and hidden_states.shape[-1:] == self.weight.shape != (0,):
                return kernels().rms_norm(hidden_states, self.weight, self.variance_epsilon)
            return NotImplemented

    return patch


for _model, _class in _RMS_NORMS.items():
    around(f"{_TRANSFORMERS}.models.{_model}.modeling_{_model}")(_rms_norm_of(_class))


# Models whose queries and keys are rotated by six operators each.
_ROTARY = ("gemma", "llama", "mistral", "mixtral", "phi", "phi3", "qwen2", "qwen2_moe")


def _rotary_embedding(module: types.ModuleType) -> Iterator[None]:
    yield

    @override(module)
    def apply_rotary_pos_emb(  # noqa: PLR0917, it is MindNLP's signature
        q: Any, k: Any, cos: Any, sin: Any, position_ids: Any = None, unsqueeze_dim: int = 1
    ) -> Any:
        if not supports(q, k, cos, sin) or cos.shape != sin.shape or unsqueeze_dim != 1:
            return NotImplemented
        if cos._requires_grad or sin._requires_grad:
            # Trained frequencies.
            return NotImplemented
        if cos.ndim == 2 and position_ids is not None and _is_integer(position_ids):
            # A row for each position; numbers below 0 count from the end, as in an array.
            places = position_ids.asnumpy()
            if not places.size or not -cos.shape[0] <= places.min() <= places.max() < cos.shape[0]:
                return NotImplemented
            places %= cos.shape[0]
            cos, sin = (kernels().embedding(places, table) for table in (cos, sin))
        if cos.ndim != 3 or not all(_fits_rotation(x, cos) for x in (q, k)):
            return NotImplemented
        return kernels().rotate(q, cos, sin), kernels().rotate(k, cos, sin)


def _fits_rotation(x: Any, cos: Any) -> bool:
    is_even = x.ndim == 4 and x.shape[-1] % 2 == 0 < math.prod(x.shape)
    return is_even and x.shape[2:] == cos.shape[1:] and cos.shape[0] in (1, x.shape[0])


for _model in _ROTARY:
    around(f"{_TRANSFORMERS}.models.{_model}.modeling_{_model}")(_rotary_embedding)


def _multiply(a: Any, b: Any) -> bool:
    """Return whether our kernels support a product: no vectors; for shapes that do not fit, MindSpore raises."""
    return (
        supports(a, b)
        and a.ndim > 1 < b.ndim
        and a.shape[-1] == b.shape[-2]
        and all(m == n or 1 in (m, n) for m, n in zip(a.shape[-3::-1], b.shape[-3::-1]))
    )


def _is_in_host_memory(*tensors: Any) -> bool:
    """Return whether a look at the tensors' values costs little."""
    return is_on_cpu() and all(map(is_here, tensors))


def _is_integer(x: Any) -> bool:
    import mindspore

    return isinstance(x, mindspore.Tensor) and x.dtype in (mindspore.int32, mindspore.int64)


@functools.cache
def kernels() -> types.ModuleType:
    """Return the module of the kernels, imported at the first use."""
    # Imported at the first call, because it imports MindSpore.
    from mindnlp_dp.kernels import functions

    return functions
