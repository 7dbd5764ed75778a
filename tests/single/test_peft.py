"""Test the public methods of MindNLP 0.4.1's PEFT models by the outputs of the model before and after."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_transformers
from library import is_0_5, optim
from mindspore import Tensor

import mindnlp_dp as dp

pytestmark = pytest.mark.skipif(is_0_5, reason="MindNLP 0.5 has no PEFT")
if not is_0_5:
    from mindnlp.peft import (
        AdaLoraConfig,
        IA3Config,
        LNTuningConfig,
        LoHaConfig,
        LoKrConfig,
        LoraConfig,
        PeftModel,
        PrefixTuningConfig,
        PromptEncoderConfig,
        PromptTuningConfig,
        get_peft_model,
    )


@pytest.fixture(autouse=True)
def group():
    return dp.init_process_group()


def tiny(kind):
    return tiny_transformers.build(kind, num_layers=1)


def config(**settings):
    return LoraConfig(**{"r": 2, "lora_alpha": 2, "target_modules": ["q_proj", "v_proj"], **settings})


def randomize(model, part, seed=1):
    rng = np.random.default_rng(seed)
    for name, parameter in model.named_parameters():
        if part in name:
            parameter.assign_value(Tensor((0.3 * rng.standard_normal(parameter.shape)).astype(np.float32)))


def build(part="lora_", **settings):
    model = get_peft_model(tiny("llama"), config(**settings))
    randomize(model, part)
    return model


def logits(model, kind="llama"):
    model.set_train(False)
    batch = {name: Tensor(values) for name, values in tiny_transformers.batch(kind, 2).items()}
    batch["attention_mask"] = Tensor(np.ones(batch["input_ids"].shape, np.int64))
    return model(**batch).logits.asnumpy()


def trainable(model):
    return sorted(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def same(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-4)


def differ(found, other):
    assert np.abs(found - other).max() > 1e-3


@pytest.fixture(scope="module")
def base():
    return tiny("llama")


TUNERS = {
    "LoRA": ("lora_", config),
    "LoRA, modules_to_save": ("modules_to_save.default", lambda: config(modules_to_save=["lm_head"])),
    "DoRA": ("lora_", lambda: config(use_dora=True)),
    "AdaLoRA": ("lora_", lambda: AdaLoraConfig(target_modules=["q_proj", "v_proj"])),
    "IA3": ("ia3_", lambda: IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "LoHa": ("hada_", lambda: LoHaConfig(r=2, target_modules=["q_proj", "down_proj"])),
    "LoKr": ("lokr_", lambda: LoKrConfig(r=2, target_modules=["q_proj", "down_proj"])),
    "layer norms": ("ln_tuning_", lambda: LNTuningConfig(target_modules=["input_layernorm"])),
}


@pytest.mark.parametrize("tuner", TUNERS)
def test_adapters_are_disabled_changed_merged_and_unloaded(base, tuner):
    part, make = TUNERS[tuner]
    model, without = get_peft_model(tiny("llama"), make()), logits(base)
    randomize(model, part)
    outputs, trains = logits(model), trainable(model)
    differ(outputs, without)
    with model.disable_adapter():
        same(logits(model), without)
        assert trainable(model) == trains
    same(logits(model), outputs)

    # AdaLoRA trains one adapter at a time.
    if tuner != "AdaLoRA":
        model.add_adapter("second", make())
        same(logits(model), outputs)
        assert trainable(model) == trains
        model.set_adapter("second")
        assert model.active_adapter == "second"
        assert trainable(model) == [name.replace("default", "second") for name in trains]
        randomize(model, "second", seed=2)
        differ(logits(model), outputs)
        model.delete_adapter("second")
        assert (model.active_adapter, list(model.peft_config)) == ("default", ["default"])
        assert trainable(model) == trains
        same(logits(model), outputs)

    model.merge_adapter()
    same(logits(model), outputs)
    model.unmerge_adapter()
    same(logits(model), outputs)
    merged = model.merge_and_unload()
    same(logits(merged), outputs)
    assert {name for name, _ in merged.named_parameters()} == {name for name, _ in base.named_parameters()}


def test_unload_returns_the_base_model(base):
    model = build()
    assert type(model.get_base_model()) is type(base)
    unloaded = model.unload()
    same(logits(unloaded), logits(base))
    assert [name for name, _ in unloaded.named_parameters()] == [name for name, _ in base.named_parameters()]


def test_dora_of_gpt2_is_merged_and_trains():
    """GPT-2 stores its weights transposed."""
    model = get_peft_model(tiny("gpt2"), config(target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True))
    same(logits(model, "gpt2"), logits(tiny("gpt2"), "gpt2"))
    randomize(model, "lora_")
    outputs = logits(model, "gpt2")
    model.merge_adapter()
    same(logits(model, "gpt2"), outputs)
    model.unmerge_adapter()
    same(logits(model, "gpt2"), outputs)
    assert update(model, "gpt2") > 0


def update(model, kind):
    """Make one update with SGD; return the gradient's norm."""
    model.set_train(True)
    batch = {name: np.asarray(values) for name, values in tiny_transformers.batch(kind, 2).items()}
    batch["attention_mask"] = np.ones(batch["input_ids"].shape, np.int64)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    step = dp.make_train_step(
        lambda **inputs: model(**inputs).loss, optim.SGD(parameters, lr=0.1), parameters, max_grad_norm=1e9
    )
    step({name: Tensor(values) for name, values in batch.items()})
    return step.grad_norm


