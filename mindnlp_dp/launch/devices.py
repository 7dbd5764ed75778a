"""How many accelerators this host has, without asking MindSpore."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from typing import Optional

# Device: the files of its cards, and the variable that hides some of them.
_CARDS = {
    "Ascend": ("/dev/davinci[0-9]*", "ASCEND_RT_VISIBLE_DEVICES"),
    "GPU": ("/dev/nvidia[0-9]*", "CUDA_VISIBLE_DEVICES"),
}


def count_devices(device: str, environ: Mapping[str, str]) -> int:
    """The number of ``"Ascend"`` or ``"GPU"`` cards that processes of this host may use."""
    pattern, visible = _CARDS[device]
    if visible in environ:
        return len([card for card in environ[visible].split(",") if card.strip()])
    return len(glob.glob(pattern))


def default_device(environ: Mapping[str, str]) -> str:
    """The device that a job trains on: what DEVICE_TARGET says, else Ascend where there are NPUs, else the CPU.

    A GPU is no reason to leave the CPU: MindSpore as PyPI has it cannot use one.
    """
    if "DEVICE_TARGET" in environ:
        return environ["DEVICE_TARGET"]
    return "Ascend" if count_devices("Ascend", environ) else "CPU"


def too_many_workers(num_workers: int, environ: Mapping[str, str]) -> Optional[str]:
    """What is wrong when more workers than cards are asked for; a CPU takes any number."""
    device = environ.get("DEVICE_TARGET", "CPU")
    if device not in _CARDS:
        return None
    count = count_devices(device, environ)
    if num_workers <= count:
        return None
    instead = f"start at most {count}" if count else "try DEVICE_TARGET=CPU"
    return f"{num_workers} workers, but this host has {count} {device} devices to use; {instead}"
