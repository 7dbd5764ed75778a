"""Whether a model's functions are ours or MindSpore's own.

Goes in: what the user asked for, and what the process was made for. Comes out: :func:`apply_to`, which the
replacements of MindNLP's functions ask at every call.
"""

from __future__ import annotations

import os
from typing import Any

from mindnlp_dp.versions import mindnlp_series

KERNELS = ("auto", "mindspore")
VARIABLE = "MINDNLP_DP_KERNELS"
_are_on = False


def check_kernels(kernels: str) -> str:
    """``kernels``, or what the environment says in place of "auto".

    Raises:
        ValueError: there are no such kernels.
    """
    asked = os.environ.get(VARIABLE) or kernels if kernels == "auto" else kernels
    if asked not in KERNELS:
        by = f"{VARIABLE}={asked}" if asked != kernels else f"kernels={kernels!r}"
        raise ValueError(f"{by} is none of {', '.join(map(repr, KERNELS))}")
    return asked


def choose(kernels: str, num_cores: int) -> None:
    """Use ours ("auto") with ``num_cores`` cores, or ("mindspore") none of ours, from now on in this process."""
    # NumPy is imported only where something computes: whoever starts processes asks for no kernels.
    from .workers import use_cores

    global _are_on
    _are_on = kernels == "auto"
    use_cores(num_cores if _are_on else 1)


def apply_to(*tensors: Any) -> bool:
    """Whether a call with these tensors is for our kernels."""
    if not _are_on:
        return False
    import mindspore
    from mindspore._c_expression.amp import get_curr_amp_strategy

    return (
        all(isinstance(x, mindspore.Tensor) and x.dtype == mindspore.float32 and _is_here(x) for x in tensors)
        and mindspore.context._get_mode() == mindspore.PYNATIVE_MODE
        # Mixed precision chooses the type of an operator's inputs by the operator's name.
        and get_curr_amp_strategy() is None
    )


def _is_here(tensor: Any) -> bool:
    """MindNLP 0.5's tensors may be on "meta", which has no values."""
    return mindnlp_series() == "0.4" or tensor.device.type == "cpu"


def given(*tensors: Any) -> list[Any]:
    """Those that are not None."""
    return [x for x in tensors if x is not None]
