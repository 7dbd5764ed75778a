"""Which model a function computes with, whose class says what the loss is; called by make_train_step and evaluate."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Callable, Optional

from .loss_weight import LossWeigher, loss_mean

# How far from the function its model may be: a bound method's object, and that object's attribute.
_MAX_DEPTH = 3


def model_of(function: Callable[..., Any], parameters: Any = None) -> Optional[Any]:
    """Return the model that a function refers to: in its closure, its globals, its object or its bound arguments.

    Args:
        parameters: the model must have one of them; None: any model will do.

    Returns:
        The one with the most parameters, where there are several; None where there is none.
    """
    wanted = None if parameters is None else {id(parameter) for parameter in parameters}
    models: dict[int, tuple[int, Any]] = {}
    for each in _referred_to(function, _MAX_DEPTH):
        if hasattr(each, "named_parameters") and not isinstance(each, type):
            own = {id(parameter) for parameter in each.parameters()}
            if own and (wanted is None or own & wanted):
                models[id(each)] = len(own), each
    # A model beside its base model: the one that has a known loss comes first.
    ranked = sorted(models.values(), key=lambda found: (loss_mean(found[1]) is not None, found[0]))
    return ranked[-1][1] if ranked else None


def modules_of(function: Callable[..., Any], parameters: Any) -> list[Any]:
    """Return all models and cells that a function refers to and that have one of ``parameters``, each once."""
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
        # An object of the user's, such as a trainer, which has the model as an attribute.
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
    """Weighs the losses of batches of any form that ``function`` is called with.

    Args:
        model: whose class says what the loss is a mean of; None where that is not known.
    """

    def __init__(self, function: Callable[..., Any], model: Optional[Any]) -> None:
        mean = None if model is None else loss_mean(model)
        whose = "this function's loss" if model is None else f"the loss of {type(model).__name__}"
        self._weigher = LossWeigher(mean, whose)
        self._names = _argument_names(function)

    def __call__(self, batch: Any) -> float:
        """Return what the loss of a batch weighs in the mean over ranks and micro batches."""
        if not isinstance(batch, Mapping) and isinstance(batch, (tuple, list)) and len(batch) <= len(self._names):
            batch = dict(zip(self._names, batch))
        return self._weigher(batch)


def _argument_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a tuple is passed as; none where they cannot be told."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
