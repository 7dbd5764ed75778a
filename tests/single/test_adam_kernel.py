"""Compare MindSpore's Adam kernel, called by ctypes, with its operator."""

from __future__ import annotations

import numpy as np
import pytest
from library import nn, optim
from mindspore import Tensor

import mindnlp_dp as dp
from mindnlp_dp.optim.fused import rules


def weights_after(kernel, monkeypatch, optimizer):
    dp.init_process_group()
    monkeypatch.setattr(rules, "kernel", kernel)
    rng = np.random.default_rng(0)
    weight = nn.Parameter(Tensor(rng.standard_normal((300, 41)).astype(np.float32)))
    x = Tensor(rng.standard_normal((5, 300)).astype(np.float32))
    step = dp.make_train_step(
        lambda x: (x @ weight).pow(2).mean(), optimizer([weight], lr=1e-2), [weight], max_grad_norm=0.5
    )
    for _ in range(4):
        step((x,))
    return weight.asnumpy()


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_the_kernel_and_the_operator_train_the_same_weights(monkeypatch, name):
    found = rules.kernel
    calls = []

    def counted():
        calls.append(found())
        return found()

    by_kernel = weights_after(counted, monkeypatch, getattr(optim, name))
    assert len(calls) == 4
    assert all(calls), "this MindSpore has no kernel that equals the operator"
    by_operator = weights_after(lambda: None, monkeypatch, getattr(optim, name))
    np.testing.assert_array_equal(by_kernel, by_operator)
