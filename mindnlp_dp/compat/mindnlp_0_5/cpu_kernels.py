"""These patches fix functions of ``mindtorch`` that fail on CPU or differ from PyTorch's."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any, Optional

import numpy as np

from mindnlp_dp.compat.import_hook import around
from mindnlp_dp.runtime.arrays import number_of
from mindnlp_dp.runtime.override import override


# Versions: MindNLP 0.5.1. Cause: mindtorch's Adam calls addcdiv, which its CPU functions lack.
# Remove when: mindtorch has it on CPU.
@around("mindtorch._apis.cpu")
def _addcdiv(module: types.ModuleType) -> Iterator[None]:
    yield
    if not hasattr(module, "addcdiv"):

        def addcdiv(x: Any, numerator: Any, denominator: Any, value: float = 1) -> Any:
            """Return ``x + value * numerator / denominator``, element by element."""
            return x + numerator / denominator * value

        module.addcdiv = addcdiv  # type: ignore[attr-defined]


# Versions: MindNLP 0.5.1. Cause: moving a tensor on CPU to "cpu" copies its values, and the copy has no gradient. The
# difference of two tensors moves both, so ``a - b``, and losses that are made of it (mse_loss), have zero gradients.
# Remove when: a tensor that is moved to its own device is the same tensor, as in PyTorch.
@around("mindtorch._tensor")
def _move_to_the_same_device(module: types.ModuleType) -> Iterator[None]:
    yield

    @override(module.TensorPlaceHolder)
    def _move_to(self: Any, device: Any, non_blocking: bool = False) -> Any:
        return self if device.type == self.device.type == "cpu" else NotImplemented


# Versions: MindNLP 0.5.1. Cause: the layers pass the running statistics where the CPU function expects scale and shift,
# so a batch normalization in training multiplies by the running mean, which is 0; and its kernel writes outside of its
# memory for the view of an input of more than two dimensions.
# Remove when: both have one order, and images are normalized without "corrupted size vs. prev_size".
@around("mindtorch._apis.cpu")
def _batch_norm(module: types.ModuleType) -> Iterator[None]:
    yield
    stock = module.batch_norm

    def batch_norm(x: Any, running_mean: Any, running_var: Any, weight: Any, bias: Any, *options: Any) -> Any:
        """Normalize ``x`` over all dimensions but the second; update the running statistics in training."""
        order = (0, *range(2, x.ndim), 1)
        # The product is a copy: the kernel does not follow the strides of a transposed view.
        rows = x if x.ndim == 2 else module.legacy.mul(module.legacy.transpose(x, order), 1.0).reshape((-1, x.shape[1]))
        out, *statistics = stock(rows, weight, bias, running_mean, running_var, *options)
        if x.ndim > 2:
            back = (0, x.ndim - 1, *range(1, x.ndim - 1))
            out = module.legacy.transpose(out.reshape(tuple(x.shape[axis] for axis in order)), back)
        return (out, *statistics)

    module.batch_norm = batch_norm  # type: ignore[attr-defined]


# Versions: MindNLP 0.5.1. Cause: SGD calls raw_sgd, which the CPU functions lack; and it resets the momenta to zero at
# every step, so momentum has no effect on any device.
# Remove when: mindtorch's SGD equals PyTorch's.
@around("mindtorch.optim.sgd")
def _sgd(module: types.ModuleType) -> Iterator[None]:
    yield
    from mindnlp_dp.runtime.mindnlp_api import mindnlp_api

    def step(self: Any, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Update by the rule of ``torch.optim.SGD``: weight decay, momentum (with dampening, or Nesterov's)."""
        loss = None if closure is None else closure()
        with mindnlp_api().no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        _sgd_update(parameter, group, self.state[parameter])
        return loss

    module.SGD.step = step  # type: ignore[attr-defined]


