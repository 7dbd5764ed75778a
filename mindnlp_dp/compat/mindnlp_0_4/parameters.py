"""These patches fix how MindNLP 0.4.1's parameters are created, copied, tied and saved."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindnlp_dp.compat.import_hook import around


# Versions: MindNLP 0.4.1. Cause: mindspore._c_expression.pyboost_empty now takes separate
# arguments; MindNLP passes one list. Its public name, mint.empty, needs an Ascend in 2.7.0.
# Remove when: mindnlp.core.ops.empty works without the patch.
@around("mindnlp.core.ops.creation")
def _empty(module: types.ModuleType) -> Iterator[None]:
    yield
    import mindspore

    def empty(*size: Any, dtype: Any = None, device: Any = None) -> Any:
        """Return a tensor of shape ``size``; callers must not rely on its values, which are 0."""
        if isinstance(size[0], (tuple, list)):
            size = tuple(size[0])
        dtype = module.get_default_dtype() if dtype is None else dtype
        return mindspore.ops.zeros(size, dtype)

    module.empty = empty  # type: ignore[attr-defined]


# Versions: MindNLP 0.4.1. Cause: Tensor lost its class attribute `grad`, and MindNLP
# reads `param.grad is None` before it has set one.
# Remove when: MindNLP's Parameter defines `grad`.
@around("mindnlp.core.nn.parameter")
def _parameter_grad(module: types.ModuleType) -> Iterator[None]:
    yield
    if not hasattr(module.Parameter, "grad"):
        module.Parameter.grad = None


# Versions: MindNLP 0.4.1. Cause: MindSpore's nn.DistributedGradReducer reads attributes of every parameter that
# MindNLP's Parameter, a Tensor, does not have ("no attribute 'layerwise_parallel'").
# Remove when: a DistributedGradReducer accepts MindNLP's parameters.
@around("mindnlp.core.nn.parameter")
def _parameters_for_a_reducer(module: types.ModuleType) -> Iterator[None]:
    yield
    # The values of a replicated mindspore.Parameter, and of its communication fusion.
    for name, replicated in {"layerwise_parallel": False, "comm_fusion": 1}.items():
        if not hasattr(module.Parameter, name):
            setattr(module.Parameter, name, replicated)


# Versions: MindNLP 0.4.1. Cause: models initialize their weights by
# ``parameter.assign_value(initializer(...))``, ``Parameter(initializer(...))`` and ``weight[row] = initializer(...)``,
# and MindSpore's initializer returns a tensor that gets its memory later (``has_init``). The parameter then has no
# memory either: its values are lost, MindSpore's kernels reject it or crash, and ``asnumpy`` returns zeros or the
# memory's previous content.
# Remove when: MindSpore's tensors call ``init_data`` for such a value themselves.
@around("mindnlp")
def _values_of_an_initializer(module: types.ModuleType) -> Iterator[None]:
    import mindspore

    for name in ("assign_value", "copy_", "__setitem__"):
        if hasattr(mindspore.Tensor, name):
            setattr(mindspore.Tensor, name, _with_memory(getattr(mindspore.Tensor, name)))
    yield


@around("mindnlp.core.nn.parameter")
def _parameter_of_an_initializer(module: types.ModuleType) -> Iterator[None]:
    yield
    module.Parameter.__init__ = _with_memory(module.Parameter.__init__)


def _with_memory(method: Any) -> Any:
    """Wrap a method of a tensor so that its arguments get their memory first."""

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *map(_initialized, args), **{name: _initialized(x) for name, x in kwargs.items()})

    return called


def _initialized(value: Any) -> Any:
    return value.init_data() if getattr(value, "has_init", False) is True else value


# Versions: MindNLP 0.4.1 on MindSpore 2.9+. Cause: some models (XLM-RoBERTa, InternLM) pass a parameter's name, as
# mindspore.Parameter expects, where MindNLP's Parameter expects ``requires_grad``; MindSpore no longer accepts a
# string as true there ("incompatible function arguments ... (arg0: ParamInfo, arg1: bool)"). And a parameter that is
# made without ``requires_grad`` has no gradient ever after, also if it is trained later: a head in PEFT's
# modules_to_save is copied while it is frozen, and did not train.
# Remove when: these models pass no name, and such a parameter can be trained.
@around("mindnlp.core.nn.parameter")
def _parameter_with_a_name_or_frozen(module: types.ModuleType) -> Iterator[None]:
    yield
    stock_init = module.Parameter.__init__

    @functools.wraps(stock_init)
    def init(self: Any, input_data: Any = None, requires_grad: Any = True) -> None:
        stock_init(self, input_data, True)
        if not requires_grad:
            self.requires_grad = False

    module.Parameter.__init__ = init


# Versions: MindNLP 0.4.1. Cause: MiniCPM3 and OpenELM initialize their weights with ``set_data`` and ``initialize``,
# which mindspore.Parameter has and MindNLP's Parameter, a Tensor, does not have.
# Remove when: these models are built without them.
@around("mindnlp.core.nn.parameter")
def _methods_of_mindspores_parameter(module: types.ModuleType) -> Iterator[None]:
    yield
    from mindspore.common.initializer import initializer

    def set_data(self: Any, data: Any, slice_shape: bool = False) -> Any:
        """Overwrite this parameter's values with those of a tensor of its shape."""
        return self.assign_value(data)

    def initialize(self: Any, init: Any) -> Any:
        """Overwrite this parameter's values with those of an initializer for its shape and type."""
        return self.assign_value(initializer(init, self.shape, self.dtype))

    for method in (set_data, initialize):
        if not hasattr(module.Parameter, method.__name__):
            setattr(module.Parameter, method.__name__, method)


