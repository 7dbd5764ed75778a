"""This module is ``mindnlp-dp export``: it writes what a run has saved as one folder that other libraries open."""

from __future__ import annotations

import shutil
from pathlib import Path

from mindnlp_dp.finetuning.saved_model import AUTO_CLASSES, adapters_of, find_model, kind_of, load_saved
from mindnlp_dp.finetuning.settings import InputError
from mindnlp_dp.finetuning.tokenizers import pretrained_tokenizer
from mindnlp_dp.runtime.atomic_write import atomic_write


def run_export(output_dir: Path, destination: Path, merge_lora: bool, base: str, *, trust_pickle: bool = False) -> int:
    """Write the model of a run, with its adapters merged into it, and its tokenizer; return the exit code.

    Raises:
        InputError: there is no model, the adapters' model cannot be loaded, or ``destination`` is not empty.
    """
    folder = find_model(output_dir)
    has_adapters, kind = adapters_of(str(folder)) is not None, kind_of(str(folder))
    if has_adapters != merge_lora:
        raise InputError(
            f"{folder} has adapters, which belong to another model: pass --merge-lora to write both as one model"
            if has_adapters
            else f"{folder} has no adapters to merge: it is a full model already; leave out --merge-lora"
        )
    if kind not in AUTO_CLASSES:
        raise InputError(
            f"the adapters of {folder} are for the task {kind}, expected one of {', '.join(AUTO_CLASSES)}: write it "
            "as task_type into adapter_config.json"
        )
    if destination.resolve() == Path.cwd():
        raise InputError(f"{destination} is the current folder; name a new one")
    if folder.resolve() in destination.resolve().parents:
        raise InputError(f"{destination} is within the folder of the model, {folder}; name one beside it")
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise InputError(f"{destination} exists and is not an empty folder; name a new one")
    with atomic_write(destination) as new:
        if has_adapters:
            model = load_saved(str(folder), kind, base, trust_pickle=trust_pickle).merge_and_unload()
            model.save_pretrained(str(new))
            pretrained_tokenizer(str(folder), base)[0].save_pretrained(str(new))
        else:
            shutil.copytree(folder, new)
    print(f"written to {destination}: a model that {AUTO_CLASSES[kind]} and AutoTokenizer open")
    return 0
