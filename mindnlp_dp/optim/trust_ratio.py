"""What LARS and LAMB share: the interface of MindNLP's optimizers, and norms."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any, Optional

import mindspore
import numpy as np

from mindnlp_dp.runtime.torch_like import torch_like


class TrustRatioOptimizer(torch_like().optim.Optimizer, abc.ABC):  # type: ignore[misc]
    """Goes through the parameters that have a gradient; subclasses say where one of them goes, and how far.

    All directions come first, then all lengths, so that a device is waited for once. That takes memory for
    the directions of all parameters at a time.
    """

    def __init__(self, params: Iterable[Any], **defaults: Any) -> None:
        if defaults["lr"] < 0:
            raise ValueError(f"lr must not be negative, got {defaults['lr']}")
        if defaults["weight_decay"] < 0:
            raise ValueError(f"weight_decay must not be negative, got {defaults['weight_decay']}")
        super().__init__(params, defaults)

    def step(self, grads: Any = None) -> None:
        """Update every parameter whose ``grad`` is set; ``grads`` is there for MindNLP's call shape, and not used."""
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
            # Without a length there is no ratio.
            self._move(parameter, direction, both if min(both) > 0 else None, self.state[parameter], group)

    @abc.abstractmethod
    def _direction(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> Any:
        """What the parameter moves along, by its gradient and the past; the weights' length is compared with its."""

    @abc.abstractmethod
    def _move(
        self,
        parameter: Any,
        direction: Any,
        lengths: Optional[tuple[float, float]],
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        """Move; ``lengths`` are the weights' and the direction's, None where the ratio is 1."""


def check_betas(betas: tuple[float, float]) -> None:
    for number, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"beta{number + 1} must be from 0 to below 1, got {beta}")


def norms(tensors: Sequence[Any]) -> list[float]:
    """The Euclidean norms, which decide over whole layers.

    Memory of the host is read where it is, in float64. On a device squares are added in float32, and all
    sums fetched at once.
    """
    if not tensors:
        return []
    if mindspore.get_context("device_target") == "CPU":
        return [float(np.linalg.norm(x.asnumpy().astype(np.float64))) for x in tensors]
    squares = [mindspore.ops.square(x.astype(mindspore.float32)).sum() for x in tensors]
    return np.sqrt(mindspore.ops.stack(squares).asnumpy().astype(np.float64)).tolist()
