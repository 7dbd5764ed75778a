"""This module implements LARS and LAMB, whose step in each layer is scaled by the norm of its weights, for MindNLP.

* LARS: You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017, algorithm 1.
* LAMB: You, Li, Reddi, Hseu, Kumar, Bhojanapalli, Song, Demmel, Keutzer and Hsieh, "Large batch optimization for deep
  learning: training BERT in 76 minutes", ICLR 2020, algorithm 2.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any, Optional

import mindspore
import numpy as np

from mindnlp_dp.runtime.arrays import read, set_weight
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api


class TrustRatioOptimizer(mindnlp_api().optim.Optimizer, abc.ABC):  # type: ignore[misc]
    """Base class of LARS and LAMB; a subclass defines the direction of a parameter's update, and the update itself.

    :meth:`step` computes all directions first, then all norms, so that it waits for the device only once. This
    needs memory for the directions of all parameters at the same time.
    """

    def __init__(self, params: Iterable[Any], **defaults: Any) -> None:
        if defaults["lr"] < 0:
            raise ValueError(f"lr must not be negative, got {defaults['lr']}")
        if defaults["weight_decay"] < 0:
            raise ValueError(f"weight_decay must not be negative, got {defaults['weight_decay']}")
        super().__init__(params, defaults)

    def step(self, grads: Any = None) -> None:
        """Update every parameter that has a ``grad``; ``grads`` only matches MindNLP's signature and is not used."""
        moving = [
            (parameter, self._direction(parameter, self.state[parameter], group), group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        trusted = [(parameter, direction) for parameter, direction, group in moving if group["use_trust_ratio"]]
        lengths = iter(norms([x for pair in trusted for x in pair]))
        for parameter, direction, group in moving:
            both = (next(lengths), next(lengths)) if group["use_trust_ratio"] else (0.0, 0.0)
            # A norm of 0 gives no usable ratio.
            self._move(parameter, direction, both if min(both) > 0 else None, self.state[parameter], group)

    @abc.abstractmethod
    def _direction(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> Any:
        """Return the direction of the update, from the gradient and the state; the trust ratio uses its norm."""

    @abc.abstractmethod
    def _move(
        self,
        parameter: Any,
        direction: Any,
        lengths: Optional[tuple[float, float]],
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        """Update the parameter; ``lengths`` are the norms of weights and direction, or None if the ratio is 1."""


def check_betas(betas: tuple[float, float]) -> None:
    """Raise ValueError unless both decay rates are in [0, 1)."""
    for number, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"beta{number + 1} must be from 0 to below 1, got {beta}")


def norms(tensors: Sequence[Any]) -> list[float]:
    """Return the Euclidean norms of the tensors.

    On CPU they are computed in float64. On a device the squares are added in float32, and all sums are fetched
    at once.
    """
    if not tensors:
        return []
    if mindspore.get_context("device_target") == "CPU":
        return [float(np.linalg.norm(x.asnumpy().astype(np.float64))) for x in tensors]
    squares = [mindspore.ops.square(x.astype(mindspore.float32)).sum() for x in tensors]
    return np.sqrt(read(mindspore.ops.stack(squares)).astype(np.float64)).tolist()


class LAMB(TrustRatioOptimizer):
    """The LAMB optimizer.

    For each layer with weights x and gradient g, update t computes::

        m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g * g
        u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay x
        x = x - lr (|x| / |u|) u

    Args:
        params: parameters, or groups of them; :func:`~mindnlp_dp.optim.parameter_groups` returns the usual two. In a
            group with ``use_trust_ratio=False`` the ratio is 1.
        max_trust_ratio: upper limit of the ratio |x| / |u|; without it, weights with a small gradient would move too
            far.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        max_trust_ratio: float = 10.0,
        use_trust_ratio: bool = True,
    ) -> None:
        check_betas(betas)
        super().__init__(
            params, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay, max_trust_ratio=max_trust_ratio,
            use_trust_ratio=use_trust_ratio,
        )  # fmt: skip

    def _direction(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> Any:
        if not state:
            state["step"] = 0
            state["exp_avg"] = mindnlp_api().ops.zeros_like(parameter)
            state["exp_avg_sq"] = mindnlp_api().ops.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        state["step"] += 1
        gradient, mean, square = parameter.grad, state["exp_avg"], state["exp_avg_sq"]
        set_weight(mean, beta1 * mean + (1 - beta1) * gradient)
        set_weight(square, beta2 * square + (1 - beta2) * gradient * gradient)
        adam = (mean / (1 - beta1 ** state["step"])) / ((square / (1 - beta2 ** state["step"])).sqrt() + group["eps"])
        return adam + group["weight_decay"] * parameter

    def _move(
        self,
        parameter: Any,
        direction: Any,
        lengths: Optional[tuple[float, float]],
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        ratio = 1.0 if lengths is None else min(lengths[0] / lengths[1], group["max_trust_ratio"])
        set_weight(parameter, parameter - group["lr"] * ratio * direction)


class LARS(TrustRatioOptimizer):
    """The LARS optimizer.

    For each layer with weights w and gradient g, an update computes::

        rate = trust_coefficient |w| / (|g| + weight_decay |w|)
        v    = momentum v + lr rate (g + weight_decay w)
        w    = w - v

    Args:
        params: parameters, or groups of them; :func:`~mindnlp_dp.optim.parameter_groups` returns the usual two. In a
            group with ``use_trust_ratio=False`` the layer's rate is 1.
        trust_coefficient: the length of a layer's step relative to the norm of its weights, at a learning rate of 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust_coefficient: float = 1e-3,
        use_trust_ratio: bool = True,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be from 0 to below 1, got {momentum}")
        super().__init__(
            params, lr=lr, momentum=momentum, weight_decay=weight_decay, trust_coefficient=trust_coefficient,
            use_trust_ratio=use_trust_ratio,
        )  # fmt: skip

    def _direction(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> Any:
        return parameter.grad

    def _move(
        self,
        parameter: Any,
        direction: Any,
        lengths: Optional[tuple[float, float]],
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        if not state:
            state["momentum_buffer"] = mindnlp_api().ops.zeros_like(parameter)
        decay, rate = group["weight_decay"], 1.0
        if lengths is not None:
            weights, gradient = lengths
            rate = group["trust_coefficient"] * weights / (gradient + decay * weights)
        velocity = state["momentum_buffer"]
        step = group["lr"] * rate * (direction + decay * parameter)
        set_weight(velocity, group["momentum"] * velocity + step)
        set_weight(parameter, parameter - velocity)
