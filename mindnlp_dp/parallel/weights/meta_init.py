"""Builds a model without weights, for models that do not fit into one process.

The user builds the model in :func:`empty_weights`; its parameters have shapes but no memory yet. Then
:func:`~mindnlp_dp.parallelize` reads each rank's shards from a folder::

    with dp.empty_weights():
        model = GPT2LMHeadModel(config)
    dp.parallelize(model, mesh, weights="gpt2")
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from mindnlp_dp.parallel.placement import Placements
from mindnlp_dp.runtime.adapters import lora_layers

# The initializers in mindnlp.core.nn.init that fill a new parameter.
_FILLS = ("normal_", "uniform_", "zeros_", "ones_", "constant_", "xavier_uniform_", "xavier_normal_",
          "kaiming_uniform_", "kaiming_normal_", "trunc_normal_")  # fmt: skip


@contextlib.contextmanager
def empty_weights() -> Iterator[None]:
    """Build MindNLP models without initial values in this block.

    Their parameters are zeros in memory pages that were never written, so the operating system allocates no memory for
    them, and at most one parameter at a time takes memory. Such a model can only be passed to ``parallelize``.
    """
    import mindspore
    from mindnlp.core import ops
    from mindnlp.core.nn import Parameter, init

    make, empty, assign = Parameter.__init__, ops.empty, mindspore.Tensor.assign_value
    fills = {name: getattr(init, name) for name in _FILLS if hasattr(init, name)}

    def make_empty(self: Any, input_data: Any = None, requires_grad: bool = True) -> None:
        make(self, input_data, requires_grad)
        if self.size and self.dtype == mindspore.float32:
            self.assign_value(mindspore.from_numpy(np.zeros(self.shape, np.float32)))
            self.is_empty = True

    def untouched(*size: Any, dtype: Any = None, device: Any = None) -> Any:
        # MindSpore would allocate memory for it and keep that.
        shape = tuple(size[0]) if isinstance(size[0], (tuple, list)) else size
        if dtype not in (None, mindspore.float32):
            return empty(*size, dtype=dtype, device=device)
        return mindspore.from_numpy(np.zeros(shape, np.float32))

    def assign_no_initializer(self: Any, value: Any) -> Any:
        return self if getattr(value, "has_init", False) is True else assign(self, value)

    try:
        Parameter.__init__, ops.empty = make_empty, untouched
        mindspore.Tensor.assign_value = assign_no_initializer
        for name in fills:
            setattr(init, name, lambda tensor, *args, **kwargs: tensor)
        yield
    finally:
        Parameter.__init__, ops.empty = make, empty
        mindspore.Tensor.assign_value = assign
        for name, fill in fills.items():
            setattr(init, name, fill)


def fill_missing(model: Any, placements: Placements, missing: Sequence[str], *, has_files: bool) -> None:
    """Initialize the parameters that are empty and that no file contains, as the model's class does for a new model.

    Raises:
        ValueError: no files were given, or the model lacks ``_init_weights``.
    """
    empty = [name for name, p in model.named_parameters() if getattr(p, "is_empty", False)]
    if empty and not has_files:
        raise ValueError(
            f"{empty[0]!r} has no value: the model was built with empty_weights(); say where its weights are: "
            "parallelize(model, mesh, weights=folder)"
        )
    _reset_adapters(model, {name for name in missing if name in set(empty)})
    modules = dict(model.named_modules())
    owners = {
        name.rpartition(".")[0]
        for name in missing
        if placements[name].trains and name in set(empty) and ".lora_" not in name
    }
    if owners and not hasattr(model, "_init_weights"):
        raise ValueError(f"{min(owners)!r} is not in the folder, and {type(model).__name__} does not say how it begins")
    for owner in sorted(owners):
        model._init_weights(modules[owner])


def _reset_adapters(model: Any, missing: Collection[str]) -> None:
    """Initialize LoRA adapters whose weights are missing as PEFT does, with which the model computes what it did."""
    for name, layer in lora_layers(model):
        for adapter in layer.r:
            prefixes = [f"{name}.lora_{kind}.{adapter}" for kind in ("A", "B", "embedding_A", "embedding_B")]
            if any(each == prefix or each.startswith(f"{prefix}.") for each in missing for prefix in prefixes):
                layer.reset_lora_parameters(adapter, model.peft_config[adapter].init_lora_weights)
