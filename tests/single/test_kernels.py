"""Compares the CPU kernels with MindSpore's kernels, with float64, and with themselves on more cores."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import mindspore
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindnlp.common.activations import quick_gelu
from mindnlp.core import nn, ops
from mindnlp.core.autograd import value_and_grad
from mindnlp.core.nn import functional as F  # noqa: N812
from mindnlp.transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel, T5Config, T5EncoderModel
from mindnlp.transformers.models.llama import modeling_llama
from mindnlp.transformers.models.qwen2 import modeling_qwen2
from mindspore import Tensor
from scipy import special

import mindnlp_dp as dp
from mindnlp_dp.dropout import dropout_masks
from mindnlp_dp.kernels import (
    activations,
    cross_entropy,
    dispatch,
    functions,
    linear_cross_entropy,
    masked,
    matmul,
    memory_pool,
    onednn,
    workers,
)
from mindnlp_dp.kernels.embedding import scatter_rows
from mindnlp_dp.kernels.normalization import normalize, normalize_backward
from mindnlp_dp.kernels.softmax import softmax_backward, softmax_of_rows
from mindnlp_dp.parallel.tensor_parallel.layers import add_bias
from mindnlp_dp.runtime.random_state import SampleStreams, seeded


@pytest.fixture(autouse=True)
def ours():
    """Start every test with our kernels on one core, and restore the previous choice after it."""
    dp.init_process_group()
    before = dispatch._are_on
    dispatch.choose("auto", 1)
    yield
    dispatch.choose("auto" if before else "mindspore", 1)


def numbers(*shape, seed=0, scale=1.0):
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) * scale).astype(np.float32)


def in_heads(x):
    """Return (2, 9, 24) in the layout of attention, (2, 3, 9, 8), without moving it in memory."""
    return x.view((2, 9, 3, 8)).permute(0, 2, 1, 3)


def attention(q, k, v):
    shares = F.softmax(ops.matmul(in_heads(q), in_heads(k).swapaxes(-1, -2)), dim=-1)
    return ops.matmul(shares, in_heads(v)).permute(0, 2, 1, 3).view((2, 9, 24))


CLASSES = np.random.default_rng(3).integers(0, 20, 64).astype(np.int32)
SOME = np.where(np.arange(64) % 3, CLASSES, -100)


# Rotary embeddings for each sample's own positions, and a table of them.
ANGLES = np.random.default_rng(4).uniform(0, 6, (2, 9, 8)).astype(np.float32)
PLACES = Tensor(np.random.default_rng(5).integers(-3, 9, (2, 9)))


def rotated(q, k):
    q, k = (x.view((2, 9, -1, 8)).permute(0, 2, 1, 3) for x in (q, k))
    cos, sin = (Tensor(table(ANGLES)).astype(q.dtype) for table in (np.cos, np.sin))
    return ops.cat(modeling_llama.apply_rotary_pos_emb(q, k, cos, sin), dim=1)


def rotated_by_table(q, k):
    cos, sin = (Tensor(table(ANGLES[0])).astype(q.dtype) for table in (np.cos, np.sin))
    return ops.cat(modeling_qwen2.apply_rotary_pos_emb(q, k, cos, sin, PLACES), dim=1)


def with_adapters(x, weight, a, b, *bias):
    if dispatch.supports(x, weight):
        return functions.lora_linear(x, weight, *(bias or [None]), (a, b), 2.0)
    lower = ops.matmul(x, a.swapaxes(0, 1))
    return sum(bias, ops.matmul(x, weight.swapaxes(0, 1)) + ops.matmul(lower, b.swapaxes(0, 1)) * 2.0)


def twice_used(x, weight):
    y = F.linear(x, weight)
    return y * y + y


def gelu_tanh_formula(x):
    return 0.5 * x * (1 + ops.tanh(float(np.sqrt(2 / np.pi)) * (x + 0.044715 * x * x * x)))


def cross_entropy_formula(reduction="mean", classes=CLASSES):
    counts = Tensor((classes >= 0).astype(np.float64))
    own = Tensor(np.maximum(classes, 0)[:, None])

    def formula(x):
        centered = x - Tensor(x.asnumpy().max(1, keepdims=True))
        losses = (ops.log(ops.exp(centered).sum(1)) - mindspore.ops.gather_elements(centered, 1, own)[:, 0]) * counts
        return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / float(counts.sum().asnumpy())}[reduction]

    return formula


def norm_formula(*shape, epsilon=1e-5):
    def formula(x, weight=None, bias=None):
        axes = tuple(range(-len(shape), 0))
        centered = x - x.mean(axes, keep_dims=True)
        normal = centered / ops.sqrt((centered * centered).mean(axes, keep_dims=True) + epsilon)
        return normal if weight is None else normal * weight + bias

    return formula


# MindSpore computes these in float32 whatever the type of the inputs; the formulas give float64 results.
EXACT = {
    "gelu, tanh": gelu_tanh_formula,
    "layer norm": norm_formula(30, epsilon=1e-12),
    "layer norm of two dimensions": norm_formula(20, 30),
    "layer norm of many rows": norm_formula(7),
    "layer norm of itself": norm_formula(30),
    "cross-entropy": cross_entropy_formula(),
    "cross-entropy, a sum": cross_entropy_formula("sum"),
    "cross-entropy, row by row": cross_entropy_formula("none"),
    "cross-entropy of some": cross_entropy_formula(classes=SOME),
    "cross-entropy, many classes": cross_entropy_formula(),
}
CAUSAL = Tensor(np.tril(np.ones((1, 1, 64, 65), bool)))
IDS = Tensor(np.random.default_rng(3).integers(0, 20, (4, 9)))
CASES = {
    "linear": (F.linear, (4, 7, 30), (50, 30), (50,)),
    "linear of one row": (F.linear, (30,), (50, 30), (50,)),
    "linear of five dimensions": (F.linear, (2, 1, 3, 2, 30), (5, 30), (5,)),
    "linear without a bias": (F.linear, (4, 7, 30), (50, 30)),
    "linear to one column": (F.linear, (64, 300), (1, 300), (1,)),
    "linear, transposed input": (lambda x, w: F.linear(x.swapaxes(0, 1), w), (7, 4, 30), (50, 30)),
    "linear, sliced input": (lambda x, w: F.linear(x[:, 3:33], w), (7, 40), (50, 30)),
    "linear, expanded input": (lambda x, w: F.linear(x.broadcast_to((7, 4, 30)), w), (1, 4, 30), (50, 30)),
    "linear, transposed gradient": (lambda x, w: F.linear(x, w).swapaxes(0, 1), (4, 7, 30), (50, 30)),
    "linear, transposed weight": (lambda x, w: F.linear(x, w.swapaxes(0, 1)), (4, 30), (30, 50)),
    "linear, one weight twice": (lambda x, w: F.linear(F.linear(x, w), w), (4, 7, 30), (30, 30)),
    "linear, an output twice": (twice_used, (4, 30), (5, 30)),
    "linear of itself": (lambda x: F.linear(x, x), (12, 30)),
    "a bias alone": (add_bias, (4, 7, 30), (30,)),
    "a bias alone, one row": (add_bias, (30,), (30,)),
    "a bias alone, transposed": (lambda x, b: add_bias(x.swapaxes(0, 1), b), (7, 4, 30), (30,)),
    "scores and a mask": (lambda x, mask: x + mask, (4, 4, 64, 65), (4, 1, 1, 65)),
    "scores and a bias of heads": (lambda x, bias: x + bias, (4, 4, 64, 65), (4, 1, 65)),
    "scores, transposed, and a mask": (lambda x, mask: x.swapaxes(0, 2) + mask, (64, 4, 4, 65), (4, 1, 65)),
    "a mask and scores": (lambda mask, x: mask + x, (4, 1, 1, 65), (4, 4, 64, 65)),
    "scores by a number": (lambda x: x / 3.0, (4, 4, 64, 65)),
    "scores by a constant": (lambda x: x / ops.full([], 3.0, dtype=x.dtype), (4, 4, 64, 65)),
    "scores by a sum": (lambda x, y: x / (y * y + 1).sum(), (4, 4, 64, 65), (3,)),
    "causal scores": (lambda x: ops.where(CAUSAL, x, ops.full([], -3.0, dtype=x.dtype)), (4, 4, 64, 65)),
    "rotary embeddings": (rotated, (2, 9, 24), (2, 9, 8)),
    "rotary embeddings, by a table": (rotated_by_table, (2, 3, 9, 8), (2, 3, 9, 8)),
    "LoRA": (with_adapters, (4, 7, 30), (50, 30), (3, 30), (50, 3)),
    "LoRA with a bias": (with_adapters, (2, 30), (5, 30), (8, 30), (5, 8), (5,)),
    "matmul": (ops.matmul, (20, 30), (30, 40)),
    "matmul of many": (ops.matmul, (2, 3, 20, 30), (2, 3, 30, 40)),
    "matmul of many large ones": (ops.matmul, (3, 100, 70), (3, 70, 80)),
    "matmul, broadcast": (ops.matmul, (2, 1, 20, 30), (3, 30, 40)),
    "matmul of five dimensions": (ops.matmul, (2, 2, 2, 5, 6), (2, 1, 2, 6, 4)),
    "matmul, vector and matrix": (ops.matmul, (30,), (30, 40)),
    "matmul, matrix and vector": (ops.matmul, (20, 30), (30,)),
    "matmul of vectors": (ops.matmul, (30,), (30,)),
    "matmul, many and one": (ops.matmul, (5, 20, 30), (30, 4)),
    "matmul, one and many": (ops.matmul, (20, 30), (5, 30, 4)),
    "matmul, vector and many": (ops.matmul, (30,), (5, 30, 4)),
    "matmul, many and vector": (ops.matmul, (5, 20, 30), (30,)),
    "matmul of itself": (lambda x: ops.matmul(x, x), (4, 9, 9)),
    "bmm": (ops.bmm, (4, 9, 8), (4, 8, 7)),
    "addmm": (ops.addmm, (40,), (20, 30), (30, 40)),
    "attention": (attention, (2, 9, 24), (2, 9, 24), (2, 9, 24)),
    "gelu": (F.gelu, (100, 301)),
    "gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), (100, 301)),
    "gelu, quick": (quick_gelu, (100, 301)),
    "gelu, transposed": (lambda x: F.gelu(x.swapaxes(0, 2)), (3, 4, 5)),
    "silu": (F.silu, (100, 301)),
    "softmax": (lambda x: F.softmax(x, dim=-1), (3, 7, 5, 33)),
    "softmax of one row": (lambda x: ops.softmax(x, dim=0), (30,)),
    "softmax, transposed": (lambda x: ops.softmax(x.swapaxes(0, 1), dim=-1), (40, 30)),
    "softmax, another dimension": (lambda x: ops.softmax(x, dim=0), (40, 30)),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (30,), w, b, 1e-12), (5, 20, 30), (30,), (30,)),
    "layer norm of two dimensions": (lambda x, w, b: F.layer_norm(x, (20, 30), w, b), (5, 20, 30), (20, 30), (20, 30)),
    "layer norm of many rows": (lambda x, w, b: F.layer_norm(x, (7,), w, b), (9000, 7), (7,), (7,)),
    "layer norm of itself": (lambda x: F.layer_norm(x, (30,)), (5, 30)),
    "cross-entropy": (lambda x: F.cross_entropy(x, Tensor(CLASSES)), (64, 20)),
    "cross-entropy, a sum": (lambda x: F.cross_entropy(x, Tensor(CLASSES), reduction="sum"), (64, 20)),
    "cross-entropy, row by row": (lambda x: F.cross_entropy(x, Tensor(CLASSES), reduction="none"), (64, 20)),
    "cross-entropy of some": (lambda x: F.cross_entropy(x, Tensor(SOME)), (64, 20)),
    "cross-entropy, many classes": (lambda x: F.cross_entropy(x, Tensor(CLASSES)), (64, 9000)),
    "embedding": (lambda w: F.embedding(IDS, w), (20, 8)),
}  # fmt: skip


def value_and_gradients(function, arrays, kernels, dtype=np.float32):
    """Return a function's value and the gradients of all inputs as float64 arrays."""
    dispatch.choose(kernels, 1)
    inputs = [Tensor(array.astype(dtype)) for array in arrays]
    weight = Tensor(numbers(*function(*inputs).shape, seed=1).astype(dtype))
    everywhere = tuple(range(len(inputs)))
    value = function(*inputs)
    gradients = mindspore.grad(lambda *xs: (function(*xs) * weight).sum(), grad_position=everywhere)(*inputs)
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    return [x.asnumpy().astype(np.float64) for x in (value, *gradients)]


