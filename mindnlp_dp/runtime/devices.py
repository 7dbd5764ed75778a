"""This module describes this host's processor and accelerators, and selects this process's device and card."""

from __future__ import annotations

import glob
import os
import platform
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Optional

from mindnlp_dp.runtime.launch_env import card_of_this_process


def set_device_from_env() -> str:
    """Switch MindSpore to the device that DEVICE_TARGET names, if it is set; return the device in use.

    DEVICE_TARGET is MindNLP's variable: CPU, GPU or Ascend. Each process of a host gets its own card here,
    because MindSpore itself assigns cards only under msrun. A device that the script has set is kept.
    """
    import mindspore

    current, target = mindspore.get_context("device_target"), os.environ.get("DEVICE_TARGET")
    device = target if target in ("CPU", "GPU", "Ascend") else current
    card = card_of_this_process(os.environ) if device != "CPU" else None
    if card is not None and not _has_set_a_device():
        mindspore.set_device(device, card)
    elif device != current:
        mindspore.set_device(device)
    return str(mindspore.get_context("device_target"))


@contextmanager
def device_set_from_env() -> Iterator[Optional[str]]:
    """Apply DEVICE_TARGET, and hide it inside the block so that no other code applies it; yield its value."""
    set_device_from_env()
    target = os.environ.pop("DEVICE_TARGET", None)
    try:
        yield target
    finally:
        if target is not None:
            os.environ["DEVICE_TARGET"] = target


def _has_set_a_device() -> bool:
    from mindspore._c_expression import DeviceManagerConf

    return bool(DeviceManagerConf.get_instance().is_device_enable())


def peak_memory() -> int:
    """Return the largest memory of this process so far, in bytes: on a card, that of the card's tensors."""
    import mindspore

    if mindspore.get_context("device_target") != "CPU":
        return int(mindspore.runtime.max_memory_allocated())
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# For each device: the pattern of its cards' files, and the variable that limits which cards are visible.
_CARDS = {
    "Ascend": ("/dev/davinci[0-9]*", "ASCEND_RT_VISIBLE_DEVICES"),
    "GPU": ("/dev/nvidia[0-9]*", "CUDA_VISIBLE_DEVICES"),
}


def count_devices(device: str, environ: Mapping[str, str]) -> int:
    """Return the number of ``"Ascend"`` or ``"GPU"`` cards that processes of this host may use."""
    pattern, visible = _CARDS[device]
    if visible in environ:
        return len([card for card in environ[visible].split(",") if card.strip()])
    return len(glob.glob(pattern))


def default_device(environ: Mapping[str, str]) -> str:
    """Return the device that a job trains on: DEVICE_TARGET if it is set, else Ascend if there are NPUs, else CPU.

    GPUs are not chosen by default, because MindSpore from PyPI cannot use them.
    """
    if "DEVICE_TARGET" in environ:
        return environ["DEVICE_TARGET"]
    return "Ascend" if count_devices("Ascend", environ) else "CPU"


def too_many_workers(num_workers: int, environ: Mapping[str, str]) -> Optional[str]:
    """Return an error message if there are more workers than cards, else None; a CPU takes any number."""
    device = environ.get("DEVICE_TARGET", "CPU")
    if device not in _CARDS:
        return None
    count = count_devices(device, environ)
    if num_workers <= count:
        return None
    instead = f"start at most {count}" if count else "try DEVICE_TARGET=CPU"
    return f"{num_workers} workers, but this host has {count} {device} devices to use; {instead}"


def machine() -> str:
    """Return the processor, its number of cores and the Python version, in one line."""
    model, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{named[0] if named else model}, {os.cpu_count()} cores, Python {platform.python_version()}"
