"""Plans how a model is fully sharded: which modules are units, and which weights each unit gathers.

:func:`~mindnlp_dp.parallelize` applies the edits on a mesh with the axis "fsdp".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from mindnlp_dp.parallel.fully_sharded.units import Units, UnitWeight, with_gathered_weights
from mindnlp_dp.parallel.model_edits import Edit, ModelIndex
from mindnlp_dp.parallel.placement import Placements
from mindnlp_dp.runtime.arrays import dtype_name
from mindnlp_dp.runtime.recompute import RecomputeLayers, check_recompute, has_recomputed_layers, layers_of
from mindnlp_dp.runtime.sharded_array import FlatShard

# What reads all weights at once, without a forward pass.
_READS_ALL = ("generate", "save_pretrained", "merge_adapter", "merge_and_unload", "unload", "resize_token_embeddings")


def fully_sharded_edits(
    index: ModelIndex, placements: Placements, units: Units, layers: RecomputeLayers = True
) -> list[Edit]:
    """Return the edits that shard all weights; ``layers`` names the units as in :func:`~mindnlp_dp.enable_recompute`.

    A weight with fewer elements than there are ranks stays on every rank.

    Raises:
        ValueError: the mesh has other axes than "dp" and "fsdp", or the model cannot be sharded so.
    """
    mesh, model = placements.mesh, index.model
    _check(model, placements)
    chosen = layers_of(model, check_recompute(layers))
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
        if math.prod(parameter.shape) >= mesh.sizes["fsdp"]:
            # A tied weight of several units is in the root unit.
            found = {unit_of.get(id(module), "") for module, _ in places[number]}
            owner = found.pop() if len(found) == 1 else ""
            weights[owner].append(UnitWeight(names[number], tuple(parameter.shape), tuple(places[number])))
    edits = []
    for name, of_unit in weights.items():
        if of_unit:
            module = index.modules[name]
            unit = units.add(name, of_unit)
            changes = {weight.name: {"shard": FlatShard(), "axis": "fsdp"} for weight in of_unit}
            forward = with_gathered_weights(unit, module)
            edits.append(Edit((name,), forward=forward, placements=changes, attributes=_guards(module, name, units)))
    return edits


def _guards(module: Any, name: str, units: Units) -> dict[str, Callable[..., Any]]:
    """Return methods of the model that say that they need all weights."""
    if name:
        return {}
    return {
        method: functools.partial(_call_if_held, units, method, getattr(module, method))
        for method in _READS_ALL
        if hasattr(module, method)
    }


def _call_if_held(units: Units, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not units.is_held:
        raise RuntimeError(
            f"{name}() needs all weights, and rank {units.group.label()} has shards of them; call it on every rank "
            f"within mindnlp_dp.gathered(model), or load a checkpoint in one process"
        )
    return method(*args, **kwargs)


def _check(model: Any, placements: Placements) -> None:
    mesh, config = placements.mesh, getattr(model, "config", None)
    others = [f"{axis}={size}" for axis, size in mesh.sizes.items() if size > 1 and axis not in ("dp", "fsdp")]
    if others:
        raise ValueError(f"fsdp is combined with dp only so far, got {mesh}; leave out {', '.join(others)}")
    if has_recomputed_layers(model):
        raise ValueError("shard the model first, and call enable_recompute() or gradient_checkpointing_enable() after")
    for name, parameter in model.named_parameters():
        if dtype_name(parameter) != "float32":
            raise ValueError(
                f"{name!r} is of type {dtype_name(parameter)}, and a fully sharded model has weights of type float32; "
                "load it with ms_dtype=mindspore.float32, or use zero_stage=2"
            )
    for setting in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, setting, 0):
            raise ValueError(
                f"{setting}={getattr(config, setting)} leaves out layers on some ranks, for whose weights the others "
                f"would wait; set {setting}=0"
            )
