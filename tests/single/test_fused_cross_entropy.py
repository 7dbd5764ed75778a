"""Test the output layer and the loss as one operator: its array function, the operator, and models that use it."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from library import is_0_5
from mindspore import Tensor
from tiny_transformers import DECODERS, LORA, VOCAB, batch, build

import mindnlp_dp as dp
from mindnlp_dp.kernels import functions, linear_cross_entropy

pytestmark = pytest.mark.skipif(is_0_5, reason="for the models of MindNLP 0.4")


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def loss_and_gradients(loss_of, *arrays):
    value, gradients = mindspore.value_and_grad(loss_of, tuple(range(len(arrays))))(*map(Tensor, arrays))
    return float(value.asnumpy()), [g.asnumpy() for g in gradients]


@pytest.mark.core
@pytest.mark.parametrize("rows_of_a_chunk", [1, 7, 1000])
@pytest.mark.parametrize(("rows", "inner", "classes"), [(1, 3, 2), (50, 16, 31), (7, 8, 1), (200, 24, 500)])
def test_the_fused_operator_equals_a_linear_layer_and_cross_entropy(monkeypatch, rows, inner, classes, rows_of_a_chunk):
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 4 * classes * rows_of_a_chunk)
    arrays = numbers(rows, inner), numbers(classes, inner, seed=1), numbers(classes, seed=2)
    labels = np.random.default_rng(3).integers(0, classes, rows)
    labels[1::3] = -100

    def whole(x, weight, bias):
        return 2 * functions.cross_entropy(functions.linear(x, weight, bias), labels, -100, "mean")

    def fused(x, weight, bias):
        return 2 * functions.linear_cross_entropy(x, weight, bias, labels)

    (expected, of_whole), (loss, of_fused) = (loss_and_gradients(f, *arrays) for f in (whole, fused))
    assert loss == pytest.approx(expected, rel=1e-6, abs=1e-6)
    for mine, theirs in zip(of_fused, of_whole, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-6 * max(np.abs(theirs).max(), 1e-3))


def test_fused_cross_entropy_handles_nan_ignored_labels_and_tied_weights(monkeypatch):
    x, weight = Tensor(numbers(4, 8)), Tensor(numbers(6, 8, seed=1))
    labels = np.array([0, -100, 5, 2])
    with_bias = functions.linear_cross_entropy(x, weight, Tensor(np.zeros(6, np.float32)), labels)
    assert float(functions.linear_cross_entropy(x, weight, None, labels)) == float(with_bias)
    assert np.isnan(float(functions.linear_cross_entropy(x, weight, None, np.full(4, -100))))
    assert np.isnan(float(functions.linear_cross_entropy(x[:0], weight, None, labels[:0])))
    # Logits beyond exp()'s range, and a row that is no number.
    large = functions.linear_cross_entropy(x * 1e4, weight, None, labels)
    logits = 1e4 * numbers(4, 8).astype(np.float64) @ numbers(6, 8, seed=1).T
    # The loss of a row is the distance of its class to the largest logit, for the others are far below.
    expected = np.mean([logits[row].max() - logits[row, labels[row]] for row in (0, 2, 3)])
    assert float(large) == pytest.approx(expected, rel=1e-5)
    bad = numbers(4, 8)
    bad[1] = np.nan
    # Its label says that it does not count.
    assert float(functions.linear_cross_entropy(Tensor(bad), weight, None, labels)) == float(with_bias)
    # Frozen weights have no gradient, and nothing has one without a backward pass.
    asked, compute = [], functions.losses_and_gradients

    def noted(*args, **options):
        asked.append(options["wanted"])
        return compute(*args, **options)

    monkeypatch.setattr(functions, "losses_and_gradients", noted)
    functions.linear_cross_entropy(x, weight, None, labels)
    mindspore.grad(lambda x: functions.linear_cross_entropy(x, weight, None, labels, is_frozen=True))(x)
    assert asked == [(False, False, False), (True, False, False)]
    # One tensor in both places.
    tied, copied = Tensor(numbers(6, 8)), Tensor(numbers(6, 8))
    of_both = mindspore.grad(lambda w: functions.linear_cross_entropy(w, w, None, np.arange(6)))(tied).asnumpy()
    parts = mindspore.grad(lambda a, b: functions.linear_cross_entropy(a, b, None, np.arange(6)), (0, 1))(tied, copied)
    np.testing.assert_allclose(of_both, sum(part.asnumpy() for part in parts), atol=1e-6)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        mindspore.grad(lambda w: mindspore.grad(lambda v: functions.linear_cross_entropy(v, w, None, labels))(x).sum())(
            weight
        )


KINDS = [*DECODERS, "gpt2", "mixtral", "qwen2_moe", f"llama{LORA}", f"gpt2{LORA}"]


def outcome(model, columns):
    """Return the loss and the gradients of what trains."""
    from mindnlp_dp.runtime.mindnlp_api import mindnlp_api

    model.set_train(True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    inputs = {name: Tensor(array) for name, array in columns.items()}
    value_and_grad = mindnlp_api().autograd.value_and_grad
    loss, gradients = value_and_grad(lambda: model(**inputs)[0], tuple(parameters), attach_grads=False)()
    return float(loss.asnumpy()), [g.asnumpy() for g in gradients]


@pytest.mark.parametrize("kind", KINDS)
def test_models_with_fused_cross_entropy_have_the_same_loss_and_gradients(kind):
    dp.init_process_group()
    columns = batch(kind, 3)
    columns["labels"][0, :6] = -100
    router = {"output_router_logits": True} if kind in ("mixtral", "qwen2_moe") else {}
    expected, fused = build(kind, **router), build(kind, **router)
    dp.fuse_cross_entropy(fused)
    dp.fuse_cross_entropy(fused)
    (loss, gradients), (mine, of_mine) = outcome(expected, columns), outcome(fused, columns)
    assert mine == pytest.approx(loss, abs=1e-6)
    largest = max(np.abs(g).max() for g in gradients)
    for found, theirs in zip(of_mine, gradients, strict=True):
        np.testing.assert_allclose(found, theirs, atol=2e-6 * largest)
    inputs = {name: Tensor(array) for name, array in columns.items()}
    assert "logits" not in fused(**inputs, return_dict=True)
    assert fused(**inputs, return_dict=False)[0].shape == ()
    del inputs["labels"]
    assert fused(**inputs, return_dict=True).logits.shape == (3, 10, VOCAB)
    for model in (expected, fused):
        model.set_train(False)
    inputs = {name: Tensor(array) for name, array in columns.items()}
    theirs, found = (model(**inputs, return_dict=True) for model in (expected, fused))
    np.testing.assert_array_equal(found.logits.asnumpy(), theirs.logits.asnumpy())


def test_fuse_cross_entropy_refuses_unsupported_models_and_adapters():
    from mindnlp.peft import LoraConfig, get_peft_model

    for kind in ("bert", "masked", "t5"):
        with pytest.raises(ValueError, match="is for the causal language models"):
            dp.fuse_cross_entropy(build(kind))
    with pytest.raises(ValueError, match="without adapters"):
        dp.fuse_cross_entropy(get_peft_model(build("llama"), LoraConfig(r=2, target_modules=["lm_head"])))
    with pytest.raises(ValueError, match="pretraining_tp"):
        dp.fuse_cross_entropy(build("llama", pretraining_tp=2))
    model = build("llama")
    dp.fuse_cross_entropy(model)
    model.set_train(True)
    columns = batch("llama", 2)
    columns["labels"][1, 3] = VOCAB
    with pytest.raises(ValueError, match=f"a label is from 0 to {VOCAB - 1}, .* got {VOCAB}"):
        model(**{name: Tensor(array) for name, array in columns.items()})
