"""Makes MindNLP run on newer MindSpore, and takes its import-time side effects out.

Goes in: the import of ``mindnlp``. Comes out: the same packages, patched where
this pair of versions needs it. Nothing is patched before ``mindnlp`` is
imported, and nothing that works already: each patch looks whether its defect is
there. This is the one module that changes other people's code.

A patch is a generator: what stands before its ``yield`` runs before the module
that it belongs to is executed, what stands behind runs after.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

from packaging.version import Version

from .import_hook import around

MINDNLP_VERSIONS = ("0.4.1",)
MINDSPORE_AT_LEAST, MINDSPORE_BELOW = "2.5.0", "2.9.0"
WORKING_PAIRS = (
    "MindNLP 0.4.1 works with MindSpore 2.7.0 to 2.8.x (tried on CPU), and is accepted with 2.5 and 2.6 "
    '(not tried here); pip install "mindspore==2.8.0" "mindnlp==0.4.1"'
)


class UnsupportedVersionsError(ImportError):
    """The installed MindNLP and MindSpore are not known to work together."""


def check_versions(mindnlp: str, mindspore: str) -> None:
    """Raise :class:`UnsupportedVersionsError` unless this pair is known to work.

    MindSpore 2.9 and later take other arguments in the autograd entry points that
    MindNLP 0.4.1 calls; no patch of ours can reach those.
    """
    known = mindnlp in MINDNLP_VERSIONS and Version(MINDSPORE_AT_LEAST) <= Version(mindspore) < Version(MINDSPORE_BELOW)
    if not known:
        raise UnsupportedVersionsError(
            f"MindNLP {mindnlp} with MindSpore {mindspore} is not a pair that works. {WORKING_PAIRS}"
        )


# Versions: all. Cause: the pair decides whether anything below can work.
# Goes when: MindNLP pins the MindSpore versions that it runs on.
@around("mindnlp")
def _refuse_unknown_pairs(module: types.ModuleType) -> Iterator[None]:
    check_versions(importlib.metadata.version("mindnlp"), importlib.metadata.version("mindspore"))
    yield


# Versions: MindNLP 0.4.1 on MindSpore 2.7+. Cause: MindNLP reads mindspore.common._stub_tensor.StubTensor as
# an attribute, but `import mindspore` no longer loads that module, and releases without it are announced.
# Goes when: MindNLP no longer uses StubTensor.
@around("mindnlp")
def _stub_tensor(module: types.ModuleType) -> Iterator[None]:
    import mindspore

    name = "mindspore.common._stub_tensor"
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        stub = types.ModuleType(name)
        stub.StubTensor = type("StubTensor", (), {})  # type: ignore[attr-defined]
        sys.modules[name] = mindspore.common._stub_tensor = stub
    yield


# Versions: MindSpore 2.7+. Cause: mindspore.dtype_to_nptype logs a deprecation warning at every call,
# and MindNLP's attention masks call it in every forward pass.
# Goes when: MindNLP stops calling it.
@around("mindnlp")
def _quiet_dtype_to_nptype(module: types.ModuleType) -> Iterator[None]:
    import mindspore

    quiet = getattr(mindspore.common.dtype, "_dtype_to_nptype", None)
    if quiet is not None:
        mindspore.dtype_to_nptype = mindspore.common.dtype.dtype_to_nptype = quiet
    yield


# Versions: MindSpore 2.7+. Cause: Tensor.data_sync warns at every call, and MindNLP's initialisers call it once
# for each weight. asnumpy() waits for the device just the same.
# Goes when: MindNLP stops calling it.
@around("mindnlp")
def _quiet_data_sync(module: types.ModuleType) -> Iterator[None]:
    import mindspore

    if Version(mindspore.__version__) >= Version("2.7.0"):

        def data_sync(self: Any, wait: bool = True) -> None:
            """Wait until this tensor's value is on the host."""
            self.asnumpy()

        mindspore.Tensor.data_sync = data_sync
    yield


# Versions: MindNLP 0.4.1. Cause: every tokenizer that is loaded warns about a default of its own.
# Goes when: MindNLP has decided on clean_up_tokenization_spaces.
@around("mindnlp")
def _quiet_tokenizers(module: types.ModuleType) -> Iterator[None]:
    warnings.filterwarnings("ignore", message="`clean_up_tokenization_spaces` was not set", category=FutureWarning)
    yield


# Versions: MindNLP 0.4.1. Cause: it sets MS_ALLOC_CONF for Ascend on every machine; on CPU MindSpore reports
# the setting on the terminal of every process, and has no use for it.
# Goes when: MindNLP sets it on Ascend only.
@around("mindnlp")
def _no_ascend_allocator_on_cpu(module: types.ModuleType) -> Iterator[None]:
    users_own = os.environ.get("MS_ALLOC_CONF")
    yield
    import mindspore

    if mindspore.get_context("device_target") == "CPU":
        os.environ.pop("MS_ALLOC_CONF", None)
        if users_own is not None:
            os.environ["MS_ALLOC_CONF"] = users_own


# Versions: MindSpore 2.7+. Cause: MindNLP obeys DEVICE_TARGET through set_context, which warns that it is
# deprecated in favour of set_device.
# Goes when: MindNLP calls set_device.
@around("mindnlp")
def _quiet_device_target(module: types.ModuleType) -> Iterator[None]:
    obey_device_target()
    target = os.environ.pop("DEVICE_TARGET", None)
    try:
        yield
    finally:
        if target is not None:
            os.environ["DEVICE_TARGET"] = target
            module.DEVICE_TARGET = target  # type: ignore[attr-defined]


