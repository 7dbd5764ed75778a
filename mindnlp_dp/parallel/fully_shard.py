"""Shards all weights of a model over all ranks in one call, for data parallelism without copies (ZeRO stage 3).

The user or the Trainer calls :func:`fully_shard` before the optimizer is made::

    model = dp.fully_shard(model)
    optimizer = optim.AdamW(model.parameters())
    step = dp.make_train_step(forward_fn, optimizer, model.parameters(), model=model)
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Optional, TypeVar, Union

from mindnlp_dp.communication.default_group import get_process_group
from mindnlp_dp.parallel.device_mesh import DeviceMesh, get_device_mesh, init_device_mesh
from mindnlp_dp.parallel.parallelize import parallelize
from mindnlp_dp.runtime.recompute import RecomputeLayers

T = TypeVar("T")


def fully_shard(
    model: T,
    mesh: Optional[DeviceMesh] = None,
    *,
    units: RecomputeLayers = True,
    keep_gathered: bool = False,
    param_dtype: Optional[str] = None,
    weights: Optional[Union[str, Path]] = None,
) -> T:
    """Shard all weights of a model over the ranks, in place, with the weights of rank 0. A collective.

    Each layer gathers its weights for its forward pass and again for its backward pass; between both, a rank has its
    shards, and the weights that are in no layer. Gradients and optimizer state are sharded as the weights are.

    Args:
        model: a MindNLP model, the same on every rank. Make its optimizer after this call.
        mesh: a mesh with the axis "fsdp", "dp" for replicas of the shards, "sp", and "tp" or "ep", whose part of the
            weights is sharded over "fsdp"; by default all ranks are on "fsdp".
        units: the modules that gather their weights together: the layers, as in :func:`~mindnlp_dp.enable_recompute`.
        keep_gathered: layers keep their weights until their backward pass: one gather less, and the memory of all.
        param_dtype: "bfloat16", on devices, or "float16": the type in which weights are gathered, and in which the
            model computes. Shards, gradients between ranks and the optimizer's state stay in float32.
        weights: a folder with ``model*.safetensors`` files, as in :func:`~mindnlp_dp.parallelize`.

    Raises:
        ValueError: the model or the mesh cannot be sharded so; the message says what to change.
    """
    if mesh is None:
        known, world = get_device_mesh(), get_process_group()
        is_replicated = known.is_data_parallel and world.world_size > 1
        mesh = init_device_mesh({"fsdp": world.world_size}) if is_replicated else known
    if mesh.sizes["fsdp"] == 1 and mesh.world.world_size > 1:
        raise ValueError(f'fully_shard needs a mesh with the axis "fsdp", got {mesh}; use {{"fsdp": ...}} and "dp"')
    return parallelize(model, mesh, weights=weights, units=units, keep_gathered=keep_gathered, param_dtype=param_dtype)


def gathered(model: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context in which every rank has all weights of a fully sharded model in full. A collective.

    Within it ``generate()`` and ``save_pretrained()`` work as for any model; changes of weights are lost after it. With
    "tp" or "ep" a rank has its part of the weights in full, and ``save_pretrained()`` is an error.
    """
    units = getattr(getattr(model, "parallel", None), "units", None)
    return contextlib.nullcontext() if units is None else units.held()
