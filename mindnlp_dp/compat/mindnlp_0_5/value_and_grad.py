"""This patch makes gradients of MindNLP 0.5 correct after a pass that raised."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from mindnlp_dp.compat.import_hook import around
from mindnlp_dp.runtime.autograd import autograd_cleared_on_error


# Versions: MindNLP 0.5.1 on MindSpore 2.7+. Cause: when a pass raises, MindSpore keeps its recorded graph and treats
# the next pass as a part of it.
# Remove when: MindSpore discards the record of a failed pass.
@around("mindtorch.autograd.function")
def _forget_a_pass_that_failed(module: types.ModuleType) -> Iterator[None]:
    yield
    stock = module.value_and_grad

    @functools.wraps(stock)
    def value_and_grad(*args: Any, **kwargs: Any) -> Any:
        return autograd_cleared_on_error(stock(*args, **kwargs))

    module.value_and_grad = value_and_grad  # type: ignore[attr-defined]
