"""This module makes Transformers' training arguments data parallel under MindNLP 0.5; the Trainer takes them."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any

from transformers.training_args import ParallelMode

from mindnlp_dp.training.trainer.base_arguments import DataParallelArgumentsBase, upgrade
from mindnlp_dp.training.trainer.mindnlp_trainer import TrainingArguments

# Transformers implements these settings in Accelerate, PyTorch or its own loop, which this package replaces.
_NOT_HERE = (
    "fp16", "param_dtype", "deepspeed", "fsdp", "torch_compile", "torch_compile_backend", "torch_compile_mode",
    "torchdynamo",
    "jit_mode_eval", "use_liger_kernel", "eval_on_start",
    "batch_eval_metrics", "use_legacy_prediction_loop", "push_to_hub",
    "debug", "neftune_noise_alpha",
)  # fmt: skip

# Settings whose value has no effect here. (average_tokens_across_devices is not among them: Transformers itself sets it
# to False in its own arguments, and the mean is over all ranks' tokens in any case.)
_WITHOUT_EFFECT = (
    "dataloader_num_workers",
    "dataloader_prefetch_factor",
    "torch_empty_cache_steps",
    "use_ipex",
    "ddp_bucket_cap_mb",
)


@dataclass(repr=False)
class DataParallelArguments(DataParallelArgumentsBase):
    """Transformers' ``TrainingArguments`` for one process of several.

    These fields of Transformers control data parallelism: ``per_device_train_batch_size`` is a rank's micro-batch;
    ``dataloader_drop_last`` drops a last global batch that is not full instead of splitting it; ``data_seed`` (else
    ``seed``) fixes the order of the samples; ``logging_nan_inf_filter`` says what happens on all ranks to a micro-batch
    whose loss is NaN or infinite: it is reported and left out of log and update (True), or training stops with the
    report (False).

    Raises:
        ValueError: a size is below 1, ``auto_find_batch_size`` with several ranks, or a setting that is not supported,
            such as ``bf16``.
    """

    @property
    def drops_last(self) -> bool:
        return self.dataloader_drop_last

    def check_library(self) -> None:
        if self.bf16:
            # Transformers would enter an autocast that MindNLP 0.5 does not have.
            raise ValueError(
                'bf16 is not supported with MindNLP 0.5; on a CPU use init_process_group(matmul_precision="medium")'
            )
        for name in _NOT_HERE:
            if getattr(self, name):
                raise ValueError(f"{name} is not supported with MindNLP 0.5; leave it out")
        if not self.skip_memory_metrics:
            raise ValueError("skip_memory_metrics=False: memory is not measured with MindNLP 0.5 here; leave it out")
        defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
        for name in _WITHOUT_EFFECT:
            if name in defaults and getattr(self, name) != defaults[name]:
                warnings.warn(f"{name} has no effect with MindNLP 0.5 here", RuntimeWarning, stacklevel=5)
        if self.overlap is True:
            raise ValueError("overlap=True: MindNLP 0.5's parameters cannot say when their gradient is there")
        self.overlap = False
        if str(getattr(self.save_strategy, "value", self.save_strategy)) == "best":
            raise ValueError('save_strategy="best" is not supported; save every so many steps, or every epoch')
        if not self.eval_do_concat_batches or "loss" in (self.include_for_metrics or ()):
            raise ValueError(
                'eval_do_concat_batches=False and include_for_metrics=["loss"] are not supported: predictions come '
                "whole, in data set order, and the loss is a mean"
            )
        config = self.accelerator_config or {}
        if config.get("split_batches") if isinstance(config, dict) else getattr(config, "split_batches", False):
            raise ValueError(
                "split_batches has no effect here: per_device_train_batch_size is a rank's; set global_batch_size"
            )

    @property
    def parallel_mode(self) -> ParallelMode:  # type: ignore[override]
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_DISTRIBUTED


def upgrade_arguments(args: Any) -> DataParallelArguments:
    """Turn a plain ``TrainingArguments``, or an instance of a subclass of it, into one that knows its rank.

    The original is not changed. Raises TypeError for anything else.
    """
    upgraded: DataParallelArguments = upgrade(args, TrainingArguments, DataParallelArguments)
    return upgraded
