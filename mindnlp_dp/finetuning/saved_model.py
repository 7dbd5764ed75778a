"""This module loads what a recipe has saved: a model, or adapters with the model that they belong to.

The recipes call it to continue from a folder, and so do the commands ``export`` and ``generate``.
"""

from __future__ import annotations

import inspect
import json
import warnings
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.finetuning.pretrained import load_pretrained
from mindnlp_dp.finetuning.settings import InputError, first_line
from mindnlp_dp.runtime.mindnlp_api import peft_api, transformers_api

# The folder in a run's output_dir.
MODEL_FOLDER = "model"

# What the recipes save, by PEFT's names: the library's class, and the recipe.
AUTO_CLASSES = {"CAUSAL_LM": "AutoModelForCausalLM", "SEQ_CLS": "AutoModelForSequenceClassification"}
RECIPES = {"CAUSAL_LM": "scripts/finetune_llm.py", "SEQ_CLS": "scripts/finetune.py"}


def find_model(output_dir: Path) -> Path:
    """Return the folder of the model that a run has written; the path itself, if it has a model.

    Raises:
        InputError: neither has one.
    """
    for folder in (output_dir / MODEL_FOLDER, output_dir):
        if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
            return folder
    raise InputError(f"{output_dir} has no model: expected config.json or adapter_config.json in it, or in its model/")


def adapters_of(name: str) -> Optional[dict[str, Any]]:
    """Return the settings of a folder's adapters; None for a whole model, and for a hub name.

    Raises:
        InputError: the file of the settings has another form.
    """
    path = Path(name) / "adapter_config.json"
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {"r": 0, **found, **{key: found[key] for key in ("peft_type", "task_type", "base_model_name_or_path")}}
    except (ValueError, KeyError, TypeError):
        raise InputError(
            f"{path} does not describe adapters: expected JSON with peft_type, task_type and base_model_name_or_path"
        ) from None


def base_of(name: str, base: str = "") -> str:
    """Return the model that a folder's adapters belong to: ``base``, or the one they name; a whole model is its own."""
    adapters = adapters_of(name)
    return name if adapters is None else base or adapters["base_model_name_or_path"]


def kind_of(name: str) -> str:
    """Return a key of :data:`AUTO_CLASSES`: PEFT's name for what a folder's model or adapters do."""
    adapters, config = adapters_of(name), Path(name) / "config.json"
    if adapters is not None:
        return str(adapters["task_type"])
    kinds = json.loads(config.read_text(encoding="utf-8")).get("architectures") if config.is_file() else None
    return "SEQ_CLS" if kinds and kinds[0].endswith("Classification") else "CAUSAL_LM"


def check_kind(name: str, kind: str, lora_rank: int = 0) -> None:
    """Raise InputError if a folder has a model or adapters that the recipe of this kind does not train.

    A language model becomes a classifier with a new head; a classifier does not become a language model.
    """
    adapters, found = adapters_of(name), kind_of(name)
    if adapters is None:
        if (found, kind) == ("SEQ_CLS", "CAUSAL_LM"):
            raise InputError(
                f"{name} is a text classifier; expected a causal language model; train it with {RECIPES[found]}"
            )
        return
    if (adapters["peft_type"], found) != ("LORA", kind):
        merge = ", or make one model of them by: mindnlp-dp export OUTPUT_DIR NEW_FOLDER --merge-lora"
        raise InputError(
            f"{name} has adapters of the kind {adapters['peft_type']} for {found}; expected LORA for {kind}; pass the "
            f"model that they belong to{merge if (found, kind) == ('CAUSAL_LM', 'SEQ_CLS') else ''}"
        )
    if lora_rank not in (0, adapters["r"]):
        raise InputError(
            f"{name} has adapters of rank {adapters['r']}, which are trained further; leave out --lora-rank, or pass "
            "the model that they belong to, for new adapters"
        )


def load_saved(
    name: str, kind: str = "CAUSAL_LM", base: str = "", *, is_trainable: bool = False, trust_pickle: bool = False
) -> Any:
    """Return a model, with its adapters if the folder has some.

    Args:
        kind: a key of :data:`AUTO_CLASSES`.
        base: the model of the adapters, if it is no longer where they were trained.
        is_trainable: whether the adapters are trained further.
        trust_pickle: as in :func:`~.pretrained.load_pretrained`.

    Raises:
        InputError: it cannot be loaded, or is another kind of model.
    """
    check_kind(name, kind)
    source, adapters, library = base_of(name, base), adapters_of(name), transformers_api()
    check_kind(source, kind)
    options: dict[str, Any] = {}
    if adapters is not None and kind == "SEQ_CLS":
        if not (Path(name) / "config.json").is_file():
            raise InputError(
                f"{name} has adapters of a classifier, and no config.json with its labels; pass the folder "
                f"{MODEL_FOLDER}/ of a run's output_dir"
            )
        # The head is saved with the adapters, and that of their model may have other sizes.
        options = {
            "config": load_pretrained(library.AutoConfig, name, "configuration"), "ignore_mismatched_sizes": True,
        }  # fmt: skip
    try:
        auto_class = getattr(library, AUTO_CLASSES[kind])
        model = load_pretrained(auto_class, source, "model", trust_pickle=trust_pickle, **options)
    except InputError as error:
        raise InputError(
            f"{error}" + (f"; {name} has adapters for it, and names it in adapter_config.json" if adapters else "")
        ) from None
    if adapters is None:
        _make_valid(getattr(model, "generation_config", None), name, is_trainable=is_trainable)
        return model
    if (Path(name) / "generation_config.json").is_file():
        model.generation_config = library.GenerationConfig.from_pretrained(name)
    _make_valid(getattr(model, "generation_config", None), name, is_trainable=is_trainable)
    return peft_api().PeftModel.from_pretrained(model, name, is_trainable=is_trainable)


def _make_valid(config: Any, name: str, *, is_trainable: bool) -> None:
    """Let settings of sampling, such as a temperature, sample; the library saves no model in which they do not.

    Raises:
        InputError: the settings cannot be saved for another reason, and the model ``name`` is to be trained.
    """
    if config is None or not (problem := _problem_of(config)):
        return
    given, config.do_sample = config.do_sample, True
    if _problem_of(config):
        config.do_sample = given
        if is_trainable:
            raise InputError(f"generation_config.json of {name} cannot be saved with a model; mend it: {problem}")


def _problem_of(config: Any) -> str:
    """Return why the library would not save a generation configuration; "" if it would."""
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            # Transformers raises only if it is strict, which MindNLP 0.4 does not have.
            config.validate(**{"strict": True} if "strict" in inspect.signature(config.validate).parameters else {})
    except ValueError as error:
        return first_line(error)
    return str(found[0].message).partition("\n")[0] if found else ""
