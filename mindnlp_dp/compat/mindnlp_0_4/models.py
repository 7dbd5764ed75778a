"""These patches fix model classes of MindNLP 0.4.1 that start with wrong weights or fail in the first forward pass."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from typing import Any

from mindnlp_dp.compat.import_hook import around
from mindnlp_dp.runtime.computing_type import computing_type
from mindnlp_dp.runtime.versions import mindspore_is_before


# Versions: MindNLP 0.4.1. Cause: a model's dtype, in which it makes its masks, is that of its last parameter; with
# param_dtype, only the layer that computes now has weights in the type of the computation.
# Remove when: it asks the tensors that it computes with.
@around("mindnlp.transformers.modeling_utils")
def _type_of_masks(module: types.ModuleType) -> Iterator[None]:
    yield
    stock = module.ModuleUtilsMixin.dtype

    def dtype(self: Any) -> Any:
        return computing_type() or stock.fget(self)

    module.ModuleUtilsMixin.dtype = property(dtype)


# Versions: MindNLP 0.4.1. Cause: ChatGLM2 and ChatGLM3 build their layers with zero_init, which disables the
# initialization of nn.Linear for the rest of the process: the linear layers of every model built later are zero.
# Remove when: zero_init restores it.
@around("mindnlp.transformers.ms_utils")
def _initialisation_after_zero_init(module: types.ModuleType) -> Iterator[None]:
    yield
    stock = module.zero_init

    @functools.wraps(stock)
    def zero_init(cls: Any, *args: Any, **kwargs: Any) -> Any:
        before = vars(cls).get("reset_parameters")
        try:
            return stock(cls, *args, **kwargs)
        finally:
            if before is None:
                del cls.reset_parameters
            else:
                cls.reset_parameters = before

    module.zero_init = zero_init  # type: ignore[attr-defined]


# Versions: MindNLP 0.4.1. Cause: the normalization weights of ChatGLM2, 3 and 4 start as zeros or uninitialized memory,
# so in a model built from a configuration only the last bias has a gradient.
# Remove when: they start as ones.
@around("mindnlp.transformers.models.chatglm2.modeling_chatglm2")
@around("mindnlp.transformers.models.chatglm4.modeling_chatglm4")
def _norms_of_chatglm(module: types.ModuleType) -> Iterator[None]:
    yield
    stock_init = module.RMSNorm.__init__

    @functools.wraps(stock_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        importlib.import_module("mindnlp.core.nn.init").ones_(self.weight)

    module.RMSNorm.__init__ = init


# Versions: MindNLP 0.4.1. Cause: ConvBERT initializes the weights of its layer normalizations with zeros and their
# biases with ones, so no layer before the last normalization has gradients.
# Remove when: its _init_weights does it the other way round.
@around("mindnlp.transformers.models.convbert.modeling_convbert")
def _norms_of_convbert(module: types.ModuleType) -> Iterator[None]:
    yield
    stock = module.ConvBertPreTrainedModel._init_weights

    @functools.wraps(stock)
    def init_weights(self: Any, layer: Any) -> None:
        stock(self, layer)
        if isinstance(layer, module.nn.LayerNorm):
            module.nn.init.ones_(layer.weight)
            module.nn.init.zeros_(layer.bias)

    module.ConvBertPreTrainedModel._init_weights = init_weights


# Versions: MindNLP 0.4.1. Cause: XLM-RoBERTa's language models call ops.gelu, XLM-ProphetNet's and ESM's
# ops.gather_elements and ops.nll_loss, which mindnlp.core.ops does not have.
# Remove when: mindnlp.core.ops has them.
@around("mindnlp.core.ops")
def _missing_operators(module: types.ModuleType) -> Iterator[None]:
    yield
    import mindspore

    def gelu(input: Any, approximate: str = "none") -> Any:
        return importlib.import_module("mindnlp.core.nn.functional").gelu(input, approximate)

    def nll_loss(input: Any, target: Any, **options: Any) -> Any:
        return importlib.import_module("mindnlp.core.nn.functional").nll_loss(input, target, **options)

    def gather_elements(input: Any, dim: int, index: Any) -> Any:
        return mindspore.ops.gather_elements(input, dim, index)

    for operator in (gelu, nll_loss, gather_elements):
        if not hasattr(module, operator.__name__):
            setattr(module, operator.__name__, operator)


# Versions: MindNLP 0.4.1 on MindSpore 2.9+ on CPU. Cause: Tensor.clone and Tensor.masked_fill_ have no CPU kernel
# ("The kernel Clone unregistered"), and Pegasus, PLBart, NLLB-MoE and others shift their labels with them.
# Remove when: both have a kernel on CPU.
@around("mindnlp")
def _in_place_operators_on_cpu(module: types.ModuleType) -> Iterator[None]:
    import mindspore

    def on_cpu(name: str, ours: Any) -> None:
        stock = getattr(mindspore.Tensor, name, None)

        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            if stock is not None and mindspore.get_context("device_target") != "CPU":
                return stock(self, *args, **kwargs)
            return ours(self, *args, **kwargs)

        setattr(mindspore.Tensor, name, functools.update_wrapper(called, stock or ours))

    def clone(self: Any) -> Any:
        """Return a copy of this tensor in new memory."""
        return self.copy()

    def masked_fill_(self: Any, mask: Any, value: Any) -> Any:
        """Overwrite the elements at which ``mask`` is true, and return this tensor."""
        return self.assign_value(self.masked_fill(mask, value))

    on_cpu("clone", clone)
    on_cpu("masked_fill_", masked_fill_)
    yield


# Versions: MindNLP 0.4.1 on MindSpore 2.8 on CPU. Cause: BART fills float attention masks with the integer 0, and
# masked_fill has no kernel for this ("Select CPU operator[MaskedFill] fail!").
# Remove when: 2.8 is no longer supported.
@around("mindnlp")
def _masked_fill_with_an_integer(module: types.ModuleType) -> Iterator[None]:
    import mindspore

    stock = mindspore.Tensor.masked_fill

    @functools.wraps(stock)
    def masked_fill(self: Any, mask: Any, value: Any) -> Any:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        return stock(self, mask, float(value) if is_integer and self.is_floating_point() else value)

    if mindspore_is_before("2.9"):
        mindspore.Tensor.masked_fill = masked_fill
    yield


# Versions: MindNLP 0.4.1. Cause: mBART's shifted labels, the decoder's inputs, still contain -100, because it discards
# the result of masked_fill; the embedding then reads a row that does not exist. PLBart shifts its labels in place, so
# its loss compares the outputs with the inputs; with a single row it copies memory onto itself.
# Remove when: their shift_tokens_right works on a copy without -100.
@around("mindnlp.transformers.models.mbart.modeling_mbart")
def _shift_without_ignored_labels(module: types.ModuleType) -> Iterator[None]:
    yield
    stock = module.shift_tokens_right

    @functools.wraps(stock)
    def shift_tokens_right(input_ids: Any, pad_token_id: int) -> Any:
        return stock(input_ids.masked_fill(input_ids == -100, pad_token_id), pad_token_id)

    module.shift_tokens_right = shift_tokens_right  # type: ignore[attr-defined]


@around("mindnlp.transformers.models.plbart.modeling_plbart")
def _shift_as_mbart_does(module: types.ModuleType) -> Iterator[None]:
    yield
    mbart = importlib.import_module("mindnlp.transformers.models.mbart.modeling_mbart")
    module.shift_tokens_right = mbart.shift_tokens_right  # type: ignore[attr-defined]


# Versions: MindNLP 0.4.1. Cause: Funnel's _init_weights reads padding_idx from the embeddings module, not from its word
# embedding.
# Remove when: it reads it from the word embedding.
@around("mindnlp.transformers.models.funnel.modeling_funnel")
def _padding_of_funnel(module: types.ModuleType) -> Iterator[None]:
    yield
    module.FunnelEmbeddings.padding_idx = property(lambda self: self.word_embeddings.padding_idx)


# Versions: MindNLP 0.4.1. Cause: these classes are written for PyTorch: they call ``tensor.size(1)``, and MindSpore's
# Tensor.size is a number ("'int' object is not callable"); or they compare a type with ``mindspore.int_``, which no
# tensor has, so class labels are treated as multi-label targets.
# Remove when: they use ``tensor.shape[1]`` and ``mindspore.int64``.
_AS_IN_PYTORCH = {
    "xlm_roberta": ("XLMRobertaForMultipleChoice", "XLMRobertaForQuestionAnswering"),
    "mobilebert": (
        "MobileBertForMultipleChoice",
        "MobileBertForQuestionAnswering",
        "MobileBertForSequenceClassification",
    ),
}

_FOR_MINDSPORE = {
    r"\.size\((-?\d+)\)": r".shape[\1]",
    r"\.size\(\)": ".shape",
    r"\bmindspore\.int_\b": "mindspore.int64",
}


def _written_for_mindspore(class_names: tuple[str, ...]) -> Any:
    def patch(module: types.ModuleType) -> Iterator[None]:
        yield
        for name in class_names:
            model_class = getattr(module, name)
            model_class.forward = _rewritten(model_class.forward, module)

    return patch


for _family, _classes in _AS_IN_PYTORCH.items():
    around(f"mindnlp.transformers.models.{_family}.modeling_{_family}")(_written_for_mindspore(_classes))


def _rewritten(method: Any, module: types.ModuleType) -> Any:
    """Recompile a method from its source, with PyTorch's expressions replaced by MindSpore's."""
    source = textwrap.dedent(inspect.getsource(method))
    for pattern, words in _FOR_MINDSPORE.items():
        source = re.sub(pattern, words, source)
    scope: dict[str, Any] = {}
    exec(compile(source, module.__file__ or "", "exec"), vars(module), scope)
    return scope[method.__name__]
