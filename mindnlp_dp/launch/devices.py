"""Count the accelerators of this host without MindSpore; the launcher calls it before it starts ranks."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from typing import Optional

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
