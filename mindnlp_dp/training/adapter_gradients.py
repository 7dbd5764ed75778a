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
        # Of each parameter, the layer and the adapter that it belongs to; "" for other parameters.
        self._adapters = [_adapter_of(names.get(id(p), "")) for p in parameters]
        self._world = world
        self._received: set[str] = set()
        self._has_looked = False

    def observe(self, gradients: Sequence[Optional[Any]]) -> None:
        """Note the adapters with a gradient in a micro-step; ``gradients`` are in the order of the parameters."""
        self._has_looked = True
        for adapter, gradient in zip(self._adapters, gradients):
            if adapter and adapter not in self._received and gradient is not None and np.any(to_host(gradient)):
                self._received.add(adapter)

    def report(self) -> bool:
        """Warn on the main rank of adapters that no rank saw a gradient of. A collective.

        Returns False if no rank has run a micro-step yet.
        """
        mine = [adapter for adapter in self._adapters if adapter]
        everyone = self._world.all_gather_object((mine, self._received, self._has_looked))
        received = set().union(*(theirs for _, theirs, _ in everyone))
        idle = [
            layer for layer in dict.fromkeys(x for layers, _, _ in everyone for x in layers) if layer not in received
        ]
        has_looked = any(looked for _, _, looked in everyone)
        if has_looked and idle and self._world.is_main:
            more = f" and {len(idle) - _SHOWN} more" if len(idle) > _SHOWN else ""
            warnings.warn(
                "adapters received no gradient in the first update: "
                f"{', '.join(idle[:_SHOWN])}{more}. They learn only from updates whose loss depends on them: are their "
                "layers used, and are they active and not merged? (An expert may have had no tokens yet.)",
                RuntimeWarning,
                stacklevel=2,
            )
        return has_looked


def _adapter_of(name: str) -> str:
    """Return the layer and the adapter of a parameter, for messages; "" if it is no adapter's.

    >>> _adapter_of("h.0.attn.lora_A.default.weight")
    "'default' of 'h.0.attn'"
    """
    layer, is_adapter, rest = name.partition(".lora_")
    adapter = rest.split(".")[1] if rest.count(".") else ""
    return f"{adapter!r} of {layer!r}" if is_adapter else ""


def adapter_check(model: Any, parameters: Sequence[Any], world: ProcessGroup) -> Optional[AdapterCheck]:
    """Return the check of a model with adapters, or None."""
    return AdapterCheck(model, parameters, world) if has_adapters(model) else None
