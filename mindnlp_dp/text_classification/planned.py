"""This module makes a run follow a plan of ``mindnlp-dp plan``; scripts/finetune.py calls it.

Before the run it merges the plan into the settings; after the run it reports the predicted and the measured time.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from mindnlp_dp.finetuning.settings import InputError
from mindnlp_dp.report.runs import RunReport
from mindnlp_dp.runtime.mesh_spec import mesh_name
from mindnlp_dp.text_classification.classification_config import FinetuneConfig

# The allowed relative difference in parameters, because the tokenizer's vocabulary changes the model's size.
_SAME = 0.1


def follow_plan(config: FinetuneConfig) -> FinetuneConfig:
    """Return the settings with the plan's mesh, ZeRO stage, micro-batch, schedule and type, if a plan is given.

    Raises:
        InputError: the file is not a plan, or a setting contradicts it.
    """
    if not config.plan:
        return config
    try:
        found = read_plan(Path(config.plan))
    except ValueError as error:
        raise InputError(f"plan: {error}") from None
    settings: dict[str, Any] = {
        "mesh": mesh_name(found["mesh"]),
        "micro_batch_size": found["micro_batch_size"],
        "zero_stage": str(found["zero_stage"]),
        "gradient_checkpointing": found["recompute"],
        "param_dtype": found["param_dtype"],
    }
    if found["schedule"]:
        settings["pipeline_schedule"] = found["schedule"]
        settings["pipeline_layers"] = ",".join(str(end - first) for first, end in found["layers"])
    if config.global_batch_size != found["batch"]:
        raise InputError(
            f"global_batch_size is {config.global_batch_size}, and the plan is for {found['batch']} samples per "
            f"update; give --global-batch-size {found['batch']}, or plan again"
        )
    if config.max_length != found["sequence"]:
        raise InputError(
            f"max_length is {config.max_length}, and the plan is for {found['sequence']} tokens per sample; give "
            f"--max-length {found['sequence']}, or plan again with --sequence {config.max_length}"
        )
    if (config.optimizer == "muon") != found["has_muon"]:
        raise InputError(
            f"optimizer is {config.optimizer}, and the plan is for {'muon' if found['has_muon'] else 'adamw'}; "
            "give its --optimizer, or plan again"
        )
    if bool(config.lora_rank) != found["has_adapters"]:
        raise InputError(
            f"lora_rank is {config.lora_rank}, and the plan is for training "
            f"{'adapters' if found['has_adapters'] else 'all weights'}; give its --lora-rank, or plan again"
        )
    defaults = {setting.name: setting.default for setting in dataclasses.fields(config)}
    for name, value in settings.items():
        given = getattr(config, name)
        if given not in (defaults[name], value):
            raise InputError(f"{name} is {given}, and the plan's is {value}; leave one of them out")
    planned = dataclasses.replace(config, **settings)
    planned.validate()
    return planned


def check_model(model: Any, config: FinetuneConfig) -> None:
    """Raise InputError if the plan was made for a model of another size."""
    if not config.plan:
        return
    planned = read_plan(Path(config.plan))["parameters"]
    built = sum(math.prod(p.shape) for p in {id(p): p for p in model.parameters()}.values())
    if abs(built / planned - 1) > _SAME:
        raise InputError(
            f"the plan is for a model of {planned:.4g} parameters, and this one has {built:.4g}; plan for its "
            "config.json, or give the sizes that the plan's launch command names"
        )


def compare_with_plan(report: RunReport, config: FinetuneConfig) -> None:
    """Add the predicted and the measured time of an update, in seconds, to the report."""
    # A run that was resumed at its end has measured nothing.
    if config.plan and report["train_samples_per_second"] > 0:
        measured = report["global_batch_size"] / report["train_samples_per_second"]
        report["plan"] = {"predicted": read_plan(Path(config.plan))["seconds"], "measured": measured}


def read_plan(path: Path) -> dict[str, Any]:
    """Return the best plan that can be launched, and its batch, from a file that ``mindnlp-dp plan --json`` wrote.

    Raises:
        ValueError: the file has another format, or none of its plans can be launched.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = next(found for found in content["plans"] if found["launch"])
        return {
            "mesh": {
                str(axis): tuple(map(int, size)) if isinstance(size, list) else int(size)
                for axis, size in found["mesh"].items()
            },
            "layers": [[int(number) for number in stage["layers"]] for stage in found["stages"]],
            "parameters": float(content["model"]["parameters"]), "sequence": int(content["model"]["sequence"]),
            "has_adapters": content["model"]["trained"] < content["model"]["parameters"],
            "has_muon": content["model"].get("optimizer") == "muon", "batch": int(content["batch"]),
            "param_dtype": str(found.get("param_dtype", "")),
            **{key: found[key] for key in ("schedule", "micro_batch_size", "recompute", "zero_stage", "seconds")},
        }  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not what mindnlp-dp plan --json writes: {error}") from None
    except StopIteration:
        raise ValueError(f"{path} has no plan that can be launched") from None
