"""This patch makes ``gradient_checkpointing_enable()`` of MindNLP's models recompute activations."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Optional

from mindnlp_dp.compat.import_hook import around
from mindnlp_dp.runtime.override import override
from mindnlp_dp.runtime.versions import mindnlp_series

_TRANSFORMERS = {"0.4": "mindnlp.transformers", "0.5": "transformers"}[mindnlp_series()]


# Versions: MindNLP 0.4.1 and 0.5.1. Cause: in 0.4.1 it calls mindspore.recompute in a way that raises, or does nothing,
# and many models do not have it; in 0.5.1 mindtorch's checkpoint() recomputes nothing.
# Remove when: the libraries recompute, with the same random numbers.
@around(f"{_TRANSFORMERS}.modeling_utils")
def _gradient_checkpointing(module: types.ModuleType) -> Iterator[None]:
    yield
    # Not above: it imports NumPy, and the launcher and the ranks' proxies start twice as fast without.
    from mindnlp_dp.runtime.recompute import check_checkpointing_options, enable_recompute, has_recomputed_layers

    model_class = module.PreTrainedModel

    @override(model_class)
    def gradient_checkpointing_enable(self: Any, gradient_checkpointing_kwargs: Optional[dict[str, Any]] = None) -> Any:
        """Recompute the activations of all layers in the backward pass."""
        check_checkpointing_options(gradient_checkpointing_kwargs)
        enable_recompute(self)

    @override(model_class)
    def gradient_checkpointing_disable(self: Any) -> Any:
        """Keep the activations of all layers again."""
        enable_recompute(self, False)

    model_class.is_gradient_checkpointing = property(has_recomputed_layers)
