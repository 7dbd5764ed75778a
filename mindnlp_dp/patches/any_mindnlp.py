"""What importing any MindNLP needs."""

from __future__ import annotations

import importlib.metadata
import types
from collections.abc import Iterator
from typing import Any

from mindnlp_dp.versions import check_versions

from .import_hook import around


# Versions: all. Cause: the pair decides whether anything below can work.
# Goes when: MindNLP pins the MindSpore versions that it runs on.
@around("mindnlp")
def _refuse_unknown_pairs(module: types.ModuleType) -> Iterator[None]:
    check_versions(importlib.metadata.version("mindnlp"), importlib.metadata.version("mindspore"))
    yield


# Versions: MindSpore 2.8+. Cause: MindNLP imports and makes much that MindSpore reports as deprecated, on the terminal
# of every process.
# Goes when: MindNLP uses what took its place.
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