def distance(x, y):
    assert x.shape == y.shape
    return np.abs(x - y).max() / np.abs(y).max()


@pytest.mark.core
@pytest.mark.parametrize("name", CASES)
def test_every_kernel_matches_mindspore_and_float64(name):
    function, *shapes = CASES[name]
    errors = []
    for seed in range(5):
        arrays = [numbers(*shape, seed=10 * seed + at, scale=2.0) for at, shape in enumerate(shapes)]
        mine, theirs = (value_and_gradients(function, arrays, kernels) for kernels in ("auto", "mindspore"))
        exact = value_and_gradients(EXACT.get(name, function), arrays, "mindspore", np.float64)
        for at, (x, y) in enumerate(zip(mine, theirs)):
            assert distance(x, y) <= (1e-5 if at else 2e-6)
        errors.append([[distance(x, z) for x, z in zip(each, exact)] for each in (mine, theirs)])
    mine, theirs = np.mean(errors, axis=0)
    # 1.2e-7, two rounding errors of float32, is allowed where MindSpore happens to be exact.
    assert (mine <= 2 * np.maximum(theirs, 1.2e-7)).all(), (mine, theirs)


@pytest.mark.parametrize("kernels", ["auto", "mindspore"])
def test_a_parameter_unfrozen_after_use_gets_gradients(kernels):
    dispatch.choose(kernels, 1)
    layer, table, norm = nn.Linear(3, 4), nn.Embedding(5, 3), nn.LayerNorm(3)
    ids = Tensor(np.arange(4))
    everything = [layer.weight, layer.bias, table.weight, norm.weight]

    def gradients():
        trained = [p for p in everything if p.requires_grad]

        def loss():
            return (layer(norm(table(ids))) ** 2).sum()

        found = mindspore.value_and_grad(loss, None, trained)()[1]
        return [float(np.abs(g.asnumpy()).max()) for g in found]

    for parameter in everything[:3]:
        parameter.requires_grad = False
    alone = gradients()
    for parameter in everything[:3]:
        parameter.requires_grad = True
    assert min(gradients()) > 0
    assert gradients()[3:] == pytest.approx(alone)


def test_lora_layers_run_forward_hooks_and_accept_empty_batches():
    from mindnlp.peft import LoraConfig, get_peft_model

    model = LlamaModel(LlamaConfig(60, 16, 32, 1, 2, max_position_embeddings=16))
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    adapted = next(module for name, module in model.named_modules() if name.endswith("q_proj"))
    assert adapted(Tensor(np.zeros((0, 16), np.float32))).shape == (0, 16)
    calls = []
    for part in (adapted.lora_dropout, adapted.lora_A):
        next(iter(part.values())).register_forward_hook(lambda *_: calls.append(1))
        adapted(Tensor(numbers(2, 16)))
    assert len(calls) == 3


STRIDES = st.sampled_from(["as it is", "transposed", "every other row", "every other column", "reversed", "one row"])


