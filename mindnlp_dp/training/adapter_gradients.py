"""Checks in the first update that every trainable adapter of PEFT receives a gradient; TrainStep calls it.

An adapter without one, in a layer that the loss does not depend on, would silently stay as it began.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.runtime.adapters import has_adapters
from mindnlp_dp.runtime.arrays import to_host

# The number of names that a message shows.
_SHOWN = 3


class AdapterCheck:
    """Notes which adapters receive a gradient, until :meth:`report` warns of the others.

    LoRA's first matrix has a gradient of zero while its second one is zero, so an adapter is one layer's matrices.
    """

    def __init__(self, model: Any, parameters: Sequence[Any], world: ProcessGroup) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        # The layer's name; None for other parameters.
        self._layers = [names.get(id(p), "").partition(".lora_") for p in parameters]
        self._world = world
        self._received: set[str] = set()
        self._has_looked = False

    def look(self, gradients: Sequence[Optional[Any]]) -> None:
        """Note the adapters with a gradient in a micro-step; ``gradients`` are in the order of the parameters."""
        self._has_looked = True
        for (layer, is_adapter, _), gradient in zip(self._layers, gradients):
            if is_adapter and layer not in self._received and gradient is not None and np.any(to_host(gradient)):
                self._received.add(layer)

    def report(self) -> bool:
        """Warn on the main rank of adapters that no rank saw a gradient of. A collective.

        Returns False if no rank has run a micro-step yet.
        """
        mine = [layer for layer, is_adapter, _ in self._layers if is_adapter]
        everyone = self._world.all_gather_object((mine, self._received, self._has_looked))
        received = set().union(*(theirs for _, theirs, _ in everyone))
        idle = [
            layer for layer in dict.fromkeys(x for layers, _, _ in everyone for x in layers) if layer not in received
        ]
        has_looked = any(looked for _, _, looked in everyone)
        if has_looked and idle and self._world.is_main:
            more = f" and {len(idle) - _SHOWN} more" if len(idle) > _SHOWN else ""
            warnings.warn(
                "adapters received no gradient in the first update: those of "
                f"{', '.join(map(repr, idle[:_SHOWN]))}{more}. The loss does not depend on them, so they will learn "
                "nothing; are their layers used?",
                RuntimeWarning,
                stacklevel=2,
            )
        return has_looked


def adapter_check(model: Any, parameters: Sequence[Any], world: ProcessGroup) -> Optional[AdapterCheck]:
    """Return the check of a model with adapters, or None."""
    return AdapterCheck(model, parameters, world) if has_adapters(model) else None
