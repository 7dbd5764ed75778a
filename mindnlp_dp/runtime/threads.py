"""This module fits one process's operator threads and operator dispatch to its cores; init_process_group calls it.

Only the CPU is configured; on Ascend and GPU nothing is changed.

MindSpore starts 25 operator threads per process and dispatches operators from
another thread; on few cores these spin against each other, and a small matrix
product takes one scheduler tick (4 ms) instead of 0.07 ms. One operator thread per
core and synchronous dispatch avoid that. Both must be set before the first
operator runs, because the thread pools are sized once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from .cores import cores_granted, num_operator_threads, own_cores, split_cores


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