def laid_out(x, how):
    """Return the same values in another memory layout."""
    if how == "transposed":
        return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    if how == "every other row":
        return np.repeat(x, 2, axis=-2)[..., ::2, :]
    if how == "every other column":
        return np.repeat(x, 2, axis=-1)[..., ::2]
    if how == "reversed":
        return np.ascontiguousarray(x[..., ::-1, ::-1])[..., ::-1, ::-1]
    return x


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 3), max_size=3), st.tuples(*[st.integers(0, 70)] * 3), st.tuples(STRIDES, STRIDES),
    st.tuples(st.booleans(), st.booleans()), st.sampled_from([1, 3]),
)  # fmt: skip
def test_matmul_is_right_for_any_shape_and_strides(batch, sizes, strides, is_batch, num_cores):
    rows, inner, columns = sizes
    a, b = numbers(*batch * is_batch[0], rows, inner), numbers(*batch * is_batch[1], inner, columns)
    of_a, of_b = strides
    workers.use_cores(num_cores)
    try:
        out = matmul.matmul(laid_out(a, of_a), laid_out(b, of_b))
        again = matmul.matmul(laid_out(a, of_a), laid_out(b, of_b), like=out.swapaxes(-1, -2).copy().swapaxes(-1, -2))
    finally:
        workers.use_cores(1)
    expected = np.matmul(a.astype(np.float64), b.astype(np.float64))
    assert out.shape == expected.shape
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, expected, atol=1e-4)
    np.testing.assert_allclose(again, expected, atol=1e-4)


def guarded_empty(shape, order):
    """Return an array between two others that hold a value, and these; its dimensions are in this memory order."""
    numel, margin = int(np.prod(shape)), 1000
    memory = np.full(numel + 2 * margin, 12345.5, np.float32)
    array = memory[margin : margin + numel].reshape([shape[axis] for axis in order]).transpose(np.argsort(order))
    return array, (memory[:margin], memory[margin + numel :])


@st.composite
def factors(draw):
    """Draw two factors of a batched product: permuted, sliced or expanded in any dimension; and the result's order."""
    batch = draw(st.lists(st.sampled_from([1, 2, 3, 5]), min_size=1, max_size=3))
    rows, inner, columns = (draw(st.sampled_from([1, 2, 3, 5, 17])) for _ in range(3))
    orders = st.permutations(range(len(batch) + 2))

    def array(*shape):
        order, is_sliced = draw(orders), draw(st.booleans())
        is_expanded = [draw(st.integers(0, 3)) == 0 for _ in shape]
        stored = [1 if one else length + is_sliced for one, length in zip(is_expanded, shape)]
        whole = numbers(*(stored[axis] for axis in order), seed=len(shape)).transpose(np.argsort(order))
        return np.broadcast_to(whole[tuple(slice(0, min(*pair)) for pair in zip(stored, shape))], shape)

    return array(*batch, rows, inner), array(*batch, inner, columns), draw(orders)


@settings(max_examples=300)
@given(factors(), st.sampled_from([1, 3]), st.booleans())
def test_batched_matmul_writes_only_its_output(both, num_cores, medium):
    a, b, order = both
    out, around = guarded_empty((*a.shape[:-1], b.shape[-1]), order)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(matmul, "empty_like", lambda shape, other: out)
        # On cores without bfloat16 this computes in float32.
        patches.setattr(matmul, "_uses_bfloat16", medium and onednn.has_primitives())
        workers.use_cores(num_cores)
        try:
            matmul.matmul(a, b, like=out)
        finally:
            workers.use_cores(1)
    expected = np.matmul(a.astype(np.float64), b.astype(np.float64))
    # Each factor is rounded to 8 bits, by at most 2^-8 of itself.
    of_rounding = 2**-7 * np.abs(a).max() * np.abs(b).max() * a.shape[-1] if medium else 0.0
    np.testing.assert_allclose(out, expected, atol=1e-4 + of_rounding)
    assert all((part == 12345.5).all() for part in around)


def test_batches_that_onednn_miscomputes_are_split():
    """Found with AVX-512: results of these were wrong, and other memory was overwritten."""

    def goes_in_one_call(a, b, out):
        return matmul._axis_to_split(out.shape, a.shape[-1], a.strides, b.strides, out.strides) is not None

    a, b, out = numbers(3, 2, 12, 8), numbers(3, 2, 8, 5), numbers(3, 2, 12, 5)
    assert goes_in_one_call(a, b, out)
    assert goes_in_one_call(a, numbers(3, 8, 2, 5).transpose(0, 2, 1, 3), out)  # attention's heads
    swapped = numbers(2, 3, 8, 5).swapaxes(0, 1)
    for factor in (
        swapped,
        np.broadcast_to(numbers(3, 1, 8, 5), b.shape),
        np.broadcast_to(numbers(1, 2, 8, 5), b.shape),
    ):
        assert not goes_in_one_call(a, factor, out)
        np.testing.assert_allclose(matmul.matmul(a, factor), np.matmul(a, factor), atol=1e-4)
    assert not goes_in_one_call(a, b, numbers(2, 3, 12, 5).swapaxes(0, 1))


def test_matmul_without_onednn_gives_the_same_products(monkeypatch):
    a, b, many = numbers(100, 70), numbers(70, 80), numbers(3, 2, 90, 100)
    bias = numbers(80)
    with_it = matmul.product(a, b, bias), matmul.matmul(many, many.swapaxes(-1, -2)), matmul.matmul(a, b)
    monkeypatch.setattr(matmul.onednn, "is_available", lambda: False)
    without = matmul.product(a, b, bias), matmul.matmul(many, many.swapaxes(-1, -2)), matmul.matmul(a, b)
    for x, y in zip(with_it, without):
        np.testing.assert_allclose(x, y, atol=1e-4)


def activation(name, x):
    """Return x s(u(x)) and its derivative in float64, where s is the normal distribution or a sigmoid."""
    x = x.astype(np.float64)
    if name == "gelu":
        s, slope = special.ndtr(x), np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    else:
        scale, cube = {"gelu_tanh": (2 * np.sqrt(2 / np.pi), 0.044715), "gelu_quick": (1.702, 0), "silu": (1, 0)}[name]
        s = special.expit(scale * (x + cube * x**3))
        slope = s * (1 - s) * scale * (1 + 3 * cube * x**2)
    return [x * s, s + x * slope]


def layer_norm(x, weight, bias, g):
    """Return a layer normalization and the gradients of x, weight and bias in float64."""
    x = x.astype(np.float64)
    scale = 1 / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    normal, of_normal = (x - x.mean(1, keepdims=True)) * scale, g * weight.astype(np.float64)
    along = normal * (of_normal * normal).mean(1, keepdims=True)
    of_x = scale * (of_normal - of_normal.mean(1, keepdims=True) - along)
    return [normal * weight + bias, of_x, (g * normal).sum(0), g.astype(np.float64).sum(0)]


def of_layer_norm(x, weight, bias, g):
    out, statistics = normalize(x, weight, bias, 1e-5, centered=True)
    return [out, *normalize_backward(g, x, weight, statistics, centered=True)]


def of_activation(name, x, g):
    out, slope = activations.forward(name, x, True)
    return [out, activations.backward(name, g, x, slope)]


def of_cross_entropy(x, classes, g):
    losses, softmax = cross_entropy.losses(x, classes, keep=True)
    return [losses, cross_entropy.backward(g, softmax, classes)]


def of_linear_cross_entropy(x, weight, bias, classes, g):
    options = {"weights": g, "wanted": (True, True, True)}
    losses, gradients = linear_cross_entropy.losses_and_gradients(x, weight, bias, classes, **options)
    return [losses, *gradients]


