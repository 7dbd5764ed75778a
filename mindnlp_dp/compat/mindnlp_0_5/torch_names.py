"""These patches add names of PyTorch that Transformers and Accelerate use and ``mindtorch`` lacks."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

from mindnlp_dp.compat.import_hook import around
from mindnlp_dp.runtime.override import override


# Versions: MindNLP 0.5.1. Cause: its optimizers' zero_grad() calls torch.autograd.profiler, which mindtorch lacks.
# Remove when: mindtorch has it.
@around("mindtorch")
def _profiler(module: types.ModuleType) -> Iterator[None]:
    yield
    if not hasattr(module.autograd, "profiler"):

        @contextlib.contextmanager
        def record_function(name: str, args: Any = None) -> Iterator[None]:
            """Do nothing, because no profiler records the span."""
            yield

        profiler = types.ModuleType("mindtorch.autograd.profiler")
        profiler.record_function = record_function  # type: ignore[attr-defined]
        module.autograd.profiler = profiler  # type: ignore[attr-defined]


# Versions: MindNLP 0.5.1. Cause: Transformers infers the framework from the module names of a model's base classes,
# which do not begin with "torch" here, so its Trainer accepts only Transformers' own models.
# Remove when: it accepts any subclass of mindtorch.nn.Module.
@around("transformers.utils.generic")
def _modules_are_pytorchs(module: types.ModuleType) -> Iterator[None]:
    yield

    @override(module)
    def infer_framework(model_class: Any) -> Any:
        """Return "pt" for a subclass of ``mindtorch.nn.Module``."""
        return "pt" if any(base.__module__.startswith("mindtorch") for base in model_class.__mro__) else NotImplemented


# Versions: MindNLP 0.5.1. Cause: Transformers reads a checkpoint's random state inside safe_globals, which mindtorch
# lacks.
# Remove when: mindtorch has it.
@around("mindtorch.serialization")
def _safe_globals(module: types.ModuleType) -> Iterator[None]:
    yield
    if not hasattr(module, "safe_globals"):

        @contextlib.contextmanager
        def safe_globals(allowed: Any) -> Iterator[None]:
            """Do nothing; in PyTorch, it allows unpickling these classes, and mindtorch's unpickler allows all."""
            yield

        module.safe_globals = safe_globals  # type: ignore[attr-defined]
