"""One process's runtime: its cores, its operator threads, its dispatch, its seeds.

Goes in: how many processes share this host. Comes out: a process whose threads
fit its cores. Only the CPU is configured; on Ascend and GPU nothing is touched.

MindSpore starts 25 operator threads a process and dispatches operators from
another thread; on few cores these spin against each other, and a small matrix
product takes one scheduler tick (4 ms) instead of 0.07 ms. One operator thread a
core and synchronous dispatch avoid that. Both must be set before the first
operator runs: the thread pools are sized once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import numpy as np


def split_cores(cores: Sequence[int], num_processes: int, index: int) -> tuple[int, ...]:
    """The cores of process ``index`` when ``num_processes`` share ``cores``.

    Consecutive blocks, the first ones larger by one where it does not divide; with
    more processes than cores, core ``index % len(cores)`` alone.

    >>> split_cores([0, 1, 2, 3, 4], 2, 0), split_cores([0, 1, 2, 3, 4], 2, 1)
    ((0, 1, 2), (3, 4))
    """
    if num_processes >= len(cores):
        return (cores[index % len(cores)],)
    small, extra = divmod(len(cores), num_processes)
    start = index * small + min(index, extra)
    return tuple(cores[start : start + small + (index < extra)])


@dataclass(frozen=True)
class RuntimeSettings:
    """What :func:`configure_runtime` left in force: None where it is MindSpore's own."""

    cores: tuple[int, ...]
    operator_threads: int | None
    synchronous_dispatch: bool


def configure_runtime(device: str, local_rank: int, local_world_size: int) -> RuntimeSettings:
    """Fit this process to its cores, unless its user or launcher already has.

    A process that may run on every core and shares the host with others of its job
    is bound to its own block of cores. An affinity that was narrowed before (by
    ``mpirun``, ``msrun --bind_core``, ``taskset``) stays, and so does a number of
    operator threads that was set with ``device_context.cpu.op_tuning.threads_num``.
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if device != "CPU":
        return RuntimeSettings(cores, None, False)

    import mindspore
    from mindspore._c_expression import RuntimeConf

    if local_world_size > 1 and len(cores) == os.cpu_count():
        cores = split_cores(cores, local_world_size, local_rank)
        os.sched_setaffinity(0, cores)

    threads = None
    if not RuntimeConf.get_instance().is_op_threads_num_configured():
        threads = len(cores)
        mindspore.device_context.cpu.op_tuning.threads_num(threads)
    mindspore.runtime.launch_blocking()
    return RuntimeSettings(cores, threads, True)


def step_seed(seed: int, rank: int, step: int, micro_step: int) -> int:
    """The seed of the randomness inside the model (dropout) for one micro step.

    A function of its arguments alone, in ``[0, 2**31)``: a resumed run replays it,
    and ranks, steps and micro steps all differ.
    """
    return int(np.random.SeedSequence([seed, rank, step, micro_step]).generate_state(1)[0] >> 1)


def machine() -> str:
    """The processor, its number of cores, and Python's version, in a line for a report."""
    model, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{named[0] if named else model}, {os.cpu_count()} cores, Python {platform.python_version()}"


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block with MindSpore's generators at ``seed``; NumPy's own state is kept around it."""
    import mindspore

    numpy_state = np.random.get_state()
    mindspore.set_seed(seed)
    mindspore.manual_seed(seed)
    np.random.set_state(numpy_state)
    yield


def autograd_cleared_on_error(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which computes gradients; when it raises, nothing of its pass is left in MindSpore's autograd.

    MindSpore keeps its record of a pass that did not come to its end, and takes later ones for parts of it: their
    gradients are zero.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        from mindspore.common.api import _pynative_executor

        try:
            return function(*args, **kwargs)
        except BaseException:
            _pynative_executor.clear_res()
            raise

    return call
