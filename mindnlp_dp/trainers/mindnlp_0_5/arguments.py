"""Training arguments of Transformers, under MindNLP 0.5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindnlp_dp.trainers.arguments import RankArguments, upgrade
from mindnlp_dp.trainers.library import TrainingArguments

# What Transformers does for these goes through Accelerate or PyTorch, whose place is taken here.
_NOT_HERE = (
    "fp16", "bf16", "deepspeed", "fsdp", "torch_compile", "group_by_length", "gradient_checkpointing",
)  # fmt: skip


@dataclass(repr=False)
class DataParallelArguments(RankArguments):
    """Transformers' ``TrainingArguments`` for one process of several.

    Of Transformers' own fields, these steer data parallelism: ``per_device_train_batch_size`` is a rank's micro batch;
    ``dataloader_drop_last`` drops a last global batch that is not full instead of splitting it; ``data_seed`` (else
    ``seed``) fixes the order of the samples; ``logging_nan_inf_filter`` says what becomes of a micro batch whose loss
    is NaN or infinite, on all ranks alike: it is reported and left out of log and update (True), or training stops with
    the report (False).

    Raises:
        ValueError: a size is below 1, ``auto_find_batch_size`` with several ranks, or a setting that has no effect
            here, such as ``bf16``.
    """

    @property
    def drops_last(self) -> bool:
        return self.dataloader_drop_last

    def check_library(self) -> None:
        for name in _NOT_HERE:
            if getattr(self, name):
                raise ValueError(f"{name} has no effect with MindNLP 0.5 here; leave it out")
        if self.overlap is True:
            raise ValueError("overlap=True: MindNLP 0.5's parameters cannot say when their gradient is there")
        self.overlap = False
        if str(getattr(self.save_strategy, "value", self.save_strategy)) == "best":
            raise ValueError('save_strategy="best" is not supported; save every so many steps, or every epoch')


def upgrade_arguments(args: Any) -> DataParallelArguments:
    """Turn a plain ``TrainingArguments``, or an instance of a subclass of it, into one that knows its rank.

    The original is left as it is. Raises TypeError for anything else.
    """
    upgraded: DataParallelArguments = upgrade(args, TrainingArguments, DataParallelArguments)
    return upgraded
