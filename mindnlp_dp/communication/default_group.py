"""This module creates, returns and destroys the :class:`~mindnlp_dp.ProcessGroup` of this process.

User scripts and the trainers call it. The launcher of the process decides which transport is used (rendezvous.py).
"""

from __future__ import annotations

import os
from typing import Optional

from mindnlp_dp.communication.backend_selection import choose_backend, meet
from mindnlp_dp.communication.consistency_checks import check_level
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.kernels.choice import check_kernels
from mindnlp_dp.kernels.choice import choose as choose_kernels
from mindnlp_dp.patches.mindspore_layers import use_kernels_in_layers
from mindnlp_dp.runtime import heartbeat
from mindnlp_dp.runtime.devices import obey_device_target
from mindnlp_dp.runtime.launch_env import detect_launch

_group: Optional[ProcessGroup] = None

_data_group: Optional[ProcessGroup] = None

# Whether this process ever joined a job; it stays True after leaving.
was_started = False


def init_process_group(
    backend: str = "auto", *, tune_runtime: bool = True, kernels: str = "auto", checks: str = "auto"
) -> ProcessGroup:
    """Join the other processes of this job, and return the group of all of them.

    Call it once, before the first tensor is created; later calls return the same group, and may still select
    MindSpore's kernels.
    With ``tune_runtime`` on CPU, threads and operator dispatch are tuned to the cores of this process; pass ``False``
    to keep MindSpore's settings. It also makes MindNLP's layers use our ``kernels`` ("auto") or MindSpore's own, slower
    ones ("mindspore"); the environment variable ``MINDNLP_DP_KERNELS`` replaces "auto".
    ``checks`` says before which collectives the ranks verify that all make the same call: before every one ("all"), or
    before all except those that each update makes ("setup"). "auto" means "all" on CPU, and "setup" on a device,
    because every check makes the host wait for the device.

    Raises:
        ValueError: ``backend``, ``kernels`` or ``checks`` is unknown, or ``backend`` contradicts the launcher or an
            earlier call.
        ImportError, RuntimeError: the backend's library is not installed, or sees other processes than were started.
    """
    kernels = check_kernels(kernels)
    if (group := current_group()) is not None:
        if backend not in ("auto", group.backend, group.backend_kind):
            raise ValueError(f"init_process_group({backend!r}), but the group was started with {group.backend!r}")
        if kernels == "mindspore":
            choose_kernels(kernels, 1)
        return group

    check_level(checks)
    # MindNLP applies DEVICE_TARGET only when it is imported, which may be later.
    device = obey_device_target()
    kind = choose_backend(backend, launch := detect_launch(os.environ), device)
    with heartbeat.waiting("init_process_group"):
        transport = meet(kind, launch)
    choose_kernels("mindspore", 1)
    if tune_runtime:
        from mindnlp_dp.runtime.threads import configure_runtime, usable_cores

        shares_host = device == "CPU" and transport.local_world_size > 1
        cores_by_rank = transport.gather_on_host(usable_cores()) if shares_host else None
        settings = configure_runtime(device, transport.local_rank, transport.local_world_size, cores_by_rank)
        if device == "CPU":
            choose_kernels(kernels, settings.num_threads)
            use_kernels_in_layers()
    group = ProcessGroup(transport, kind, checks=checks)
    set_process_group(group)
    heartbeat.meet()
    return group


def current_group() -> Optional[ProcessGroup]:
    """Return the group of this process, or None if it has not joined one or has left it."""
    return _group


def set_process_group(group: ProcessGroup) -> None:
    """Set the group of this process, which :func:`get_process_group` returns from now on."""
    global _group, was_started
    _group = group
    was_started = True


def get_process_group() -> ProcessGroup:
    """Return the group that :func:`init_process_group` created.

    Raises:
        RuntimeError: the group does not exist yet; under a launcher, every process would train its own model.
    """
    if _group is not None:
        return _group
    launch = detect_launch(os.environ)
    among = f", though {launch.by} started {launch.num_known} processes" if launch.num_known > 1 else ""
    raise RuntimeError(
        f"no process group{among}; call mindnlp_dp.init_process_group() first, before the model is built"
    )


def destroy_process_group() -> None:
    """Leave the job and close its transport."""
    global _group, _data_group
    if _group is not None:
        _group._transport.close()
        _group = _data_group = None


def get_data_group() -> ProcessGroup:
    """Return the ranks that split the samples: all, unless a mesh says otherwise (:mod:`mindnlp_dp.parallel`)."""
    return _data_group or get_process_group()


def set_data_group(group: ProcessGroup) -> None:
    """Set the group of the ranks that split the samples from now on."""
    global _data_group
    _data_group = group
