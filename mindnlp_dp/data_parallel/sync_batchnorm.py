"""Normalizes batches over the rows of all ranks, as one process with all rows does; for models with BatchNorm layers.

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
from mindnlp_dp.runtime.once_differentiable import once_differentiable


def convert_sync_batchnorm(model: Any) -> Any:
    """Make the model's BatchNorm layers normalize over the rows of all ranks in each micro-step; return the model.

    N ranks then train what one process with all rows trains, and their running statistics are that process's. Layers of
    MindNLP and of ``mindspore.nn`` are converted in place. With one rank, outside of a step of the Trainer or of
    :func:`~mindnlp_dp.make_train_step`, and in evaluation, a layer does what it did before. Each layer has one
    all-reduce in the forward and one in the backward pass; ``jit=True`` cannot compile them.

    Raises:
        ValueError: the model has no BatchNorm layer, or a subclass of one overrides its forward pass.
    """
    found = [cell for cell in _cells(model) if isinstance(cell, _stock_layers())]
    if not found:
        raise ValueError(f"{type(model).__name__} has no BatchNorm layer to convert")
    layers = [layer for layer in found if not isinstance(layer, _Synchronized)]
    for layer in layers:
        stock = next(base for base in type(layer).__mro__ if base in _stock_layers())
        if any(getattr(type(layer), name, None) is not getattr(stock, name, None) for name in ("forward", "construct")):
            raise ValueError(
                f"{type(layer).__name__} overrides the forward pass of {stock.__name__}, which would be lost; write it "
                "as a module that has a BatchNorm layer"
            )
    for layer in layers:
        kind: Any = type(layer)
        layer.__class__ = _synchronized(kind)
    return model


def has_synchronized_layers(model: Any) -> bool:
    """Return whether layers of the model were converted."""
    return any(isinstance(cell, _Synchronized) for cell in _cells(model))


def _cells(model: Any) -> list[Any]:
    if hasattr(model, "modules"):
        return list(model.modules())
    return [cell for _, cell in model.cells_and_names()] if hasattr(model, "cells_and_names") else []


@functools.cache
def _stock_layers() -> tuple[Any, ...]:
    modules = mindnlp_api().nn.modules.batchnorm
    return (modules._BatchNorm, mindspore_nn.BatchNorm1d, mindspore_nn.BatchNorm2d, mindspore_nn.BatchNorm3d)


@functools.cache
def _synchronized(stock: Any) -> Any:
    kind = _SynchronizedCell if issubclass(stock, mindspore_nn.Cell) and hasattr(stock, "construct") else _Synchronized
    return type(f"Sync{stock.__name__}", (kind, stock), {})


def _new(stock: Any) -> Any:
    """Return an empty layer of a converted class, for pickle."""
    kind = _synchronized(stock)
    return kind.__new__(kind)


class _Synchronized:
    """A BatchNorm layer of MindNLP that normalizes over the rows of all ranks."""

    training: bool

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time, so pickle does not find it by its name.
        return _new, (type(self).__bases__[1],), self.__dict__

    def forward(self: Any, input: Tensor) -> Tensor:
        batch = batch_across_ranks()
        keeps_statistics = self.running_mean is not None or self.running_var is not None
        if batch is None or (keeps_statistics and not self.training):
            return super().forward(input)  # type: ignore[misc]
        self._check_input_dim(input)
        momentum = self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked = self.num_batches_tracked + 1
            if momentum is None:
                momentum = 1.0 / float(to_host(self.num_batches_tracked))
        statistics = _Statistics(batch, self.eps)
        output = _BatchNorm.apply(input, self.weight, self.bias, statistics)
        if self.training and self.track_running_stats:
            statistics.update(self.running_mean, self.running_var, momentum)
        return output


class _SynchronizedCell(_Synchronized):
    """A BatchNorm layer of ``mindspore.nn`` that normalizes over the rows of all ranks."""

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
    inverse: np.ndarray
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
        self.inverse = 1 / np.sqrt(self.variance + self.epsilon)

    def normalized(self, x: np.ndarray) -> np.ndarray:
        """Return ``x`` with mean 0 and variance 1 in each channel, as a new float32 array."""
        return (x.astype(np.float32, copy=False) - _over_channels(self.mean, x.ndim)) * _over_channels(
            self.inverse, x.ndim
        )

    def update(self, running_mean: Any, running_variance: Any, momentum: float) -> None:
        """Move the running statistics by ``momentum`` towards these, with the unbiased variance."""
        unbiased = self.variance * (self.num_values / max(self.num_values - 1, 1))
        for running, new in ((running_mean, self.mean), (running_variance, unbiased)):
            old = to_host(running)
            set_weight(
                running, from_host(((1 - momentum) * old + momentum * new).astype(old.dtype), dtype_name(running))
            )


class _BatchNorm(_Function):
    """Batch normalization (Ioffe and Szegedy, 2015) with statistics over the rows of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], statistics: _Statistics
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.statistics, ctx.axes = statistics, (0, *range(2, x.ndim))
        statistics.compute(to_host(x), ctx.axes)
        out = statistics.normalized(to_host(x))
        for parameter, combine in ((weight, np.multiply), (bias, np.add)):
            if parameter is not None:
                combine(out, _over_channels(to_host(parameter), x.ndim), out=out)
        return from_host(out, dtype_name(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x, weight), statistics = ctx.saved_tensors, ctx.statistics
        g, normalized = to_host(gradient).astype(np.float32, copy=False), statistics.normalized(to_host(x))
        of_bias = g.sum(ctx.axes, dtype=np.float64)
        of_weight = (g * normalized).sum(ctx.axes, dtype=np.float64)
        means = statistics.batch.sum_of_gradients(np.stack([of_bias, of_weight])) / statistics.num_values
        mean, mean_of_product = (_over_channels(each, x.ndim) for each in means)
        of_x = _over_channels(statistics.inverse, x.ndim) * (g - mean - normalized * mean_of_product)
        if weight is None:
            return from_host(of_x, dtype_name(x)), None, None, None
        of_x *= _over_channels(to_host(weight), x.ndim)
        sums = [from_host(each.astype(np.float32), "float32") for each in (of_weight, of_bias)]
        return from_host(of_x, dtype_name(x)), *sums, None


def _over_channels(x: np.ndarray, ndim: int) -> np.ndarray:
    return x.astype(np.float32).reshape(1, -1, *(1,) * (ndim - 2))
