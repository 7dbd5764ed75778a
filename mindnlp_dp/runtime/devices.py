"""This module describes this host's processor and accelerators, and selects this process's device and card."""

from __future__ import annotations

import glob
import itertools
import os
import platform
import re
import resource
from collections.abc import Iterable, Iterator, Mapping
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
    elif device != current and not _has_set_a_device():
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


def is_on_cpu() -> bool:
    """Return whether MindSpore computes on CPU."""
    import mindspore

    return bool(mindspore.get_context("device_target") == "CPU")


def _has_set_a_device() -> bool:
    from mindspore._c_expression import DeviceManagerConf

    return bool(DeviceManagerConf.get_instance().is_device_enable())


def peak_memory() -> int:
    """Return the largest memory of this process so far, in bytes: on a card, that of the card's tensors."""
    import mindspore

    if not is_on_cpu():
        return int(mindspore.runtime.max_memory_allocated())
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# For each device: the pattern of its cards' files, and the variable that limits which cards are visible.
_CARDS = {
    "Ascend": ("/dev/davinci[0-9]*", "ASCEND_RT_VISIBLE_DEVICES"),
    "GPU": ("/dev/nvidia[0-9]*", "CUDA_VISIBLE_DEVICES"),
}

DEVICES = ("CPU", *_CARDS)


def visible_devices(device: str, environ: Mapping[str, str]) -> Optional[list[str]]:
    """Return the ids to which a variable limits the ``"Ascend"`` or ``"GPU"`` cards; None if it is not set.

    The ids are those that CANN or CUDA reads: both stop at an id that is invalid, such as -1, and CANN also at any
    character that is neither a digit nor a comma (CANN's manual, envref_07_0028: of "1, 2,3" it reads 1).
    """
    listed = environ.get(_CARDS[device][1])
    if listed is None:
        return None
    if device == "Ascend":
        read = re.match(r"\d+(,\d+)*", listed)
        return read.group().split(",") if read else []
    return list(itertools.takewhile(lambda id_: id_ and not id_.startswith("-"), map(str.strip, listed.split(","))))


def limit_devices(device: str, ids: Iterable[int]) -> dict[str, str]:
    """Return the variable that limits the ``"Ascend"`` or ``"GPU"`` cards to these; none on a CPU."""
    return {_CARDS[device][1]: ",".join(map(str, sorted(ids)))} if device in _CARDS else {}


def check_visible_devices(environ: Mapping[str, str]) -> Optional[str]:
    """Return an error message if CANN would see other cards than ASCEND_RT_VISIBLE_DEVICES seems to list, else None.

    The list does not matter if DEVICE_TARGET names another device.
    """
    if environ.get("DEVICE_TARGET", "Ascend") not in ("", "Ascend"):
        return None
    variable = _CARDS["Ascend"][1]
    # -1 hides all cards after it, which some users want.
    listed = re.split(r"(?:^|,)-1\b", environ.get(variable, ""))[0]
    ids: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:\s*-\s*(\d+))?", listed):
        ids.update(range(int(first), min(int(last or first), int(first) + 63) + 1))
    meant = ",".join(map(str, sorted(ids)))
    if listed == meant:
        return None
    read = ",".join(visible_devices("Ascend", environ) or []) or "none"
    why = f"it reads {read}, and stops at any character that is neither a digit nor a comma"
    if re.fullmatch(r"\d+(,\d+)*", listed):
        why = "it takes ascending ids, each once"
    instead = f"write, for example, {variable}={meant}"
    if not meant or re.search(r"[^\W\d]|(?:^|[,\s])-", listed):
        instead = f"unset {variable} to use all NPUs, or list their numbers, for example {variable}=0,1,2,3"
    return f"{variable}={environ[variable]!r} is not a list for CANN: {why}; {instead}"


def count_devices(device: str, environ: Mapping[str, str]) -> int:
    """Return the number of ``"Ascend"`` or ``"GPU"`` cards that processes of this host may use."""
    visible = visible_devices(device, environ)
    return len(glob.glob(_CARDS[device][0]) if visible is None else visible)


def default_device(environ: Mapping[str, str]) -> str:
    """Return the device that a job trains on: DEVICE_TARGET if it is set, else Ascend if there are NPUs, else CPU.

    GPUs are not chosen by default, because MindSpore from PyPI cannot use them.
    """
    return environ.get("DEVICE_TARGET") or ("Ascend" if count_devices("Ascend", environ) else "CPU")


def too_many_workers(num_workers: int, environ: Mapping[str, str]) -> Optional[str]:
    """Return an error message if there are more workers than cards, else None; a CPU takes any number."""
    device = default_device(environ)
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
