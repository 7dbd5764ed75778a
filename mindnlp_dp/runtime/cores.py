"""This module computes which cores each process of a host may use, and how much of their time.

The launcher and threads.py call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Optional


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
