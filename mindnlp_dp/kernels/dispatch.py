"""This module decides whether a call runs on our CPU kernels or on MindSpore's.

``init_process_group`` calls :func:`choose` once; the patched functions of MindNLP call :func:`supports` at every call.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from mindnlp_dp.runtime.versions import mindnlp_series

KERNELS, PRECISIONS = ("auto", "mindspore"), ("highest", "medium")

VARIABLE, PRECISION_VARIABLE = "MINDNLP_DP_KERNELS", "MINDNLP_DP_MATMUL_PRECISION"

_are_on = False


def check_kernels(kernels: str) -> str:
    """Return ``kernels``; for "auto", the environment variable ``MINDNLP_DP_KERNELS`` takes precedence.

    Raises:
        ValueError: the value is neither "auto" nor "mindspore".
    """
    return _checked("kernels", kernels, "auto", VARIABLE, KERNELS)


def check_precision(matmul_precision: str) -> str:
    """Return ``matmul_precision``; for "auto", that of ``MINDNLP_DP_MATMUL_PRECISION``, or "highest".

    Raises:
        ValueError: the value is none of "auto", "highest" and "medium".
    """
    found = _checked("matmul_precision", matmul_precision, "auto", PRECISION_VARIABLE, ("auto", *PRECISIONS))
    return "highest" if found == "auto" else found


def _checked(name: str, value: str, default: str, variable: str, choices: Sequence[str]) -> str:
    asked = os.environ.get(variable) or value if value == default else value
    if asked not in choices:
        by = f"{variable}={asked}" if asked != value else f"{name}={value!r}"
        raise ValueError(f"{by} must be one of {', '.join(map(repr, choices))}")
    return asked


def choose(kernels: str, num_cores: int) -> None:
    """Make this process use our kernels on ``num_cores`` cores ("auto"), or only MindSpore's ("mindspore")."""
    # Imported here because it imports NumPy, which the launcher does not need.
    from mindnlp_dp.kernels.workers import use_cores

    global _are_on
    _are_on = kernels == "auto"
    use_cores(num_cores if _are_on else 1)


def choose_precision(matmul_precision: str) -> None:
    """Make our kernels multiply in float32 ("highest"), or from factors rounded to bfloat16 ("medium")."""
    from mindnlp_dp.kernels.matmul import use_bfloat16

    is_medium = matmul_precision == "medium"
    if use_bfloat16(is_medium and _are_on) != is_medium:
        reason = (
            "this core has no AMX, or MindSpore's oneDNN is not version 3"
            if _are_on
            else "only this package's CPU kernels have bfloat16 products, and they are not in use"
        )
        warnings.warn(f'matmul_precision="medium" (bf16) changes nothing here: {reason}', RuntimeWarning, stacklevel=3)


def current_precision() -> str:
    """Return how products are computed now: "highest" or "medium"."""
    from mindnlp_dp.kernels.matmul import uses_bfloat16

    return "medium" if uses_bfloat16() else "highest"


@contextlib.contextmanager
def medium_precision(uses: bool) -> Iterator[None]:
    """Multiply as ``matmul_precision="medium"`` does inside of the ``with`` block, if ``uses``."""
    if not uses:
        yield
        return
    from mindnlp_dp.kernels import matmul

    before = matmul.uses_bfloat16()
    choose_precision("medium")
    try:
        yield
    finally:
        matmul.use_bfloat16(before)


def are_on() -> bool:
    """Return whether our kernels are in use."""
    return _are_on


def supports(*tensors: Any) -> bool:
    """Return whether our kernels support a call with these tensors: float32, on CPU, PyNative mode, no AMP."""
    if not _are_on:
        return False
    import mindspore
    from mindspore._c_expression.amp import get_curr_amp_strategy

    return (
        all(isinstance(x, mindspore.Tensor) and x.dtype == mindspore.float32 and is_here(x) for x in tensors)
        and mindspore.context._get_mode() == mindspore.PYNATIVE_MODE
        # Automatic mixed precision casts inputs by operator name, and does not know our kernels.
        and get_curr_amp_strategy() is None
    )


def is_here(tensor: Any) -> bool:
    """Return whether the tensor is on CPU; tensors of MindNLP 0.5 may be on "meta", without values."""
    return mindnlp_series() == "0.4" or tensor.device.type == "cpu"


def not_none(*tensors: Any) -> list[Any]:
    """Return the tensors that are not None."""
    return [x for x in tensors if x is not None]
