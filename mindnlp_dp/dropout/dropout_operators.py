"""This module drops elements by the masks of samples with MindSpore's own operators, where the CPU kernels do not."""

from __future__ import annotations

from typing import Any

import numpy as np

from mindnlp_dp.dropout.dropout_masks import dropout_mask, next_key
from mindnlp_dp.runtime.devices import is_on_cpu
from mindnlp_dp.runtime.random_state import sample_streams


def supports_masks(x: Any) -> bool:
    """Return whether a call of dropout is in a training step whose samples have their own masks, on CPU in PyNative.

    On a device, a mask that is drawn on the host would have to be copied at every call.
    """
    import mindspore

    return (
        sample_streams() is not None
        and isinstance(x, mindspore.Tensor)
        and is_on_cpu()
        and mindspore.context._get_mode() == mindspore.PYNATIVE_MODE
    )


def dropped(x: Any, p: float) -> Any:
    """Zero elements of ``x`` with probability ``p`` and scale the others by ``1 / (1 - p)``."""
    return x * scaled_mask(x, p, next_key())


def scaled_mask(x: Any, p: float, key: tuple[int, int]) -> Any:
    """Return the mask of :func:`~mindnlp_dp.dropout.dropout_masks.dropout_mask`, a tensor of 0 and ``1 / (1 - p)``."""
    import mindspore

    keep = dropout_mask(x.shape, p, key).reshape(x.shape)
    return mindspore.Tensor(keep * np.float32(1 / (1 - p) if p < 1 else 0)).astype(x.dtype)