def large_kernels():
    """Return by name every kernel that uses several cores, on arrays of many blocks, and its results in float64."""
    x, weight, bias = numbers(1300, 301), numbers(1536, 301, scale=0.1), numbers(1536)
    y, g, of_rows = numbers(1300, 1536), numbers(1300, 1536, seed=1), numbers(1300)
    wide_x, wide_weight, wide_y, wide_g = (each.astype(np.float64) for each in (x, weight, y, g))
    heads, long = numbers(8, 12, 80, 64), numbers(2, 3, 200, 64)
    classes = np.random.default_rng(3).integers(0, 1536, 1300)
    keep = dropout_masks.keep_mask(y.size, 0.1, (1, 2))
    one_hot = np.eye(1536)[classes]

    def softmax():
        return special.softmax(wide_y, 1)

    def losses(logits):
        of_logits = of_rows[:, None] * (special.softmax(logits, 1) - one_hot)
        return special.logsumexp(logits, 1) - logits[np.arange(1300), classes], of_logits

    def linear_losses():
        of_each, of_logits = losses(wide_x @ wide_weight.T + bias)
        return [of_each, of_logits @ wide_weight, of_logits.T @ wide_x, of_logits.sum(0)]

    def softmax_gradient():
        share = softmax()
        return [share * (wide_g - (wide_g * share).sum(1, keepdims=True))]

    def square(x):
        return x @ x.swapaxes(-1, -2)

    return {
        "product and a bias": (lambda: [matmul.product(x, weight.T, bias)], lambda: [wide_x @ wide_weight.T + bias]),
        "product": (lambda: [matmul.product(y, weight)], lambda: [wide_y @ wide_weight]),
        "product of a gradient": (lambda: [matmul.product(y.T, x)], lambda: [wide_y.T @ wide_x]),
        "batched product": (
            lambda: [matmul.matmul(heads, heads.swapaxes(-1, -2))], lambda: [square(heads.astype(np.float64))],
        ),
        "batched product of long rows": (
            lambda: [matmul.matmul(long, long.swapaxes(-1, -2))], lambda: [square(long.astype(np.float64))],
        ),
        **{
            name: (
                functools.partial(of_activation, name, y, g),
                lambda name=name: [activation(name, y)[0], activation(name, y)[1] * g],
            )
            for name in onednn.ACTIVATIONS
        },
        "layer norm": (lambda: of_layer_norm(y, bias, -bias, g), lambda: layer_norm(y, bias, -bias, g)),
        "softmax": (lambda: [softmax_of_rows(y)], lambda: [softmax()]),
        "softmax, backward": (lambda: [softmax_backward(g, softmax_of_rows(y))], softmax_gradient),
        "cross-entropy": (lambda: of_cross_entropy(y, classes, of_rows), lambda: losses(wide_y)),
        "linear cross-entropy": (
            lambda: of_linear_cross_entropy(x, weight, bias, classes, of_rows), linear_losses,
        ),
        "masked": (lambda: [masked.masked(y, keep, 1.25)], lambda: [wide_y * keep.reshape(y.shape) * 1.25]),
    }  # fmt: skip


@pytest.mark.parametrize("primitives", [True, False])
@pytest.mark.parametrize("name", large_kernels())
def test_kernels_are_bitwise_equal_on_any_number_of_cores_and_match_float64(monkeypatch, name, primitives):
    """Without oneDNN's primitives, NumPy computes what they compute."""
    if not primitives:
        monkeypatch.setattr(onednn, "has_primitives", lambda: False)
        monkeypatch.setattr(onednn, "has_fast_exponentials", lambda: False)
    kernel, reference = large_kernels()[name]
    alone, expected = kernel(), reference()
    assert len(alone) == len(expected)
    for mine, exact in zip(alone, expected):
        assert distance(mine, exact) < 2e-6
    parts = []
    submit = ThreadPoolExecutor.submit
    monkeypatch.setattr(ThreadPoolExecutor, "submit", lambda *args: parts.append(args[3:]) or submit(*args))
    for num_cores in (2, 3, 8):
        workers.use_cores(num_cores)
        parts.clear()
        for several, one in zip(kernel(), alone):
            np.testing.assert_array_equal(several, one, err_msg=f"{num_cores} cores")
        assert parts, "the arrays are too small for several cores"


