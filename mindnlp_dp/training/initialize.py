"""This module implements :func:`init_process_group`, with which a script joins its job before it builds a model.

The launcher of the process decides which transport is used (communication/backend_selection.py).
"""

from __future__ import annotations

import os
from typing import Union

from mindnlp_dp.communication.backend_selection import choose_backend, connect
from mindnlp_dp.communication.consistency_checks import check_level
from mindnlp_dp.communication.default_group import current_group, set_process_group
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.compat.mindspore_layers import use_kernels_in_layers
from mindnlp_dp.kernels.dispatch import check_kernels, check_precision, choose_precision
from mindnlp_dp.kernels.dispatch import choose as choose_kernels
from mindnlp_dp.runtime import heartbeat
from mindnlp_dp.runtime.determinism import check_deterministic, choose_deterministic
from mindnlp_dp.runtime.devices import set_device_from_env
from mindnlp_dp.runtime.launch_env import detect_launch


def init_process_group(
    backend: str = "auto",
    *,
    tune_runtime: bool = True,
    kernels: str = "auto",
    matmul_precision: str = "auto",
    checks: str = "auto",
    deterministic: Union[bool, str] = "auto",
) -> ProcessGroup:
    """Join the other processes of this job, and return the group of all of them.

    Call it once, before the first tensor is created; later calls return the same group, and may still select
    MindSpore's kernels.

    Args:
        backend: library that moves the bytes: "mpi", "mindspore" (HCCL, NCCL or MCCL, by the device), or "single", one
            process. "auto" is that of the launcher.
        tune_runtime: on CPU, tune threads and operator dispatch to the cores of this process. False keeps MindSpore's
            settings.
        kernels: the CPU kernels of MindNLP's layers: ours ("auto") or MindSpore's own, slower ones ("mindspore"). The
            environment variable ``MINDNLP_DP_KERNELS`` replaces "auto".
        matmul_precision: how our kernels multiply: in float32 ("highest"), or from factors rounded to bfloat16, with
            sums in float32 ("medium"), on cores that can. Everything else stays in float32. "auto" is the environment
            variable ``MINDNLP_DP_MATMUL_PRECISION``, or "highest".
        checks: before which collectives the ranks verify that all make the same call: every one ("all"), or all except
            those that each update makes ("setup"). "auto" means "all" on CPU, and "setup" on a device, because every
            check makes the host wait for the device.
        deterministic: MindSpore's deterministic mode on a device (``mindspore.set_deterministic``), without which its
            operators and collectives may give other last bits each time, so that no two runs are equal, and replicas
            that compute the same may drift apart. It often makes operators slower. "auto" is the environment variable
            ``MINDNLP_DP_DETERMINISTIC`` (true or false), or True on Ascend; False leaves MindSpore's default, which is
            off. A script that has called ``mindspore.set_deterministic`` keeps what it has set. On a CPU it changes
            nothing.

    Raises:
        ValueError: an argument has an unknown value, or ``backend`` contradicts the launcher or an earlier call.
        ImportError: the backend's library is not installed.
        RuntimeError: the backend's library sees other processes than were started.

    Examples:
        >>> import numpy as np
        >>> import mindnlp_dp as dp
        >>> group = dp.init_process_group()
        >>> group.rank, group.world_size
        (0, 1)
        >>> float(group.all_reduce(np.float32(3.0), op="sum"))
        3.0
    """
    kernels, precision = check_kernels(kernels), check_precision(matmul_precision)
    wants_determinism = check_deterministic(deterministic)
    if (group := current_group()) is not None:
        if backend not in ("auto", group.backend, group.backend_kind):
            raise ValueError(f"init_process_group({backend!r}), but the group was started with {group.backend!r}")
        if kernels == "mindspore":
            choose_kernels(kernels, 1)
        if matmul_precision != "auto":
            choose_precision(precision)
        return group

    check_level(checks)
    # MindNLP applies DEVICE_TARGET only when it is imported, which may be later.
    device = set_device_from_env()
    # Before communication starts: HCCL's communicators take the mode from MindSpore when they are created.
    choose_deterministic(wants_determinism, device)
    kind = choose_backend(backend, launch := detect_launch(os.environ), device)
    with heartbeat.waiting("init_process_group"):
        transport = connect(kind, launch)
    choose_kernels("mindspore", 1)
    if tune_runtime:
        from mindnlp_dp.runtime.threads import configure_runtime, usable_cores

        shares_host = device == "CPU" and transport.local_world_size > 1
        cores_by_rank = transport.gather_on_host(usable_cores()) if shares_host else None
        settings = configure_runtime(device, transport.local_rank, transport.local_world_size, cores_by_rank)
        if device == "CPU":
            choose_kernels(kernels, settings.num_threads)
    if device == "CPU":
        use_kernels_in_layers()
    choose_precision(precision)
    group = ProcessGroup(transport, kind, checks=checks)
    set_process_group(group)
    heartbeat.mark_joined()
    return group
