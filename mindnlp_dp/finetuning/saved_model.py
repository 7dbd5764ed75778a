"""This module loads what a recipe has saved: a model, or adapters with the model that they belong to.

The recipe for language models calls it to continue from a folder, and the commands ``export`` and ``generate``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.finetuning.pretrained import load_pretrained
from mindnlp_dp.finetuning.results import MODEL_FOLDER
from mindnlp_dp.finetuning.settings import InputError
from mindnlp_dp.runtime.mindnlp_api import peft_api, transformers_api


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
    """Return the settings of a folder's adapters; None for a whole model, and for a hub name."""
    path = Path(name) / "adapter_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def base_of(name: str, base: str = "") -> str:
    """Return the model that a folder's adapters belong to: ``base``, or the one they name; a whole model is its own."""
    adapters = adapters_of(name)
    return name if adapters is None else base or adapters["base_model_name_or_path"]


def load_causal_lm(name: str, base: str = "", *, is_trainable: bool = False, trust_pickle: bool = False) -> Any:
    """Return a causal language model, with its adapters if the folder has some.

    Args:
        base: the model of the adapters, if it is no longer where they were trained.
        is_trainable: whether the adapters are trained further.
        trust_pickle: as in :func:`~.pretrained.load_pretrained`.

    Raises:
        InputError: it cannot be loaded, or is another kind of model.
    """
    source, adapters, library = base_of(name, base), adapters_of(name), transformers_api()
    if adapters is not None and (adapters["peft_type"], adapters["task_type"]) != ("LORA", "CAUSAL_LM"):
        kind = f"{adapters['peft_type']} for {adapters['task_type']}"
        raise InputError(f"{name} has adapters of the kind {kind}; expected LORA for CAUSAL_LM")
    config = Path(source) / "config.json"
    kinds = json.loads(config.read_text(encoding="utf-8")).get("architectures") if config.is_file() else None
    if kinds and kinds[0].endswith("Classification"):
        raise InputError(f"{source} is a {kinds[0]}; expected a causal language model")
    try:
        model = load_pretrained(library.AutoModelForCausalLM, source, "model", trust_pickle=trust_pickle)
    except InputError as error:
        raise InputError(
            f"{error}" + (f"; {name} has adapters for it, and names it in adapter_config.json" if adapters else "")
        ) from None
    if adapters is None:
        return model
    if (Path(name) / "generation_config.json").is_file():
        model.generation_config = library.GenerationConfig.from_pretrained(name)
    return peft_api().PeftModel.from_pretrained(model, name, is_trainable=is_trainable)
