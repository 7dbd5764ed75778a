"""Build small models of every MindNLP family from its configuration class, and batches, for several suites."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindnlp_dp.runtime.versions import mindnlp_series

LENGTH, VOCAB_SIZE, NUM_LABELS, NUM_CHOICES = 12, 64, 3, 2
IGNORED = -100
# The smallest id of an ordinary token; special tokens have smaller ids.
FIRST_WORD = 5

# Heads for text, by the end of the class name, and the kind of labels in a batch for them.
HEADS = {
    "ForSequenceClassification": "classes",
    "ForTokenClassification": "token classes",
    "ForCausalLM": "words",
    "LMHeadModel": "words",
    "ForMaskedLM": "words",
    "ForConditionalGeneration": "words",
    "MTModel": "words",
    "ModelWithLMHead": "words",
    "ForQuestionAnswering": "spans",
    "ForQuestionAnsweringSimple": "spans",
    "ForMultipleChoice": "choices",
}

# The parts of composite models, each of which has its own configuration (for example ``text_config``).
_PARTS = ("text", "vision", "speech", "audio", "qformer", "encoder", "decoder", "t2u", "vocoder")

# Families whose inputs another model makes (from an image, sound or another part), or whose labels point at tokens.
_READ_MORE = ("CogVLM", "Mllama", "Musicgen", "SeamlessM4T", "BrosSpade")

# Files that are skipped: models for MindSpore graphs or other libraries, and output classes.
_OTHER_FILES = ("modeling_graph", "modeling_tf", "modeling_flax", "modeling_outputs")
# The families of Transformers that users of MindNLP 0.5 use most.
_OF_0_5 = (
    "bart", "bert", "distilbert", "electra", "gpt2", "llama", "mistral", "qwen2", "roberta", "t5", "xlm_roberta",
)  # fmt: skip

# The settings that make a configuration small, under all names that configuration classes use.
_SIZES = {
    32: (
        "hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim", "embed_dim", "d_embed",
        "word_embed_proj_dim", "rotary_dim_total", "attention_hidden_size", "true_hidden_size",
    ),
    64: (
        "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "d_inner", "n_inner", "dff",
        "hidden_dim", "ffn_hidden_size", "feed_forward_size", "inner_dim", "dim_ff", "d_ffn", "expert_hidden_size",
        "moe_intermediate_size", "shared_expert_intermediate_size", "vocab_size", "src_vocab_size", "tgt_vocab_size",
        "decoder_vocab_size", "n_positions", "n_ctx", "max_position_embeddings", "max_seq_len", "max_seq_length",
        "max_encoder_position_embeddings", "max_decoder_position_embeddings", "seq_length",
        "max_2d_position_embeddings",
        "max_length_position_embeddings", "padded_vocab_size", "entity_vocab_size", "context_length",
    ),
    2: (
        "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers",
        "num_encoder_layers", "num_decoder_layers", "num_key_value_heads", "type_vocab_size", "kv_n_heads",
        "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "num_kv_heads",
        "multi_query_group_num", "num_key_value_groups",
    ),
    4: (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
        "num_encoder_attention_heads", "num_decoder_attention_heads",
    ),
    8: ("d_kv", "head_dim", "kv_channels", "attention_head_size", "dim_head", "rotary_dim", "attention_window"),
}  # fmt: skip
_SMALL: dict[str, Any] = {name: size for size, names in _SIZES.items() for name in names}
# Settings of randomness.
_RANDOM = ("dropout", "pdrop", "layerdrop", "_drop", "dropout_rate", "drop_path_rate", "dropout_prob")


@dataclass(frozen=True)
class ModelClass:
    """Identifies a model class of MindNLP by its family (a folder of ``transformers.models``), name and module."""

    family: str
    name: str
    module: str

    @property
    def head(self) -> str:
        return _head_of(self.name)

    def load(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)


def _head_of(name: str) -> str:
    return next(head for head in sorted(HEADS, key=len, reverse=True) if name.endswith(head))


def model_classes() -> Iterator[ModelClass]:
    """Find every class with a head for text in the model folders of the installed MindNLP, in the order of names."""
    from mindnlp_dp.training.trainer.mindnlp_trainer import PreTrainedModel

    models = importlib.import_module(PreTrainedModel.__module__.rpartition(".")[0] + ".models")
    families = sorted(each.name for each in pkgutil.iter_modules(models.__path__))
    for family in families if mindnlp_series() == "0.4" else _OF_0_5:
        folder = importlib.import_module(f"{models.__name__}.{family}")
        for file in sorted(each.name for each in pkgutil.iter_modules(folder.__path__)):
            if not file.startswith("modeling_") or file.startswith(_OTHER_FILES):
                continue
            module = importlib.import_module(f"{folder.__name__}.{file}")
            for name, found in sorted(vars(module).items()):
                is_model = inspect.isclass(found) and issubclass(found, PreTrainedModel)
                if is_model and found.__module__ == module.__name__ and _is_for_text(found, name):
                    yield ModelClass(family, name, module.__name__)


def _is_for_text(model_class: Any, name: str) -> bool:
    """Tell whether a model has a head of ``HEADS`` and one configuration, and reads only text and its boxes."""
    if not name.endswith(tuple(HEADS)):
        return False
    inputs = list(inspect.signature(model_class.forward).parameters)
    settings = inspect.signature(model_class.config_class.__init__).parameters
    is_composite = any(name.startswith(_PARTS) and name.endswith("_config") for name in settings)
    sees = {"pixel_values", "image", "visual_embeds", "input_features", "input_values"} & set(inputs)
    is_for_spans = HEADS[_head_of(name)] == "spans"
    has_targets = ("start_positions" if is_for_spans else "labels") in inputs
    is_alone = not name.startswith(_READ_MORE)
    return inputs[1:2] == ["input_ids"] and has_targets and is_alone and not is_composite and not sees


def small_config(config_class: Any, dropout: float = 0.0, **settings: Any) -> Any:
    """Return a configuration with two layers of width 32 and ``dropout``, as far as the class has such settings.

    Layers are never left out (layerdrop).
    """
    names = inspect.signature(config_class.__init__).parameters
    small = {name: value for name, value in _SMALL.items() if name in names}
    random = [name for name in names if name.endswith(_RANDOM) and not name.startswith("use_")]
    small.update({name: 0.0 if "layerdrop" in name or "path" in name else dropout for name in random})
    return config_class(**{**small, **settings})


def build(
    model_class: ModelClass, seed: int = 1, dropout: float = 0.0, num_labels: int = NUM_LABELS, **more: Any
) -> Any:
    """Build a small model of a class, with weights drawn from ``seed``; ``more`` are settings of its configuration."""
    from mindnlp_dp.training.trainer.mindnlp_trainer import set_seed

    loaded = model_class.load()
    names = inspect.signature(loaded.config_class.__init__).parameters
    settings: dict[str, Any] = {"num_labels": num_labels, "use_cache": False, "decoder_start_token_id": 0}
    # Batches with several padded rows need a pad token; the default is often None, or beyond the small vocabulary.
    given = names["pad_token_id"].default if "pad_token_id" in names else None
    if given is None or not 0 <= given < VOCAB_SIZE:
        settings["pad_token_id"] = 0
    settings.update({**_OF_FAMILY.get(model_class.family, {}), **more})
    if model_class.name.endswith(("ForCausalLM", "LMHeadModel", "ModelWithLMHead")):
        settings.setdefault("is_decoder", True)
    if HEADS[model_class.head] == "spans":
        settings["num_labels"] = 2
    numpy_state = np.random.get_state()
    set_seed(seed)
    try:
        config = small_config(loaded.config_class, dropout, **settings)
        # Most classes do not have these arguments; the default is 0.1.
        config.classifier_dropout = config.hidden_dropout = dropout
        # By default, ChatGLM leaves its weights empty, because it expects to load a file.
        options = {"empty_init": False} if "empty_init" in inspect.signature(loaded.__init__).parameters else {}
        return loaded(config, **options)
    finally:
        np.random.set_state(numpy_state)


def batch(model_class: ModelClass, model: Any, num_rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return the columns of a batch whose rows have different numbers of counted labels (or of valid spans)."""
    random = np.random.RandomState(seed)
    config = model.config
    names = inspect.signature(type(model).forward).parameters
    kind = HEADS[model_class.head]
    shape = (num_rows, NUM_CHOICES, LENGTH) if kind == "choices" else (num_rows, LENGTH)
    ids = random.randint(FIRST_WORD, VOCAB_SIZE, shape)
    # Classifiers of encoder-decoder models read the last end-of-sequence token; every row needs one.
    end = getattr(config, "eos_token_id", None)
    if getattr(config, "is_encoder_decoder", False) and isinstance(end, int) and end < VOCAB_SIZE:
        ids[..., -1] = end
    columns: dict[str, np.ndarray] = {"input_ids": ids}
    if "attention_mask" in names:
        columns["attention_mask"] = np.ones(shape, np.int64)
    if model_class.family == "longformer" and kind in ("spans", "choices"):
        # Longformer expects three separators per row: the question ends at the first one.
        ids[..., [3, 5, 11]] = config.sep_token_id
    if model_class.family == "chatglm":
        ids[..., 5:7] = config.gmask_token_id, config.bos_token_id
    if "bbox_first_token_mask" in names:
        columns["bbox_first_token_mask"] = np.ones(shape, bool)
    if "bbox" in names:
        columns["bbox"] = np.sort(random.randint(0, 32, (*shape, 4)), -1)
    ignored = config.pad_token_id if model_class.family == "gpt_pangu" else IGNORED
    counted = np.arange(LENGTH) < random.randint(2, LENGTH + 1, (num_rows, 1))
    if kind in ("classes", "choices"):
        columns["labels"] = random.randint(0, NUM_CHOICES, num_rows)
    elif kind == "token classes":
        columns["labels"] = np.where(counted, random.randint(0, NUM_LABELS, shape), ignored)
    elif kind == "words":
        columns["labels"] = np.where(counted, random.randint(FIRST_WORD, VOCAB_SIZE, shape), ignored)
    else:
        # A position beyond the text means that the answer is not in it. Ends exceed the text more often than starts, as
        # with answers that are cut off.
        for name, beyond in (("start_positions", 2), ("end_positions", 6)):
            columns[name] = random.randint(0, LENGTH + (0 if model_class.family in _WITHIN_TEXT else beyond), num_rows)
    return columns


