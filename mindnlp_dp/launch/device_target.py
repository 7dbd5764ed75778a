"""Select the device, and its card, that this process uses; the process group and the patches call it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Optional

from .launchers import card_of_this_process


def obey_device_target() -> str:
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
def device_target_obeyed() -> Iterator[Optional[str]]:
    """Apply DEVICE_TARGET, and hide it inside the block so that no other code applies it; yield its value."""
    obey_device_target()
    target = os.environ.pop("DEVICE_TARGET", None)
    try:
        yield target
    finally:
        if target is not None:
            os.environ["DEVICE_TARGET"] = target


def _has_set_a_device() -> bool:
    from mindspore._c_expression import DeviceManagerConf

    return bool(DeviceManagerConf.get_instance().is_device_enable())
