"""These patches fix what MindNLP 0.5 needs from MindSpore at import, and undo its side effects."""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Iterator
from typing import Any

from mindnlp_dp.compat.import_hook import around
from mindnlp_dp.runtime.devices import device_set_from_env


# Versions: MindNLP 0.5.1 on MindSpore 2.8+. Cause: MindSpore's internal Generator now takes seed and offset in its
# constructor and no longer in its calls; mindtorch creates one at import in the old way.
# Remove when: mindtorch creates its generator with MindSpore's documented API.
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
        """The generator with mindtorch's call: ``generator(command, (seed, offset[, state or step]))``."""

        def __call__(self, command: int, inputs: Any) -> Any:
            return super().__call__(
                command, tuple(x if isinstance(x, mindspore.Tensor) else mindspore.Tensor(x) for x in inputs)
            )

    _inner_ops.Generator = Generator
    try:
        yield
    finally:
        _inner_ops.Generator = stock


# Versions: MindNLP 0.5.1. Cause: its import sets the device that DEVICE_TARGET names; MindSpore refuses this after a
# communication library has started or an operator has run.
# Remove when: mindtorch keeps a device that is already set.
@around("mindtorch")
def _device_target_is_set_once(module: types.ModuleType) -> Iterator[None]:
    with device_set_from_env():
        yield


# Versions: MindNLP 0.5.1. Cause: mindtorch requires every tensor to have a device; tensors that MindSpore creates, such
# as gradients and results of its functions, have none.
# Remove when: mindtorch uses the default device for a tensor without one.
@around("mindtorch")
def _tensors_have_a_device(module: types.ModuleType) -> Iterator[None]:
    yield
    import mindspore

    if mindspore.get_context("device_target") == "CPU" and not hasattr(mindspore.Tensor, "_device"):
        mindspore.Tensor._device = module.device("cpu")


# Versions: MindNLP 0.5.1. Cause: where HF_ENDPOINT is not set, its import sets it to a mirror, and imports libraries
# that copy it, such as huggingface_hub; so it must have a value before.
# Remove when: MindNLP leaves HF_ENDPOINT to the user.
@around("mindnlp")
def _keep_the_users_endpoint(module: types.ModuleType) -> Iterator[None]:
    is_users_own = "HF_ENDPOINT" in os.environ
    os.environ.setdefault("HF_ENDPOINT", "https://huggingface.co")
    try:
        yield
    finally:
        if not is_users_own:
            os.environ.pop("HF_ENDPOINT", None)
