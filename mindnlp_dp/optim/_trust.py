"""What LARS and LAMB share: the interface of MindNLP's optimizers, and norms."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any

import numpy as np
from mindnlp.core.optim import Optimizer


class TrustRatioOptimizer(Optimizer, abc.ABC):
    """Goes through the parameters that have a gradient; subclasses update one of them."""

    def __init__(self, params: Iterable[Any], **defaults: Any) -> None:
        if defaults["lr"] < 0:
            raise ValueError(f"lr must not be negative, got {defaults['lr']}")
        if defaults["weight_decay"] < 0:
            raise ValueError(f"weight_decay must not be negative, got {defaults['weight_decay']}")
        super().__init__(params, defaults)

    def step(self, grads: Any = None) -> None:
        """Update every parameter whose ``grad`` is set; ``grads`` is there for MindNLP's call shape, and not used."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, self.state[parameter], group)

    @abc.abstractmethod
    def _update(self, parameter: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None: ...


def check_betas(betas: tuple[float, float]) -> None:
    for number, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"beta{number + 1} must be from 0 to below 1, got {beta}")


def norm(x: Any) -> float:
    """The Euclidean norm, in float64: it decides over a whole layer."""
    return float(np.linalg.norm(x.asnumpy().astype(np.float64)))
