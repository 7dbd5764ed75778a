"""Plans how a model is fully sharded: which modules are units, and which weights each unit gathers.

:func:`~mindnlp_dp.parallelize` applies the edits on a mesh with the axis "fsdp".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from mindnlp_dp.parallel.fully_sharded.unit_exchange import UnitWeight
from mindnlp_dp.parallel.fully_sharded.units import Unit, Units, calling
from mindnlp_dp.parallel.model_edits import Edit, ModelIndex
from mindnlp_dp.parallel.placement import Placements
from mindnlp_dp.runtime.arrays import dtype_name
from mindnlp_dp.runtime.recompute import RecomputeLayers, check_recompute, has_recomputed_layers, layers_of

# Methods that read weights without the forward pass that gathers them, those that return or write them, and those that
# change them.
_READ = ("generate", "get_delta_weight")
_WRITE = ("save_pretrained", "state_dict")
_CHANGE = (
    "load_state_dict",
    "merge_adapter",
    "unmerge_adapter",
    "merge_and_unload",
    "unload",
    "resize_token_embeddings",
)
# The axes of a mesh on which weights are gathered, and those on which they are cast.
_WITH_SHARDS = ("dp", "ep", "fsdp", "sp", "tp")
_WITH_CASTS = ("dp", "fsdp", "sp")
# Those of a layer with adapters; other modules may have methods of these names.
_MERGE = ("merge", "unmerge")


def fully_sharded_edits(
    index: ModelIndex, placements: Placements, units: Units, layers: RecomputeLayers = True
) -> list[Edit]:
    """Return the edits that shard all weights; ``layers`` names the units as in :func:`~mindnlp_dp.enable_recompute`.

    ``placements`` are those after the edits of other axes, whose shards are sharded again. A weight with fewer elements
    than there are ranks stays on every rank. On a mesh without the axis "fsdp", units only cast their weights to the
    type in which the model computes.

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
    if within := next((name for name in chosen if "experts" in name.split(".")), None):
        raise ValueError(
            f"units={layers!r} names {within}, and a rank calls only the experts that get tokens, while others would "
            "wait for it; name whole layers"
        )
    unit_of = {id(m): name for name, layer in chosen.items() for m in layer.modules()}
    paths: dict[int, list[tuple[str, str]]] = {}
    for path, module in index.unique():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                paths.setdefault(id(parameter), []).append((path, attribute))
    weights: dict[str, list[UnitWeight]] = {"": [], **{name: [] for name in chosen}}
    elsewhere: list[str] = []
    for places in paths.values():
        name = ".".join(filter(None, places[0]))
        placement = placements[name]
        shape = placements.shape_gathered(placement)
        # The first part over "tp" is the smallest, and ranks must agree.
        smallest = shape if placement.shard is None else placement.shard.shape(placement.shape, 0, mesh.sizes["tp"])
        is_sharded = 1 < mesh.sizes["fsdp"] <= math.prod(smallest)
        if not placements.is_here(placement):
            elsewhere += [name] * is_sharded
        elif is_sharded or units.precision is not None:
            # A tied weight of several units is in the root unit.
            found = {unit_of.get(id(index.modules[path]), "") for path, _ in places}
            owner = found.pop() if len(found) == 1 else ""
            weights[owner].append(UnitWeight(name, shape, places, is_sharded, placement.summed_over))
    edits = []
    for name, of_unit in weights.items():
        # The model's forward pass is that of the root unit, also if all weights are in layers.
        if of_unit or not name:
            unit = units.add(name, of_unit)
            # Every rank knows how the experts of other ranks are sharded.
            sharded = [weight.name for weight in of_unit if weight.is_sharded] + ([] if name else elsewhere)
            attributes = {} if name or units.precision is None else {"mixed_precision": units.precision}
            changes = {weight: {"is_fully_sharded": True} for weight in sharded}
            edits.append(Edit((name,), forward=calling(unit.forward), attributes=attributes, placements=changes))
    are_parts = any(mesh.sizes[axis] > 1 for axis in ("tp", "ep"))
    return edits + _guards(index, units, _refuse_to_write if are_parts else _call_in_full)


def _guards(index: ModelIndex, units: Units, write: Callable[..., Any]) -> list[Edit]:
    """Return the edits with which a module raises an error where its shards would be used as if they were weights.

    ``write`` is called in place of methods that return or write weights.
    """
    if not any(weight.is_sharded for unit in units.by_name.values() for weight in unit.weights):
        generate = {"generate": calling(_in_float32, units)}
        return [
            Edit((name,), methods=generate, is_shown=False)
            for name, module in index.unique()
            if hasattr(module, "generate")
        ]
    units_of: dict[int, list[Unit]] = {}
    for unit in units.by_name.values():
        sharded = [weight for weight in unit.weights if weight.is_sharded]
        for path in dict.fromkeys(path for weight in sharded for path, _ in weight.paths):
            units_of.setdefault(id(index.modules[path]), []).append(unit)
    # The kernel of a layer with adapters is for layers that have their own forward methods.
    tuned = [module for _, module in index.unique() if hasattr(module, "get_delta_weight")]
    adapted = {id(module) for layer in tuned for module in layer.modules() if module is not layer}
    edits = []
    for name, module in index.unique():
        within = list(dict.fromkeys(unit for m in module.modules() for unit in units_of.get(id(m), ())))
        if not within:
            continue
        merges = _MERGE if hasattr(module, "get_delta_weight") else ()
        kinds = ((_READ, _call_in_full), (_WRITE, write), ((*_CHANGE, *merges), _refuse))
        methods = {
            method: calling(guard, units, within, f"{name or 'the model'}: {method}()")
            for names, guard in kinds
            for method in names
            if hasattr(module, method)
        }
        own = within if merges else units_of.get(id(module), [])
        if name in units.by_name or id(module) in adapted:
            own = []
        forward = calling(_call_in_full, units, own, f"{name}: forward()") if own else None
        edits.append(Edit((name,), forward=forward, methods=methods, is_shown=False))
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


def _refuse_to_write(units: Units, needed: Sequence[Unit], what: str, *_: Any, **__: Any) -> None:
    raise RuntimeError(
        f"{what}: with tp and ep, rank {units.group.label()} has parts of the weights also when shards are gathered; "
        "save the model with the Trainer, or FunctionalRun, on every rank"
    )


def check_units(model: Any, placements: Placements, *, is_cast: bool) -> None:
    """Raise ValueError if units cannot be combined with an axis of the mesh, or the model cannot be sharded so."""
    mesh, config = placements.mesh, getattr(model, "config", None)
    what, known = ("param_dtype", _WITH_CASTS) if is_cast else ("fsdp", _WITH_SHARDS)
    others = [f"{axis}={size}" for axis, size in mesh.sizes.items() if size > 1 and axis not in known]
    if others:
        raise ValueError(
            f"{what} is combined with {', '.join(known)} only so far, got {mesh}; leave out {', '.join(others)}"
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
