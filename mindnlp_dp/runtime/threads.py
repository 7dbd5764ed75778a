"""This module computes which cores each process of a host may use, and fits MindSpore's threads to them.

The launcher and ``init_process_group`` call it. Only the CPU is configured; on Ascend and GPU nothing is changed.

MindSpore starts 25 operator threads per process and dispatches operators from
another thread; on few cores these spin against each other, and a small matrix
product takes one scheduler tick (4 ms) instead of 0.07 ms. One operator thread per
core and synchronous dispatch avoid that. Both must be set before the first
operator runs, because the thread pools are sized once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional


@dataclass(frozen=True)
class RuntimeSettings:
    """The settings that are in force after :func:`configure_runtime`.

    ``operator_threads`` is None if MindSpore's number had already been set by other code; ``num_threads`` is the number
    of threads for which this process's cores have time.
    """

    cores: tuple[int, ...]
    operator_threads: int | None
    synchronous_dispatch: bool
    num_threads: int


def usable_cores() -> tuple[int, ...]:
    """Return the cores that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def configure_runtime(
    device: str, local_rank: int, local_world_size: int, cores_by_rank: Optional[Sequence[tuple[int, ...]]] = None
) -> RuntimeSettings:
    """Fit this process, number ``local_rank`` of its host, to its cores, unless its user or launcher already has.

    ``cores_by_rank`` are the cores that each process of this host may use; None if they are not known.

    Processes of this host that may run on the same cores (all of the machine's, or those of a
    container or a ``taskset`` around the job) are each bound to a block of them. Processes that were bound separately
    before (by ``mpirun``, ``msrun --bind_core``, ``mindnlp-dp run``) keep their cores. A number of
    operator threads that was set with ``device_context.cpu.op_tuning.threads_num`` is kept, too.
    """
    cores = usable_cores()
    if device != "CPU":
        return RuntimeSettings(cores, None, False, len(cores))

    import mindspore
    from mindspore._c_expression import RuntimeConf
    from threadpoolctl import threadpool_limits

    if local_world_size > 1:
        if cores_by_rank is not None:
            cores = own_cores(cores_by_rank, local_rank)
        elif cores == tuple(sorted(os.sched_getaffinity(os.getppid()))):
            # The launcher started all processes and left this one its own cores, so it has not bound them separately.
            cores = split_cores(cores, local_world_size, local_rank)
        os.sched_setaffinity(0, cores)

    num_threads = num_operator_threads(len(cores), cores_granted(_read), local_world_size)
    threads = None
    if not RuntimeConf.get_instance().is_op_threads_num_configured():
        threads = num_threads
        mindspore.device_context.cpu.op_tuning.threads_num(threads)
    mindspore.runtime.launch_blocking()
    # NumPy's BLAS counted the cores when it was loaded, before this process was bound to its own.
    threadpool_limits(num_threads, user_api="blas")
    return RuntimeSettings(cores, threads, True, num_threads)


def _read(file: str) -> str:
    try:
        return Path(file).read_text()
    except OSError:
        return ""


def split_cores(cores: Sequence[int], num_processes: int, index: int) -> tuple[int, ...]:
    """Return the cores of process ``index`` when ``num_processes`` split ``cores``.

    They are consecutive blocks, the first ones larger by one core if the number does not divide evenly; with
    more processes than cores, a process gets core ``index % len(cores)`` alone.

    >>> split_cores([0, 1, 2, 3, 4], 2, 0), split_cores([0, 1, 2, 3, 4], 2, 1)
    ((0, 1, 2), (3, 4))
    """
    if num_processes >= len(cores):
        return (cores[index % len(cores)],)
    small, extra = divmod(len(cores), num_processes)
    start = index * small + min(index, extra)
    return tuple(cores[start : start + small + (index < extra)])


def own_cores(sets: Sequence[Sequence[int]], index: int) -> tuple[int, ...]:
    """Return the cores of process ``index`` of a host whose processes may run on ``sets`` of cores.

    Processes with the same set, which were not bound separately, split it; any other process keeps its set.

    >>> own_cores([(0, 1), (0, 1)], 1), own_cores([(0,), (1,)], 1)
    ((1,), (1,))
    """
    mine = sets[index]
    sharing = [other for other, cores in enumerate(sets) if cores == mine]
    return split_cores(mine, len(sharing), sharing.index(index))


def cores_granted(read: Callable[[str], str]) -> Optional[float]:
    """Return how many cores' worth of time this process's cgroups grant it; None without a limit.

    ``read`` returns a file's contents, or "" if the file does not exist. Every group
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
    """Yield a group's path and those above it, up to the root, "": in a container the root is the group itself."""
    while path.strip("/"):
        yield path.rstrip("/")
        path = path.rstrip("/").rpartition("/")[0]
    yield ""


def num_operator_threads(num_cores: int, granted: Optional[float], num_processes: int) -> int:
    """Return one thread per core, limited to this process's part of the cores' time that all processes are granted.

    >>> num_operator_threads(8, None, 2), num_operator_threads(8, 4.0, 2), num_operator_threads(8, 1.5, 2)
    (8, 2, 1)
    """
    return num_cores if granted is None else max(1, min(num_cores, int(granted / num_processes)))