def test_kernels_work_while_the_process_exits():
    script = """if True:
        import atexit, mindnlp_dp, numpy
        mindnlp_dp.init_process_group()
        from mindnlp_dp.kernels import matmul, workers
        workers.use_cores(3)
        x = numpy.ones((1000, 300), numpy.float32)
        matmul.product(x, x.T)
        atexit.register(lambda: print(matmul.product(x, x.T).sum()))
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split()[-1] == str(np.float32(300_000_000))


def test_matmul_results_are_contiguous():
    heads = [in_heads(Tensor(numbers(2, 9, 24, seed=seed))) for seed in range(2)]
    for result in (ops.matmul(heads[0], heads[1].swapaxes(-1, -2)), ops.matmul(heads[0].swapaxes(-1, -2), heads[1])):
        assert result.is_contiguous()


def test_an_error_in_a_worker_thread_is_raised():
    def part(first, last):
        if first:
            raise RuntimeError(f"at {first}")

    workers.use_cores(2)
    with pytest.raises(RuntimeError, match="at 50"):
        workers.parallel_for(part, 100, 1, 1)
    workers.use_cores(1)


def test_kernels_work_in_a_forked_process():
    workers.use_cores(3)
    x, weight = numbers(1000, 384), numbers(1536, 384)
    expected = matmul.product(x, weight.T)
    child = os.fork()
    if not child:
        signal.alarm(20)
        os._exit(0 if np.array_equal(matmul.product(x, weight.T), expected) else 1)
    _, status = os.waitpid(child, 0)
    workers.use_cores(1)
    assert status == 0


class TestUnusualInputs:
    """Checks that our kernels treat unusual inputs as MindSpore's kernels do."""

    INFINITE = np.array([-np.inf, np.inf, np.nan, 1e30, -1e30, -0.0, 0.0, 5.0, -5.0], np.float32)

    @pytest.mark.parametrize("function", [F.gelu, lambda x: F.gelu(x, approximate="tanh"), quick_gelu])
    def test_gelu_of_infinity_and_nan_matches_mindspore(self, function):
        mine, theirs = (value_and_gradients(function, [self.INFINITE], kernels) for kernels in ("auto", "mindspore"))
        for x, y in zip(mine, theirs):
            # Whether GELU of infinity is infinity or no number depends on the core.
            is_finite = np.isfinite(y)
            np.testing.assert_array_equal(np.isfinite(x), is_finite)
            np.testing.assert_allclose(x[is_finite], y[is_finite], rtol=1e-5, atol=1e-5)

    def test_a_nan_row_does_not_change_other_rows(self):
        x = numbers(6, 30)
        x[2, 3] = np.nan
        for y in (F.linear(Tensor(x), Tensor(numbers(5, 30))), F.layer_norm(Tensor(x), (30,))):
            assert np.isnan(y.asnumpy()).any(1).tolist() == [False, False, True, False, False, False]

    def test_kernels_accept_empty_tensors(self):
        weight = Tensor(numbers(5, 30))
        empty = Tensor(np.zeros((0, 30), np.float32))
        assert F.linear(empty, weight).shape == (0, 5)
        assert F.gelu(empty).shape == F.layer_norm(empty, (30,)).shape == F.dropout(empty, 0.5).shape == (0, 30)
        assert F.embedding(Tensor(np.zeros((0, 3), np.int32)), weight).shape == (0, 3, 30)
        of_x, of_weight = mindspore.grad(lambda x, w: F.linear(x, w).sum(), (0, 1))(empty, weight)
        assert of_x.shape == (0, 30)
        assert of_weight.shape == (5, 30)
        assert not of_weight.asnumpy().any()
        zeros = ops.matmul(Tensor(np.zeros((2, 3, 0), np.float32)), Tensor(np.zeros((2, 0, 4), np.float32)))
        assert zeros.shape == (2, 3, 4)
        assert not zeros.asnumpy().any()

    def test_kernels_accept_scalars(self):
        x = Tensor(np.float32(1.5))
        assert float(F.gelu(x)) == pytest.approx(1.399789, rel=1e-6)
        assert float(mindspore.grad(F.gelu)(x)) == pytest.approx(1.127469, rel=1e-6)
        assert F.dropout(x, 0.5).shape == ()

    def test_cross_entropy_of_only_ignored_labels_is_nan_or_zero(self):
        x, ignored = Tensor(numbers(4, 3)), Tensor(np.full(4, -100))
        assert np.isnan(float(F.cross_entropy(x, ignored)))
        assert float(F.cross_entropy(x, ignored, reduction="sum")) == 0
        gradient = mindspore.grad(lambda x: F.cross_entropy(x, ignored, reduction="sum"))(x).asnumpy()
        assert not gradient.any()

    def test_cross_entropy_of_large_and_infinite_logits_matches_mindspore(self):
        x = np.array([[1e4, -1e4, 0.0], [-np.inf, 0.0, 1.0], [np.nan, 0.0, 0.0], [0.0, -np.inf, 2.0]], np.float32)
        classes = Tensor(np.array([1, 2, 0, -100]))
        mine, theirs = (
            value_and_gradients(lambda x: F.cross_entropy(x, classes, reduction="none"), [x], kernels)
            for kernels in ("auto", "mindspore")
        )
        # MindSpore's kernel has this relative error: the exact value is 0.31326169.
        np.testing.assert_allclose(mine[0], theirs[0], rtol=1e-5)
        rows = [0, 1, 3]
        np.testing.assert_allclose(mine[1][rows], theirs[1][rows], atol=1e-5)
        assert np.isnan(mine[1][2]).all()

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_changing_logits_after_the_loss_keeps_the_gradient(self, reduction):
        """Check that the gradient belongs to the original loss if a metric or decoding changes the logits later."""
        classes = Tensor(CLASSES)

        def loss(x, is_changed):
            logits = x * 2.0
            losses = F.cross_entropy(logits, classes, reduction=reduction)
            if is_changed:
                mindspore.ops.assign(logits, mindspore.ops.full_like(logits, -1e9))
            return losses.sum()

        x = Tensor(numbers(64, 20))
        changed, expected = (mindspore.grad(loss)(x, is_changed).asnumpy() for is_changed in (True, False))
        np.testing.assert_array_equal(changed, expected)

    @pytest.mark.filterwarnings("error")
    def test_overflows_give_no_warnings(self):
        x, weight = Tensor(numbers(70, 30, scale=1e38)), Tensor(numbers(5, 30, scale=1e38))
        bias = Tensor(numbers(5))
        gradients = mindspore.grad(lambda *xs: F.gelu(F.linear(*xs)).sum() * 1e38, (0, 1, 2))(x, weight, bias)
        assert not np.isfinite(gradients[2].asnumpy()).all()

    def test_layer_norm_of_one_element_is_zero(self):
        assert not F.layer_norm(Tensor(numbers(5, 1)), (1,)).asnumpy().any()

    @pytest.mark.parametrize(
        ("function", "shapes"),
        [(F.linear, [(4, 31), (5, 30)]), (ops.matmul, [(4, 31), (30, 5)]), (ops.matmul, [(2, 4, 3), (3, 3, 4)]),
         (F.linear, [(4, 30), (5, 30), (4,)])],
    )  # fmt: skip
    def test_mismatched_shapes_give_the_errors_of_mindspore(self, function, shapes):
        outcomes = []
        for kernels in ("auto", "mindspore"):
            dispatch.choose(kernels, 1)
            try:
                outcomes.append(function(*(Tensor(numbers(*shape)) for shape in shapes)).shape)
            except (ValueError, RuntimeError) as error:
                outcomes.append((type(error), str(error)[:60]))
        assert outcomes[0] == outcomes[1]

    @pytest.mark.parametrize("dtype", [mindspore.float16, mindspore.float64])
    def test_other_dtypes_use_the_kernels_of_mindspore(self, dtype, monkeypatch):
        monkeypatch.setattr("mindnlp_dp.kernels.functions.linear", None)
        x, weight = (Tensor(numbers(*shape)).astype(dtype) for shape in ((4, 30), (5, 30)))
        assert F.linear(x, weight).dtype == dtype

    def test_mixed_precision_uses_the_kernels_of_mindspore(self, monkeypatch):
        monkeypatch.setattr("mindnlp_dp.kernels.functions.linear", None)

        class Net(mindspore.nn.Cell):
            def construct(self, x, weight):
                return F.linear(x, weight)

        net = mindspore.amp.auto_mixed_precision(Net(), "auto", mindspore.float16)
        assert net(Tensor(numbers(4, 30)), Tensor(numbers(5, 30))).shape == (4, 5)

    def test_graph_mode_uses_the_kernels_of_mindspore(self, monkeypatch):
        monkeypatch.setattr("mindnlp_dp.kernels.functions.linear", None)
        x, weight = Tensor(numbers(4, 30)), Tensor(numbers(5, 30))

        def linear(x, weight):
            return F.linear(x, weight)

        compiled = mindspore.jit(linear)
        expected = x.asnumpy() @ weight.asnumpy().T
        np.testing.assert_allclose(compiled(x, weight).asnumpy(), expected, rtol=1e-4, atol=1e-5)
        mindspore.set_context(mode=mindspore.GRAPH_MODE)
        try:
            np.testing.assert_allclose(F.linear(x, weight).asnumpy(), expected, rtol=1e-4, atol=1e-5)
        finally:
            mindspore.set_context(mode=mindspore.PYNATIVE_MODE)

    def test_layer_norm_accepts_any_form_of_shape_and_invalid_arguments_are_refused(self):
        x, weight = Tensor(numbers(4, 6)), Tensor(numbers(6))
        expected = F.layer_norm(x, (6,), weight, weight).asnumpy()
        # MindNLP takes the shape from the weight.
        for shape in (np.int64(6), None, [6]):
            np.testing.assert_allclose(F.layer_norm(x, shape, weight, weight).asnumpy(), expected, atol=1e-6)
        with pytest.raises(TypeError):
            F.cross_entropy(x, Tensor([0, 1, 2, 3]), foo=0)
        with pytest.raises(TypeError):
            F.linear(None, weight)


class TestNorms:
    """Tests rows for which float32 has few digits."""

    @pytest.mark.parametrize("columns", [30, 768, 4096])
    @pytest.mark.parametrize("mean", [10.0, 1e3, 1e5])
    @pytest.mark.parametrize("turned", [False, True])
    def test_layer_norm_is_exact_for_a_large_mean_and_a_small_variance(self, columns, mean, turned):
        x = (numbers(40, columns) + mean).astype(np.float32)
        x = np.asfortranarray(x) if turned else x
        weight, g = np.ones(columns, np.float32), numbers(40, columns, seed=1)
        out, statistics = normalize(x, weight, None, 1e-5, centered=True)
        of_x, of_weight, _ = normalize_backward(g, x, weight, statistics, centered=True)
        wide = x.astype(np.float64)
        centered = wide - wide.mean(1, keepdims=True)
        scale = 1 / np.sqrt((centered**2).mean(1, keepdims=True) + 1e-5)
        normal = centered * scale
        assert distance(out, normal) < 1e-6
        assert distance(of_weight, (g * normal).sum(0)) < 2e-6
        expected = scale * (g - g.mean(1, keepdims=True) - normal * (g * normal).mean(1, keepdims=True))
        assert distance(of_x, expected) < 2e-6

    @pytest.mark.parametrize("scale", [1e18, 1e19, 3e30])
    def test_layer_norm_is_finite_when_squares_overflow(self, scale):
        x, weight = numbers(5, 768, scale=scale), np.ones(768, np.float32)
        out, statistics = normalize(x, weight, None, 1e-5, centered=True)
        wide = x.astype(np.float64)
        expected = (wide - wide.mean(1, keepdims=True)) / wide.std(1, keepdims=True)
        assert distance(out, expected) < 1e-6
        of_x, *_ = normalize_backward(numbers(5, 768, seed=1), x, weight, statistics, centered=True)
        assert np.isfinite(of_x).all()


