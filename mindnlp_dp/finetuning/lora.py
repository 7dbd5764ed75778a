"""This module adds LoRA adapters to a model, as a recipe's settings say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindnlp_dp.finetuning.settings import InputError, ParallelConfig
from mindnlp_dp.runtime.mindnlp_api import peft_api


def with_lora(model: Any, name: str, config: ParallelConfig, task_type: str) -> Any:
    """Return the model ``name`` with adapters in its linear layers, or in those that the settings name.

    The head of a classifier (``SEQ_CLS``) has none: it is new, and all its weights are trained and saved.

    Raises:
        InputError: the settings name a layer that the model has not.
    """
    peft = peft_api()
    head = model.get_output_embeddings()
    is_classifier = task_type == "SEQ_CLS"
    paths = [
        path
        for path, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") and module is not head
        if not is_classifier or (path.startswith(f"{model.base_model_prefix}.") and ".pooler." not in path)
    ]
    linear = {path.rpartition(".")[2] for path in paths}
    targets = [name.strip() for name in config.lora_targets.split(",") if name.strip()] or sorted(linear)
    unknown = [name for name in targets if name not in linear]
    if unknown:
        raise InputError(f"lora_targets names {unknown[0]!r}; the linear layers are {', '.join(sorted(linear))}")
    if is_classifier:
        # Layers of the head may have the same names.
        targets = [path for path in paths if path.rpartition(".")[2] in targets]
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            task_type=task_type, r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout,
            target_modules=targets, fan_in_fan_out=model.config.model_type == "gpt2", use_rslora=config.use_rslora,
            use_dora=config.use_dora,
            # The adapters name their model, also for a command in another folder.
            base_model_name_or_path=str(Path(name).resolve()) if Path(name).exists() else name,
        ),
    )  # fmt: skip