# Versions: MindNLP 0.4.1. Cause: a deep copy of a Parameter shares the original's memory, so training a copy (the head
# saved with a LoRA, a teacher, an average) trains the original.
# Remove when: copy.deepcopy of a Parameter copies its memory.
@around("mindnlp.core.nn.parameter")
def _deep_copies(module: types.ModuleType) -> Iterator[None]:
    yield

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        copied = module.Parameter(self.copy(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    module.Parameter.__deepcopy__ = deepcopy


# Versions: MindNLP 0.4.1. Cause: a Parameter's ``data`` can be read and not written, and merging adapters into a model
# (merge_adapter, merge_and_unload), as well as taking them out again, writes it.
# Remove when: PeftModel.merge_and_unload works.
@around("mindnlp.core.nn.parameter")
def _written_data(module: types.ModuleType) -> Iterator[None]:
    yield
    read = module.Parameter.data

    def write(self: Any, value: Any) -> None:
        self.assign_value(value)

    if isinstance(read, property) and read.fset is None:
        module.Parameter.data = read.setter(write)  # type: ignore[attr-defined]


# Versions: MindNLP 0.4.1. Cause: tying weights assigns a slice of the output bias to that bias, which then is a view
# that optimizers cannot update: the bias of every tied language model keeps its initial values.
# Remove when: tie_weights does not touch a bias that already has the right length.
@around("mindnlp.transformers.modeling_utils")
def _tied_bias(module: types.ModuleType) -> Iterator[None]:
    yield
    stock_tie = module.PreTrainedModel._tie_or_clone_weights

    @functools.wraps(stock_tie)
    def tie(self: Any, output_embeddings: Any, input_embeddings: Any) -> None:
        stock_tie(self, output_embeddings, input_embeddings)
        bias = getattr(output_embeddings, "bias", None)
        if bias is not None:
            bias.assign_value(bias.copy())

    module.PreTrainedModel._tie_or_clone_weights = tie


# Versions: MindNLP 0.4.1. Cause: importing MindNLP renames types (Float32 becomes mindspore.float32),
# and its adapter files then contain type names that MindSpore's load_checkpoint does not know.
# Remove when: PeftModel.from_pretrained reads what PeftModel.save_pretrained wrote.
@around("mindnlp.peft.utils.save_and_load")
def _types_in_adapter_files(module: types.ModuleType) -> Iterator[None]:
    yield
    stock_list = module.get_data_list

    @functools.wraps(stock_list)
    def get_data_list(param_dict: Any) -> Any:
        entries = stock_list(param_dict)
        for entry in entries.values():
            name = entry[1].rpartition(".")[2].rstrip("_").capitalize()
            entry[1] = name.replace("Uint", "UInt").replace("Bfloat", "BFloat")
        return entries

    module.get_data_list = get_data_list  # type: ignore[attr-defined]


# Versions: MindNLP 0.4.1. Cause: weights are written with the metadata {"format": "np"} (save_pretrained, the Trainer)
# or without metadata (save_model), and Transformers 4 on PyTorch opens neither.
# Remove when: PreTrainedModel.save_pretrained writes {"format": "pt"}.
@around("mindnlp.core.serialization")
def _format_of_weights(module: types.ModuleType) -> Iterator[None]:
    yield
    stock_save = module.safe_save_file

    @functools.wraps(stock_save)
    def safe_save_file(tensor_dict: Any, filename: Any, metadata: Any = None) -> Any:
        return stock_save(tensor_dict, filename, {**(metadata or {}), "format": "pt"})

    module.safe_save_file = safe_save_file  # type: ignore[attr-defined]


# Versions: MindNLP 0.4.1. Cause: adapters are written as adapter_model.ckpt, in MindSpore's format, which PEFT on
# PyTorch cannot read.
# Remove when: PeftModel.save_pretrained writes adapter_model.safetensors.
@around("mindnlp.peft.peft_model")
def _adapters_as_safetensors(module: types.ModuleType) -> Iterator[None]:
    yield
    from mindspore import load_checkpoint
    from safetensors.numpy import save_file

    from mindnlp_dp.runtime.arrays import to_host

    stock_save = module.PeftModel.save_pretrained

    @functools.wraps(stock_save)
    def save_pretrained(self: Any, save_directory: Any, **kwargs: Any) -> None:
        stock_save(self, save_directory, **kwargs)
        for name in self.peft_config:
            folder = Path(save_directory) / ("" if name == "default" else name)
            weights = load_checkpoint(str(folder / module.WEIGHTS_NAME))
            arrays = {key: to_host(weight) for key, weight in weights.items()}
            save_file(arrays, folder / "adapter_model.safetensors", metadata={"format": "pt"})

    module.PeftModel.save_pretrained = save_pretrained
