"""These patches fix MindNLP 0.4.1's optimizers and gradient clipping."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from mindnlp_dp.compat.import_hook import around

# The scalar arguments of raw_adam and raw_adam_amsgrad that change from update to update.
_CHANGING_SCALARS = ("beta1_power", "beta2_power", "lr")


# Versions: MindNLP 0.4.1 on MindSpore 2.7+. Cause: Adam and AdamW pass the powers of their betas and the learning rate
# to MindSpore's kernel as Python floats, and MindSpore compiles and caches the operator again for every new value: the
# memory grows by 1.4 MB per update, for any size of model. As tensors, the values are data.
# Remove when: MindNLP passes tensors, or a process's memory no longer grows with its updates (a test measures it).
@around("mindnlp.core.ops.optim")
def _adam_without_new_constants(module: types.ModuleType) -> Iterator[None]:
    yield
    import mindspore
    import numpy as np

    # Cached, because all parameters of an update have the same values.
    as_tensor = functools.lru_cache(maxsize=16)(lambda value: mindspore.Tensor(np.float32(value)))

    def with_tensors(stock: Callable[..., Any], first: int) -> Callable[..., Any]:
        """Wrap ``stock`` so that its changing scalars, from argument number ``first`` on, are passed as tensors."""
        where = range(first, first + len(_CHANGING_SCALARS))

        @functools.wraps(stock)
        def raw(*arguments: Any) -> Any:
            return stock(
                *(as_tensor(x) if at in where and isinstance(x, float) else x for at, x in enumerate(arguments))
            )

        return raw

    module.raw_adam = with_tensors(module.raw_adam, 3)  # type: ignore[attr-defined]
    module.raw_adam_amsgrad = with_tensors(module.raw_adam_amsgrad, 4)  # type: ignore[attr-defined]


# Versions: MindNLP 0.4.1 on MindSpore 2.7+. Cause: on CPU, MindSpore's norm of a tensor with zero, three or more
# dimensions is None, so clip_grad_norm_ fails for scalar or convolution weights ("The pointer[elementi] is null").
# Remove when: mindspore.ops.norm returns a number for them.
@around("mindnlp.core.ops.reduction")
def _norm_of_any_shape(module: types.ModuleType) -> Iterator[None]:
    yield
    stock = module.norm

    @functools.wraps(stock)
    def norm(input: Any, p: Any = "fro", dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = stock(input, p, dim, *args, **kwargs)
        return stock(input.reshape(-1), p, None, *args, **kwargs) if result is None and dim is None else result

    module.norm = norm  # type: ignore[attr-defined]


# Versions: MindNLP 0.4.1. Cause: an AdamW that loads its state converts the step counts to float32 tensors and computes
# the powers of its betas in float32, but an uninterrupted run computes them in float64: the weights then differ in the
# last bits. An Adam that loads its state raises a KeyError.
# Remove when: they keep step counts as they were saved.
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
