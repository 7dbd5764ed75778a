"""These patches raise where Transformers' Trainer or ``loss.backward()`` would silently train wrongly."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from mindnlp_dp.compat.import_hook import around
from mindnlp_dp.compat.multi_process_guard import refused_in_several_processes

# Versions: MindNLP 0.5.1. Cause: under msrun, each process's Trainer silently trains a separate model; under mpirun, it
# fails in Accelerate.
# Remove when: torch.distributed works under MindNLP.
around("transformers.trainer")(refused_in_several_processes("Transformers'"))


# Versions: MindNLP 0.5.1. Cause: loss.backward() does nothing, so a loop written for PyTorch silently trains nothing.
# (The Trainer's own training_step calls it where gradients are computed anyway.)
# Remove when: it computes gradients.
@around("mindtorch")
def _backward_says_that_it_does_nothing(module: types.ModuleType) -> Iterator[None]:
    yield
    import mindspore

    stock = mindspore.Tensor.backward

    @functools.wraps(stock)
    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        from mindnlp_dp.runtime.pynative_executor import pynative_executor

        if not pynative_executor.grad_flag():
            raise RuntimeError(
                "loss.backward() computes no gradients under MindNLP 0.5: use mindtorch.autograd.value_and_grad, a "
                "Trainer, or mindnlp_dp.make_train_step"
            )
        return stock(self, *args, **kwargs)

    mindspore.Tensor.backward = backward
