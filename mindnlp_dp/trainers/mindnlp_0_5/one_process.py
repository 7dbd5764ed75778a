"""Accelerate, which is told that this process is alone.

Transformers' Trainer leaves processes, devices and their data to Accelerate, which finds the others by the variables
that launchers set, wraps the model and cuts the data. Here the process group knows them, and our stages do all that: so
Accelerate must not. It looks once, when arguments and Trainer are made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# Of torchrun, and of those that MPIs set.
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_PREFIXES = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_", "MV2_COMM_WORLD_")


@contextmanager
def one_process() -> Iterator[None]:
    """Within it, nothing in the environment says that there are others."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name in _NAMES or name.startswith(_PREFIXES)}
    try:
        yield
    finally:
        os.environ.update(hidden)
