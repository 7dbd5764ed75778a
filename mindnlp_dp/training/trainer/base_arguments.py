"""This module adds settings of data parallelism, and the true rank and world size, to a library's training arguments.

The properties for rank and world size ask the process group. Batch sizes stay per device; the rest is the library's.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional, Union

from mindnlp_dp.communication.default_group import get_process_group
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.data_parallel.powersgd import DEFAULT_RANK
from mindnlp_dp.kernels.dispatch import current_precision
from mindnlp_dp.optim.optimizer_by_name import OWN_OPTIMIZERS
from mindnlp_dp.optim.updater_factory import check_zero_stage
from mindnlp_dp.parallel.mixed_precision import check_param_dtype
from mindnlp_dp.runtime.recompute import RecomputeLayers, check_checkpointing_options, check_recompute
from mindnlp_dp.training.forward_backward import GLOBAL, check_dropout
from mindnlp_dp.training.timeline import updates_of
from mindnlp_dp.training.trainer.mindnlp_trainer import TrainingArguments

_RESULT_SETTINGS = (
    "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "optim", "optim_args",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_ratio", "warmup_steps", "label_smoothing_factor",
    "neftune_noise_alpha", "compression", "powersgd_rank", "dropout", "router_loss", "param_dtype",
)  # fmt: skip


def _plain(value: Any) -> Any:
    """Return a setting in a form that a checkpoint can hold."""
    value = value.value if isinstance(value, enum.Enum) else value
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


@dataclass(repr=False)
class DataParallelArgumentsBase(TrainingArguments):
    """The library's ``TrainingArguments`` with the settings of data parallelism; base of ``DataParallelArguments``."""

    dataset_shuffle: bool = field(
        default=True,
        metadata={"help": "Read the training set in another order every epoch, a function of (seed, epoch)."},
    )
    global_batch_size: Optional[int] = field(
        default=None,
        metadata={
            "help": "Number of samples in an update over all ranks, for any number of ranks; accumulation steps are "
            "derived from it. None: the product of the other settings."
        },
    )
    bucket_cap_mb: Optional[float] = field(
        default=None, metadata={"help": "Maximum size of a gradient bucket, in MiB; None: 2 on CPUs, 25 on devices."}
    )
    overlap: Union[bool, str] = field(
        default="auto",
        metadata={"help": 'Exchange gradients during the backward pass: True, False, or "auto" to find out.'},
    )
    compression: Optional[str] = field(
        default=None, metadata={"help": 'Gradient compression: "fp16", "bf16" or "powersgd"; None: no compression.'}
    )
    zero_stage: Union[int, str] = field(
        default="auto",
        metadata={
            "help": "ZeRO stage: every rank updates everything (0), or each rank its shard, of the optimizer state "
            "(1), also of the averaged gradients (2), and also of the weights (3, which gathers those of a layer while "
            'it computes); "auto": the fastest of 0 to 2.'
        },
    )
    param_dtype: Optional[str] = field(
        default=None,
        metadata={
            "help": 'The type in which the model computes: "bfloat16", or "float16" with a scale of the gradient that '
            "follows overflows; parameters, optimizer state and the exchange stay in float32. None: float32."
        },
    )
    dropout: str = field(
        default=GLOBAL,
        metadata={
            "help": 'Dropout masks: "global": by the position in the global batch, so that any number of ranks trains '
            'the same model; "per-rank": every rank draws its own.'
        },
    )
    router_loss: str = field(
        default=GLOBAL,
        metadata={
            "help": 'The load-balancing loss of a mixture of experts is over the tokens of all ranks ("global") or of '
            'each rank ("local").'
        },
    )
    recompute_layers: Union[bool, int, str, list[str]] = field(
        default=True,
        metadata={
            "help": "With gradient_checkpointing, the layers whose activations are recomputed: all (True), every n-th "
            '(a number), or those named by patterns such as "encoder.layer.[0-5]".'
        },
    )
    fused_cross_entropy: bool = field(
        default=False,
        metadata={
            "help": "Causal language models: compute the output layer and the loss in chunks of tokens, so that the "
            "logits of all tokens are never in memory; outputs have no logits in training."
        },
    )
    powersgd_rank: int = field(default=DEFAULT_RANK, metadata={"help": "The rank of PowerSGD's approximation."})
    async_save: bool = field(
        default=False,
        metadata={
            "help": "Write checkpoints while training continues: a copy in memory, then a thread; one at a time."
        },
    )
    sharded_checkpoints: bool = field(
        default=False,
        metadata={"help": "Every rank writes its part of the optimizer state; all hosts must share output_dir."},
    )
    peak_teraflops: Optional[float] = field(
        default=None,
        metadata={"help": "What one device can do, in TFLOP/s, to log the model FLOPs utilization (MFU)."},
    )
    trace: Optional[str] = field(
        default=None, metadata={"help": "A file for the timeline of all ranks, as a Chrome trace (JSON)."}
    )
    profile: Optional[str] = field(
        default=None,
        metadata={
            "help": "FROM:TO: write a trace of these updates, with operators on CPU, to profile.json in output_dir."
        },
    )
    sync_stats: bool = field(
        default=False, metadata={"help": "Print the time of the gradient exchange for each update."}
    )

    @property
    def process_group(self) -> ProcessGroup:
        return get_process_group()

    @property
    def world_size(self) -> int:
        return self.process_group.world_size

    @property
    def process_index(self) -> int:
        return self.process_group.rank

    @property
    def local_process_index(self) -> int:
        return self.process_group.local_rank

    @property
    def parallel_mode(self) -> str:
        return "distributed" if self.world_size > 1 else "not_distributed"

    @property
    def drops_last(self) -> bool:
        """Whether a last global batch that is not full is dropped, rather than split."""
        raise NotImplementedError

    @property
    def recomputed(self) -> RecomputeLayers:
        """The layers whose activations are recomputed; False: none."""
        return self.recompute_layers if self.gradient_checkpointing else False

    def timeline(self) -> tuple[Optional[str], Optional[range]]:
        """Return the file of the timeline, and the updates that it is of, which begin at 0; None: all of them."""
        if self.profile is None:
            return self.trace, None
        return os.path.join(self.output_dir, "profile.json"), updates_of(self.profile)

    @property
    def shuffle_seed(self) -> int:
        return self.seed if self.data_seed is None else self.data_seed

    def data_order(self, loader: Any) -> dict[str, Any]:
        """Return the seeds and what identifies the data and its order; a resumed run needs the same. A collective."""
        return {
            "num_samples": loader.num_samples,
            "seed": self.seed,
            "data_seed": self.shuffle_seed,
            "dataset_shuffle": self.dataset_shuffle,
            "dataset_drop_last": self.drops_last,
            "lengths": loader.digest_of_lengths,
            "samples": loader.sample_digests,
        }

    def result_settings(self) -> dict[str, Any]:
        """Return those of the settings, except the data's, that change the trained weights."""
        settings = {name: _plain(getattr(self, name)) for name in _RESULT_SETTINGS if hasattr(self, name)}
        return {**settings, "matmul_precision": current_precision()}

    def absolute_interval(self, name: str, max_steps: int) -> Optional[int]:
        """Return ``logging_steps``, ``eval_steps`` or ``save_steps`` in updates; below 1 it is a share of the run."""
        interval = getattr(self, name)
        return math.ceil(max_steps * interval) if interval is not None and interval < 1 else interval

    def metric_to_watch(self, metrics: Mapping[str, float]) -> float:
        """Return the value of ``metric_for_best_model``, which decides on the best model and the learning rate."""
        name = self.metric_for_best_model
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise ValueError(f"metric_for_best_model is {name}, which is not among the metrics: {', '.join(metrics)}")
        return metrics[name]

    def is_better(self, value: float, best: Optional[float]) -> bool:
        """Tell whether a value of that metric is better than the best one so far; any number is better than NaN."""
        if math.isnan(value):
            return False
        return best is None or math.isnan(best) or (value > best if self.greater_is_better else value < best)

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run a block on the main process of each host (``local``) or of the job, then on the others."""
        first = (self.local_process_index if local else self.process_index) == 0
        if not first:
            self.process_group.barrier()
        try:
            yield
        finally:
            if first:
                self.process_group.barrier()

    def __post_init__(self) -> None:
        self._join_group()
        optim: Any = self.optim  # type: ignore[has-type]
        self.optim = TrainingArguments.optim if optim in OWN_OPTIMIZERS else optim
        super().__post_init__()
        self.optim = optim if optim in OWN_OPTIMIZERS else self.optim

    def _join_group(self) -> None:
        """Check that these settings are valid for several ranks, and set ``local_rank``."""
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.global_batch_size is not None and self.global_batch_size < 1:
            raise ValueError(f"global_batch_size must be at least 1, got {self.global_batch_size}")
        if self.peak_teraflops is not None and not self.peak_teraflops > 0:
            raise ValueError(f"peak_teraflops must be positive, got {self.peak_teraflops}")
        if self.profile is not None:
            updates_of(self.profile)
            if self.trace is not None:
                raise ValueError("trace and profile write the same timeline: give one of them")
        if self.sharded_checkpoints and getattr(self, "save_on_each_node", False):
            raise ValueError("sharded_checkpoints needs one folder for all hosts; save_on_each_node has one for each")
        check_zero_stage(self.zero_stage)
        check_dropout(self.dropout)
        check_param_dtype(self.param_dtype)
        if self.auto_find_batch_size and self.world_size > 1:
            raise ValueError(
                "auto_find_batch_size with several ranks: each would find its own batch size; "
                "set per_device_train_batch_size"
            )
        self.check_library()
        if self.recompute_layers is not True and not self.gradient_checkpointing:
            raise ValueError("recompute_layers is given, and gradient_checkpointing is not")
        check_recompute(self.recomputed)
        check_checkpointing_options(self.gradient_checkpointing_kwargs)
        self.local_rank = self.local_process_index

    def check_library(self) -> None:
        """Raise ValueError for settings that the library accepts but that are not supported here."""


def _remade(kind: Any, settings: dict[str, Any]) -> Any:
    """Rebuild arguments that :func:`upgrade` made, from what was pickled of them."""
    args = object.__new__(kind)
    vars(args).update(settings)
    return args


def upgrade(args: Any, stock: Any, ours: Any) -> Any:
    """Turn a ``TrainingArguments`` (``stock`` or a subclass of it) into one that knows its rank (``ours``).

    The original is not changed. Raises TypeError for anything else.
    """
    if isinstance(args, ours):
        return args
    if not isinstance(args, stock):
        raise TypeError(
            f"args must be a DataParallelArguments, got {type(args).__name__}; "
            "write args = mindnlp_dp.DataParallelArguments(output_dir=...)"
        )
    kind: Any = ours
    if type(args) is not stock:
        of_user = type(args)
        # In a pickle, such as the one that Transformers writes next to a model, they are of the user's class.
        reduce = {"__reduce__": lambda self: (_remade, (of_user, dict(vars(self))))}
        kind = dataclass(repr=False)(type(f"DataParallel{of_user.__name__}", (ours, of_user), reduce))
    upgraded = object.__new__(kind)
    upgraded.__dict__.update(copy.copy(args.__dict__))
    for extra in dataclasses.fields(kind):
        if extra.name not in upgraded.__dict__:
            upgraded.__dict__[extra.name] = extra.default
    upgraded._join_group()
    return upgraded
