"""Finds the model that a loss function uses, because its class defines the loss weight.

make_train_step and evaluate call it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Callable, Optional

from mindnlp_dp.data.loss_weight import LossWeigher, loss_mean

# The number of references from the function to its model, such as: bound method, its object, an attribute of that.
_MAX_DEPTH = 3


def model_of(function: Callable[..., Any], parameters: Any = None) -> Optional[Any]:
    """Return the model that a function refers to: in its closure, its globals, its object or its bound arguments.

    Args:
        function: the function that computes the loss.
        parameters: parameters of which the model must have at least one; None accepts any model.

    Returns:
        The model, or None. If there are several: one with a known loss, then the one with the most parameters.
    """
    wanted = None if parameters is None else {id(parameter) for parameter in parameters}
    models: dict[int, tuple[int, Any]] = {}
    for each in _referred_to(function, _MAX_DEPTH):
        if hasattr(each, "named_parameters") and not isinstance(each, type):
            own = {id(parameter) for parameter in each.parameters()}
            if own and (wanted is None or own & wanted):
                models[id(each)] = len(own), each
    # A function may refer to a model and to its base model; the loss is that of the one with a known loss.
    ranked = sorted(models.values(), key=lambda found: (loss_mean(found[1]) is not None, found[0]))
    return ranked[-1][1] if ranked else None


def modules_of(function: Callable[..., Any], parameters: Any) -> list[Any]:
    """Return all models and cells that a function refers to and that have at least one of ``parameters``."""
    wanted = {id(parameter) for parameter in parameters}
    found: dict[int, Any] = {}
    for each in _referred_to(function, _MAX_DEPTH):
        if isinstance(each, type):
            continue
        if hasattr(each, "named_parameters"):
            own = each.parameters()
        elif hasattr(each, "parameters_and_names"):
            own = (parameter for _, parameter in each.parameters_and_names())
        else:
            continue
        if any(id(parameter) in wanted for parameter in own):
            found[id(each)] = each
    return list(found.values())


def is_module(value: Any) -> bool:
    """Return whether this is a model of MindNLP or a cell, not a class of them."""
    return not isinstance(value, type) and (hasattr(value, "named_parameters") or hasattr(value, "cells_and_names"))


def _referred_to(value: Any, depth: int) -> Iterator[Any]:
    yield value
    if depth == 0:
        return
    found: list[Any] = []
    if isinstance(value, functools.partial):
        found = [value.func, *value.args, *value.keywords.values()]
    elif inspect.ismethod(value):
        found = [value.__self__, value.__func__]
    elif inspect.isfunction(value):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        names = [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
        found = [*cells, *names, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif not isinstance(value, type) and not inspect.ismodule(value) and not hasattr(value, "named_parameters"):
        # A user's object, such as a trainer, may have the model as an attribute.
        found = list(getattr(value, "__dict__", {}).values())
    for each in found:
        yield from _referred_to(each, depth - 1)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


class BatchWeigher:
    """Computes the loss weights of the batches that a function is called with, in any form.

    Args:
        function: the function that computes the loss; its argument names are the column names of a tuple batch.
        model: the model whose class defines what the loss is the mean of; None if unknown.
    """

    def __init__(self, function: Callable[..., Any], model: Optional[Any]) -> None:
        mean = None if model is None else loss_mean(model)
        whose = "this function's loss" if model is None else f"the loss of {type(model).__name__}"
        self._weigher = LossWeigher(mean, whose)
        self._names = _argument_names(function)

    def __call__(self, batch: Any) -> float:
        """Return the weight of a batch's loss in the mean over ranks and micro-batches."""
        if not isinstance(batch, Mapping) and isinstance(batch, (tuple, list)) and len(batch) <= len(self._names):
            batch = dict(zip(self._names, batch))
        return self._weigher(batch)


def _argument_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of the function's positional arguments; an empty list if it has no readable signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
