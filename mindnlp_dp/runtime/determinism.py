"""This module switches MindSpore's deterministic mode on; :func:`~mindnlp_dp.init_process_group` calls it.

On a device, an operator or a collective may give other last bits each time it runs on the same input. In deterministic
mode it does not, and is often slower. Neither MindSpore nor Ascend's HCCL is deterministic by default. On a CPU, the
bits do not depend on the mode.
"""

from __future__ import annotations

import os
from typing import Any, Optional, Union

VARIABLE = "MINDNLP_DP_DETERMINISTIC"

_WORDS: dict[str, Union[bool, str]] = {"true": True, "1": True, "false": False, "0": False, "auto": "auto"}


def check_deterministic(deterministic: Any) -> Union[bool, str]:
    """Return True, False or "auto"; for "auto", the environment variable ``MINDNLP_DP_DETERMINISTIC`` takes precedence.

    Raises:
        ValueError: the value is none of True, False and "auto", or the variable none of true, false, 1, 0 and auto.
    """
    if not isinstance(deterministic, bool) and deterministic != "auto":
        raise ValueError(f'deterministic must be True, False or "auto", got {deterministic!r}')
    text = os.environ.get(VARIABLE, "")
    if deterministic != "auto" or not text:
        return bool(deterministic) if deterministic != "auto" else "auto"
    if text.lower() not in _WORDS:
        raise ValueError(f"{VARIABLE}={text} must be one of {', '.join(_WORDS)}")
    return _WORDS[text.lower()]


def choose_deterministic(deterministic: Union[bool, str], device: str) -> Optional[bool]:
    """Switch MindSpore's deterministic mode on if it is wanted; return the mode, None if a script has set it before.

    It must be called after the device is set and before communication starts, because HCCL reads the mode when a
    communicator is created. "auto" is True on Ascend and leaves MindSpore's default elsewhere.
    """
    wants = device == "Ascend" if deterministic == "auto" else bool(deterministic)
    if device == "CPU":
        return wants
    import mindspore
    from mindspore._c_expression import DeviceManagerConf

    # Versions: MindSpore 2.7 to 2.10. Cause: a second call of set_deterministic is a RuntimeError in them, and this is
    # how it asks; a script that has called it keeps what it has set. Remove when: the mode has a public reader.
    if DeviceManagerConf.get_instance().is_deterministic_configured():
        return None
    if wants:
        mindspore.set_deterministic(True)
    return wants
