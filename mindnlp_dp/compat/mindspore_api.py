"""Patches of MindSpore that MindNLP needs; they are applied when ``mindnlp`` is imported."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from mindnlp_dp.compat.import_hook import around
from mindnlp_dp.runtime.versions import mindspore_is_before


# Versions: all, on CPU. Cause: Tensor.repeat has no CPU kernel, and MindNLP's evaluation loop
# repeats the loss of a batch with it.
# Remove when: Tensor.repeat works on CPU.
@around("mindnlp")
def _tensor_repeat_on_cpu(module: types.ModuleType) -> Iterator[None]:
    import mindspore
    from mindspore import ops

    original = mindspore.Tensor.repeat

    # The patch does not test for the defect: running an operator at import would start MindSpore's thread
    # pools before runtime/threads.py can set their size.
    def repeat(self: Any, *repeats: Any, **options: Any) -> Any:
        """Tile this tensor: shape ``(d1, ..., dn)`` becomes ``(r1 * d1, ..., rn * dn)``."""
        if mindspore.get_context("device_target") != "CPU":
            return original(self, *repeats, **options)
        if len(repeats) == 1 and isinstance(repeats[0], (tuple, list)):
            repeats = tuple(repeats[0])
        return ops.tile(self.reshape((1,)) if self.ndim == 0 else self, repeats)

    mindspore.Tensor.repeat = repeat
    yield


# Versions: all. Cause: mindspore.dtype_to_nptype logs a deprecation warning at every call,
# and MindNLP's attention masks call it in every forward pass.
# Remove when: MindNLP stops calling it.
@around("mindnlp")
def _quiet_dtype_to_nptype(module: types.ModuleType) -> Iterator[None]:
    import mindspore

    # A newer version may have removed the function together with the warning.
    quiet = getattr(mindspore.common.dtype, "_dtype_to_nptype", None)
    if quiet is not None:
        mindspore.dtype_to_nptype = mindspore.common.dtype.dtype_to_nptype = quiet
    yield


# Versions: all. Cause: Tensor.data_sync warns at every call, and MindNLP's initialisers call it once
# for each weight. asnumpy() also waits for the device.
# Remove when: MindNLP stops calling it.
@around("mindnlp")
def _quiet_data_sync(module: types.ModuleType) -> Iterator[None]:
    import mindspore

    def data_sync(self: Any, wait: bool = True) -> None:
        """Wait until this tensor's value is on the host."""
        self.asnumpy()

    mindspore.Tensor.data_sync = data_sync
    yield


# Versions: MindSpore 2.7 on CPU. Cause: the default generator's offset never advances: all draws after one seed are the
# same, so dropout layers of the same size have the same mask.
# Remove when: 2.7 is no longer supported.
@functools.cache
def fix_generator_offset() -> None:
    """Make the default generator advance its offset at every draw, for MindSpore's own layers as well."""
    import mindspore
    from mindspore.common.generator import Generator

    if not mindspore_is_before("2.8"):
        return
    stock = Generator._step

    @functools.wraps(stock)
    def _step(self: Any, step: Any) -> Any:
        """Return the generator's seed and offset, and advance the offset by ``step``."""
        seed, offset = stock(self, step)
        if mindspore.get_context("device_target") == "CPU":
            after = int(offset.asnumpy().flat[0]) + int(step.asnumpy().flat[0])
            self._offset.set_data(mindspore.Tensor(after, mindspore.int64))
        return seed, offset

    Generator._step = _step


@around("mindnlp")
def _generator_offset(module: types.ModuleType) -> Iterator[None]:
    fix_generator_offset()
    yield