@pytest.mark.parametrize(("combination", "rank"), [("svd", 4), ("cat", None), ("linear", None), ("ties", None)])
def test_a_weighted_adapter_combines_others_as_its_type_says(combination, rank):
    """Two types combine the matrices, "ties" and "linear"; the others combine their products."""
    model = build()
    model.add_adapter("second", config())
    randomize(model, "second", seed=2)
    layer = next(layer for layer in model.modules() if hasattr(layer, "lora_A"))
    weights = [0.7, 0.3]
    if combination == "linear":
        # It is a combination of the matrices, and not of their products, so that one of them has to have weight 0.
        weights = [0.7, 0.0]
    options = {"density": 1.0} if combination == "ties" else {"svd_rank": rank}
    model.add_weighted_adapter(["default", "second"], weights, "mixed", combination_type=combination, **options)
    expected = sum(w * layer.get_delta_weight(name).asnumpy() for w, name in zip(weights, ["default", "second"]))
    if combination == "ties":
        lower, upper = (
            ties([matrices[name].weight.asnumpy() for name in ("default", "second")], weights)
            for matrices in (layer.lora_A, layer.lora_B)
        )
        expected = upper @ lower
    before = logits(model)
    model.set_adapter("mixed")
    assert all("mixed" in name for name in trainable(model))
    np.testing.assert_allclose(layer.get_delta_weight("mixed").asnumpy(), expected, atol=1e-5)
    assert np.abs(logits(model) - before).max() > 1e-3


def ties(matrices, weights):
    """Return TIES (Yadav and others, 2023) of two matrices: the mean of those whose sign is that of their sum."""
    sign = np.where(sum(matrices) >= 0, 1, -1)
    agrees = [np.sign(matrix) == sign for matrix in matrices]
    return sum(np.sqrt(w) * x * a for w, x, a in zip(weights, matrices, agrees)) / np.maximum(sum(agrees), 1)


@pytest.mark.parametrize("library", ["MindNLP", "PyTorch"])
def test_adapters_are_saved_and_loaded_under_any_name(tmp_path, library):
    model = build(modules_to_save=["lm_head"])
    randomize(model, "modules_to_save.default")
    outputs = logits(model)
    model.save_pretrained(str(tmp_path))
    if library == "PyTorch":
        # PEFT on PyTorch writes the other file only.
        (tmp_path / "adapter_model.ckpt").unlink()
    loaded = PeftModel.from_pretrained(tiny("llama"), str(tmp_path), is_trainable=True)
    same(logits(loaded), outputs)
    assert trainable(loaded) == trainable(model)
    other = build(modules_to_save=["lm_head"])
    before, trains = logits(other), trainable(other)
    other.load_adapter(str(tmp_path), "loaded")
    same(logits(other), before)
    assert trainable(other) == trains
    other.set_adapter("loaded")
    same(logits(other), outputs)


def test_unknown_adapter_names_are_refused():
    model = build()
    for method in (model.set_adapter, model.delete_adapter):
        with pytest.raises(ValueError, match="there is no adapter 'other'; this model has 'default'"):
            method("other")
    with pytest.raises(ValueError, match="'default' is the only adapter; unload"):
        model.delete_adapter("default")


PROMPTS = {
    "prompt tuning": lambda task: PromptTuningConfig(task_type=task, num_virtual_tokens=3),
    "prefix tuning": lambda task: PrefixTuningConfig(task_type=task, num_virtual_tokens=3),
    "p-tuning": lambda task: PromptEncoderConfig(task_type=task, num_virtual_tokens=3, encoder_hidden_size=8),
}
TASKS = {"gpt2": "CAUSAL_LM", "llama": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM", "bert": "SEQ_CLS"}


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("method", PROMPTS)
def test_prompt_tuning_trains_with_an_int64_attention_mask(tmp_path, kind, method):
    """A tokenizer's attention mask is int64."""
    made = PROMPTS[method](TASKS[kind])
    if (kind, method) == ("bert", "prefix tuning"):
        with pytest.raises(NotImplementedError, match="no prefix tuning for sequence classification; use"):
            get_peft_model(tiny(kind), made)
        return
    model = get_peft_model(tiny(kind), made)
    assert update(model, kind) > 0
    outputs = logits(model, kind)
    with model.disable_adapter():
        same(logits(model, kind), logits(tiny(kind), kind))
    same(logits(model, kind), outputs)
    model.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(tiny(kind), str(tmp_path))
    same(logits(loaded, kind), outputs)
