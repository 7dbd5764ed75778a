"""Makes MindNLP run on newer MindSpore, and takes its import-time side effects out.

Goes in: the import of ``mindnlp``. Comes out: the same packages, patched where
this pair of versions needs it. Nothing is patched before ``mindnlp`` is
imported, and nothing that works already: each patch looks whether its defect is
there. With ``compat_autograd``, ``compat_optim`` and ``compat_quiet``, this is the one module that changes other
people's code.

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
from collections.abc import Iterator
from typing import Any

from packaging.version import Version

from .import_hook import around

MINDNLP_VERSIONS = ("0.4.1",)
MINDSPORE_AT_LEAST, MINDSPORE_BELOW = "2.5.0", "2.11.0"
WORKING_PAIRS = (
    "MindNLP 0.4.1 works with MindSpore 2.7.0 to 2.10.x (tried on CPU), and is accepted with 2.5 and 2.6 "
    '(not tried here); pip install "mindspore==2.8.0" "mindnlp==0.4.1"'
)


class UnsupportedVersionsError(ImportError):
    """The installed MindNLP and MindSpore are not known to work together."""


def check_versions(mindnlp: str, mindspore: str) -> None:
    """Raise :class:`UnsupportedVersionsError` unless this pair is known to work."""
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

    DEVICE_TARGET is MindNLP's variable: CPU, GPU or Ascend. Of several cards, each process takes its own,
    for MindSpore itself sees to that under msrun only. A device that the script has set stays.
    """
    import mindspore

    from .rendezvous import card_of_this_process

    current, target = mindspore.get_context("device_target"), os.environ.get("DEVICE_TARGET")
    device = target if target in ("CPU", "GPU", "Ascend") else current
    card = card_of_this_process(os.environ) if device != "CPU" else None
    if card is not None and not _has_set_a_device():
        mindspore.set_device(device, card)
    elif device != current:
        mindspore.set_device(device)
    return str(mindspore.get_context("device_target"))


def _has_set_a_device() -> bool:
    from mindspore._c_expression import DeviceManagerConf

    return bool(DeviceManagerConf.get_instance().is_device_enable())


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


# Versions: MindNLP 0.4.1. Cause: MindSpore's nn.DistributedGradReducer asks every parameter how it is to be exchanged,
# and MindNLP's Parameter, a Tensor, has no answer ("no attribute 'layerwise_parallel'").
# Goes when: a DistributedGradReducer can be made of MindNLP's parameters.
@around("mindnlp.core.nn.parameter")
def _parameters_for_a_reducer(module: types.ModuleType) -> Iterator[None]:
    yield
    # What mindspore.Parameter says of one that is replicated, and of the fusion that it is in.
    for name, replicated in {"layerwise_parallel": False, "comm_fusion": 1}.items():
        if not hasattr(module.Parameter, name):
            setattr(module.Parameter, name, replicated)


# Versions: MindNLP 0.4.1 on MindSpore 2.7+. Cause: a Parameter made of mindspore's initializer(...), which gets its
# memory later, loses what it should hold, and updates in place never reach it.
# Goes when: MindNLP's Parameter gives such a tensor its memory itself.
@around("mindnlp.core.nn.parameter")
def _parameter_of_an_initializer(module: types.ModuleType) -> Iterator[None]:
    yield
    stock_init = module.Parameter.__init__

    @functools.wraps(stock_init)
    def init(self: Any, input_data: Any = None, *args: Any, **kwargs: Any) -> None:
        if getattr(input_data, "has_init", False):
            input_data = input_data.init_data()
        stock_init(self, input_data, *args, **kwargs)

    module.Parameter.__init__ = init


# Versions: MindNLP 0.4.1. Cause: the deep copy of a Parameter shares the original's memory, so that training a copy
# (the head beside a LoRA, a teacher, an average) trains the original.
# Goes when: copy.deepcopy of a Parameter copies.
@around("mindnlp.core.nn.parameter")
def _deep_copies(module: types.ModuleType) -> Iterator[None]:
    yield

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        copied = module.Parameter(self.copy(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    module.Parameter.__deepcopy__ = deepcopy


# Versions: MindNLP 0.4.1. Cause: tying weights assigns a slice of the output bias to that bias, which is from then
# on a view that optimizers update in vain: the bias of every tied language model stays as it is initialised.
# Goes when: tie_weights leaves a bias alone that has its length already.
@around("mindnlp.transformers.modeling_utils")
def _tied_bias(module: types.ModuleType) -> Iterator[None]:
    yield
    stock_tie = module.PreTrainedModel._tie_or_clone_weights

    @functools.wraps(stock_tie)
    def tie(self: Any, output_embeddings: Any, input_embeddings: Any) -> None:
        stock_tie(self, output_embeddings, input_embeddings)
        bias = getattr(output_embeddings, "bias", None)
        if bias is not None:
            bias.assign_value(bias.copy())

    module.PreTrainedModel._tie_or_clone_weights = tie


# Versions: MindNLP 0.4.1 on MindSpore 2.7+. Cause: importing MindNLP renames types (Float32 becomes mindspore.float32),
# and its adapter files then name types that MindSpore's load_checkpoint does not know.
# Goes when: PeftModel.from_pretrained reads what PeftModel.save_pretrained wrote.
@around("mindnlp.peft.utils.save_and_load")
def _types_in_adapter_files(module: types.ModuleType) -> Iterator[None]:
    yield
    stock_list = module.get_data_list

    @functools.wraps(stock_list)
    def get_data_list(param_dict: Any) -> Any:
        entries = stock_list(param_dict)
        for entry in entries.values():
            name = entry[1].rpartition(".")[2].rstrip("_").capitalize()
            entry[1] = name.replace("Uint", "UInt").replace("Bfloat", "BFloat")
        return entries

    module.get_data_list = get_data_list  # type: ignore[attr-defined]


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
        if launch.num_known > 1 and not getattr(self, "is_data_parallel", False):
            raise RuntimeError(
                f"{launch.by} started {launch.num_known} processes, and MindNLP's own Trainer would train "
                f"{launch.num_known} separate models; call mindnlp_dp.init_process_group() and use "
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
