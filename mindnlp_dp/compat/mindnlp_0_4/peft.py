"""These patches fix MindNLP 0.4.1's PEFT models: several adapters, disabling, merging and loading them."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindnlp_dp.compat.import_hook import around


# Versions: MindNLP 0.4.1. Cause: an adapter's layer is frozen and unfrozen by ``layer.requires_grad = ...``, which for
# a module sets an attribute and not its parameters (an inactive adapter continues to train), or by ``set_grad``, which
# its modules do not have (disable_adapter() fails).
# Remove when: set_adapter() changes which parameters are trainable, and disable_adapter() works.
@around("mindnlp.peft.tuners.tuners_utils")
def _trainable_adapters(module: types.ModuleType) -> Iterator[None]:
    yield
    stock_enable = module.BaseTunerLayer.enable_adapters

    def set_adapter(self: Any, adapter_names: Any) -> None:
        """Activate adapters: their parameters train, those of the layer's other adapters do not."""
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        for name, weights in _adapters_of(self):
            _set_trainable(weights, name in names)
        self._active_adapter = names

    @functools.wraps(stock_enable)
    def enable_adapters(self: Any, enabled: bool) -> None:
        if enabled:
            stock_enable(self, True)
            return
        for _, weights in _adapters_of(self):
            _set_trainable(weights, False)
        self._disable_adapters = True

    module.BaseTunerLayer.set_adapter = set_adapter
    module.BaseTunerLayer.enable_adapters = enable_adapters


# Versions: MindNLP 0.4.1. Cause: LoKr has a copy of the method above.
# Remove when: LoKrLayer.set_adapter changes which parameters are trainable.
@around("mindnlp.peft.tuners.lokr.layer")
def _trainable_lokr_adapters(module: types.ModuleType) -> Iterator[None]:
    yield
    for kind in vars(module).values():
        if isinstance(kind, type) and kind.__module__ == module.__name__ and "set_adapter" in vars(kind):
            del kind.set_adapter  # type: ignore[attr-defined]


