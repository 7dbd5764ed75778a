"""Compares each step of LARS and LAMB with the papers' algorithms in NumPy; tests rates and groups."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from library import is_0_5, nn

import mindnlp_dp as dp
from mindnlp_dp.optim import LAMB, LARS, Muon, parameter_groups, scaled_learning_rate, warmup_factor
from mindnlp_dp.optim.optimizer_by_name import OWN_OPTIMIZERS, make_optimizer
from mindnlp_dp.optim.updater import MindNLPUpdater, MindSporeUpdater
from models import tiny_roberta
from stand_in_device import counted_host_reads

SHAPES = [(6, 4), (4,), (3, 2, 2)]
NUM_STEPS = 7


def start():
    rng = np.random.default_rng(1)
    return [rng.standard_normal(shape) for shape in SHAPES]


def gradient(step, index):
    return np.random.default_rng([step, index]).standard_normal(SHAPES[index]) * 10.0 ** (index - 1)


def run(make):
    parameters = [nn.Parameter(mindspore.Tensor(x.astype(np.float32))) for x in start()]
    optimizer = make(parameters)
    for step in range(NUM_STEPS):
        for index, parameter in enumerate(parameters):
            parameter.grad = mindspore.Tensor(gradient(step, index).astype(np.float32))
        optimizer.step()
    return [parameter.asnumpy() for parameter in parameters]


def lamb(weight_decay, lr=0.02, beta1=0.9, beta2=0.99, eps=1e-6, max_ratio=10.0, trust=True):  # noqa: PLR0917
    x = start()
    m, v = [np.zeros_like(w) for w in x], [np.zeros_like(w) for w in x]
    for t in range(1, NUM_STEPS + 1):
        for i, w in enumerate(x):
            g = gradient(t - 1, i)
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g**2
            r = (m[i] / (1 - beta1**t)) / (np.sqrt(v[i] / (1 - beta2**t)) + eps)
            u = r + weight_decay * w
            ratio = min(np.sqrt((w**2).sum()) / np.sqrt((u**2).sum()), max_ratio) if trust else 1.0
            x[i] = w - lr * ratio * u
    return x


def lars(weight_decay, lr=0.5, momentum=0.9, eta=0.01, trust=True):
    x = start()
    velocity = [np.zeros_like(w) for w in x]
    for t in range(NUM_STEPS):
        for i, w in enumerate(x):
            g = gradient(t, i)
            local = eta * np.sqrt((w**2).sum()) / (np.sqrt((g**2).sum()) + weight_decay * np.sqrt((w**2).sum()))
            velocity[i] = momentum * velocity[i] + lr * (local if trust else 1.0) * (g + weight_decay * w)
            x[i] = w - velocity[i]
    return x


@pytest.mark.core
@pytest.mark.parametrize("trust", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lamb_matches_the_algorithm_of_the_paper(weight_decay, trust):
    mine = run(lambda p: LAMB(p, 0.02, (0.9, 0.99), weight_decay=weight_decay, use_trust_ratio=trust))
    for one, expected in zip(mine, lamb(weight_decay, trust=trust)):
        np.testing.assert_allclose(one, expected, rtol=2e-5, atol=1e-6)


def test_max_trust_ratio_bounds_the_ratio_of_lamb():
    mine = run(lambda p: LAMB(p, 0.02, (0.9, 0.99), weight_decay=0.1, max_trust_ratio=0.5))
    for one, expected in zip(mine, lamb(0.1, max_ratio=0.5)):
        np.testing.assert_allclose(one, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("trust", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lars_matches_the_algorithm_of_the_paper(weight_decay, trust):
    options = {"weight_decay": weight_decay, "trust_coefficient": 0.01, "use_trust_ratio": trust}
    for one, expected in zip(run(lambda p: LARS(p, 0.5, **options)), lars(weight_decay, trust=trust)):
        np.testing.assert_allclose(one, expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [LAMB, LARS])
def test_lamb_and_lars_use_the_plain_rate_for_zero_weights_and_gradients(kind):
    """Check that the plain rate is used where a ratio is undefined, and that nothing is divided by zero."""
    zeros = nn.Parameter(mindspore.Tensor(np.zeros((2, 2), np.float32)))
    still = nn.Parameter(mindspore.Tensor(np.ones((2, 2), np.float32)))
    unused = nn.Parameter(mindspore.Tensor(np.ones(3, np.float32)))
    optimizer = kind([zeros, still, unused], 0.1, weight_decay=0.0)
    zeros.grad, still.grad = (
        mindspore.Tensor(np.ones((2, 2), np.float32)),
        mindspore.Tensor(np.zeros((2, 2), np.float32)),
    )
    optimizer.step()
    np.testing.assert_allclose(zeros.asnumpy(), -0.1, rtol=1e-4)
    np.testing.assert_array_equal(still.asnumpy(), 1)
    np.testing.assert_array_equal(unused.asnumpy(), 1)


@pytest.mark.parametrize("kind", [LAMB, LARS])
def test_a_trust_ratio_makes_the_step_independent_of_the_gradient_norm(kind):
    """Check that a step changes a layer in proportion to its norm: 1,000 times the gradient gives the same step."""
    moved = []
    for factor in (1.0, 1000.0):
        parameter = nn.Parameter(mindspore.Tensor(start()[0].astype(np.float32)))
        optimizer = kind([parameter], 0.01, weight_decay=0.0)
        parameter.grad = mindspore.Tensor((factor * gradient(0, 0)).astype(np.float32))
        optimizer.step()
        moved.append(parameter.asnumpy() - start()[0])
    np.testing.assert_allclose(moved[0], moved[1], rtol=1e-2, atol=1e-6)


def test_parameter_groups_exclude_biases_and_normalization_from_weight_decay():
    model = tiny_roberta()
    matrices, others = parameter_groups(model, 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all("bias" in names[id(p)] or "LayerNorm" in names[id(p)] for p in others["params"])
    assert not any("bias" in names[id(p)] or "LayerNorm" in names[id(p)] for p in matrices["params"])
    assert len(matrices["params"]) + len(others["params"]) == len(list(model.parameters()))
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert (matrices["use_trust_ratio"], others["use_trust_ratio"]) == (True, False)
    LAMB(parameter_groups(model, 0.1))
    LARS(parameter_groups(model, 0.1))


@pytest.mark.parametrize("make", [LAMB, LARS])
def test_unknown_keys_of_a_parameter_group_are_ignored(make):
    dp.init_process_group()
    parameter = nn.Parameter(mindspore.Tensor(np.ones(3, np.float32)))
    optimizer = make([{"params": [parameter], "names": ["weight"]}], lr=0.1)
    step = dp.make_train_step(lambda x: (parameter * x).sum(), optimizer, [parameter])
    step(mindspore.Tensor(np.ones(3, np.float32)))
    assert (parameter.asnumpy() < 1).all()


def test_the_learning_rate_scales_with_the_batch_size():
    assert scaled_learning_rate(0.1, 256, 1024) == pytest.approx(0.4)
    assert scaled_learning_rate(0.1, 256, 1024, "sqrt") == pytest.approx(0.2)
    assert scaled_learning_rate(0.1, 256, 64) == pytest.approx(0.025)
    with pytest.raises(ValueError, match='rule must be "linear" or "sqrt", got \'cubic\''):
        scaled_learning_rate(0.1, 1, 2, "cubic")
    with pytest.raises(ValueError, match="batch sizes must be at least 1, got 0 and 2"):
        scaled_learning_rate(0.1, 0, 2)
    assert [warmup_factor(step, 2) for step in range(3)] == [0.5, 1.0, 1.0]
    assert warmup_factor(0, 0) == 1.0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: LAMB(p, lr=-1), "lr must not be negative, got -1"),
        (lambda p: LAMB(p, betas=(0.9, 1.0)), "beta2 must be from 0 to below 1, got 1.0"),
        (lambda p: LARS(p, momentum=1.0), "momentum must be from 0 to below 1, got 1.0"),
        (lambda p: LARS(p, weight_decay=-0.1), "weight_decay must not be negative, got -0.1"),
    ],
)
def test_optimizer_settings_out_of_range_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make([nn.Parameter(mindspore.Tensor(np.ones(2, np.float32)))])


# On a device, every read of a value waits for the device.


@pytest.mark.skipif(is_0_5, reason="on CPU, operators of MindNLP 0.5 read memory of the host themselves")
@pytest.mark.parametrize("make", [lambda p: LAMB(p, 0.02, weight_decay=0.1), lambda p: LARS(p, 0.5)])
def test_a_lamb_or_lars_step_reads_from_the_device_once(monkeypatch, make):
    on_host = run(make)
    monkeypatch.setattr(mindspore, "get_context", lambda key: "Ascend")
    for mine, expected in zip(run(make), on_host):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)
    parameters = [nn.Parameter(mindspore.Tensor(x.astype(np.float32))) for x in start()]
    optimizer = make(parameters)
    for index, parameter in enumerate(parameters):
        parameter.grad = mindspore.Tensor(gradient(0, index).astype(np.float32))
    with counted_host_reads() as reads:
        optimizer.step()
    assert reads == ["asnumpy"]


def test_clipping_for_mindspore_optimizers_reads_from_the_device_once():
    updater = MindSporeUpdater(None, [None] * (len(SHAPES) + 1))
    gradients = [mindspore.Tensor(x.astype(np.float32)) for x in start()]
    with counted_host_reads() as reads:
        clipped, norm = updater.clip([*gradients, None], 0.5)
    assert reads == ["asnumpy"]
    assert norm == pytest.approx(np.sqrt(sum((x**2).sum() for x in start())))
    for mine, x in zip(clipped, start()):
        np.testing.assert_allclose(mine.asnumpy(), x * 0.5 / norm, rtol=1e-5)
    assert updater.clip([None], 0.5) == ([None], 0.0)


def test_gradients_whose_squared_norm_exceeds_float16_are_clipped():
    parameter = nn.Parameter(mindspore.Tensor(np.zeros(10_000, np.float16)))
    gradient = mindspore.Tensor(np.full(10_000, 3.0, np.float16))
    [clipped], norm = MindNLPUpdater(None, [parameter]).clip([gradient], 30.0)
    assert norm == pytest.approx(300.0)
    assert clipped.dtype == mindspore.float16
    np.testing.assert_allclose(clipped.asnumpy(), np.full(10_000, 0.3), rtol=1e-3)


@pytest.mark.parametrize(("name", "kind"), zip(OWN_OPTIMIZERS, (Muon, LAMB, LARS)))
def test_optimizers_are_made_by_name(tmp_path, name, kind):
    """The Trainer's ``optim`` and ``optim_args``; weights of layers decay, biases do not."""
    args = dp.DataParallelArguments(str(tmp_path), optim=name, optim_args="lr=0.5", learning_rate=0.25)
    assert args.optim == name
    model = tiny_roberta()
    optimizer = make_optimizer(
        args.optim, model, learning_rate=args.learning_rate, weight_decay=0.3, settings="momentum=0.5" * (kind is LARS)
    )
    assert type(optimizer) is kind
    groups = optimizer.param_groups
    assert {group["lr"] for group in groups} == {0.25}
    assert {group["weight_decay"] for group in groups} == {0.3, 0.0}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert kind is not LARS or groups[0]["momentum"] == 0.5
    again = make_optimizer(name, model, learning_rate=0.25, weight_decay=0.3, settings=args.optim_args)
    assert {group["lr"] for group in again.param_groups} == {0.5}
    with pytest.raises(ValueError, match="optim_args must be settings such as momentum=0.9,ns_steps=6, got 'momentum'"):
        make_optimizer(args.optim, model, learning_rate=0.1, weight_decay=0.0, settings="momentum")
