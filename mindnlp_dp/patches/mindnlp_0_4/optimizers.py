"""MindNLP 0.4.1's optimizers."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from mindnlp_dp.patches.import_hook import around

# What raw_adam and its kin take between their tensors and the gradient; of these, only the first three change.
_CHANGING_SCALARS = ("beta1_power", "beta2_power", "lr")


# Versions: MindNLP 0.4.1 on MindSpore 2.7+. Cause: Adam and AdamW hand the powers of their betas and the rate to
# MindSpore's kernel as Python floats, and MindSpore compiles that operator anew, and keeps it, for every value that it
# has not met: 1.4 MB an update, without end, whatever the size of the model. As tensors they are data.
# Goes when: MindNLP passes tensors, or the memory of a process no longer grows with its updates (a test measures it).
@around("mindnlp.core.ops.optim")
def _adam_without_new_constants(module: types.ModuleType) -> Iterator[None]:
    yield
    import mindspore
    import numpy as np

    # All parameters of an update share these values.
    as_tensor = functools.lru_cache(maxsize=16)(lambda value: mindspore.Tensor(np.float32(value)))

    def with_tensors(stock: Callable[..., Any], first: int) -> Callable[..., Any]:
        """Make tensors of the floats from argument number ``first`` on, as many as change."""
        where = range(first, first + len(_CHANGING_SCALARS))

        @functools.wraps(stock)
        def raw(*arguments: Any) -> Any:
            return stock(
                *(as_tensor(x) if at in where and isinstance(x, float) else x for at, x in enumerate(arguments))
            )

        return raw

    module.raw_adam = with_tensors(module.raw_adam, 3)  # type: ignore[attr-defined]
    module.raw_adam_amsgrad = with_tensors(module.raw_adam_amsgrad, 4)  # type: ignore[attr-defined]


# Versions: MindNLP 0.4.1 on MindSpore 2.7+. Cause: MindSpore's norm of a tensor of no, three or more dimensions is None
# on CPU, so that clip_grad_norm_ dies of a scalar parameter, or of a convolution's ("The pointer[elementi] is null").
# Goes when: mindspore.ops.norm returns a number for them.
@around("mindnlp.core.ops.reduction")
def _norm_of_any_shape(module: types.ModuleType) -> Iterator[None]:
    yield
    stock = module.norm

    @functools.wraps(stock)
    def norm(input: Any, p: Any = "fro", dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = stock(input, p, dim, *args, **kwargs)
        return stock(input.reshape(-1), p, None, *args, **kwargs) if result is None and dim is None else result

    module.norm = norm  # type: ignore[attr-defined]


# Versions: MindNLP 0.4.1. Cause: an AdamW that loads its state makes float32 tensors of its step counts, and then
# computes the powers of its betas in float32, where one that never stopped computes them in float64: their weights
# part in the last bits. An Adam that loads its state dies of a KeyError.
# Goes when: they leave step counts as they were saved.
@around("mindnlp.core.optim.adam")
@around("mindnlp.core.optim.adamw")
def _adam_that_loads_its_state(module: types.ModuleType) -> Iterator[None]:
    yield

    def setstate(self: Any, state: Any) -> None:
        module.Optimizer.__setstate__(self, state)
        for group in self.param_groups:
            group.setdefault("amsgrad", False)
            group.setdefault("maximize", False)

    (module.AdamW if hasattr(module, "AdamW") else module.Adam).__setstate__ = setstate