def find(name: str) -> ModelClass:
    """Return the model class of that name."""
    return next(each for each in _all_classes() if each.name == name)


@functools.cache
def _all_classes() -> tuple[ModelClass, ...]:
    return tuple(model_classes())


def samples(model_class: ModelClass, model: Any, num_rows: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Return the rows of a batch as a list of samples, like a data set."""
    columns = batch(model_class, model, num_rows, seed)
    return [{name: values[row] for name, values in columns.items()} for row in range(num_rows)]


# More settings that the configuration classes of some families need.
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"], "local_attn_chunk_length": 4,
                 "lsh_attn_chunk_length": 4, "hash_seed": 1, "num_buckets": 2},
    # With as many experts for each token as there are, the routers' losses would be constant.
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "lilt": {"hidden_size": 48},
    "bros": {"hidden_size": 128},
    "deepseek_v2": {"topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "mobilebert": {"hidden_size": 64, "embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    "chatglm": {"gmask_token_id": 3, "mask_token_id": 3, "bos_token_id": 4},
    "chatglm2": {"original_rope": True, "add_bias_linear": False},
    "chatglm3": {"original_rope": True, "add_bias_linear": False},
    "chatglm4": {"original_rope": True, "add_bias_linear": False},
}  # fmt: skip
# Families whose question answering fails if a position is beyond the text.
_WITHIN_TEXT = ("falcon", "flaubert", "lilt", "rembert", "splinter", "xlm", "xlnet")
