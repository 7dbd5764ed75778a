"""This module implements LARS: SGD with momentum and a separate learning rate for each layer.

You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional

from mindnlp_dp.optim.trust_ratio import TrustRatioOptimizer
from mindnlp_dp.runtime.arrays import set_weight
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api


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
