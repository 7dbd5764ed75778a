"""Where the processes meet: the group of this process.

Goes in: a transport, chosen by who launched us (rendezvous.py). Comes
out: one :class:`~mindnlp_dp.ProcessGroup` a process, with its rank and the world size.
"""

from __future__ import annotations

import os
from typing import Optional

from mindnlp_dp.kernels.choice import check_kernels
from mindnlp_dp.kernels.choice import choose as choose_kernels
from mindnlp_dp.launch.device_target import obey_device_target
from mindnlp_dp.launch.launchers import detect_launch
from mindnlp_dp.patches.mindspore_layers import use_kernels_in_layers
from mindnlp_dp.runtime import progress

from .checks import check_level
from .collectives import ProcessGroup
from .rendezvous import choose_backend, meet

__all__ = ["ProcessGroup", "destroy_process_group", "get_process_group", "init_process_group"]

_group: Optional[ProcessGroup] = None
_data_group: Optional[ProcessGroup] = None
# Whether this process ever joined a job; stays so when it has left.
was_started = False


def init_process_group(
    backend: str = "auto", *, tune_runtime: bool = True, kernels: str = "auto", checks: str = "auto"
) -> ProcessGroup:
    """Meet the other processes of this job, and return the group of all of them.

    Call it once, before the first tensor is made; later calls return the same group, and may say that kernels are
    to be MindSpore's.
    With ``tune_runtime``, on CPU, threads and dispatch are fitted to the cores of this
    process; pass ``False`` to keep MindSpore's own. With it, too, MindNLP's layers are computed by our ``kernels``
    ("auto"), or by MindSpore's own ("mindspore"), which are slower; the environment variable ``MINDNLP_DP_KERNELS``
    says which where the script does not.
    ``checks`` says how often the ranks are asked whether they make the same call: before every collective ("all"), or
    not before those that each update makes ("setup"); "auto" is all on CPU, and setup on a device, which every
    question makes wait.

    Raises:
        ValueError: ``backend``, ``kernels`` or ``checks`` is unknown, or ``backend`` contradicts the launcher or an
            earlier call.
        ImportError, RuntimeError: the backend's library is not installed, or sees other processes than were started.
    """
    global _group, was_started
    kernels = check_kernels(kernels)
    if _group is not None:
        if backend not in ("auto", _group.backend, _group.backend_kind):
            raise ValueError(f"init_process_group({backend!r}), but the group was started with {_group.backend!r}")
        if kernels == "mindspore":
            choose_kernels(kernels, 1)
        return _group

    check_level(checks)
    # MindNLP obeys DEVICE_TARGET when it is imported, which may be later.
    device = obey_device_target()
    kind = choose_backend(backend, launch := detect_launch(os.environ), device)
    with progress.waiting("init_process_group"):
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
    _group = ProcessGroup(transport, kind, checks=checks)
    was_started = True
    progress.meet()
    return _group


def get_process_group() -> ProcessGroup:
    """The group that :func:`init_process_group` made.

    Raises:
        RuntimeError: there is none yet; under a launcher, every process would train its own model.
    """
    if _group is not None:
        return _group
    launch = detect_launch(os.environ)
    among = f", though {launch.by} started {launch.num_known} processes" if launch.num_known > 1 else ""
    raise RuntimeError(
        f"no process group{among}; call mindnlp_dp.init_process_group() first, before the model is built"
    )


def destroy_process_group() -> None:
    """Leave the job."""
    global _group, _data_group
    if _group is not None:
        _group._transport.close()
        _group = _data_group = None


def get_data_group() -> ProcessGroup:
    """The ranks that share out the samples: all of them, unless a mesh says otherwise (:mod:`mindnlp_dp.parallel`)."""
    return _data_group or get_process_group()


def set_data_group(group: ProcessGroup) -> None:
    """Say who shares out the samples from now on."""
    global _data_group
    _data_group = group
