"""The rest of :mod:`mindnlp_dp.compat`: patches that only silence what a user can do nothing about."""

from __future__ import annotations

import os
import types
import warnings
from collections.abc import Iterator
from typing import Any

from packaging.version import Version

from .import_hook import around


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


# Versions: MindSpore 2.9+. Cause: MindNLP imports mindspore.common.api and makes an Eps, both of which MindSpore
# reports as deprecated on the terminal of every process.
# Goes when: MindNLP uses what took their place.
@around("mindnlp")
def _quiet_deprecations_at_import(module: types.ModuleType) -> Iterator[None]:
    from mindspore import log

    logger = log._get_logger()

    def is_news(record: Any) -> bool:
        return "is deprecated from version" not in record.getMessage()

    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)
