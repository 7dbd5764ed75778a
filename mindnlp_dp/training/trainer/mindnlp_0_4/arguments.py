"""This module makes the training arguments of MindNLP 0.4.1 data parallel; the Trainer in this folder takes them.

MindNLP's ``TrainingArguments`` reports rank 0 of 1 in every process, so every process would log, save and delete the
same files.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass, field
from typing import Any, Optional, Union

from mindnlp_dp.runtime.devices import is_on_cpu
from mindnlp_dp.training.trainer.base_arguments import DataParallelArgumentsBase, upgrade
from mindnlp_dp.training.trainer.mindnlp_trainer import TrainingArguments

# Settings of MindSpore's pipelines in MindNLP's Trainer; here the rank itself reads its samples, between its updates.
_OF_PIPELINES = ("dataset_num_workers", "dataset_prefetch_factor")


@dataclass(repr=False)
class DataParallelArguments(DataParallelArgumentsBase):
    """MindNLP's ``TrainingArguments`` for one process of several.

    These fields of MindNLP control data parallelism: ``per_device_train_batch_size`` is a rank's micro-batch;
    ``dataset_drop_last`` drops a last global batch that is not full instead of splitting it; ``data_seed`` (else
    ``seed``) fixes the order of the samples; ``logging_nan_inf_filter`` says what happens on all ranks to a micro-batch
    whose loss is NaN or infinite: it is reported and left out of log and update (True), or training stops with the
    report (False); with ``log_on_each_node`` and ``save_on_each_node`` the first rank of every host logs or writes.

    Raises:
        ValueError: a size is below 1, or ``auto_find_batch_size`` with several ranks.

    Examples:
        >>> import mindnlp_dp as dp
        >>> group = dp.init_process_group()
        >>> args = dp.DataParallelArguments("outputs", per_device_train_batch_size=8, global_batch_size=64)
        >>> args.global_batch_size, args.overlap
        (64, 'auto')
    """

    report_to: Union[str, list[str], None] = field(
        default=None,
        metadata={
            "help": 'Trackers of the log: "tensorboard", "swanlab", "mlflow", "all" that are installed, or "none".'
        },
    )
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Recompute the activations of layers in the backward pass to save memory."}
    )
    gradient_checkpointing_kwargs: Optional[dict[str, Any]] = field(
        default=None, metadata={"help": "As in Transformers; use_reentrant is accepted and makes no difference."}
    )

    predict_with_generate: bool = field(
        default=False,
        metadata={"help": "Encoder-decoder models: predictions of evaluate and predict are generated tokens."},
    )
    generation_max_length: Optional[int] = field(
        default=None, metadata={"help": "Maximum length of generated rows; None: the model's."}
    )
    generation_num_beams: Optional[int] = field(
        default=None, metadata={"help": "Number of beams of generated rows; None: the model's."}
    )

    @property
    def drops_last(self) -> bool:
        return self.dataset_drop_last

    def check_library(self) -> None:
        # MindNLP's names for gradient checkpointing; its own Trainer would call a method that models do not have.
        if self.recompute:
            self.recompute: bool = False
            self.gradient_checkpointing = True
            self.gradient_checkpointing_kwargs = self.gradient_checkpointing_kwargs or self.recompute_kwargs
        if self.bf16_full_eval and not self.process_group.on_device:
            raise ValueError(
                "bf16_full_eval is not supported on a CPU: MindSpore has no operators in bfloat16 there; leave it out, "
                "or set fp16_full_eval"
            )
        wanted = "bfloat16" if self.bf16 else "float16" if self.fp16 else None
        if not is_on_cpu():
            self.param_dtype = self.param_dtype or wanted
        elif self.fp16 and self.param_dtype is None:
            warnings.warn(
                "fp16 has no effect on training in MindNLP 0.4.1 on a CPU; bf16 has one on newer processors, and "
                'param_dtype="float16" computes in half precision, slowly',
                RuntimeWarning,
                stacklevel=5,
            )
        defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
        for name in _OF_PIPELINES:
            if getattr(self, name) != defaults.get(name):
                warnings.warn(
                    f"{name} has no effect here: each rank reads its samples itself, between its updates. Map what "
                    "takes long before training, or pass a MindSpore pipeline that does it with its own workers",
                    RuntimeWarning,
                    stacklevel=5,
                )


def upgrade_arguments(args: Any) -> DataParallelArguments:
    """Turn a plain ``TrainingArguments``, or an instance of a subclass of it, into one that knows its rank.

    The original is not changed. Raises TypeError for anything else.
    """
    upgraded: DataParallelArguments = upgrade(args, TrainingArguments, DataParallelArguments)
    return upgraded
