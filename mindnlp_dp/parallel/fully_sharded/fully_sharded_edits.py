"""Plans how a model is fully sharded: which modules are units, and which weights each unit gathers.

:func:`~mindnlp_dp.parallelize` applies the edits on a mesh with the axis "fsdp".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from mindnlp_dp.parallel.fully_sharded.unit_exchange import UnitWeight
from mindnlp_dp.parallel.fully_sharded.units import Unit, Units, calling
from mindnlp_dp.parallel.model_edits import Edit, ModelIndex
from mindnlp_dp.parallel.placement import Placements
from mindnlp_dp.runtime.arrays import dtype_name
from mindnlp_dp.runtime.recompute import RecomputeLayers, check_recompute, has_recomputed_layers, layers_of
from mindnlp_dp.runtime.sharded_array import FlatShard

# Methods that read weights without the forward pass that gathers them, and those that change them.
_READ = ("generate", "save_pretrained", "state_dict", "get_delta_weight")
_CHANGE = (
    "load_state_dict",
    "merge_adapter",
    "unmerge_adapter",
    "merge_and_unload",
    "unload",
    "resize_token_embeddings",
)
# The axes of a mesh on which weights are gathered or cast.
_COMBINED = ("dp", "fsdp", "sp")
# Those of a layer with adapters; other modules may have methods of these names.
_MERGE = ("merge", "unmerge")


def fully_sharded_edits(
    index: ModelIndex, placements: Placements, units: Units, layers: RecomputeLayers = True
) -> list[Edit]:
    """Return the edits that shard all weights; ``layers`` names the units as in :func:`~mindnlp_dp.enable_recompute`.

    A weight with fewer elements than there are ranks stays on every rank. On a mesh without the axis "fsdp", units only
    cast their weights to the type in which the model computes.

    Raises:
        ValueError: the model has no such layers.
    """
    mesh, model = placements.mesh, index.model
    try:
        chosen = layers_of(model, check_recompute(layers))
    except ValueError as error:
        raise ValueError(
            f"{type(model).__name__} has no layers units={layers!r} that gather their weights in turn; call mindnlp_dp."
            "fully_shard(model, units=...) with patterns of module names, or False to gather all weights at once"
        ) from error
    unit_of = {id(m): name for name, layer in chosen.items() for m in layer.modules()}
    places: dict[int, list[tuple[Any, str]]] = {}
    names: dict[int, str] = {}
    parameters: dict[int, Any] = {}
    for name, module in index.unique():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                parameters[id(parameter)] = parameter
                names.setdefault(id(parameter), f"{name}.{attribute}" if name else attribute)
                places.setdefault(id(parameter), []).append((module, attribute))
    weights: dict[str, list[UnitWeight]] = {"": [], **{name: [] for name in chosen}}
    for number, parameter in parameters.items():
        is_sharded = 1 < mesh.sizes["fsdp"] <= math.prod(parameter.shape)
        if is_sharded or units.precision is not None:
            # A tied weight of several units is in the root unit.
            found = {unit_of.get(id(module), "") for module, _ in places[number]}
            owner = found.pop() if len(found) == 1 else ""
            shape = tuple(parameter.shape)
            weights[owner].append(UnitWeight(names[number], shape, tuple(places[number]), is_sharded))
    edits = []
    for name, of_unit in weights.items():
        # The model's forward pass is that of the root unit, also if all weights are in layers.
        if of_unit or not name:
            unit = units.add(name, of_unit)
            changes = {weight.name: {"shard": FlatShard(), "axis": "fsdp"} for weight in of_unit if weight.is_sharded}
            attributes = {} if name or units.precision is None else {"mixed_precision": units.precision}
            forward = calling(unit.forward, index.modules[name])
            edits.append(Edit((name,), forward=forward, attributes=attributes, placements=changes))
    return edits + _guards(index, units)


def _guards(index: ModelIndex, units: Units) -> list[Edit]:
    """Return the edits with which a module raises an error where its shards would be used as if they were weights."""
    if not any(weight.is_sharded for unit in units.by_name.values() for weight in unit.weights):
        generating = [(name, module) for name, module in index.unique() if hasattr(module, "generate")]
        return [
            Edit(
                (name,), attributes={"generate": functools.partial(_in_float32, units, module.generate)}, is_shown=False
            )
            for name, module in generating
        ]
    units_of: dict[int, list[Unit]] = {}
    for unit in units.by_name.values():
        sharded = [weight for weight in unit.weights if weight.is_sharded]
        for module in {id(module): module for weight in sharded for module, _ in weight.places}.values():
            units_of.setdefault(id(module), []).append(unit)
    # The kernel of a layer with adapters is for layers that have their own forward methods.
    tuned = [module for _, module in index.unique() if hasattr(module, "get_delta_weight")]
    adapted = {id(module) for layer in tuned for module in layer.modules() if module is not layer}
    edits = []
    for name, module in index.unique():
        within = list(dict.fromkeys(unit for m in module.modules() for unit in units_of.get(id(m), ())))
        if not within:
            continue
        merges = _MERGE if hasattr(module, "get_delta_weight") else ()
        guards = [(method, _call_in_full) for method in _READ] + [(method, _refuse) for method in (*_CHANGE, *merges)]
        attributes = {
            method: functools.partial(guard, units, within, f"{name or 'the model'}: {method}()", stock)
            for method, guard in guards
            if (stock := getattr(module, method, None)) is not None
        }
        own = within if merges else units_of.get(id(module), [])
        if name in units.by_name or id(module) in adapted:
            own = []
        forward = calling(_call_in_full, units, own, f"{name}: forward()") if own else None
        edits.append(Edit((name,), forward=forward, attributes=attributes, is_shown=False))
    return edits


def _call_in_full(
    units: Units, needed: Sequence[Unit], what: str, method: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a method that needs the weights of these units; raise RuntimeError if they are not gathered."""
    missing = next((unit for unit in needed if not unit.is_in_full), None)
    if missing is not None:
        raise RuntimeError(
            f"{what} needs weights of which rank {units.group.label()} has shards, and which are gathered within the "
            f"forward pass of {missing.name or 'the model'}; call it on every rank within mindnlp_dp.gathered(model), "
            "or load a checkpoint in one process"
        )
    return method(*args, **kwargs)


