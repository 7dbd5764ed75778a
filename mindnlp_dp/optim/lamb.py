"""This module implements LAMB: Adam, with each layer's step scaled by the norm of its weights.

You, Li, Reddi, Hseu, Kumar, Bhojanapalli, Song, Demmel, Keutzer and Hsieh, "Large batch optimization for deep
learning: training BERT in 76 minutes", ICLR 2020, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional

from mindnlp_dp.optim.trust_ratio import TrustRatioOptimizer, check_betas
from mindnlp_dp.runtime.arrays import set_weight
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api


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
