"""This patch makes models trainable whose embeddings were resized; it is for MindNLP 0.4.1 and 0.5.1."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from mindnlp_dp.compat.import_hook import around
from mindnlp_dp.runtime.versions import mindnlp_series

_TRANSFORMERS = {"0.4": "mindnlp.transformers", "0.5": "transformers"}[mindnlp_series()]


# Versions: MindNLP 0.4.1 and 0.5.1. Cause: resize_token_embeddings gives a parameter, and the bias of a tied head,
# another shape in place, and MindSpore's autograd keeps the first one: "grad tensor should be broadcast to expected
# shape".
# Remove when: they replace the parameters.
@around(f"{_TRANSFORMERS}.modeling_utils")
def _resized_parameters(module: types.ModuleType) -> Iterator[None]:
    yield
    stock = module.PreTrainedModel.resize_token_embeddings

    @functools.wraps(stock)
    def resize_token_embeddings(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = {id(parameter): (parameter, tuple(parameter.shape)) for parameter in self.parameters()}
        embeddings = stock(self, *args, **kwargs)
        resized = {key: _replacement(p) for key, (p, shape) in before.items() if tuple(p.shape) != shape}
        # Modules that share a parameter share the new one.
        for each in self.modules():
            for name, parameter in each._parameters.items():
                if id(parameter) in resized:
                    each._parameters[name] = resized[id(parameter)]
        return embeddings

    module.PreTrainedModel.resize_token_embeddings = resize_token_embeddings


def _replacement(parameter: Any) -> Any:
    from mindnlp_dp.runtime.mindnlp_api import mindnlp_api

    values = parameter.copy() if mindnlp_series() == "0.4" else parameter.detach().clone()
    return mindnlp_api().nn.Parameter(values, parameter.requires_grad)
