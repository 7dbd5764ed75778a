"""MindNLP's own PyTorch: ``mindnlp.core`` in 0.4, ``mindtorch`` in 0.5."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from mindnlp_dp.versions import mindnlp_series


@functools.cache
def torch_like() -> Any:
    """The package, with ``nn``, ``optim`` and ``autograd`` in it."""
    # Its patches come with MindNLP.
    importlib.import_module("mindnlp")
    return importlib.import_module("mindtorch" if mindnlp_series() == "0.5" else "mindnlp.core")
