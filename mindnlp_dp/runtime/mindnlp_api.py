"""This module imports MindNLP's replacements for PyTorch and Transformers, whose names depend on its version.

In 0.4 both are MindNLP's own, ``mindnlp.core`` and ``mindnlp.transformers``; in 0.5 they are ``mindtorch``, and
Transformers itself on top of it.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from mindnlp_dp.runtime.versions import mindnlp_series


@functools.cache
def mindnlp_api() -> Any:
    """Return the package with ``nn``, ``optim`` and ``autograd``."""
    # Importing MindNLP applies its patches.
    importlib.import_module("mindnlp")
    return importlib.import_module("mindtorch" if mindnlp_series() == "0.5" else "mindnlp.core")


@functools.cache
def transformers_api() -> Any:
    """Return the package with models and tokenizers."""
    importlib.import_module("mindnlp")
    return importlib.import_module("transformers" if mindnlp_series() == "0.5" else "mindnlp.transformers")


@functools.cache
def peft_api() -> Any:
    """Return the package with adapters."""
    importlib.import_module("mindnlp")
    return importlib.import_module("peft" if mindnlp_series() == "0.5" else "mindnlp.peft")
