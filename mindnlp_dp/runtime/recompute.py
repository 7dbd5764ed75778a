"""Recomputes the activations of layers in the backward pass instead of keeping them (gradient checkpointing).

The Trainers, :func:`~mindnlp_dp.make_train_step`, :func:`~mindnlp_dp.parallelize` and a model's own
``gradient_checkpointing_enable()`` call :func:`enable_recompute`. Only the inputs of such a layer are kept; its
backward pass first runs its forward pass again (Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016).
The gradients are the same to the bit, because the second pass draws the same random numbers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Optional, TypeVar, Union

from mindnlp_dp.runtime.arrays import dtype_name, from_host, set_weight, to_host
from mindnlp_dp.runtime.random_state import RandomState

T = TypeVar("T")

# True: all layers; a number n: every n-th; patterns: the modules with these names.
RecomputeLayers = Union[bool, int, str, Sequence[str]]

_LISTS, _SEQUENCES = {"ModuleList", "CellList"}, {"Sequential", "SequentialCell"}
_MOST_NAMED = 6
# What batch normalization updates in its forward pass, in MindNLP and in MindSpore.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked", "moving_mean", "moving_variance")


def enable_recompute(model: Any, layers: RecomputeLayers = True) -> list[str]:
    """Recompute the activations of these layers while the model trains, and of no others; return the layers' names.

    Args:
        model: a model of MindNLP, or a cell that runs in PyNative mode.
        layers: True: all layers, which are the members of the model's lists of layers (of several modules each, if
            there are such). A number n: every n-th member of
            each list, beginning with the first; ``"2"`` means the same as 2. One or several shell patterns: the modules
            with these names; the beginning of a name may be left out, as in ``"encoder.layer.[0-5]"``. False: none.

    Raises:
        ValueError: ``layers`` is out of range, the model has no such layer, or MindSpore is older than 2.8.
    """
    layers = check_recompute(layers)
    modules = _named_modules(model)
    chosen = layers_of(model, layers)
    _check_units(model, chosen)
    for module in modules.values():
        if hasattr(module, "forward_in_training"):
            module.forward_in_training = None
    for name, module in modules.items():
        if name in chosen:
            _replace_forward(module, _forward)
        elif any(layer.startswith(f"{name}." if name else "") for layer in chosen) and _has_cache(module):
            _replace_forward(module, _forward_without_cache)
    return list(chosen)


def layers_of(model: Any, layers: RecomputeLayers) -> dict[str, Any]:
    """Return the modules that :func:`enable_recompute` would recompute, by name."""
    return {} if layers is False else _chosen(model, _named_modules(model), layers)


def has_recomputed_layers(model: Any) -> bool:
    """Return whether :func:`enable_recompute` is in effect for a layer of the model."""
    return any(getattr(module, "forward_in_training", None) for module in _named_modules(model).values())


def check_recompute(layers: RecomputeLayers) -> RecomputeLayers:
    """Return ``layers``, "2" as a number; raise ValueError for other values, or if MindSpore is too old."""
    if isinstance(layers, str) and layers.isdecimal():
        layers = int(layers)
    is_text = isinstance(layers, Sequence) and all(isinstance(pattern, str) and pattern for pattern in layers)
    if not (isinstance(layers, bool) or (isinstance(layers, int) and layers > 0) or (is_text and layers)):
        raise ValueError(
            f"the layers to recompute are True, a number n of at least 1 (every n-th), or patterns of names; "
            f"got {layers!r}"
        )
    if layers is not False and not _options():
        raise ValueError("recomputing activations needs MindSpore 2.8 or later")
    return layers


def check_checkpointing_options(options: Optional[Mapping[str, Any]]) -> None:
    """Raise ValueError for ``gradient_checkpointing_kwargs`` that have no meaning here.

    ``use_reentrant`` may have either value, because the gradients are the same.
    """
    unknown = sorted(set(options or ()) - {"use_reentrant"})
    if unknown:
        raise ValueError(f"gradient_checkpointing_kwargs takes use_reentrant only, got {', '.join(unknown)}")


@functools.cache
def _options() -> dict[str, bool]:
    """Return the options of ``mindspore.recompute``; empty if it cannot be used."""
    import mindspore

    known = inspect.signature(mindspore.recompute).parameters
    if "use_reentrant" not in known:
        return {}
    # The reentrant form takes cells only, and drops gradients of inputs in tuples. Stopping early raises an error
    # through MindSpore's own operators, which they do not survive.
    return {"use_reentrant": False, **({"early_stop": False} if "early_stop" in known else {})}


def _replace_forward(module: Any, ours: Callable[..., Any]) -> None:
    """Let a module call ``ours`` with itself and its own forward method in training."""
    if not hasattr(module, "forward_in_training"):
        # MindSpore's cells call their forward pass "construct".
        name = "forward" if hasattr(module, "forward") else "construct"
        # The class may be replaced later, as convert_sync_batchnorm does, and then its forward pass, too.
        stock = vars(module).get(name) or functools.partial(_forward_of_class, module, name)
        replaced = functools.partial(_run, module, stock)
        setattr(module, name, functools.update_wrapper(replaced, getattr(module, name)))
    module.forward_in_training = ours


def _forward_of_class(module: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(type(module), name)(module, *args, **kwargs)


def _has_cache(module: Any) -> bool:
    return "use_cache" in inspect.signature(getattr(module, "forward", module.__call__)).parameters


def _run(module: Any, stock: Any, *args: Any, **kwargs: Any) -> Any:
    from mindnlp_dp.runtime.pynative_executor import pynative_executor

    if module.forward_in_training is None or not module.training or not pynative_executor.grad_flag():
        return stock(*args, **kwargs)
    return module.forward_in_training(module, stock, *args, **kwargs)


def _forward_without_cache(module: Any, stock: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a model without its cache: a layer that runs twice would add its keys and values to it twice."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    bound.arguments["use_cache"] = False
    return stock(*bound.args, **bound.kwargs)


def _forward(layer: Any, stock: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a layer's ``stock`` forward pass, and keep only its inputs."""
    import mindspore

    return mindspore.recompute(_Pass(layer, stock, args, kwargs), *args, **_options())


