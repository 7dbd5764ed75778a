"""Normalises batches over the rows of all ranks, as one process with all rows does; for models with BatchNorm layers.

The user calls :func:`convert_sync_batchnorm`. The layers' classes change and their weights, buffers and names stay, so
checkpoints do not change.
"""

from __future__ import annotations

import functools
from typing import Any, Optional

import numpy as np
from mindspore import Tensor
from mindspore import nn as mindspore_nn
from mindspore.common._grad_function import _Function

from mindnlp_dp.communication.batch_across_ranks import BatchAcrossRanks, batch_across_ranks
from mindnlp_dp.runtime.arrays import dtype_name, from_host, set_weight, to_host
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api


def convert_sync_batchnorm(model: Any) -> Any:
    """Make the model's BatchNorm layers normalise over the rows of all ranks in each micro-step; return the model.

    N ranks then train what one process with all rows trains, and their running statistics are that process's. Layers of
    MindNLP (``BatchNorm1d``, ``2d`` and ``3d``) and of ``mindspore.nn`` are converted in place. With one rank, outside
    of a step of the Trainer or of :func:`~mindnlp_dp.make_train_step`, and in evaluation, a layer does what it did
    before. Each layer has one all-reduce in the forward and one in the backward pass.

    Raises:
        ValueError: the model has no BatchNorm layer.
    """
    cells = list(model.modules()) if hasattr(model, "modules") else [cell for _, cell in model.cells_and_names()]
    layers = [cell for cell in cells if isinstance(cell, _stock_layers()) and not isinstance(cell, _Synchronized)]
    if not layers and not any(isinstance(cell, _Synchronized) for cell in cells):
        raise ValueError(f"{type(model).__name__} has no BatchNorm layer to convert")
    for layer in layers:
        kind: Any = type(layer)
        layer.__class__ = _synchronized(kind)
    return model


def _stock_layers() -> tuple[type, ...]:
    modules = mindnlp_api().nn.modules.batchnorm
    return (modules._BatchNorm, mindspore_nn.BatchNorm1d, mindspore_nn.BatchNorm2d, mindspore_nn.BatchNorm3d)


@functools.cache
def _synchronized(stock: Any) -> Any:
    kind = _SynchronizedCell if issubclass(stock, mindspore_nn.Cell) and hasattr(stock, "construct") else _Synchronized
    return type(f"Sync{stock.__name__}", (kind, stock), {})


class _Synchronized:
    """A BatchNorm layer of MindNLP that normalises over the rows of all ranks."""

    training: bool

    def forward(self: Any, input: Tensor) -> Tensor:
        batch = batch_across_ranks()
        if not self.training or batch is None:
            return super().forward(input)  # type: ignore[misc]
        self._check_input_dim(input)
        momentum = self.momentum
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked = self.num_batches_tracked + 1
            if momentum is None:
                momentum = 1.0 / float(to_host(self.num_batches_tracked))
        statistics = _Statistics(batch, self.eps)
        output = _BatchNorm.apply(input, self.weight, self.bias, statistics)
        if self.track_running_stats:
            statistics.update(self.running_mean, self.running_var, momentum)
        return output


class _SynchronizedCell(_Synchronized):
    """A BatchNorm layer of ``mindspore.nn`` that normalises over the rows of all ranks."""

    def construct(self: Any, x: Tensor) -> Tensor:
        batch = batch_across_ranks()
        if batch is None or not (self.training if self.use_batch_statistics is None else self.use_batch_statistics):
            return super().construct(x)  # type: ignore[misc]
        statistics = _Statistics(batch, self.eps)
        output = _BatchNorm.apply(x, self.gamma, self.beta, statistics)
        if self.training:
            statistics.update(self.moving_mean, self.moving_variance, self.momentum)
        return output


class _Statistics:
    """The mean and variance of each channel over the rows of all ranks in a micro-step."""

    mean: np.ndarray
    variance: np.ndarray
    num_values: float

    def __init__(self, batch: BatchAcrossRanks, epsilon: float) -> None:
        self.batch = batch
        self.epsilon = epsilon

    def compute(self, x: np.ndarray, axes: tuple[int, ...]) -> None:
        """Compute the statistics of the channels, which are dimension 1 of ``x``. A collective."""
        sums = [x.sum(axes, dtype=np.float64), np.square(x, dtype=np.float64).sum(axes)]
        number = np.full_like(sums[0], x.size // x.shape[1])
        total, squares, numbers = self.batch.sum(np.stack([*sums, number]))
        self.num_values = float(numbers[0])
        self.mean = total / self.num_values
        self.variance = np.maximum(squares / self.num_values - self.mean**2, 0.0)

    def update(self, running_mean: Any, running_variance: Any, momentum: float) -> None:
        """Move the running statistics by ``momentum`` towards these, with the unbiased variance."""
        unbiased = self.variance * (self.num_values / max(self.num_values - 1, 1))
        for running, new in ((running_mean, self.mean), (running_variance, unbiased)):
            old = to_host(running)
            set_weight(
                running, from_host(((1 - momentum) * old + momentum * new).astype(old.dtype), dtype_name(running))
            )


class _BatchNorm(_Function):
    """Batch normalisation (Ioffe and Szegedy, 2015) with statistics over the rows of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], statistics: _Statistics
    ) -> Tensor:
        array = to_host(x).astype(np.float32, copy=False)
        ctx.axes = (0, *range(2, array.ndim))
        statistics.compute(array, ctx.axes)
        ctx.statistics, ctx.dtype = statistics, dtype_name(x)
        ctx.inverse = _over_channels(1 / np.sqrt(statistics.variance + statistics.epsilon), array.ndim)
        ctx.normalised = (array - _over_channels(statistics.mean, array.ndim)) * ctx.inverse
        ctx.weight = None if weight is None else _over_channels(to_host(weight), array.ndim)
        out = ctx.normalised if ctx.weight is None else ctx.normalised * ctx.weight
        return from_host(out if bias is None else out + _over_channels(to_host(bias), array.ndim), ctx.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        g, statistics = to_host(gradient).astype(np.float32, copy=False), ctx.statistics
        of_bias = g.sum(ctx.axes, dtype=np.float64)
        of_weight = (g * ctx.normalised).sum(ctx.axes, dtype=np.float64)
        means = statistics.batch.sum_of_gradients(np.stack([of_bias, of_weight])) / statistics.num_values
        mean, mean_of_product = (_over_channels(each, g.ndim) for each in means)
        of_x = ctx.inverse * (g - mean - ctx.normalised * mean_of_product)
        if ctx.weight is None:
            return from_host(of_x, ctx.dtype), None, None, None
        sums = [from_host(each.astype(np.float32), "float32") for each in (of_weight, of_bias)]
        return from_host(of_x * ctx.weight, ctx.dtype), *sums, None


def _over_channels(x: np.ndarray, ndim: int) -> np.ndarray:
    return x.astype(np.float32).reshape(1, -1, *(1,) * (ndim - 2))