def _in_float32(units: Units, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method that may run parts of the model, whose inputs nothing casts, with the weights in float32."""
    with units.held():
        return method(*args, **kwargs)


def _refuse(units: Units, needed: Sequence[Unit], what: str, *_: Any, **__: Any) -> None:
    raise RuntimeError(
        f"{what} would change weights of which rank {units.group.label()} has shards; call it before fully_shard(), or "
        "save the model and call it in one process (mindnlp-dp export --merge-lora merges adapters)"
    )


def check_units(model: Any, placements: Placements) -> None:
    """Raise ValueError if the mesh has other axes than "dp", "fsdp" and "sp", or the model cannot be sharded so."""
    mesh, config = placements.mesh, getattr(model, "config", None)
    others = [f"{axis}={size}" for axis, size in mesh.sizes.items() if size > 1 and axis not in _COMBINED]
    if others:
        raise ValueError(
            f"fsdp and param_dtype are combined with dp and sp only so far, got {mesh}; leave out {', '.join(others)}"
        )
    if has_recomputed_layers(model):
        raise ValueError("shard the model first, and call enable_recompute() or gradient_checkpointing_enable() after")
    for name, parameter in model.named_parameters():
        if dtype_name(parameter) != "float32":
            raise ValueError(
                f"{name!r} is of type {dtype_name(parameter)}, and a fully sharded model, or one with param_dtype, has "
                "weights of type float32; load it with ms_dtype=mindspore.float32, or leave out zero_stage=3, "
                "param_dtype, bf16 and fp16"
            )
    settings = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop") if mesh.sizes["fsdp"] > 1 else ()
    for setting in settings:
        if getattr(config, setting, 0):
            raise ValueError(
                f"{setting}={getattr(config, setting)} leaves out layers on some ranks, for whose weights the others "
                f"would wait; set {setting}=0"
            )
