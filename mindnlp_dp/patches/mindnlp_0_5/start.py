"""What importing MindNLP 0.5 needs from MindSpore, and should leave alone."""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Iterator
from typing import Any

from mindnlp_dp.launch.device_target import device_target_obeyed
from mindnlp_dp.patches.import_hook import around


# Versions: MindNLP 0.5.1 on MindSpore 2.8+. Cause: mindspore's internal Generator wants a seed and an offset when it
# is made, and is not called with them any more; mindtorch makes one at import.
# Goes when: mindtorch makes its generator from what MindSpore documents.
@around("mindtorch._C")
def _generator(module: types.ModuleType) -> Iterator[None]:
    import mindspore
    from mindspore.ops.auto_generate import gen_ops_prim
    from mindspore.ops.operations import _inner_ops

    stock = _inner_ops.Generator
    if "seed" not in inspect.signature(stock.__init__).parameters:
        yield
        return

    class Generator(gen_ops_prim.Generator):  # type: ignore[misc]
        """As mindtorch calls it: ``generator(command, (seed, offset[, state or step]))``."""

        def __call__(self, command: int, inputs: Any) -> Any:
            return super().__call__(
                command, tuple(x if isinstance(x, mindspore.Tensor) else mindspore.Tensor(x) for x in inputs)
            )

    _inner_ops.Generator = Generator
    try:
        yield
    finally:
        _inner_ops.Generator = stock


# Versions: MindNLP 0.5.1. Cause: it sets the device by DEVICE_TARGET when it is imported; after a communication library
# has started, or an operator has run, MindSpore refuses to.
# Goes when: mindtorch leaves a device alone that is set.
@around("mindtorch")
def _device_target_is_set_once(module: types.ModuleType) -> Iterator[None]:
    with device_target_obeyed():
        yield


# Versions: MindNLP 0.5.1. Cause: every tensor must say on which device it is; those that MindSpore makes, such as
# gradients and results of its own functions, do not.
# Goes when: mindtorch takes a tensor without a device for one of the default's.
@around("mindtorch")
def _tensors_have_a_device(module: types.ModuleType) -> Iterator[None]:
    yield
    import mindspore

    if mindspore.get_context("device_target") == "CPU" and not hasattr(mindspore.Tensor, "_device"):
        mindspore.Tensor._device = module.device("cpu")


# Versions: MindNLP 0.5.1. Cause: it has Hugging Face's files come from a mirror, whoever wants them from where.
# Goes when: HF_ENDPOINT is left to its user.
@around("mindnlp")
def _keep_the_users_endpoint(module: types.ModuleType) -> Iterator[None]:
    users_own = os.environ.get("HF_ENDPOINT")
    yield
    if users_own is None:
        os.environ.pop("HF_ENDPOINT", None)
