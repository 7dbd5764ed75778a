"""Tests the CPU kernels under MindNLP 0.5: mindtorch calls them, and they return the values of MindSpore's kernels."""

from __future__ import annotations

import numpy as np
import pytest
from library import is_0_5
from mindspore import Tensor

import mindnlp_dp as dp
from mindnlp_dp.kernels import dispatch
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api, transformers_api

pytestmark = pytest.mark.skipif(not is_0_5, reason="of MindNLP 0.5; 0.4's are in test_kernels.py")

CLASSES = np.random.default_rng(3).integers(0, 20, 64)
SOME = np.where(np.arange(64) % 3, CLASSES, -100)


@pytest.fixture(autouse=True)
def one_process():
    dp.init_process_group()
    before = dispatch._are_on
    yield
    dispatch.choose("auto" if before else "mindspore", 1)


def numbers(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def functional():
    return mindnlp_api().nn.functional


# By name: the kernel of ours that is expected, the function, and the shapes of its inputs.
FUNCTIONS = {
    "linear": ("linear", lambda x, w, b: functional().linear(x, w, b), [(4, 6, 8), (5, 8), (5,)]),
    "linear, no bias": ("linear", lambda x, w: functional().linear(x, w), [(4, 6, 8), (5, 8)]),
    "gelu": ("gelu", lambda x: functional().gelu(x), [(4, 33)]),
    "gelu, tanh": ("gelu", lambda x: functional().gelu(x, approximate="tanh"), [(4, 33)]),
    "layer_norm": ("layer_norm", lambda x, w, b: functional().layer_norm(x, (8,), w, b, 1e-5), [(4, 6, 8), (8,), (8,)]),
    "embedding": ("embedding", lambda w: functional().embedding(Tensor(CLASSES), w), [(20, 8)]),
    "cross_entropy": ("cross_entropy", lambda x: functional().cross_entropy(x, Tensor(CLASSES)), [(64, 20)]),
    "cross_entropy, some ignored": (
        "cross_entropy", lambda x: functional().cross_entropy(x, Tensor(SOME), ignore_index=-100), [(64, 20)]
    ),
    "matmul": ("matmul", lambda a, b: mindnlp_api().matmul(a, b), [(2, 3, 4, 5), (2, 3, 5, 6)]),
    "@": ("matmul", lambda a, b: a @ b, [(2, 3, 4, 5), (5, 6)]),
    "bmm": ("matmul", lambda a, b: mindnlp_api().bmm(a, b), [(3, 4, 5), (3, 5, 6)]),
}  # fmt: skip


def value_and_gradients(function, shapes, kernels):
    dispatch.choose(kernels, 1)
    torch = mindnlp_api()
    weights = [torch.nn.Parameter(Tensor(numbers(*shape, seed=i))) for i, shape in enumerate(shapes)]
    scale = None

    def forward():
        nonlocal scale
        out = function(*weights)
        scale = Tensor(numbers(*out.shape, seed=9)) if out.ndim else Tensor(np.float32(2))
        return (out * scale).sum()

    value = torch.autograd.value_and_grad(forward, weights)()
    return float(value.asnumpy()), [w.grad.asnumpy() for w in weights]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_mindtorch_calls_our_kernels_and_gets_the_same_values(name, monkeypatch):
    from mindnlp_dp.kernels import functions

    kernel, function, shapes = FUNCTIONS[name]
    called, stock = [], getattr(functions, kernel)
    monkeypatch.setattr(functions, kernel, lambda *args: called.append(kernel) or stock(*args))
    mine = value_and_gradients(function, shapes, "auto")
    assert called
    called.clear()
    theirs = value_and_gradients(function, shapes, "mindspore")
    assert not called
    np.testing.assert_allclose(mine[0], theirs[0], rtol=2e-5)
    for ours, other in zip(mine[1], theirs[1]):
        np.testing.assert_allclose(ours, other, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["Roberta", "GPT2", "Llama"])
def test_models_with_our_kernels_match_mindspore_kernels(kind):
    library, torch = transformers_api(), mindnlp_api()
    sizes = {
        "Roberta": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
                    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 40},
        "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "Llama": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
                  "num_key_value_heads": 2},
    }[kind]  # fmt: skip
    torch.manual_seed(0)
    model = getattr(library, f"{kind}Model")(getattr(library, f"{kind}Config")(vocab_size=50, **sizes))
    weights = [p for p in model.parameters() if p.requires_grad]
    ids = Tensor(np.random.default_rng(0).integers(5, 50, (3, 9)))
    results = {}
    for kernels in ("auto", "mindspore"):
        dispatch.choose(kernels, 1)
        for weight in weights:
            weight.grad = None

        def forward():
            return (model(input_ids=ids).last_hidden_state ** 2).mean()

        value = torch.autograd.value_and_grad(forward, weights)()
        results[kernels] = float(value.asnumpy()), [None if w.grad is None else w.grad.asnumpy() for w in weights]
    np.testing.assert_allclose(results["auto"][0], results["mindspore"][0], rtol=1e-5)
    for ours, other in zip(results["auto"][1], results["mindspore"][1]):
        assert (ours is None) == (other is None)
        if ours is not None:
            np.testing.assert_allclose(ours, other, rtol=1e-3, atol=1e-5)


DIFFERENCES = {
    "a - b": lambda a, b: (a - b).sum(),
    "b - a": lambda a, b: -(b - a).sum(),
    "sub": lambda a, b: mindnlp_api().sub(a, b).sum(),
    "to its own device": lambda a, b: a.to("cpu").sum(),
    "mse_loss": lambda a, b: functional().mse_loss(a, b, reduction="sum") / 2,
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_gradients_of_differences_match_the_derivatives(name):
    """Compare with the derivatives; MindNLP 0.5.1 alone returns zeros."""
    a, b = Tensor(numbers(5)), Tensor(numbers(5, seed=1))
    weight = mindnlp_api().nn.Parameter(a)
    value_and_grad = mindnlp_api().autograd.value_and_grad
    _, (gradient,) = value_and_grad(lambda: DIFFERENCES[name](weight, b), (weight,), attach_grads=False)()
    expected = a.asnumpy() - b.asnumpy() if name == "mse_loss" else np.ones(5)
    np.testing.assert_allclose(gradient.asnumpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("shape", [(8, 3), (6, 3, 4, 5)])
def test_batch_norm_matches_numpy(shape):
    """Compare with NumPy; MindNLP 0.5.1 alone multiplies by the running mean."""
    torch = mindnlp_api()
    layer = (torch.nn.BatchNorm1d if len(shape) == 2 else torch.nn.BatchNorm2d)(3)
    x = numbers(*shape) * 2 + 1
    axes = (0, *range(2, len(shape)))
    mean, variance = (each.reshape(1, 3, *[1] * (len(shape) - 2)) for each in (x.mean(axes), x.var(axes)))
    layer.train()
    np.testing.assert_allclose(layer(Tensor(x)).asnumpy(), (x - mean) / np.sqrt(variance + 1e-5), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer.running_mean.asnumpy(), 0.1 * mean.reshape(-1), rtol=1e-4)
    running = 0.9 + 0.1 * x.var(axes, ddof=1)
    np.testing.assert_allclose(layer.running_var.asnumpy(), running, rtol=1e-4)
    layer.eval()
    expected = (x - 0.1 * mean) / np.sqrt(running.reshape(mean.shape) + 1e-5)
    np.testing.assert_allclose(layer(Tensor(x)).asnumpy(), expected, rtol=1e-4, atol=1e-5)
