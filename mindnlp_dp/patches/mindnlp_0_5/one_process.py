"""Accelerate, which is told that this process is alone.

Transformers' Trainer leaves processes, devices and their data to Accelerate, which finds the others by the variables
that launchers set, starts ``torch.distributed`` and wraps the model. Here the process group knows them, and our stages
do all that.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mindnlp_dp.patches.import_hook import around

# Of torchrun, and of those that MPIs set.
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_PREFIXES = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_", "MV2_COMM_WORLD_")


# Versions: MindNLP 0.5.1 with Accelerate 1.10. Cause: mindtorch.distributed cannot start what Accelerate asks it for
# ("gloo"), and no collective of it works.
# Goes when: torch.distributed works under MindNLP; the Trainer's loop could go through it then.
@around("accelerate.state")
def _one_process(module: types.ModuleType) -> Iterator[None]:
    yield
    stock = module.PartialState.__init__

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        with _alone():
            stock(self, *args, **kwargs)

    module.PartialState.__init__ = init  # type: ignore[attr-defined]


@contextmanager
def _alone() -> Iterator[None]:
    """Within it, nothing in the environment says that there are others."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name in _NAMES or name.startswith(_PREFIXES)}
    try:
        yield
    finally:
        os.environ.update(hidden)
