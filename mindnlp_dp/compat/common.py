"""Patches for the import of every MindNLP version."""

from __future__ import annotations

import importlib.metadata
import types
from collections.abc import Iterator
from typing import Any

from mindnlp_dp.compat.import_hook import around
from mindnlp_dp.runtime.versions import check_versions


# Versions: all. Cause: the other patches work only for known pairs of MindNLP and MindSpore.
# Remove when: MindNLP pins the MindSpore versions that it runs on.
@around("mindnlp")
def _refuse_unknown_pairs(module: types.ModuleType) -> Iterator[None]:
    check_versions(importlib.metadata.version("mindnlp"), importlib.metadata.version("mindspore"))
    yield


# Versions: MindSpore 2.8+. Cause: importing MindNLP uses many deprecated APIs of MindSpore, and every process prints
# the warnings.
# Remove when: MindNLP uses their replacements.
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
