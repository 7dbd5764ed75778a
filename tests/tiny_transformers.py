"""Build tiny MindNLP transformers of every kind that can be sharded, and data, for the parallel tests."""

from __future__ import annotations

from typing import Any

import numpy as np

VOCAB, WIDTH, LENGTH = 51, 16, 10
KINDS = ("bert", "roberta", "masked", "gpt2", "t5", "mixtral")
# Decoders with their class and the settings that make them differ: grouped keys and values, tied heads, sliding
# windows, heads wider than the hidden size, projections around the layers.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "llama, tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 4}),
    "gemma": ("Gemma", {"num_key_value_heads": 2, "head_dim": 8, "hidden_activation": "gelu_pytorch_tanh"}),
    "phi": ("Phi", {"num_key_value_heads": 4}),
    "opt": ("OPT", {"ffn_dim": 32, "word_embed_proj_dim": 8, "do_layer_norm_before": True}),
}
# The end of a kind that stands for the model with LoRA adapters, and the layers that have them.
LORA = ", LoRA"
_TARGETS = {
    "bloom": ["query_key_value", "dense", "dense_4h_to_h"],
    "gpt2": ["c_attn", "c_proj"],
    "opt": ["q_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "phi": ["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"],
    "t5": ["q", "v", "o", "wi", "wo"],
}
_LLAMA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def build(kind: str, seed: int = 3, dropout: float = 0.0, num_layers: int = 4, **config: Any) -> Any:
    """Build a model whose weights depend on ``seed`` only. T5 and the mixtures of experts have two layers."""
    model = _build(kind.removesuffix(LORA), seed, dropout, num_layers, **config)
    return with_lora(model, dropout) if kind.endswith(LORA) else model


def _build(kind: str, seed: int, dropout: float, num_layers: int, **config: Any) -> Any:
    import mindnlp.transformers as models
    from library import set_seed

    set_seed(seed)
    encoder = {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": num_layers, "num_attention_heads": 4,
        "intermediate_size": 32, "max_position_embeddings": LENGTH + 6, "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }  # fmt: skip
    mixture = {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": LENGTH + 6, "use_cache": False,
        "attention_dropout": dropout,
    }  # fmt: skip
    if kind == "bert":
        return models.BertForSequenceClassification(models.BertConfig(**{**encoder, "num_labels": 3, **config}))
    if kind == "roberta":
        return models.RobertaForSequenceClassification(models.RobertaConfig(**{**encoder, "num_labels": 3, **config}))
    if kind == "masked":
        return models.RobertaForMaskedLM(models.RobertaConfig(**{**encoder, **config}))
    if kind == "gpt2":
        sizes = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": num_layers, "n_head": 4, "n_positions": LENGTH + 6}
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        return models.GPT2LMHeadModel(models.GPT2Config(**{**sizes, **drops, **config}))
    if kind == "t5":
        sizes = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
        rest = {"dropout_rate": dropout, "decoder_start_token_id": 0, "use_cache": False}
        return models.T5ForConditionalGeneration(models.T5Config(**{**sizes, **rest, **config}))
    if kind in DECODERS:
        name, settings = DECODERS[kind]
        sizes = {**mixture, "num_hidden_layers": num_layers, "pad_token_id": 0, **settings}
        if kind in ("phi", "opt"):
            drops = ("resid_pdrop", "embd_pdrop") if kind == "phi" else ("dropout",)
            sizes.update(dict.fromkeys(drops, dropout))
        config_class, model_class = getattr(models, f"{name}Config"), getattr(models, f"{name}ForCausalLM")
        return model_class(config_class(**{**sizes, **config}))
    if kind == "qwen2_moe":
        sizes = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "num_experts": 4}
        return models.Qwen2MoeForCausalLM(
            models.Qwen2MoeConfig(**{**mixture, **sizes, "num_experts_per_tok": 2, **config})
        )
    return models.MixtralForCausalLM(models.MixtralConfig(**{**mixture, "num_local_experts": 4, **config}))


def with_lora(model: Any, dropout: float = 0.0) -> Any:
    """Put adapters into a model; their second matrices are not zeros, so that both matrices have gradients at once."""
    from mindnlp.peft import LoraConfig, get_peft_model
    from mindspore import Tensor

    targets = _TARGETS.get(model.config.model_type, _LLAMA_TARGETS)
    model = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=targets, lora_dropout=dropout))
    rng = np.random.default_rng(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.assign_value(Tensor(0.1 * rng.standard_normal(parameter.shape).astype(np.float32)))
    return model


def batch(kind: str, num_rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return rows and labels for a model of this kind; some rows are padded, and some tokens are ignored."""
    kind, rng = kind.removesuffix(LORA), np.random.default_rng(seed)
    ids = rng.integers(3, VOCAB, (num_rows, LENGTH))
    columns = {"input_ids": ids}
    if kind in ("bert", "roberta"):
        return {**columns, "attention_mask": _mask(rng, num_rows), "labels": rng.integers(0, 3, num_rows)}
    labels = rng.integers(3, VOCAB, (num_rows, LENGTH))
    if kind in ("masked", "t5"):
        # Every row has the same number of labels, so the mean over all tokens is the mean of the rows' means.
        labels[:, 7:] = -100
        columns["attention_mask"] = _mask(rng, num_rows)
    return {**columns, "labels": labels}


def _mask(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    mask = np.ones((num_rows, LENGTH), np.int64)
    mask[:, LENGTH - 2 :] = rng.integers(0, 2, (num_rows, 1))
    return mask


def rows(columns: dict[str, np.ndarray], first: int, last: int) -> Any:
    """Return the rows ``first`` to ``last`` (exclusive) of a batch, or None for an empty range."""
    return {name: array[first:last] for name, array in columns.items()} if last > first else None


def train(model: Any, kind: str, pieces: Any, *, num_updates: int = 5, group: Any = None, **options: Any) -> Any:
    """Train with clipping; ``pieces`` makes this rank's micro-batches from a global batch of 8 rows.

    ``optimizer`` is "adamw", or "muon", which updates the matrices of layers.
    """
    from mindnlp.core import optim

    import mindnlp_dp as dp

    model.set_train(True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    # If an element's gradient is only rounding, AdamW's update of it is random, and as large as the learning rate.
    lr = options.pop("lr", 5e-4)
    if options.pop("optimizer", "adamw") == "muon":
        optimizer = dp.optim.Muon(dp.optim.muon_groups(model), lr=lr, adjust_lr_fn="match_rms_adamw")
    else:
        optimizer = optim.AdamW(parameters, lr=lr, weight_decay=0.1)
    num_micro_steps = len(pieces(batch(kind, 8)))
    step = dp.make_train_step(
        lambda **inputs: model(**inputs)[0], optimizer, parameters, model=model,
        accumulation_steps=num_micro_steps, max_grad_norm=0.5, group=group, **options,
    )  # fmt: skip
    step.norms = []
    for number in range(num_updates):
        micro_batches = pieces(batch(kind, 8, number))
        step(micro_batches if num_micro_steps > 1 else micro_batches[0])
        step.norms.append(step.grad_norm)
    return step


def whole_weights(model: Any) -> dict[str, np.ndarray]:
    """Return what trains as full arrays, gathered from the shards if the model is sharded. A collective."""
    if getattr(model, "parallel", None) is None:
        return {name: p.asnumpy().copy() for name, p in model.named_parameters() if p.requires_grad}
    arrays = {p.name: whole.copy() for p, whole in model.parallel.full_arrays()}
    return {name: arrays[name] for name in arrays if model.parallel.placements[name].trains}
