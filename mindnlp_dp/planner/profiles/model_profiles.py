"""Loads models as graphs of operators for the planner, from a MindNLP configuration or from a YAML file of operators.

A loaded model also says where a pipeline may be cut, and which numbers the degrees of parallelism must divide.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional, Union

from mindnlp_dp.planner.profiles.architectures import BUILDERS
from mindnlp_dp.planner.profiles.builder import Builder
from mindnlp_dp.planner.profiles.cluster_profile import read_yaml
from mindnlp_dp.planner.profiles.operator_graph import ROLES, Graph, Model, Operator, with_lora, with_muon

# Published configurations, as differences from the defaults of their model type.
_SHIPPED: dict[str, dict[str, Any]] = {
    "bert-base": {"model_type": "bert", "vocab_size": 30522},
    "bert-large": {
        "model_type": "bert", "vocab_size": 30522, "hidden_size": 1024, "num_hidden_layers": 24,
        "num_attention_heads": 16, "intermediate_size": 4096,
    },
    "roberta-base": {"model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514},
    "roberta-large": {
        "model_type": "roberta", "vocab_size": 50265, "hidden_size": 1024, "num_hidden_layers": 24,
        "num_attention_heads": 16, "intermediate_size": 4096, "max_position_embeddings": 514,
    },
    "gpt2": {"model_type": "gpt2"},
    "gpt2-xl": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "gpt3-175b": {"model_type": "gpt2", "n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048},
    "t5-base": {
        "model_type": "t5", "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12,
    },
    "llama-2-7b": {"model_type": "llama"},
    "llama-3-8b": {
        "model_type": "llama", "vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
    "tinyllama-1.1b": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
        "num_key_value_heads": 4, "max_position_embeddings": 2048,
    },
    "qwen2-0.5b": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen2-7b": {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    },
    "mistral-7b": {"model_type": "mistral"},
    "gemma-2b": {
        "model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
        "num_attention_heads": 8, "num_key_value_heads": 1,
    },
    "phi-2": {
        "model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32,
    },
    "opt-125m": {"model_type": "opt"},
    "opt-6.7b": {
        "model_type": "opt", "hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "mixtral-8x7b": {"model_type": "mixtral"},
}  # fmt: skip

_DEFAULTS: dict[str, dict[str, Any]] = {
    "bert": {
        "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "max_position_embeddings": 512, "type_vocab_size": 2, "num_labels": 2,
    },
    "gpt2": {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
    "t5": {
        "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
        "is_gated_act": False, "relative_attention_num_buckets": 32,
    },
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "tie_word_embeddings": False, "max_position_embeddings": 4096,
    },
    "qwen2": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "tie_word_embeddings": False, "max_position_embeddings": 32768,
    },
    "mistral": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
    },
    "gemma": {
        "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    "phi": {
        "vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
        "num_attention_heads": 32, "tie_word_embeddings": False, "max_position_embeddings": 2048,
    },
    "opt": {
        "vocab_size": 50272, "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "tie_word_embeddings": True, "max_position_embeddings": 2048,
    },
    "mixtral": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "tie_word_embeddings": False, "max_position_embeddings": 4096,
    },
}  # fmt: skip

_DEFAULTS["roberta"] = {**_DEFAULTS["bert"], "vocab_size": 50265}

# Names of the pretrained weights of the models above.
_HUB = {
    "bert-base": "bert-base-uncased", "bert-large": "bert-large-uncased", "roberta-base": "roberta-base",
    "roberta-large": "roberta-large",
}  # fmt: skip

_HUGE = 10**9


def model_names() -> list[str]:
    """Return the names of the models that the planner knows."""
    return list(_SHIPPED)


def load_model(
    given: Union[str, Path, Mapping[str, Any]], *, sequence: Optional[int] = None, lora_rank: Optional[int] = None,
    optimizer: str = "adamw",
) -> Model:  # fmt: skip
    """Load a model: a name of :func:`model_names`, a ``config.json`` or its folder, a YAML file, or their content.

    Args:
        sequence: tokens per sample; by default the number of positions, at most 512 for BERT, RoBERTa and T5, and at
            most 2048 for other configurations.
        lora_rank: train LoRA adapters of this rank in all products of the layers, and nothing else.
        optimizer: "adamw", or "muon" for the matrices of layers.

    Raises:
        ValueError: A key is unknown or missing, or its value is invalid; the message is one sentence with the key.
    """
    keys, name = _read(given)
    pretrained = _pretrained(given, str(keys.get("model_type")))
    if pretrained:
        # It is launched as a classifier, whatever head its weights have.
        keys.pop("architectures", None)
    model = _from_keys(keys, name, sequence)
    if pretrained:
        model.train_flags = f"--model {pretrained} --max-length {model.sequence}"
    if optimizer not in ("adamw", "muon"):
        raise ValueError(f"optimizer must be adamw or muon, got {optimizer!r}")
    if lora_rank is not None:
        # The recipe adds adapters to pretrained models only.
        is_pretrained = model.train_flags.startswith("--model")
        flags = f"{model.train_flags} --lora-rank {lora_rank}" if is_pretrained else ""
        model = with_lora(model, lora_rank)
        model.train_flags = flags
    return with_muon(model) if optimizer == "muon" else model


def _pretrained(given: Union[str, Path, Mapping[str, Any]], kind: str) -> str:
    """Return what ``scripts/finetune.py --model`` takes for a model with weights; "" for a configuration alone."""
    if isinstance(given, Mapping):
        return ""
    has_weights = kind in ("bert", "roberta") and any(Path(given).glob("model*.safetensors"))
    return shlex.quote(str(given)) if has_weights else _HUB.get(str(given), "")


def _read(given: Union[str, Path, Mapping[str, Any]]) -> tuple[dict[str, Any], str]:
    """Return the keys and the name of a model."""
    if isinstance(given, Mapping):
        return dict(given), str(given.get("name") or given.get("model_type") or "model")
    if str(given) in _SHIPPED:
        return dict(_SHIPPED[str(given)]), str(given)
    path = Path(given)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"model {str(given)!r} is a folder without a config.json")
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"model {str(given)!r} is neither a file nor one of {', '.join(_SHIPPED)}")
    if path.suffix == ".json":
        try:
            keys = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise ValueError(f"model {path} cannot be read: {error}") from None
        if not isinstance(keys, dict):
            raise ValueError(f"model {path} must have keys and values, got {type(keys).__name__}")
    else:
        keys = read_yaml(path, "model")
    name = path.parent.name if path.name == "config.json" else path.stem
    return keys, str(keys.get("name") or name)


def _from_keys(keys: dict[str, Any], name: str, sequence: Optional[int]) -> Model:
    if "operators" in keys:
        return _from_operators(keys, name, sequence)
    kind = keys.get("model_type")
    if not isinstance(kind, str) or kind not in BUILDERS:
        raise ValueError(
            f"model key model_type must be one of {', '.join(BUILDERS)}, or there must be operators; got {kind!r}"
        )
    config = {**_DEFAULTS[kind], **{key: value for key, value in keys.items() if value is not None}}
    if isinstance(keys.get("id2label"), Mapping):
        config["num_labels"] = max(2, len(keys["id2label"]))
    for key in _DEFAULTS[kind]:
        value = config[key]
        is_flag = isinstance(_DEFAULTS[kind][key], bool)
        if is_flag != isinstance(value, bool) or (not is_flag and (not isinstance(value, int) or value < 1)):
            expected = "true or false" if is_flag else "a whole number of at least 1"
            raise ValueError(f"model key {key} must be {expected}, got {value!r}")
    _check(config, kind)
    positions = config.get("max_position_embeddings", config.get("n_positions", 512))
    # RoBERTa's position numbers begin at two.
    positions -= 2 * (kind == "roberta")
    sequence = sequence or keys.get("sequence") or min(positions, 512 if kind in ("bert", "roberta", "t5") else 2048)
    if isinstance(sequence, bool) or not isinstance(sequence, int) or sequence < 1:
        raise ValueError(f"model key sequence must be a whole number of at least 1, got {sequence!r}")
    if kind != "t5" and sequence > positions:
        raise ValueError(f"model key sequence is {sequence}, and the model has {positions} positions")
    heads = next((key for key in ("num_attention_heads", "n_head", "num_heads") if key in config), "")
    hidden = next((key for key in ("hidden_size", "n_embd", "d_model") if key in config), "")
    if kind != "t5" and "head_dim" not in config and config[hidden] % config[heads]:
        raise ValueError(f"model key {heads} is {config[heads]}, which does not divide {hidden}, {config[hidden]}")
    model = BUILDERS[kind](Builder(name, kind, sequence, config), config)
    model.train_flags = _train_flags(kind, config, sequence)
    return model


def _check(config: Mapping[str, Any], kind: str) -> None:
    """Check keys without a default, the sizes of numbers, and keys that depend on each other."""
    for key in (
        "n_inner",
        "num_decoder_layers",
        "num_labels",
        "num_key_value_heads",
        "head_dim",
        "word_embed_proj_dim",
    ):
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _HUGE):
            raise ValueError(f"model key {key} must be a whole number of at least 1, got {value!r}")
    for key in _DEFAULTS[kind]:
        if config[key] >= _HUGE:
            raise ValueError(f"model key {key} must be below {_HUGE}, got a number of {len(str(config[key]))} digits")
    architectures = config.get("architectures", [])
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ValueError(f"model key architectures must be a list of names, got {architectures!r}")
    for key, value in config.items():
        if ("dropout" in key or key.endswith("_pdrop")) and value is not None:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= 1:
                raise ValueError(f"model key {key} must be a share from 0 to 1, got {value!r}")
    if "num_key_value_heads" in config and config["num_attention_heads"] % config["num_key_value_heads"]:
        raise ValueError(
            f"model key num_key_value_heads is {config['num_key_value_heads']}, which does not divide "
            f"num_attention_heads, {config['num_attention_heads']}"
        )
    if kind == "mixtral" and config["num_experts_per_tok"] > config["num_local_experts"]:
        raise ValueError(
            f"model key num_experts_per_tok is {config['num_experts_per_tok']}, and there are "
            f"{config['num_local_experts']} experts"
        )


def _train_flags(kind: str, config: Mapping[str, Any], sequence: int) -> str:
    """Return the flags for ``scripts/finetune.py`` to train this model from scratch; "" if it cannot train it."""
    is_classifier = "Classification" in " ".join(config.get("architectures") or ["Classification"])
    if kind != "roberta" or not is_classifier:
        return ""
    sizes = {
        "vocab-size": "vocab_size", "hidden-size": "hidden_size", "num-layers": "num_hidden_layers",
        "num-heads": "num_attention_heads", "intermediate-size": "intermediate_size",
    }  # fmt: skip
    return " ".join([*(f"--{flag} {config[key]}" for flag, key in sizes.items()), f"--max-length {sequence}"])


_NUMBERS = {
    f.name
    for f in dataclasses.fields(Operator)
    if f.name not in ("name", "kind", "inputs", "keeps_input", "tied_to", "only")
}


def _from_operators(keys: dict[str, Any], name: str, sequence: Optional[int]) -> Model:
    unknown = sorted(set(keys) - {"name", "sequence", "operators"})
    if unknown:
        raise ValueError(f"model key {unknown[0]!r} is unknown; there are name, sequence and operators")
    listed = keys["operators"]
    if not isinstance(listed, list) or not listed or not all(isinstance(entry, Mapping) for entry in listed):
        raise ValueError("model key operators must be a list of operators, each with name and kind")
    operators = [_operator(dict(entry), number) for number, entry in enumerate(listed)]
    graph = Graph(operators, name)
    if not any(o.flops or o.traffic for o in operators):
        raise ValueError("model key operators: none of them has FLOPs or traffic, so there is nothing to plan")
    sequence = sequence or keys.get("sequence", 1)
    if not isinstance(sequence, int) or sequence < 1:
        raise ValueError(f"model key sequence must be a whole number of at least 1, got {sequence!r}")
    return Model(name, graph, sequence, split_points=list(range(1, len(operators))))


def _operator(entry: dict[str, Any], number: int) -> Operator:
    where = f"model key operators[{number}]"
    for key in ("name", "kind"):
        if not isinstance(entry.get(key), str):
            raise ValueError(f"{where}.{key} must be a text, got {entry.get(key)!r}")
    known = {f.name for f in dataclasses.fields(Operator)}
    for key, value in entry.items():
        if key not in known:
            raise ValueError(f"{where}.{key} is unknown; there are {', '.join(sorted(known))}")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if key in _NUMBERS and not (is_number and 0 <= value < 1e18):
            raise ValueError(f"{where}.{key} must be a number of at least 0, got {value!r}")
    for key in ("inputs", "only"):
        names = entry.get(key, [])
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{where}.{key} must be a list of names, got {names!r}")
        entry[key] = tuple(names) if names or key == "inputs" else None
    if not isinstance(entry.get("tied_to"), (str, type(None))):
        raise ValueError(f"{where}.tied_to must be a name, got {entry['tied_to']!r}")
    if not isinstance(entry.get("keeps_input", True), bool):
        raise ValueError(f"{where}.keeps_input must be true or false, got {entry['keeps_input']!r}")
    if entry["kind"] in ROLES and entry["only"] and not set(entry["only"]) <= set(ROLES[entry["kind"]]):
        raise ValueError(f"{where}.only must be some of {', '.join(ROLES[entry['kind']])}, got {list(entry['only'])}")
    rows, k, n = (entry.get(key, default) for key, default in (("rows", 1), ("width_in", 0), ("width_out", 0)))
    if entry["kind"] == "matmul":
        entry.setdefault("flops", 2 * rows * k * n)
        entry.setdefault("parameters", k * n)
    entry.setdefault("traffic", rows * (k + n))
    try:
        return Operator(**entry)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
