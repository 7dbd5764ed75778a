"""Names of PyTorch's that Transformers and Accelerate use, and ``mindtorch`` lacks."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

from mindnlp_dp.patches.import_hook import around
from mindnlp_dp.patches.in_place_of import in_place_of


# Versions: MindNLP 0.5.1. Cause: its optimizers' zero_grad() reports itself to torch.autograd.profiler, which is not
# there.
# Goes when: mindtorch has it.
@around("mindtorch")
def _profiler(module: types.ModuleType) -> Iterator[None]:
    yield
    if not hasattr(module.autograd, "profiler"):

        @contextlib.contextmanager
        def record_function(name: str, args: Any = None) -> Iterator[None]:
            """A span of the profile, of which there is none."""
            yield

        profiler = types.ModuleType("mindtorch.autograd.profiler")
        profiler.record_function = record_function  # type: ignore[attr-defined]
        module.autograd.profiler = profiler  # type: ignore[attr-defined]


# Versions: MindNLP 0.5.1. Cause: Transformers tells a framework by the name of a model's base class's module, which is
# not "torch..." here, so that its Trainer takes none but its own models.
# Goes when: it does.
@around("transformers.utils.generic")
def _modules_are_pytorchs(module: types.ModuleType) -> Iterator[None]:
    yield

    @in_place_of(module)
    def infer_framework(model_class: Any) -> Any:
        """ "pt", for a subclass of ``mindtorch.nn.Module``."""
        return "pt" if any(base.__module__.startswith("mindtorch") for base in model_class.__mro__) else NotImplemented


# Versions: MindNLP 0.5.1. Cause: Transformers reads the random state of a checkpoint within safe_globals, which is not
# there.
# Goes when: mindtorch has it.
@around("mindtorch.serialization")
def _safe_globals(module: types.ModuleType) -> Iterator[None]:
    yield
    if not hasattr(module, "safe_globals"):

        @contextlib.contextmanager
        def safe_globals(allowed: Any) -> Iterator[None]:
            """Within it, these classes may be unpickled; mindtorch's own unpickler does not ask."""
            yield

        module.safe_globals = safe_globals  # type: ignore[attr-defined]
