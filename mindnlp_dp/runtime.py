"""One process's runtime: its cores, its operator threads, its dispatch, its seeds.

Goes in: the processes that share this host, and their cores. Comes out: a process whose threads
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np

from .backends.base import Backend


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


def own_cores(sets: Sequence[Sequence[int]], index: int) -> tuple[int, ...]:
    """The cores of process ``index`` of a host, whose processes may run on ``sets`` of cores.

    Processes with the same set, which nobody bound apart, split it; any other keeps its own.

    >>> own_cores([(0, 1), (0, 1)], 1), own_cores([(0,), (1,)], 1)
    ((1,), (1,))
    """
    mine = sets[index]
    sharing = [other for other, cores in enumerate(sets) if cores == mine]
    return split_cores(mine, len(sharing), sharing.index(index))


def cores_granted(read: Callable[[str], str]) -> Optional[float]:
    """How many cores' time this process's cgroups grant it; None without a limit.

    ``read`` gives a file's contents, or "" where there is no such file. Every group
    above this process's own counts as well (Linux, cgroups(7): cpu.max in version 2, cpu.cfs_quota_us in version 1).
    """
    granted: list[float] = []
    for line in read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for group in _upwards(path):
            if controllers:
                folder = f"/sys/fs/cgroup/{controllers}{group}"
                quota, period = read(f"{folder}/cpu.cfs_quota_us"), read(f"{folder}/cpu.cfs_period_us")
            else:
                quota, _, period = read(f"/sys/fs/cgroup{group}/cpu.max").strip().partition(" ")
            if quota.strip().isdigit() and int(period or 0) > 0:
                granted.append(int(quota) / int(period))
    return min(granted, default=None)


def _upwards(path: str) -> Iterator[str]:
    """A group's path and those above it, to the root, "": in a container the root is the group itself."""
    while path.strip("/"):
        yield path.rstrip("/")
        path = path.rstrip("/").rpartition("/")[0]
    yield ""


def num_operator_threads(num_cores: int, granted: Optional[float], num_processes: int) -> int:
    """A thread a core, and no more than a process's part of the cores' time that all of them are granted.

    >>> num_operator_threads(8, None, 2), num_operator_threads(8, 4.0, 2), num_operator_threads(8, 1.5, 2)
    (8, 2, 1)
    """
    return num_cores if granted is None else max(1, min(num_cores, int(granted / num_processes)))


def configure_runtime(device: str, backend: Backend) -> RuntimeSettings:
    """Fit this process to its cores, unless its user or launcher already has. A collective.

    Processes of this host that may run on the same cores, all of the machine's or those of a
    container or a ``taskset`` around the job, are bound to a block of them each. Processes that were bound apart
    before (by ``mpirun``, ``msrun --bind_core``, ``mindnlp-dp run``) stay, and so does a number of
    operator threads that was set with ``device_context.cpu.op_tuning.threads_num``.
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if device != "CPU":
        return RuntimeSettings(cores, None, False)

    import mindspore
    from mindspore._c_expression import RuntimeConf

    if backend.local_world_size > 1:
        sets = backend.gather_on_host(cores)
        if sets is not None:
            cores = own_cores(sets, backend.local_rank)
        elif cores == tuple(sorted(os.sched_getaffinity(os.getppid()))):
            # The launcher, which started all of them, gave this process what it has itself.
            cores = split_cores(cores, backend.local_world_size, backend.local_rank)
        os.sched_setaffinity(0, cores)

    threads = None
    if not RuntimeConf.get_instance().is_op_threads_num_configured():
        threads = num_operator_threads(len(cores), cores_granted(_read), backend.local_world_size)
        mindspore.device_context.cpu.op_tuning.threads_num(threads)
    mindspore.runtime.launch_blocking()
    return RuntimeSettings(cores, threads, True)


def _read(file: str) -> str:
    try:
        return Path(file).read_text()
    except OSError:
        return ""


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
