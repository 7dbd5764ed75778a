"""This patch makes Accelerate believe that this process is the only one.

Transformers' Trainer delegates processes, devices and data sharding to Accelerate, which detects other processes by the
launcher's environment variables, starts ``torch.distributed`` and wraps the model. Our own process group and trainer do
this work instead.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mindnlp_dp.compat.import_hook import around

# The variables of torchrun, and the prefixes of those of MPI implementations.
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

_PREFIXES = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_", "MV2_COMM_WORLD_")


# Versions: MindNLP 0.5.1 with Accelerate 1.10. Cause: mindtorch.distributed cannot start the backend that Accelerate
# asks for ("gloo"), and none of its collectives works.
# Remove when: torch.distributed works under MindNLP; the Trainer's loop could use it then.
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
    """Hide the environment variables that tell of other processes while the block runs."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name in _NAMES or name.startswith(_PREFIXES)}
    try:
        yield
    finally:
        os.environ.update(hidden)
