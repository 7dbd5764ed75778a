"""This patch computes the load-balancing losses of mixtures of experts over the tokens of all ranks."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from mindnlp_dp.compat.import_hook import around
from mindnlp_dp.runtime.override import override
from mindnlp_dp.runtime.versions import mindnlp_series

_TRANSFORMERS = {"0.4": "mindnlp.transformers", "0.5": "transformers"}[mindnlp_series()]


# Versions: MindNLP 0.4.1 and 0.5.1. Cause: the loss is a product of two means over tokens, so the mean of the ranks'
# losses is not the loss of one process with all tokens.
# Remove when: the libraries' functions take the sums over several ranks.
def _router_loss(module: types.ModuleType) -> Iterator[None]:
    yield
    import numpy as np

    @override(module)
    def load_balancing_loss_func(
        gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Any = None
    ) -> Any:
        """Return the loss of Switch Transformers (Fedus et al., 2021, equations 4 to 6) over all ranks' tokens.

        ``gate_logits`` is a tuple of tensors of shape (tokens, experts), one per layer; ``attention_mask`` has the
        shape (rows, length), or is None.
        """
        from mindnlp_dp.communication.batch_across_ranks import all_reduce_with_grad, batch_across_ranks
        from mindnlp_dp.runtime.arrays import from_host, to_host
        from mindnlp_dp.runtime.mindnlp_api import mindnlp_api

        batch = batch_across_ranks()
        if batch is None or batch.has_local_router_loss or not isinstance(gate_logits, tuple):
            return NotImplemented
        counts = np.zeros(num_experts + 1)
        probabilities: Any = 0.0
        mask = None if attention_mask is None else to_host(attention_mask).reshape(-1).astype(np.float32)
        for logits in gate_logits:
            routing = mindnlp_api().nn.functional.softmax(logits, dim=-1)
            counted = np.ones(len(routing), np.float32) if mask is None else mask
            chosen = np.argsort(-to_host(routing), axis=1, kind="stable")[:, :top_k]
            counts[:-1] += np.bincount(chosen.reshape(-1), np.repeat(counted, top_k), num_experts)
            counts[-1] += counted.sum()
            probabilities = probabilities + (routing * from_host(counted[:, None], "float32")).sum(0)
        totals = batch.sum(counts)
        shares = from_host((totals[:-1] / totals[-1]).astype(np.float32), "float32")
        return (shares * all_reduce_with_grad(probabilities)).sum() * float(num_experts / totals[-1])


for _model in ("mixtral", "qwen2_moe"):
    around(f"{_TRANSFORMERS}.models.{_model}.modeling_{_model}")(_router_loss)
