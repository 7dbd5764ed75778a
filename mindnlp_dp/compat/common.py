"""Patches for the import of every MindNLP version."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from mindnlp_dp.compat.import_hook import around
from mindnlp_dp.runtime.launch_env import launched_rank
from mindnlp_dp.runtime.versions import check_versions


# Versions: all. Cause: the other patches do not work with versions older than the tested ones, and may not with newer.
# Remove when: MindNLP pins the MindSpore versions that it runs on.
@around("mindnlp")
def _check_versions(module: types.ModuleType) -> Iterator[None]:
    warning = check_versions(importlib.metadata.version("mindnlp"), importlib.metadata.version("mindspore"))
    if warning and launched_rank(os.environ, default=0) == 0:
        print(warning, file=sys.stderr)
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
