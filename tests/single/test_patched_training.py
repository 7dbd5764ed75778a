"""Measures the effect of the patches of optimizers and autograd, in this process or in a separate one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mindspore
import numpy as np
import pytest
from mindnlp.core import nn, ops, optim
from mindnlp.core.nn import Parameter

TESTS = str(Path(__file__).resolve().parent.parent)


def trained_by_adam(kind, amsgrad, num_updates=30):
    rng = np.random.default_rng(0)
    parameters = [Parameter(mindspore.Tensor(rng.standard_normal((5, 3)).astype(np.float32))) for _ in range(2)]
    optimizer = kind(parameters, lr=1e-2, weight_decay=0.1, amsgrad=amsgrad)
    for update in range(num_updates):
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + update)
        for parameter in parameters:
            parameter.grad = mindspore.Tensor(rng.standard_normal((5, 3)).astype(np.float32))
        optimizer.step()
    return [parameter.asnumpy() for parameter in parameters]


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adam])
def test_patched_adam_trains_the_same_weights_as_stock_adam(kind, amsgrad, monkeypatch):
    patched = trained_by_adam(kind, amsgrad)
    raw = "raw_adam_amsgrad" if amsgrad else "raw_adam"
    monkeypatch.setattr(ops.optim, raw, getattr(ops.optim, raw).__wrapped__)
    for ours, stock in zip(patched, trained_by_adam(kind, amsgrad)):
        np.testing.assert_array_equal(ours, stock)


def test_patched_adam_passes_changing_scalars_as_tensors(monkeypatch):
    seen = []
    monkeypatch.setattr(sys.modules["mindnlp.core.ops.optim"], "_adam", lambda *arguments: seen.append(arguments))
    trained_by_adam(optim.AdamW, amsgrad=False, num_updates=3)
    scalars = [[x for x in arguments if isinstance(x, float)] for arguments in seen]
    # Only the betas and epsilon, which do not change, remain Python numbers.
    assert scalars == [[0.9, 0.999, 1e-8]] * 6
    assert len({id(arguments[3]) for arguments in seen}) == 3, "one tensor an update, for all parameters"


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4), (2, 3, 1, 5)])
def test_clip_grad_norm_clips_gradients_of_any_shape(shape):
    parameter = Parameter(mindspore.Tensor(np.zeros(shape, np.float32)))
    gradient = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    parameter.grad = mindspore.Tensor(gradient)
    norm = nn.utils.clip_grad_norm_([parameter], 0.1)
    assert float(norm.asnumpy()) == pytest.approx(float(np.linalg.norm(gradient)), rel=1e-6)
    np.testing.assert_allclose(parameter.grad.asnumpy(), gradient * 0.1 / np.linalg.norm(gradient), rtol=1e-4)


GROWTH = """
import mindnlp_dp as dp
dp.init_process_group()
import numpy as np, mindspore
from pathlib import Path
from mindnlp.core import optim
from mindnlp.core.nn import Parameter
from models import Rows, tiny_roberta
model = tiny_roberta()
parameters = list(model.parameters())
gradients = [mindspore.Tensor(np.full(p.shape, 1e-3, np.float32)) for p in parameters]
optimizer = optim.AdamW(parameters, lr=1e-3)
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4
def updates(number):
    for _ in range(number):
        for p, g in zip(parameters, gradients):
            p.grad = g
        optimizer.step()
updates(20)
before = resident()
updates(100)
print((resident() - before) / 100)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_adam_updates():
    environment = {**os.environ, "PYTHONPATH": TESTS}
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    # KiB per update: more than a thousand before the patch, only noise after it.
    assert float(done.stdout.split()[-1]) < 100