def _sgd_update(parameter: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
    gradient = -parameter.grad if group["maximize"] else parameter.grad
    if group["weight_decay"]:
        gradient = gradient + parameter * group["weight_decay"]
    if group["momentum"]:
        before = state.get("momentum_buffer")
        if before is None:
            # A copy, because the caller may change the gradient.
            momentum = gradient.clone()
        else:
            momentum = before * group["momentum"] + gradient * (1 - group["dampening"])
        state["momentum_buffer"] = momentum
        gradient = gradient + momentum * group["momentum"] if group["nesterov"] else momentum
    parameter.copy_(parameter - gradient * number_of(group["lr"]))


# Versions: MindNLP 0.5.1. Cause: the norm's kernel fails if no axes are given (which means all axes), and for a tensor
# without axes; gradient clipping calls it like this.
# Remove when: mindtorch passes all axes.
@around("mindtorch._apis.cpu")
def _vector_norm(module: types.ModuleType) -> Iterator[None]:
    yield
    stock = module.linalg_vector_norm

    def linalg_vector_norm(x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
        """Return the norm over ``dim``, or over all axes."""
        if not x.ndim:
            return stock(x.reshape((1,)), ord, (0,), False, dtype)
        return stock(x, ord, tuple(range(x.ndim)) if dim is None else dim, keepdim, dtype)

    module.linalg_vector_norm = linalg_vector_norm  # type: ignore[attr-defined]


# Versions: MindNLP 0.5.1. Cause: dropout passes neither the seed nor the offset of its generator to the kernel, so
# torch.manual_seed() has no effect, and no run can be reproduced.
# Remove when: it passes them.
@around("mindtorch._apis.cpu")
def _dropout_by_its_seed(module: types.ModuleType) -> Iterator[None]:
    yield
    from mindnlp_dp.dropout.dropout_operators import scaled_mask

    def dropout(x: Any, p: float, seed: Any, offset: Any) -> tuple[Any, Optional[Any]]:
        """Zero elements of ``x`` with probability ``p``, and scale the others by ``1 / (1 - p)``.

        The mask is a function of ``seed`` and ``offset``, and in a training step of the samples' positions.
        """
        if p == 1:
            return x * 0, None
        mask_64 = 0xFFFFFFFFFFFFFFFF
        mask = scaled_mask(x, p, (int(seed) & mask_64, int(offset) & mask_64))
        return x * mask, mask

    module.dropout = dropout  # type: ignore[attr-defined]


# Versions: MindNLP 0.5.1. Cause: on CPU, rand, randn and randint ignore their generator, and bernoulli always draws
# with probability 0.5: the collators of masked language models mask half of all tokens.
# Remove when: they behave like PyTorch's.
@around("mindtorch._apis.cpu")
def _random_numbers(module: types.ModuleType) -> Iterator[None]:
    yield
    import mindspore

    def generator_of(generator: Any) -> np.random.Generator:
        return _philox(*generator._step(12))

    def bernoulli(probabilities: Any, generator: Any) -> Any:
        """Draw 1 with each given probability, else 0, in the same shape and type."""
        draws = generator_of(generator).random(probabilities.shape)
        return mindspore.Tensor((draws < probabilities.asnumpy()).astype(np.float32)).astype(probabilities.dtype)

    def rand(size: Any, generator: Any, dtype: Any) -> Any:
        """Draw numbers from 0 to 1, uniformly."""
        return mindspore.Tensor(generator_of(generator).random(tuple(size), dtype=np.float32)).astype(dtype)

    def randn(size: Any, generator: Any, dtype: Any) -> Any:
        """Draw numbers from the standard normal distribution."""
        return mindspore.Tensor(generator_of(generator).standard_normal(tuple(size), np.float32)).astype(dtype)

    def randint(low: int, high: int, shape: Any, generator: Any, dtype: Any) -> Any:
        """Draw integers from ``low`` to ``high - 1``."""
        return mindspore.Tensor(generator_of(generator).integers(low, high, tuple(shape))).astype(dtype)

    for function in (bernoulli, rand, randn, randint):
        setattr(module, function.__name__, function)


def _philox(seed: Any, offset: Any) -> np.random.Generator:
    key = [int(seed) & 0xFFFFFFFFFFFFFFFF, int(offset) & 0xFFFFFFFFFFFFFFFF]
    return np.random.Generator(np.random.Philox(key=key))