def _adapters_of(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name of each adapter of a layer with one of its modules or parameters."""
    for attribute in layer.adapter_layer_names:
        yield from getattr(layer, attribute).items()


def _set_trainable(weights: Any, trains: bool) -> None:
    for parameter in weights.parameters() if hasattr(weights, "parameters") else [weights]:
        parameter.requires_grad = trains


# Versions: MindNLP 0.4.1. Cause: unload() and merge_and_unload() of IA3 call a method that only LoKr has.
# Remove when: BaseTuner has it.
@around("mindnlp.peft.tuners.tuners_utils")
def _checks_before_unloading(module: types.ModuleType) -> Iterator[None]:
    yield

    def check(self: Any, adapter_names: Any) -> None:
        names = adapter_names or self.active_adapters
        if len(names) > 1 and any(getattr(self.peft_config[name], "modules_to_save", None) for name in names):
            raise ValueError("of several adapters with modules_to_save, only one at a time can be merged")

    if not hasattr(module.BaseTuner, "_unloading_checks"):
        module.BaseTuner._unloading_checks = check


# Versions: MindNLP 0.4.1. Cause: LoKr has the method that unloads, and no public one that calls it.
# Remove when: LoKrModel has merge_and_unload().
@around("mindnlp.peft.tuners.lokr.model")
def _merged_lokr(module: types.ModuleType) -> Iterator[None]:
    yield

    def merge_and_unload(self: Any, progressbar: bool = False, safe_merge: bool = False, names: Any = None) -> Any:
        """Merge the adapters into the layers, and return the model without them."""
        return self._unload_and_optionally_merge(True, progressbar, safe_merge, names)

    def unload(self: Any) -> Any:
        """Return the model without the adapters."""
        return self._unload_and_optionally_merge(merge=False)

    for method in (merge_and_unload, unload):
        if method.__name__ not in vars(module.LoKrModel):
            setattr(module.LoKrModel, method.__name__, method)


# Versions: MindNLP 0.4.1. Cause: the layers of AdaLoRA share the list of merged adapters, so one layer alone is merged.
# Remove when: AdaLoraLayer makes its own list.
@around("mindnlp.peft.tuners.adalora.layer")
def _merged_adalora(module: types.ModuleType) -> Iterator[None]:
    yield
    stock_init = module.SVDLinear.__init__

    @functools.wraps(stock_init)
    def init(self: Any, *args: Any, **keywords: Any) -> None:
        stock_init(self, *args, **keywords)
        self.merged_adapters = []

    module.SVDLinear.__init__ = init


# Versions: MindNLP 0.4.1. Cause: the loop of LoRA's merge_and_unload() and unload() is commented out, so the model that
# they return still has its adapters, and is saved with their names.
# Remove when: merge_and_unload() returns a model without adapters.
@around("mindnlp.peft.tuners.lora.model")
def _merged_lora(module: types.ModuleType) -> Iterator[None]:
    yield

    def unload(self: Any, merge: bool = True, *, safe_merge: bool = False, adapter_names: Any = None, **_: Any) -> Any:
        if merge:
            self._check_merge_allowed()
        for key in [key for key, _ in self.model.named_modules() if key and self.prefix not in key]:
            try:
                parent, target, name = module._get_submodules(self.model, key)
            except AttributeError:
                # Below a layer that was replaced before.
                continue
            if isinstance(target, module.ModulesToSaveWrapper):
                target = target.modules_to_save[target.active_adapter]
                setattr(parent, name, target)
            if isinstance(target, module.BaseTunerLayer):
                if merge:
                    target.merge(safe_merge=safe_merge, adapter_names=adapter_names)
                setattr(parent, name, target.get_base_layer())
        return self.model

    module.LoraModel._unload_and_optionally_merge = unload


# Versions: MindNLP 0.4.1. Cause: a missing submodule is a TypeError (a module is added to a text), where the callers
# expect an AttributeError.
# Remove when: the error is an AttributeError.
@around("mindnlp.peft.utils.other")
def _missing_submodules(module: types.ModuleType) -> Iterator[None]:
    yield
    module.custom_get_submodule = lambda model, target: model.get_submodule(target)  # type: ignore[attr-defined]


# Versions: MindNLP 0.4.1. Cause: DoRA takes the norm of rows by ``ops.norm(weight, dim=1)``, for which MindSpore does
# not accept the default order "fro"; and the norm has a gradient, which DoRA's section 4.3 excludes.
# Remove when: a LoraConfig(use_dora=True) trains.
@around("mindnlp.peft.tuners.lora.dora")
def _norm_of_dora(module: types.ModuleType) -> Iterator[None]:
    yield
    import mindspore

    def get_weight_norm(self: Any, weight: Any, lora_weight: Any, scaling: float) -> Any:
        merged = module.transpose(weight, self.fan_in_fan_out) + scaling * lora_weight
        return mindspore.ops.stop_gradient((merged * merged).sum(1).sqrt())

    module.DoraLinearLayer.get_weight_norm = get_weight_norm
    # Merging divides the layer, in place of its weight, by the norm.
    module.DoraLinearLayer.__truediv__ = lambda self, norm: self.weight / norm


# Versions: MindNLP 0.4.1. Cause: merging DoRA takes the normalized weight for its norm, and unmerging does not
# transpose the factors for layers that store their weight transposed (GPT-2).
# Remove when: merge_adapter() and unmerge_adapter() work with DoRA.
@around("mindnlp.peft.tuners.lora.layer")
def _merged_dora(module: types.ModuleType) -> Iterator[None]:
    yield
    stock_unmerge = module.Linear.unmerge

    @functools.wraps(stock_unmerge)
    def unmerge(self: Any) -> None:
        while self.merged_adapters and self.use_dora.get(self.merged_adapters[-1]):
            name = self.merged_adapters.pop()
            factor = self.lora_magnitude_vector[name] / self._cache_pop(f"{name}-weight_norm")
            weight = self.get_base_layer().weight
            weight.data = weight.data / module.transpose(factor.view(-1, 1), self.fan_in_fan_out)
            weight.data = weight.data - self.get_delta_weight(name)
        if self.merged_adapters:
            stock_unmerge(self)

    module.Linear.unmerge = unmerge
    module.LoraLayer._get_weight_norm = module.DoraLinearLayer.get_weight_norm


# Versions: MindNLP 0.4.1. Cause: a PeftModel has no set_adapter() and delete_adapter() itself; those of its base model
# do not change the PeftModel's active adapter, nor the modules in modules_to_save. add_adapter() leaves the new adapter
# trainable, and freezes the modules_to_save of the active one, and disable_adapter() fails for prompt learning.
# Remove when: tests/single/test_peft.py passes without this patch.
@around("mindnlp.peft.peft_model")
def _several_adapters(module: types.ModuleType) -> Iterator[None]:
    yield
    from mindnlp.peft.tuners.tuners_utils import BaseTunerLayer
    from mindnlp.peft.utils.other import ModulesToSaveWrapper

    def layers_of(model: Any, kind: Any) -> list[Any]:
        return [layer for layer in model.modules() if isinstance(layer, kind)]

    def check_name(model: Any, name: str) -> None:
        if name not in model.peft_config:
            raise ValueError(f"there is no adapter {name!r}; this model has {', '.join(map(repr, model.peft_config))}")

    def set_adapter(self: Any, adapter_name: str) -> None:
        """Activate one adapter: it alone computes and trains, with its modules in modules_to_save."""
        check_name(self, adapter_name)
        for layer in layers_of(self, BaseTunerLayer):
            if layer.merged:
                layer.unmerge()
            layer.set_adapter(adapter_name)
        if not self.peft_config[adapter_name].is_prompt_learning:
            self.base_model.active_adapter = adapter_name
        for wrapper in layers_of(self, ModulesToSaveWrapper):
            for name, saved in wrapper.modules_to_save.items():
                _set_trainable(saved, name == adapter_name)
            wrapper._active_adapter = adapter_name
        self.active_adapter = adapter_name

    def delete_adapter(self: Any, adapter_name: str) -> None:
        """Remove an adapter; if it is the active one, the first of the others becomes active."""
        check_name(self, adapter_name)
        if len(self.peft_config) == 1:
            raise ValueError(f"{adapter_name!r} is the only adapter; unload() returns the model without adapters")
        if adapter_name == self.active_adapter:
            set_adapter(self, next(name for name in self.peft_config if name != adapter_name))
        holders = [wrapper.modules_to_save for wrapper in layers_of(self, ModulesToSaveWrapper)]
        if self.peft_config.pop(adapter_name).is_prompt_learning:
            holders += [self.prompt_encoder, self.prompt_tokens]
        for layer in layers_of(self, BaseTunerLayer):
            layer.delete_adapter(adapter_name)
        for holder in holders:
            if adapter_name in holder:
                del holder[adapter_name]

    stock_add = module.PeftModel.add_adapter

    @functools.wraps(stock_add)
    def add_adapter(self: Any, adapter_name: str, peft_config: Any) -> None:
        trained = {id(parameter) for parameter in self.parameters() if parameter.requires_grad}
        stock_add(self, adapter_name, peft_config)
        if adapter_name == self.active_adapter:
            return
        for parameter in self.parameters():
            parameter.requires_grad = id(parameter) in trained
        for wrapper in layers_of(self, ModulesToSaveWrapper):
            wrapper._active_adapter = self.active_adapter

    @contextlib.contextmanager
    def disable_adapter(self: Any) -> Iterator[None]:
        """Compute as the base model within this block; what trains is not changed."""
        with contextlib.ExitStack() as restore:
            for layer in layers_of(self, (BaseTunerLayer, ModulesToSaveWrapper)):
                restore.callback(setattr, layer, "_disable_adapters", layer._disable_adapters)
                layer._disable_adapters = True
            if self.active_peft_config.is_prompt_learning:
                for name in ("forward", "generate"):
                    restore.callback(delattr, self, name)
                    setattr(self, name, getattr(self.base_model, name))
            yield

    for method in (set_adapter, delete_adapter, add_adapter, disable_adapter):
        setattr(module.PeftModel, method.__name__, method)


# Versions: MindNLP 0.4.1. Cause: load_adapter() refuses the name of a new adapter.
# Remove when: load_adapter() adds it.
@around("mindnlp.peft.peft_model")
def _loaded_adapters(module: types.ModuleType) -> Iterator[None]:
    yield
    stock_load = module.PeftModel.load_adapter

    @functools.wraps(stock_load)
    def load_adapter(self: Any, model_id: str, adapter_name: str, is_trainable: bool = False, **kwargs: Any) -> Any:
        if adapter_name not in self.peft_config:
            from mindnlp.peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

            kind = module.PeftConfig.from_pretrained(model_id).peft_type
            config = PEFT_TYPE_TO_CONFIG_MAPPING[kind].from_pretrained(model_id)
            config.inference_mode = not is_trainable
            self.add_adapter(adapter_name, config)
        return stock_load(self, model_id, adapter_name, is_trainable, **kwargs)

    module.PeftModel.load_adapter = load_adapter


# Versions: MindNLP 0.4.1. Cause: sequence classification has no prefix tuning ("'tuple' object has no attribute 'to'");
# models with a Cache (Llama, Qwen2) get the prefix as a tuple, and with the heads of queries, not of keys.
# Remove when: prefix tuning works for these models.
@around("mindnlp.peft.peft_model")
def _prefix_tuning(module: types.ModuleType) -> Iterator[None]:
    yield
    from mindnlp.transformers.cache_utils import DynamicCache

    stock_init = module.PeftModelForSequenceClassification.__init__

    @functools.wraps(stock_init)
    def init(self: Any, model: Any, peft_config: Any, *rest: Any, **keywords: Any) -> None:
        if peft_config.peft_type == module.PeftType.PREFIX_TUNING:
            raise NotImplementedError(
                "MindNLP 0.4.1 has no prefix tuning for sequence classification; use PromptTuningConfig, "
                "PromptEncoderConfig or LoraConfig"
            )
        stock_init(self, model, peft_config, *rest, **keywords)

    stock_prompt = module.PeftModel.get_prompt

    @functools.wraps(stock_prompt)
    def get_prompt(self: Any, *args: Any, **keywords: Any) -> Any:
        prompt = stock_prompt(self, *args, **keywords)
        takes_cache = getattr(self.base_model, "_supports_cache_class", False)
        is_prefix = self.active_peft_config.peft_type == module.PeftType.PREFIX_TUNING
        return DynamicCache.from_legacy_cache(prompt) if is_prefix and takes_cache else prompt

    stock_prepare = module._prepare_prompt_learning_config

    @functools.wraps(stock_prepare)
    def prepare(peft_config: Any, model_config: dict[str, Any]) -> Any:
        peft_config = stock_prepare(peft_config, model_config)
        heads, key_heads = peft_config.num_attention_heads, model_config.get("num_key_value_heads")
        if peft_config.peft_type == module.PeftType.PREFIX_TUNING and key_heads:
            peft_config.token_dim = peft_config.token_dim // heads * key_heads
            peft_config.num_attention_heads = key_heads
        return peft_config

    module.PeftModelForSequenceClassification.__init__ = init
    module.PeftModel.get_prompt = get_prompt
    module._prepare_prompt_learning_config = prepare  # type: ignore[attr-defined]


# Versions: MindNLP 0.4.1. Cause: adapters are read from adapter_model.ckpt only, and PEFT on PyTorch writes
# adapter_model.safetensors.
# Remove when: PeftModel.from_pretrained opens a folder that PEFT on PyTorch wrote.
@around("mindnlp.peft.utils.save_and_load")
def _adapters_of_pytorch(module: types.ModuleType) -> Iterator[None]:
    yield
    import mindspore
    from safetensors.numpy import load_file

    stock_load = module.load_peft_weights

    @functools.wraps(stock_load)
    def load_peft_weights(model_id: str) -> dict[str, Any]:
        path = Path(model_id, "adapter_model.safetensors")
        old = Path(model_id, module.WEIGHTS_NAME)
        # Of both, each library leaves the other one's as it was.
        if path.exists() and (not old.exists() or path.stat().st_mtime_ns >= old.stat().st_mtime_ns):
            return {name: mindspore.Parameter(array, name=name) for name, array in load_file(path).items()}
        found: dict[str, Any] = stock_load(model_id)
        return found

    module.load_peft_weights = load_peft_weights  # type: ignore[attr-defined]