class _Pass:
    """A forward pass of a layer, which draws the same random numbers when it runs again."""

    def __init__(self, layer: Any, stock: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._layer, self._stock, self._kwargs = layer, stock, kwargs
        # The caller may change its lists and caches before the layer runs again.
        self._containers = {number: copied for number, x in enumerate(args) if (copied := _copied(x)) is not x}
        self._kwargs_again = _copied(kwargs)
        self._state: Optional[RandomState] = None

    def __call__(self, *args: Any) -> Any:
        if self._state is None:
            self._state = RandomState.current()
            return self._stock(*args, **self._kwargs)
        args = tuple(self._containers.get(number, x) for number, x in enumerate(args))
        from mindnlp_dp.runtime.pynative_executor import recording

        # A backward pass runs, in which MindSpore 2.8 leaves it to the caller to record operators.
        with recording(True), self._state.replayed(), _unchanged_statistics(self._layer), _recomputing():
            return self._stock(*args, **self._kwargs_again)


_passes = 0


def is_recomputing() -> bool:
    """Return whether a layer's forward pass runs again now, within a backward pass."""
    return _passes > 0


@contextlib.contextmanager
def _recomputing() -> Iterator[None]:
    global _passes
    _passes += 1
    try:
        yield
    finally:
        _passes -= 1


def _copied(x: Any) -> Any:
    """Return copies of lists, dictionaries and caches of keys and values, with the same tensors; all else as it is."""
    if type(x) in (list, tuple):
        return type(x)(_copied(each) for each in x)
    if type(x) is dict:
        return {key: _copied(value) for key, value in x.items()}
    if "Cache" in type(x).__name__:
        new = copy.copy(x)
        vars(new).update({name: _copied(value) for name, value in vars(x).items()})
        return new
    return x


@contextlib.contextmanager
def _unchanged_statistics(layer: Any) -> Iterator[None]:
    """Put the running statistics of batch normalization back after the block."""
    before = []
    for module in _named_modules(layer).values():
        for name in _STATISTICS:
            if (statistic := getattr(module, name, None)) is not None:
                before.append((module, name, statistic, to_host(statistic).copy()))
    try:
        yield
    finally:
        for module, name, statistic, value in before:
            set_weight(statistic, from_host(value, dtype_name(statistic)))
            if getattr(module, name) is not statistic:
                # MindNLP counts batches in a new tensor each time.
                setattr(module, name, statistic)


def _check_units(model: Any, chosen: dict[str, Any]) -> None:
    """Raise ValueError if a layer is not a unit of a fully sharded model, whose weights are gathered together."""
    known = (getattr(getattr(model, name, None), "units", None) for name in ("parallel", "mixed_precision"))
    units = next(filter(None, known), None)
    if units is None:
        return
    for name in chosen:
        if name not in units.by_name:
            raise ValueError(
                f"{name} cannot be recomputed: this model is fully sharded, or casts its weights, and gathers those of "
                f"{', '.join(list(units.by_name)[1:_MOST_NAMED])}, ... as units; recompute these, or pass units="
            )


def _chosen(model: Any, modules: dict[str, Any], layers: RecomputeLayers) -> dict[str, Any]:
    # Where no list has layers of several modules, such as an encoder's, its members may be single ones.
    found_in_lists = list(_members_of_lists(modules, _is_composite)) or list(_members_of_lists(modules, _has_weights))
    members = _outermost({name: (layer, number) for name, layer, number in found_in_lists})
    if isinstance(layers, int):
        if not members:
            raise ValueError(
                f"{type(model).__name__} has no list of layers to recompute; name them by a pattern: pass "
                "recompute_layers to DataParallelArguments, or call mindnlp_dp.enable_recompute(model, pattern)"
            )
        return {name: layer for name, (layer, number) in members.items() if number % layers == 0}
    candidates = {name: module for name, module in modules.items() if _has_weights(module)}
    # Other stages of a pipeline have the layers that this one has not.
    weights = getattr(getattr(model, "parallel", None), "placements", ())
    elsewhere = {name.rsplit(".", depth)[0] for name in weights for depth in range(1, name.count(".") + 1)}
    found = {}
    for pattern in (layers,) if isinstance(layers, str) else layers:
        matching = {name for name in {*candidates, *elsewhere} if _matches(name, pattern)}
        if not matching:
            known = ", ".join(list(members)[:_MOST_NAMED]) + ", ..." * (len(members) > _MOST_NAMED)
            known = known or "no list of layers"
            raise ValueError(f"no layer with weights of {type(model).__name__} is named {pattern!r}; it has {known}")
        found.update({name: module for name, module in candidates.items() if name in matching})
    found = _outermost(found)
    for name, module in found.items():
        if any(getattr(each, "is_stage_boundary", False) for each in _named_modules(module).values()):
            raise ValueError(f"{name} contains layers of several stages of the pipeline; name layers within it")
    return found


def _matches(name: str, pattern: str) -> bool:
    return bool(name) and (fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}"))


def _members_of_lists(modules: dict[str, Any], is_layer: Callable[[Any], bool]) -> Iterator[tuple[str, Any, int]]:
    """Yield the name, the module, and the number in its list of each member that is a layer."""
    for name, module in modules.items():
        if _is_list(module):
            for number, (member, layer) in enumerate(_members(name, modules)):
                if not _is_list(layer) and is_layer(layer):
                    yield member, layer, number


def _members(name: str, modules: dict[str, Any]) -> list[tuple[str, Any]]:
    prefix = f"{name}." if name else ""
    return [(n, m) for n, m in modules.items() if n and n.startswith(prefix) and "." not in n.removeprefix(prefix)]


def _is_list(module: Any) -> bool:
    """Return whether a module only holds others, or runs others that are layers, one after another."""
    names = {base.__name__ for base in type(module).__mro__}
    if names & _LISTS:
        return True
    return bool(names & _SEQUENCES) and any(_is_composite(m) for _, m in _members("", _named_modules(module)))


def _is_composite(module: Any) -> bool:
    return len(_named_modules(module)) > 1 and _has_weights(module)


def _has_weights(module: Any) -> bool:
    return any(True for _ in (module.parameters() if hasattr(module, "parameters") else module.get_parameters()))


def _outermost(layers: dict[str, T]) -> dict[str, T]:
    """Leave out layers within other ones."""
    return {name: x for name, x in layers.items() if not any(name.startswith(f"{other}.") for other in layers)}


def _named_modules(model: Any) -> dict[str, Any]:
    """Return the submodules of a MindNLP module or a cell, and itself, by name."""
    return dict(model.named_modules() if hasattr(model, "named_modules") else model.cells_and_names())
