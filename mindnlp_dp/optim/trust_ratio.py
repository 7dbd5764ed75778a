"""This module is the common base of LARS and LAMB: the interface of MindNLP's optimizers, and the norms."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any, Optional

import mindspore
import numpy as np

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
    return np.sqrt(mindspore.ops.stack(squares).asnumpy().astype(np.float64)).tolist()
