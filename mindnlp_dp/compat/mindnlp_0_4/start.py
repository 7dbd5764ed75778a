"""These patches make MindNLP 0.4.1 importable and remove the side effects of importing it."""

from __future__ import annotations

import importlib
import os
import sys
import types
import warnings
from collections.abc import Iterator

from mindnlp_dp.compat.import_hook import around
from mindnlp_dp.runtime.devices import device_set_from_env
from mindnlp_dp.runtime.launch_env import RANK_TABLE, detect_launch


# Versions: MindNLP 0.4.1 on MindSpore 2.7+. Cause: MindNLP reads mindspore.common._stub_tensor.StubTensor as
# an attribute, but `import mindspore` no longer loads that module, and later releases will not have it.
# Remove when: MindNLP no longer uses StubTensor.
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


# Versions: MindSpore 2.7+. Cause: MindNLP applies DEVICE_TARGET with set_context, which warns that it is
# deprecated in favor of set_device.
# Remove when: MindNLP calls set_device.
@around("mindnlp")
def _quiet_device_target(module: types.ModuleType) -> Iterator[None]:
    with device_set_from_env() as target:
        yield
    if target is not None:
        module.DEVICE_TARGET = target  # type: ignore[attr-defined]


# Versions: MindNLP 0.4.1. Cause: its import removes RANK_TABLE_FILE, which may be the only variable that tells
# init_process_group() of other processes, so that it refuses to train as one of several alone.
# Remove when: MindNLP leaves RANK_TABLE_FILE to the user.
@around("mindnlp")
def _keep_the_rank_table(module: types.ModuleType) -> Iterator[None]:
    table = os.environ.get("RANK_TABLE_FILE") if detect_launch(os.environ).by == RANK_TABLE else None
    yield
    if table is not None:
        os.environ["RANK_TABLE_FILE"] = table


# Versions: MindNLP 0.4.1. Cause: with MULTI_NPU=true, importing this module starts communication, draws a random
# seed for each process and makes load_dataset shard; init_process_group() and the Trainer do that here.
# Remove when: importing MindNLP has no side effects.
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


# Versions: MindNLP 0.4.1. Cause: it sets MS_ALLOC_CONF for Ascend on every machine; on CPU MindSpore does not use
# the setting, but every process prints it.
# Remove when: MindNLP sets it on Ascend only.
@around("mindnlp")
def _no_ascend_allocator_on_cpu(module: types.ModuleType) -> Iterator[None]:
    users_own = os.environ.get("MS_ALLOC_CONF")
    yield
    import mindspore

    if mindspore.get_context("device_target") == "CPU":
        os.environ.pop("MS_ALLOC_CONF", None)
        if users_own is not None:
            os.environ["MS_ALLOC_CONF"] = users_own


# Versions: MindNLP 0.4.1. Cause: every tokenizer that is loaded warns about its own default.
# Remove when: MindNLP has decided on clean_up_tokenization_spaces.
@around("mindnlp")
def _quiet_tokenizers(module: types.ModuleType) -> Iterator[None]:
    warnings.filterwarnings("ignore", message="`clean_up_tokenization_spaces` was not set", category=FutureWarning)
    yield
