"""Finds the LoRA adapters of PEFT (``mindnlp.peft``, or ``peft`` with MindNLP 0.5) in a model.

The code that shards, checkpoints and trains models calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def has_adapters(model: Any) -> bool:
    """Return whether PEFT has put adapters into this model."""
    return hasattr(model, "peft_config")


def base_model(model: Any) -> tuple[str, Any]:
    """Return the name and the module of the model that PEFT wraps; "" and the model itself if it has no adapters."""
    if not has_adapters(model):
        return "", model
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return next((name, module) for name, module in model.named_modules() if module is inner)


def is_lora(module: Any) -> bool:
    """Return whether a module is a layer with LoRA adapters."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def lora_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the module of each layer with LoRA adapters."""
    return ((name, module) for name, module in model.named_modules() if is_lora(module))