class TestAutograd:
    def test_gradients_are_right_after_an_exception_in_a_forward_pass(self):
        def run(x, fails):
            y = F.gelu(x)
            if fails:
                raise KeyError("a bad sample")
            return F.cross_entropy(F.dropout(F.layer_norm(y, (30,)), 0.1), Tensor([1, 2, 3, 4]))

        x = Tensor(numbers(4, 30))
        with pytest.raises(KeyError, match="a bad sample"):
            mindspore.value_and_grad(lambda x: run(x, fails=True))(x)
        mindspore.manual_seed(1)
        _, again = mindspore.value_and_grad(lambda x: run(x, fails=False))(x)
        mindspore.manual_seed(1)
        _, expected = mindspore.value_and_grad(lambda x: run(x, fails=False))(x)
        np.testing.assert_array_equal(again.asnumpy(), expected.asnumpy())

    def test_a_nested_first_derivative_matches_mindspore(self):
        stop = mindspore.ops.stop_gradient
        inner = mindspore.grad(lambda x: F.gelu(x).sum())
        x = Tensor(numbers(4, 30))

        def adversarial(x):
            return F.gelu(x + stop(inner(stop(x)))).sum()

        mine = mindspore.grad(adversarial)(x).asnumpy()
        dispatch.choose("mindspore", 1)
        np.testing.assert_allclose(mine, mindspore.grad(adversarial)(x).asnumpy(), atol=1e-5)

    @pytest.mark.parametrize("name", ["linear", "matmul of many", "gelu", "layer norm", "embedding", "cross-entropy"])
    def test_a_second_derivative_is_refused_with_advice(self, name):
        function, *shapes = CASES[name]
        inputs = [Tensor(numbers(*shape, seed=at)) for at, shape in enumerate(shapes)]
        everywhere = tuple(range(len(inputs)))

        def first(*xs):
            gradients = mindspore.grad(lambda *ys: (function(*ys) ** 2).sum(), everywhere)(*xs)
            gradients = gradients if isinstance(gradients, tuple) else (gradients,)
            return sum((g**2).sum() for g in gradients)

        with pytest.raises(NotImplementedError, match='kernels="mindspore"'):
            mindspore.grad(first, everywhere)(*inputs)
        # The next first-order gradient is correct again.
        value_and_gradients(function, [x.asnumpy() for x in inputs], "auto")


class TestDropout:
    @pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9, 0.9999])
    def test_dropout_drops_the_fraction_p(self, p):
        size = 4_000_000
        dropped = size - np.count_nonzero(dropout_masks.keep_mask(size, p, (3, 4)))
        assert abs(dropped - p * size) < 5 * np.sqrt(size * p * (1 - p))

    @pytest.mark.parametrize("p", [0.1, 1 / 256, 0.5, 255.5 / 256])
    def test_adjacent_elements_are_dropped_independently(self, p):
        keep = dropout_masks.keep_mask(1_000_000, p, (5, 6)) - (1 - p)
        for shift in (1, 2, 8, 16, 384):
            correlation = np.mean(keep[:-shift] * keep[shift:]) / (p * (1 - p))
            assert abs(correlation) < 5 / 1000

    def test_dropout_drops_all_with_p_1_and_nothing_with_p_0(self):
        assert not dropout_masks.keep_mask(1000, 1.0, (1, 1)).any()
        x = Tensor(numbers(4, 30))
        assert not F.dropout(x, 1.0).asnumpy().any()
        assert F.dropout(x, 0.0) is x
        assert F.dropout(x, 0.5, training=False) is x

    def test_kept_elements_and_their_gradients_are_scaled(self):
        x = numbers(64, 300)
        mindspore.manual_seed(4)
        y = F.dropout(Tensor(x), 0.3).asnumpy()
        mindspore.manual_seed(4)
        gradient = mindspore.grad(lambda x: F.dropout(x, 0.3).sum())(Tensor(x)).asnumpy()
        kept = y != 0
        np.testing.assert_allclose(y[kept], x[kept] / 0.7, rtol=2e-7)
        np.testing.assert_allclose(gradient, kept / np.float32(0.7), rtol=2e-7)

    def test_a_dropout_mask_depends_only_on_the_generator_state(self):
        x = Tensor(np.ones(1000, np.float32))
        mindspore.manual_seed(4)
        first, second = (F.dropout(x, 0.5).asnumpy() for _ in range(2))
        mindspore.manual_seed(4)
        again = F.dropout(x, 0.5).asnumpy()
        state = mindspore.get_rng_state()
        third = F.dropout(x, 0.5).asnumpy()
        mindspore.set_rng_state(state)
        np.testing.assert_array_equal(first, again)
        np.testing.assert_array_equal(second, third)
        np.testing.assert_array_equal(F.dropout(x, 0.5).asnumpy(), second)
        assert (first != second).any()
        mindspore.manual_seed(5)
        assert (F.dropout(x, 0.5).asnumpy() != first).any()

    def test_seed_zero_repeats_the_mask_and_no_seed_draws_another_one(self):
        script = """if True:
            import mindnlp_dp, mindspore, numpy
            mindnlp_dp.init_process_group()
            from mindnlp.core.nn import functional
            for seed in (None, 0, 0):
                if seed is not None:
                    mindspore.manual_seed(seed)
                mask = functional.dropout(mindspore.Tensor(numpy.ones(200, numpy.float32)), 0.5).asnumpy() != 0
                print(numpy.packbits(mask).tobytes().hex())
        """

        started = [
            subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)
        ]
        masks = [process.communicate(timeout=120)[0].split()[-3:] for process in started]
        (one, *seeded), (other, *seeded_too) = masks
        assert len({*seeded, *seeded_too}) == 1
        assert len({one, other, seeded[0]}) == 3

    def test_recomputation_drops_the_same_elements(self):
        class Net(mindspore.nn.Cell):
            def construct(self, x):
                return F.dropout(F.gelu(x), 0.5)

        def gradient(net):
            mindspore.manual_seed(9)
            return mindspore.grad(lambda x: (net(x) ** 2).sum())(Tensor(numbers(20, 30))).asnumpy()

        recomputed = Net()
        recomputed.recompute()
        np.testing.assert_array_equal(gradient(recomputed), gradient(Net()))


@pytest.mark.parametrize("dtype", [mindspore.float32, mindspore.float16])
@pytest.mark.parametrize("layer", [lambda x: F.dropout(x, 0.25), mindspore.nn.Dropout(p=0.25).set_train()])
def test_dropout_of_a_training_step_has_the_masks_of_our_kernels_with_those_of_mindspore(layer, dtype):
    x = np.random.default_rng(3).standard_normal((3, 5, 8)).astype(np.float32)
    found = []
    for choice in ("auto", "mindspore"):
        dispatch.choose(choice, 1)
        of_type = mindspore.float32 if choice == "auto" else dtype
        with seeded(7, SampleStreams(11, np.array([4, 0, 2]), frozenset([5]))):
            y, gradient = mindspore.value_and_grad(layer)(Tensor(x).astype(of_type))
        assert y.dtype == gradient.dtype == of_type
        found.append([y.astype(mindspore.float32).asnumpy(), gradient.astype(mindspore.float32).asnumpy()])
    (y, gradient), others = found
    assert 0 < np.count_nonzero(gradient == 0) < x.size
    np.testing.assert_allclose(others, [y, gradient], rtol=0 if dtype == mindspore.float32 else 1e-3)