def obey_device_target() -> str:
    """Switch MindSpore to the device that DEVICE_TARGET names, if it does; return the device in use.

    DEVICE_TARGET is MindNLP's variable: CPU, GPU or Ascend.
    """
    import mindspore

    target = os.environ.get("DEVICE_TARGET")
    if target in ("CPU", "GPU", "Ascend") and target != mindspore.get_context("device_target"):
        mindspore.set_device(target)
    return str(mindspore.get_context("device_target"))


# Versions: MindSpore 2.7+ on CPU. Cause: Tensor.repeat has no CPU kernel there, and MindNLP's evaluation
# loop repeats the loss of a batch with it.
# Goes when: Tensor.repeat works on CPU.
@around("mindnlp")
def _tensor_repeat_on_cpu(module: types.ModuleType) -> Iterator[None]:
    import mindspore
    from mindspore import ops

    original = getattr(mindspore.Tensor, "repeat", None)

    # Nothing is tried here: an operator that runs at import would start MindSpore's thread pools
    # before runtime.py can say how many threads they may have.
    def repeat(self: Any, *repeats: Any, **options: Any) -> Any:
        """Tile this tensor: shape ``(d1, ..., dn)`` becomes ``(r1 * d1, ..., rn * dn)``."""
        if original is not None and mindspore.get_context("device_target") != "CPU":
            return original(self, *repeats, **options)
        if len(repeats) == 1 and isinstance(repeats[0], (tuple, list)):
            repeats = tuple(repeats[0])
        return ops.tile(self.reshape((1,)) if self.ndim == 0 else self, repeats)

    if Version(mindspore.__version__) >= Version("2.7.0"):
        mindspore.Tensor.repeat = repeat
    yield


# Versions: MindNLP 0.4.1 on MindSpore 2.7+. Cause: mindspore._c_expression.pyboost_empty takes its
# arguments one by one now; MindNLP passes one list. mint.empty, its public name, asks for an Ascend in 2.7.0.
# Goes when: mindnlp.core.ops.empty works without.
@around("mindnlp.core.ops.creation")
def _empty(module: types.ModuleType) -> Iterator[None]:
    yield
    import mindspore

    def empty(*size: Any, dtype: Any = None, device: Any = None) -> Any:
        """Return a tensor of shape ``size``; its values are nobody's business, and zero."""
        if isinstance(size[0], (tuple, list)):
            size = tuple(size[0])
        dtype = module.get_default_dtype() if dtype is None else dtype
        return mindspore.ops.zeros(size, dtype)

    if Version(mindspore.__version__) >= Version("2.7.0"):
        module.empty = empty  # type: ignore[attr-defined]


# Versions: MindNLP 0.4.1 on MindSpore 2.7+. Cause: Tensor lost its class attribute `grad`, and MindNLP
# reads `param.grad is None` before it has set one.
# Goes when: MindNLP's Parameter defines `grad`.
@around("mindnlp.core.nn.parameter")
def _parameter_grad(module: types.ModuleType) -> Iterator[None]:
    yield
    if not hasattr(module.Parameter, "grad"):
        module.Parameter.grad = None


# Versions: MindNLP 0.4.1. Cause: an Adam or AdamW that loads its state makes float32 tensors of its step counts, and
# then computes the powers of its betas in float32, where one that never stopped computes them in float64: their
# weights part in the last bits.
# Goes when: they leave step counts as they were saved.
@around("mindnlp.core.optim.adam")
@around("mindnlp.core.optim.adamw")
def _adam_step_counts(module: types.ModuleType) -> Iterator[None]:
    yield
    optimizer = module.AdamW if hasattr(module, "AdamW") else module.Adam
    stock_setstate = optimizer.__setstate__

    @functools.wraps(stock_setstate)
    def setstate(self: Any, state: Any) -> None:
        counts = {id(entry): entry.get("step") for entry in state.get("state", {}).values() if isinstance(entry, dict)}
        stock_setstate(self, state)
        for entry in self.state.values():
            if isinstance(counts.get(id(entry)), int):
                entry["step"] = counts[id(entry)]

    optimizer.__setstate__ = setstate


# Versions: MindNLP 0.4.1. Cause: its own Trainer exchanges no gradients, so that each of several processes
# trains a model of its own, and says nothing.
# Goes when: MindNLP's Trainer is data parallel itself.
@around("mindnlp.engine.trainer.base")
def _refuse_the_stock_trainer_in_several_processes(module: types.ModuleType) -> Iterator[None]:
    yield
    from .rendezvous import detect_launch

    stock_train = module.Trainer.train

    @functools.wraps(stock_train)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        launch = detect_launch(os.environ)
        if launch.world_size > 1 and not getattr(self, "is_data_parallel", False):
            raise RuntimeError(
                f"{launch.by} started {launch.world_size} processes, and MindNLP's own Trainer would train "
                f"{launch.world_size} separate models; call mindnlp_dp.init_process_group() and use "
                "mindnlp_dp.DataParallelTrainer (for a Trainer of your own: mindnlp_dp.DataParallelTrainerMixin)"
            )
        return stock_train(self, *args, **kwargs)

    module.Trainer.train = train


# Versions: MindNLP 0.4.1. Cause: with MULTI_NPU=true this module starts communication, draws a random seed
# for each process and has load_dataset shard, all at import; init_process_group() and the Trainer do that here.
# Goes when: importing MindNLP has no side effects.
@around("mindnlp.accelerate.utils.constants")
def _no_distributed_start_at_import(module: types.ModuleType) -> Iterator[None]:
    import numpy as np

    numpy_state = np.random.get_state()
    multi_npu = os.environ.pop("MULTI_NPU", None)
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        if multi_npu is not None:
            os.environ["MULTI_NPU"] = multi_npu
