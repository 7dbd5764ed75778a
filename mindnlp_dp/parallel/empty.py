"""A model's structure without its weights: for models that no process could hold.

Goes in: a block that builds a model. Comes out: the model, whose parameters have shapes and no memory of their own yet;
:func:`~mindnlp_dp.parallelize` gives each rank its parts of them, from a folder::

    with dp.empty_weights():
        model = GPT2LMHeadModel(config)
    dp.parallelize(model, mesh, weights="gpt2")
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .placement import Placements

# Names of the functions that fill a new parameter.
_FILLS = ("normal_", "uniform_", "zeros_", "ones_", "constant_", "xavier_uniform_", "xavier_normal_",
          "kaiming_uniform_", "kaiming_normal_", "trunc_normal_")  # fmt: skip


@contextlib.contextmanager
def empty_weights() -> Iterator[None]:
    """A block in which MindNLP's models are built without values.

    Their parameters are zeros that the system has not given any memory yet (pages that nobody has touched), so that no
    more than one of them takes any at a time. Such a model is no good for anything but ``parallelize``.
    """
    import mindspore
    from mindnlp.core import ops
    from mindnlp.core.nn import Parameter, init

    make, empty, assign = Parameter.__init__, ops.empty, mindspore.Tensor.assign_value
    fills = {name: getattr(init, name) for name in _FILLS if hasattr(init, name)}

    def make_empty(self: Any, input_data: Any = None, requires_grad: bool = True) -> None:
        make(self, input_data, requires_grad)
        if self.size and self.dtype == mindspore.float32:
            self.assign_value(mindspore.Tensor.from_numpy(np.zeros(self.shape, np.float32)))
            self.is_empty = True

    def untouched(*size: Any, dtype: Any = None, device: Any = None) -> Any:
        # MindSpore would take memory for it, and keep that.
        shape = tuple(size[0]) if isinstance(size[0], (tuple, list)) else size
        if dtype not in (None, mindspore.float32):
            return empty(*size, dtype=dtype, device=device)
        return mindspore.Tensor.from_numpy(np.zeros(shape, np.float32))

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
    """Give the parameters of a model that was built empty, and that no file has, the values of a new model.

    Raises:
        ValueError: there is no file at all, or the model does not know how it begins.
    """
    empty = [name for name, p in model.named_parameters() if getattr(p, "is_empty", False)]
    if empty and not has_files:
        raise ValueError(
            f"{empty[0]!r} has no value: the model was built with empty_weights(); say where its weights are: "
            "parallelize(model, mesh, weights=folder)"
        )
    modules = dict(model.named_modules())
    owners = {name.rpartition(".")[0] for name in missing if placements[name].trains and name in set(empty)}
    if owners and not hasattr(model, "_init_weights"):
        raise ValueError(f"{min(owners)!r} is not in the folder, and {type(model).__name__} does not say how it begins")
    for owner in sorted(owners):
        model._init_weights(modules[owner])