class TestMemory:
    def test_a_transposed_tensor_is_not_copied(self):
        tensor = Tensor(numbers(4, 5, 6))
        turned = memory_pool.array_of(tensor.permute(2, 0, 1))
        assert np.shares_memory(turned, memory_pool.array_of(tensor))
        np.testing.assert_array_equal(turned, numbers(4, 5, 6).transpose(2, 0, 1))
        part = memory_pool.array_of(tensor[1:3, 2])
        np.testing.assert_array_equal(part, numbers(4, 5, 6)[1:3, 2])

    def test_a_transposed_array_becomes_a_transposed_tensor(self):
        turned = memory_pool.tensor_of(numbers(4, 5, 6).transpose(2, 0, 1))
        assert turned.shape == (6, 4, 5)
        assert not turned.is_contiguous()
        np.testing.assert_array_equal(turned.asnumpy(), numbers(4, 5, 6).transpose(2, 0, 1))

    def test_memory_in_use_is_never_reused(self):
        size = memory_pool.SMALLEST_KEPT
        arrays = []
        for number in range(5):
            array = memory_pool.empty(2, size // 2)
            array[...] = number
            # Every object made from the array keeps it alive: views of views, and tensors.
            arrays.append([array.reshape(-1)[8:].reshape(8, -1)[1:3], memory_pool.tensor_of(array)][number % 2])
            del array
            gc.collect()
        for number, array in enumerate(arrays):
            assert (array == number).all()

    def test_freed_memory_is_reused(self):
        size = 3 * memory_pool.SMALLEST_KEPT
        array = memory_pool.empty(size)
        address = array.ctypes.data
        del array
        assert memory_pool.empty(size - 5).ctypes.data == address

    def test_the_memory_pool_is_bounded_by_peak_use(self):
        kept = memory_pool._Kept()
        for size in range(1000, 9000, 100):
            arrays = [kept.take(size) for _ in range(3)]
            assert all(size <= len(array) <= 1.25 * size for array in arrays)
            del arrays
            assert kept._num_used == 0
            assert kept._num_free <= 1.25 * kept._most_used
            assert kept._num_free == sum(size * len(free) for size, free in kept._free.items())

    def test_a_failed_allocation_does_not_change_the_counts(self):
        kept = memory_pool._Kept()
        with pytest.raises(MemoryError):
            kept.take(1 << 46)
        assert kept._num_used == kept._most_used == 0

    @pytest.mark.parametrize("recorded", [True, False])
    def test_arrays_are_freed_after_their_pass(self, recorded):
        x, weight = Tensor(numbers(600, 600)), Tensor(numbers(600, 600))

        def run(x):
            for _ in range(10):
                x = F.dropout(F.layer_norm(F.gelu(F.linear(x, weight)), (600,)), 0.1)
            return x.sum()

        call = mindspore.value_and_grad(run) if recorded else run
        call(x)
        gc.collect()
        used = memory_pool._kept._num_used
        memory_pool._kept._most_used = used
        for _ in range(3):
            call(x)
        gc.collect()
        assert memory_pool._kept._num_used == used
        # A recorded graph keeps arrays of every layer, two for each kernel; a pass without a graph keeps none.
        most = (memory_pool._kept._most_used - used) / 600**2
        assert most < 60 if recorded else most < 8

    def test_kernels_do_not_write_to_their_inputs(self):
        x, weight = numbers(600, 600), numbers(600)
        tensors = Tensor(x.copy()), Tensor(weight.copy())
        mindspore.grad(lambda x, w: F.dropout(F.layer_norm(F.gelu(x), (600,), w, w), 0.1).sum(), (0, 1))(*tensors)
        np.testing.assert_array_equal(tensors[0].asnumpy(), x)
        np.testing.assert_array_equal(tensors[1].asnumpy(), weight)


def test_scatter_rows_adds_rows_of_equal_indices():
    rows = numbers(1000, 3)
    ids = np.random.default_rng(0).integers(0, 7, 1000)
    expected = np.zeros((9, 3), np.float32)
    for row, at in zip(rows, ids):
        expected[at] += row
    np.testing.assert_allclose(scatter_rows(rows, ids, 9), expected, atol=1e-4)
    assert not scatter_rows(rows, ids, 9)[7:].any()


def test_rms_norm_matches_its_formula():
    x, weight, g = numbers(50, 30), numbers(30, seed=1), numbers(50, 30, seed=2)
    mine = F.rms_norm(Tensor(x), Tensor(weight), 1e-6).asnumpy()
    wide = x.astype(np.float64)
    np.testing.assert_allclose(
        mine, wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6) * weight, rtol=1e-5, atol=1e-6
    )

    def formula(x, w):
        return (x * ops.rsqrt(ops.mean(x.pow(2), -1, keepdim=True) + 1e-6) * w * Tensor(g)).sum()

    got = mindspore.grad(lambda x, w: (F.rms_norm(x, w, 1e-6) * Tensor(g)).sum(), (0, 1))(Tensor(x), Tensor(weight))
    for a, b in zip(got, mindspore.grad(formula, (0, 1))(Tensor(x), Tensor(weight))):
        assert distance(a.asnumpy(), b.asnumpy()) < 1e-5


LLAMA = LlamaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
T5 = T5Config(vocab_size=50, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, dropout_rate=0.0)
GPT2 = GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4)


class TestWholeModels:
    """Compares models that our kernels compute with models that MindSpore's kernels compute."""

    def of_both(self, run):
        results = []
        for kernels in ("auto", "mindspore"):
            dispatch.choose(kernels, 1)
            results.append([x.asnumpy() for x in run()])
        for mine, theirs in zip(*results):
            np.testing.assert_allclose(mine, theirs, atol=2e-5 * max(1, np.abs(theirs).max()))

    @pytest.mark.parametrize(
        ("make", "config"),
        [(LlamaModel, LLAMA), (T5EncoderModel, T5), (GPT2Model, GPT2)],
    )  # fmt: skip
    def test_mindnlp_models_match_mindspore_kernels(self, make, config, monkeypatch):
        asked = []
        stock = dispatch.supports
        monkeypatch.setattr("mindnlp_dp.compat.shared_cpu_kernels.supports", lambda *xs: asked.append(xs) or stock(*xs))
        model = make(config)
        model.set_train(False)
        ids = Tensor(np.arange(12).reshape(2, 6))
        parameters = tuple(model.parameters())

        def forward():
            return (model(ids).last_hidden_state ** 2).mean()

        def run():
            value, gradients = value_and_grad(forward, parameters, attach_grads=False)()
            return [value, *gradients]

        self.of_both(run)
        assert asked

    def test_mindspore_layers_match_mindspore_kernels(self):
        net = mindspore.nn.SequentialCell(
            mindspore.nn.Dense(30, 50, activation="relu"), mindspore.nn.LayerNorm([50]), mindspore.nn.GELU(),
            mindspore.nn.LayerNorm([7, 50], begin_norm_axis=1, begin_params_axis=1),
            mindspore.nn.Dropout(p=0.0), mindspore.nn.Dense(50, 3, has_bias=False),
        )  # fmt: skip
        x = Tensor(numbers(4, 7, 30))

        def run():
            value, gradients = mindspore.value_and_grad(lambda x: (net(x) ** 2).sum(), 0, net.trainable_params())(x)
            return [value, gradients[0], *gradients[1]]

        self.of_both(run)
        expected = net(x).asnumpy()
        mindspore.set_context(mode=mindspore.GRAPH_MODE)
        try:
            np.testing.assert_allclose(net(x).asnumpy(), expected, atol=1e-5)
        finally:
            mindspore.set_context(mode=mindspore.PYNATIVE_MODE)

    def test_layers_with_to_float_compute_in_float16(self):
        x = Tensor(numbers(4, 6))
        for layer in (mindspore.nn.Dense(6, 5), mindspore.nn.LayerNorm([6]), mindspore.nn.GELU()):
            assert layer(x).dtype == mindspore.float32
            assert layer.to_float(mindspore.float16)(x).dtype == mindspore.float16

    def test_mindspore_dropout_layers_follow_the_seed_and_the_rate(self):
        for layer in (mindspore.nn.Dropout(p=0.25), mindspore.nn.Dropout(keep_prob=0.75)):
            layer.set_train(True)
            masks = []
            for _ in range(2):
                mindspore.manual_seed(3)
                masks.append(layer(Tensor(np.ones((100, 100), np.float32))).asnumpy())
            np.testing.assert_array_equal(*masks)
            assert np.count_nonzero(masks[0] == 0) == pytest.approx(2500, abs=250)
            layer.set_train(False)
            assert layer(Tensor(numbers(3))).asnumpy().tolist() == numbers(3).tolist()


