"""This module turns a recipe's settings into the Trainer's arguments."""

from __future__ import annotations

import math
from typing import Any, Union

import numpy as np

import mindnlp_dp as dp
from mindnlp_dp.data.sampler import accumulation_steps_to_keep, for_stages
from mindnlp_dp.finetuning.settings import InputError, ParallelConfig, as_input_error
from mindnlp_dp.optim.optimizer_by_name import OWN_OPTIMIZERS


def training_arguments(config: ParallelConfig, mesh: dp.DeviceMesh, **more: Any) -> dp.DataParallelArguments:
    """Return the Trainer's arguments, with a micro-batch and accumulation steps that keep the global batch size."""
    from mindnlp_dp.training.trainer.mindnlp_trainer import EVAL_STRATEGY

    num_ranks = mesh.dp_group.world_size
    when: dict[str, Any] = {
        EVAL_STRATEGY: "steps" if config.eval_steps else "epoch",
        "save_strategy": "steps" if config.save_steps else "no",
    }
    if config.optimizer in OWN_OPTIMIZERS:
        more["optim"] = config.optimizer
    if metric := config.metric_to_keep:
        # The library compares models when it evaluates them, so they are saved then.
        when.update(
            save_strategy=when[EVAL_STRATEGY], load_best_model_at_end=True, metric_for_best_model=f"eval_{metric}",
            greater_is_better=metric != "loss",
        )  # fmt: skip
    with as_input_error():
        micro_batch_size = config.micro_batch_size
        if not micro_batch_size:
            # If the number of ranks does not divide the global batch, some ranks have one sample less.
            micro_batch_size = math.ceil(config.global_batch_size / num_ranks)
            micro_batch_size = for_stages(micro_batch_size, mesh.sizes["pp"])
        accumulation_steps = accumulation_steps_to_keep(config.global_batch_size, micro_batch_size * num_ranks)
        return dp.DataParallelArguments(
            output_dir=config.output_dir,
            per_device_train_batch_size=micro_batch_size,
            gradient_accumulation_steps=accumulation_steps,
            global_batch_size=config.global_batch_size,
            per_device_eval_batch_size=config.eval_batch_size,
            num_train_epochs=config.num_epochs,
            max_steps=config.max_steps,
            learning_rate=config.learning_rate,
            warmup_ratio=config.warmup_ratio,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            logging_steps=config.logging_steps,
            peak_teraflops=config.peak_teraflops or None,
            report_to=[name.strip() for name in config.report_to.split(",")],
            **when,
            eval_steps=config.eval_steps or None,
            lr_scheduler_type=config.lr_scheduler,
            save_steps=config.save_steps or config.eval_steps or None,
            save_total_limit=2,
            async_save=config.async_save,
            sharded_checkpoints=config.sharded_checkpoints,
            seed=config.seed,
            group_by_length=config.group_by_length,
            bucket_cap_mb=config.bucket_cap_mb or None,
            overlap=config.overlap if config.overlap == "auto" else config.overlap == "true",
            compression=config.compression or None,
            param_dtype=config.param_dtype or None,
            powersgd_rank=config.powersgd_rank,
            gradient_checkpointing=config.gradient_checkpointing,
            recompute_layers=_layers(config.recompute_layers),
            zero_stage="auto" if config.zero_stage == "auto" else int(config.zero_stage),
            trace=config.trace or None,
            profile=config.profile or None,
            sync_stats=config.stats,
            **more,
        )


def callbacks(config: ParallelConfig) -> list[Any]:
    """Return the library's callbacks that the settings ask for."""
    if not config.early_stopping:
        return []
    from mindnlp_dp.training.trainer.mindnlp_trainer import EarlyStoppingCallback

    return [EarlyStoppingCallback(config.early_stopping)]


def chosen(num_samples: int, most: int, seed: int) -> np.ndarray:
    """Return the numbers of at most ``most`` samples (0: all), chosen at random, in their order.

    >>> chosen(5, 0, 0).tolist(), len(chosen(5, 3, 0))
    ([0, 1, 2, 3, 4], 3)
    """
    if not 0 < most < num_samples:
        return np.arange(num_samples)
    return np.sort(np.random.default_rng(seed).permutation(num_samples)[:most])


def repeated(num_samples: int, weight: float, seed: int) -> np.ndarray:
    """Return the numbers of the samples, each as often as ``weight`` says; its fraction is of samples chosen at random.

    >>> repeated(2, 2.5, 0).tolist() in ([0, 1, 0, 1, 0], [0, 1, 0, 1, 1])
    True
    """
    part = round(num_samples * (weight % 1))
    all_of_them = np.tile(np.arange(num_samples), int(weight))
    return np.concatenate([all_of_them, chosen(num_samples, part, seed)[: part or 0]])


def held_out(labels: np.ndarray, fraction: float, seed: int, source: str = "the file") -> np.ndarray:
    """Return which samples are held out, bool of shape (samples,): this fraction of each label, chosen at random.

    >>> held_out(np.array([0, 0, 0, 0, 1, 1]), 0.5, 0).reshape(3, 2).sum()
    3
    """
    is_held_out = np.zeros(len(labels), bool)
    order = np.random.default_rng(seed).permutation(len(labels))
    names, counts = np.unique(labels, return_counts=True)
    for label in names:
        ours = order[labels[order] == label]
        is_held_out[ours[: int(len(ours) * fraction)]] = True
    if not is_held_out.any():
        of_label = " of its most frequent label" if len(names) > 1 else ""
        raise InputError(
            f"{source}: test_fraction {fraction} of its rows{of_label} ({max(counts, default=0)}) is less than one "
            f"row; add rows (at least {math.ceil(1 / fraction)}), raise --test-fraction, or pass --test-file"
        )
    return is_held_out


def _layers(text: str) -> Union[bool, str, list[str]]:
    """Return the layers of ``recompute_layers``: all (True), every n-th ("n"), or patterns of names.

    >>> _layers(""), _layers("2"), _layers("layer.[0-5], layer.9")
    (True, '2', ['layer.[0-5]', 'layer.9'])
    """
    patterns = [part.strip() for part in text.split(",") if part.strip()]
    return patterns if len(patterns) > 1 else patterns[0] if patterns else True
