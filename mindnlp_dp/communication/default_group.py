"""This module creates, returns and destroys the :class:`~mindnlp_dp.ProcessGroup` of this process.

User scripts and the trainers call it. The launcher of the process decides which transport is used
(backend_selection.py).
"""

from __future__ import annotations

import os
from typing import Optional

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.runtime.launch_env import detect_launch

_group: Optional[ProcessGroup] = None

_data_group: Optional[ProcessGroup] = None

# Whether this process ever joined a job; it stays True after leaving.
was_started = False


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