class TestKernelChoice:
    def test_unknown_kernels_are_refused(self, monkeypatch):
        with pytest.raises(ValueError, match="kernels='fast' must be one of 'auto', 'mindspore'"):
            dispatch.check_kernels("fast")
        monkeypatch.setenv(dispatch.VARIABLE, "quick")
        with pytest.raises(ValueError, match="MINDNLP_DP_KERNELS=quick"):
            dispatch.check_kernels("auto")

    def test_the_environment_replaces_auto_but_not_an_explicit_choice_of_kernels(self, monkeypatch):
        monkeypatch.setenv(dispatch.VARIABLE, "mindspore")
        assert dispatch.check_kernels("auto") == "mindspore"
        monkeypatch.setenv(dispatch.VARIABLE, "auto")
        assert dispatch.check_kernels("mindspore") == "mindspore"

    def test_a_second_init_may_switch_to_mindspore_kernels(self):
        with pytest.raises(ValueError, match="quick"):
            dp.init_process_group(kernels="quick")
        dp.init_process_group()
        assert dispatch._are_on
        dp.init_process_group(kernels="mindspore")
        assert not dispatch._are_on

    def test_the_choice_mindspore_calls_no_kernel_of_this_package(self, monkeypatch):
        monkeypatch.setattr("mindnlp_dp.kernels.functions.linear", None)
        dispatch.choose("mindspore", 1)
        assert nn.Linear(3, 2)(Tensor(numbers(4, 3))).shape == (4, 2)


def random_products():
    """Return products with every layout of the factors, as functions of no arguments that return arrays."""
    x, w, bias = numbers(300, 48), numbers(70, 48, seed=1), numbers(70, seed=2)
    large_x, large_w = numbers(512, 384, seed=4), numbers(1536, 384, seed=5)
    q, k = numbers(2, 20, 3, 16), numbers(2, 20, 3, 16, seed=1)
    return {
        "linear": lambda: matmul.product(x, w.T, bias),
        "no bias": lambda: matmul.product(x, w.T),
        "large": lambda: matmul.product(large_x, large_w.T),
        "one row": lambda: matmul.product(x[:1], w.T, bias),
        "of a weight": lambda: matmul.product(x.T, numbers(300, 70, seed=3)),
        "no rows": lambda: matmul.product(x[:0], w.T, bias),
        "nothing to sum": lambda: matmul.product(x[:, :0], w.T[:0], bias),
        "attention": lambda: matmul.matmul(q.transpose(0, 2, 1, 3), k.transpose(0, 2, 3, 1)),
    }


class TestPrecision:
    @pytest.fixture(autouse=True)
    def highest_afterwards(self):
        yield
        matmul.use_bfloat16(False)

    @pytest.mark.parametrize("name", random_products())
    @pytest.mark.parametrize("num_cores", [1, 3])
    def test_medium_precision_rounds_only_the_factors(self, monkeypatch, name, num_cores):
        """Cores without bfloat16 take the same way, and compute in float32."""
        can = onednn.has_bfloat16()
        monkeypatch.setattr(onednn, "has_bfloat16", onednn.has_primitives)
        workers.use_cores(num_cores)
        multiply = random_products()[name]
        expected = multiply()
        assert matmul.use_bfloat16(True) == onednn.has_primitives()
        medium = multiply()
        assert medium.dtype == np.float32
        assert medium.shape == expected.shape
        # The bias is not rounded, and a factor has 8 bits.
        tolerance = 1e-2 if can else 1e-6
        assert np.linalg.norm(medium - expected) <= tolerance * np.linalg.norm(expected)
        # oneDNN keeps float32 for small products where that is faster.
        assert (medium != expected).any() or not (can and name == "large")

    def test_medium_precision_without_amx_warns_and_changes_nothing(self, monkeypatch):
        monkeypatch.setattr(onednn, "has_bfloat16", lambda: False)
        with pytest.warns(RuntimeWarning, match="changes nothing here: this core has no AMX"):
            dp.init_process_group(matmul_precision="medium")
        assert not matmul.uses_bfloat16()

    def test_medium_precision_with_mindspore_kernels_gives_a_warning(self, monkeypatch):
        monkeypatch.setattr(onednn, "has_bfloat16", lambda: True)
        dispatch.choose("mindspore", 1)
        with pytest.warns(RuntimeWarning, match="only this package's CPU kernels have bfloat16 products, and they"):
            dp.init_process_group(matmul_precision="medium")
        assert not matmul.uses_bfloat16()

    def test_matmul_precision_is_set_by_argument_or_environment(self, monkeypatch):
        monkeypatch.setattr(onednn, "has_bfloat16", lambda: True)
        dp.init_process_group(matmul_precision="medium")
        assert matmul.uses_bfloat16()
        dp.init_process_group()
        assert matmul.uses_bfloat16(), "a later call without the argument keeps it"
        dp.init_process_group(matmul_precision="highest")
        assert not matmul.uses_bfloat16()
        monkeypatch.setenv("MINDNLP_DP_MATMUL_PRECISION", "medium")
        assert dispatch.check_precision("auto") == "medium"
        assert dispatch.check_precision("highest") == "highest"
        monkeypatch.setenv("MINDNLP_DP_MATMUL_PRECISION", "low")
        with pytest.raises(
            ValueError, match="MINDNLP_DP_MATMUL_PRECISION=low must be one of 'auto', 'highest', 'medium'"
        ):
            dispatch.check_precision("auto")
        with pytest.raises(ValueError, match="matmul_precision='high' must be one of"):
            dp.init_process_group(matmul_precision="high")

    def test_medium_precision_context_restores_the_previous_precision(self, monkeypatch):
        monkeypatch.setattr(onednn, "has_bfloat16", lambda: True)
        dispatch.choose("auto", 1)
        with pytest.raises(KeyError, match="a bad batch"), dispatch.medium_precision(True):
            assert matmul.uses_bfloat16()
            raise KeyError("a bad batch")
        assert not matmul.uses_bfloat16()
        with dispatch.medium_precision(False):
            assert not matmul.uses_bfloat16()


@pytest.mark.core
@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize(("heads", "length", "width"), [(4, 12, 8), (2, 7, 16), (12, 5, 8)])
def test_attention_products_of_packed_queries_keys_and_values_are_right(num_cores, pieces, heads, length, width):
    """Views of ``pieces`` packed arrays, for batches of up to 3 times the tokens and the heads."""
    workers.use_cores(num_cores)
    for rows in sorted({*range(1, 8), *(n * k for n in (length, heads, width) for k in (1, 2, 3))}):
        packed = numbers(rows, length, pieces, heads, width)
        q, k = (packed[:, :, at % pieces].transpose(0, 2, 1, 3) for at in (0, 1))
        scores = matmul.matmul(q, k.swapaxes(-1, -2))
        np.testing.assert_allclose(scores, q.astype(np.float64) @ k.swapaxes(-1, -2), atol=1e-4, err_msg=str(rows))
        np.testing.assert_allclose(matmul.matmul(scores, k), scores.astype(np.float64) @ k, rtol=1e-4, atol=1e-3)
        # The gradient of the keys.
        np.testing.assert_allclose(
            matmul.matmul(scores.swapaxes(-1, -2), q),
            scores.swapaxes(-1, -2).astype(np.float64) @ q,
            rtol=1e-4,
            atol=1e-3,
        )


def test_threads_share_one_onednn_engine(monkeypatch):
    """A primitive does not run on the stream of another engine."""
    both_are_here = threading.Barrier(2)

    @functools.cache
    def make():
        with contextlib.suppress(threading.BrokenBarrierError):
            both_are_here.wait(0.2)
        return object()

    monkeypatch.setattr(onednn, "_only_engine", make)
    with ThreadPoolExecutor(2) as pool:
        first, second = [each.result() for each in [pool.submit(onednn._engine) for _ in range(2)]]
    assert first is second


def test_memory_freed_during_an_allocation_is_counted(monkeypatch):
    """Free an array during another allocation, as the garbage collector may do in the same thread."""
    kept = memory_pool._Kept()
    first = kept.take(1024)
    drop = kept._drop

    def drop_and_collect(size):
        nonlocal first
        first = None
        drop(size)

    monkeypatch.setattr(kept, "_drop", drop_and_collect)
    second = kept.take(4096)
    assert kept._num_used == second.size
    del second
    assert kept._num_used == 0
