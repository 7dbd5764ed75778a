"""This module lists the parameters and buffers of a MindNLP module or a cell by name; every folder above uses it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def named_weights(model: Any) -> list[tuple[str, Any]]:
    """Return ``(name, tensor)`` of all parameters, frozen ones too, then of the persistent buffers, each tensor once.

    ``model`` is a MindNLP module, a ``mindspore.nn.Cell``, or such pairs. Non-persistent buffers, such as rotary
    embedding tables that grow with the longest sequence, are left out: they are local to each process.
    """
    return _each_once(_pairs(model))


def named_buffers(model: Any) -> list[tuple[str, Any]]:
    """Return the named tensors that a forward pass may change and that a state dict contains.

    These are the persistent buffers of a MindNLP module, or the non-trainable parameters of a ``mindspore.nn.Cell``:
    a cell keeps the running statistics of batch normalization in such parameters.
    """
    if hasattr(model, "named_parameters"):
        return _each_once(_persistent_buffers(model))
    return _each_once((name, w) for name, w in _pairs(model) if not getattr(w, "requires_grad", True))


def transient_buffers(model: Any) -> list[tuple[str, Any]]:
    """Return the non-persistent buffers of a MindNLP module, which no state dict contains."""
    persistent = {id(buffer) for _, buffer in _persistent_buffers(model)}
    every = model.named_buffers() if hasattr(model, "named_buffers") else ()
    return _each_once((name, buffer) for name, buffer in every if id(buffer) not in persistent)


def _persistent_buffers(model: Any, **options: Any) -> list[tuple[str, Any]]:
    if not hasattr(model, "named_buffers"):
        return []
    transient: set[str] = set()
    # MindSpore's cells have buffers since 2.10, and call their modules cells.
    modules = model.cells_and_names() if hasattr(model, "cells_and_names") else model.named_modules()
    for prefix, module in modules:
        names = getattr(module, "_non_persistent_buffers_set", ())
        transient |= {f"{prefix}.{name}" if prefix else name for name in names}
    return [(name, buffer) for name, buffer in model.named_buffers(**options) if name not in transient]


def _pairs(model: Any) -> list[tuple[str, Any]]:
    if hasattr(model, "named_parameters"):
        return [*model.named_parameters(), *_persistent_buffers(model)]
    if hasattr(model, "parameters_and_names"):
        return [*model.parameters_and_names(), *_persistent_buffers(model)]
    return list(model)


def _each_once(pairs: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    seen: set[int] = set()
    return [(name, w) for name, w in pairs if w is not None and not (id(w) in seen or seen.add(id(w)))]  # type: ignore[func-returns-value]


def all_names(model: Any) -> dict[str, Any]:
    """Return all parameters and persistent buffers by name; a tensor that has several names appears under each."""
    if not hasattr(model, "named_parameters"):
        return dict(named_weights(model))
    pairs = [*model.named_parameters(remove_duplicate=False), *_persistent_buffers(model, remove_duplicate=False)]
    return {name: weight for name, weight in pairs if weight is not None}
