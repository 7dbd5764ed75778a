"""What MindNLP has in place of PyTorch and of Transformers.

In 0.4 both are its own, ``mindnlp.core`` and ``mindnlp.transformers``; in 0.5 they are ``mindtorch``, and Transformers
itself on top of it.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from mindnlp_dp.versions import mindnlp_series


@functools.cache
def torch_like() -> Any:
    """The package with ``nn``, ``optim`` and ``autograd``."""
    # Its patches come with MindNLP.
    importlib.import_module("mindnlp")
    return importlib.import_module("mindtorch" if mindnlp_series() == "0.5" else "mindnlp.core")


@functools.cache
def transformers_like() -> Any:
    """The package with models and tokenizers."""
    importlib.import_module("mindnlp")
    return importlib.import_module("transformers" if mindnlp_series() == "0.5" else "mindnlp.transformers")
