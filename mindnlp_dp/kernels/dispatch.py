"""This module decides whether a call runs on our CPU kernels or on MindSpore's.

``init_process_group`` calls :func:`choose` once; the patched functions of MindNLP call :func:`supports` at every call.
"""

from __future__ import annotations

import os
from typing import Any

from mindnlp_dp.runtime.versions import mindnlp_series

KERNELS = ("auto", "mindspore")

VARIABLE = "MINDNLP_DP_KERNELS"

_are_on = False


def check_kernels(kernels: str) -> str:
    """Return ``kernels``; for "auto", the environment variable ``MINDNLP_DP_KERNELS`` takes precedence.

    Raises:
        ValueError: the value is neither "auto" nor "mindspore".
    """
    asked = os.environ.get(VARIABLE) or kernels if kernels == "auto" else kernels
    if asked not in KERNELS:
        by = f"{VARIABLE}={asked}" if asked != kernels else f"kernels={kernels!r}"
        raise ValueError(f"{by} is none of {', '.join(map(repr, KERNELS))}")
    return asked


def choose(kernels: str, num_cores: int) -> None:
    """Make this process use our kernels on ``num_cores`` cores ("auto"), or only MindSpore's ("mindspore")."""
    # Imported here because it imports NumPy, which the launcher does not need.
    from mindnlp_dp.kernels.workers import use_cores

    global _are_on
    _are_on = kernels == "auto"
    use_cores(num_cores if _are_on else 1)


def supports(*tensors: Any) -> bool:
    """Return whether our kernels support a call with these tensors: float32, on CPU, PyNative mode, no AMP."""
    if not _are_on:
        return False
    import mindspore
    from mindspore._c_expression.amp import get_curr_amp_strategy

    return (
        all(isinstance(x, mindspore.Tensor) and x.dtype == mindspore.float32 and _is_here(x) for x in tensors)
        and mindspore.context._get_mode() == mindspore.PYNATIVE_MODE
        # Automatic mixed precision casts inputs by operator name, and does not know our kernels.
        and get_curr_amp_strategy() is None
    )


def _is_here(tensor: Any) -> bool:
    """Return whether the tensor is on CPU; tensors of MindNLP 0.5 may be on "meta", without values."""
    return mindnlp_series() == "0.4" or tensor.device.type == "cpu"


def not_none(*tensors: Any) -> list[Any]:
    """Return the tensors that are not None."""
    return [x for x in tensors if x is not None]
