"""This module defines what the training loop, the data, the checkpoints and the evaluation use of a Trainer.

base_trainer.py implements what is abstract here, or leaves it to the folders of MindNLP's versions. The rest comes from
the library's Trainer, whose types are not known.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from mindnlp_dp.checkpoint.background import BackgroundWriter
from mindnlp_dp.checkpoint.manifest import RunId
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.data.batches import Batch
from mindnlp_dp.data_parallel.synchronizer_base import Synchronizer
from mindnlp_dp.parallel.distributed_model import DistributedModel
from mindnlp_dp.training.trainer.base_arguments import DataParallelArgumentsBase

if TYPE_CHECKING:
    from mindnlp_dp.training.trainer.trainer_loss import TrainerLoss
    from mindnlp_dp.training.trainer.training_loop import TrainingLoop


class TrainerInterface(abc.ABC):
    """What the parts of a data-parallel Trainer need of it.

    Attributes:
        group: The ranks among which samples are split.
        world: All ranks of the job, which may hold shards of the model.
        resumed_from: The checkpoint that this run continues.
        run_id: The run whose checkpoints ``train()`` writes.
        global_batch_size: Samples per update; None if it follows from the other settings and the number of ranks.
        current_tokens: Input tokens since the last log line.
        replica_digest: The digest of the weights after training.
    """

    group: ProcessGroup
    world: ProcessGroup
    args: DataParallelArgumentsBase
    checkpoint_writer: BackgroundWriter
    resumed_from: Optional[Path]
    run_id: RunId
    global_batch_size: Optional[int]
    current_tokens: int
    trainer_loss: TrainerLoss
    training_loop: TrainingLoop
    replica_digest: str

    # Of the library's Trainer. These are annotations only: a method here would hide the library's.
    model: Any
    state: Any
    control: Any
    optimizer: Any
    lr_scheduler: Any
    callback_handler: Any
    train_dataset: Any
    eval_dataset: Any
    label_smoother: Any
    compute_metrics: Any
    preprocess_logits_for_metrics: Any
    neftune_noise_alpha: Any
    is_in_train: bool
    current_flos: float
    _train_batch_size: int
    _globalstep_last_logged: int
    _created_lr_scheduler: bool
    _past: Any
    create_optimizer_and_scheduler: Callable[..., None]
    is_local_process_zero: Callable[[], bool]
    is_world_process_zero: Callable[[], bool]
    compute_loss: Callable[..., Any]
    prediction_step: Callable[..., Any]
    floating_point_ops: Callable[[Any], float]
    evaluate: Callable[..., dict[str, float]]
    log: Callable[..., None]
    save_model: Callable[..., None]
    store_flos: Callable[[], None]
    _load_best_model: Callable[[], None]
    _prepare_inputs: Callable[[Any], Any]
    _deactivate_neftune: Callable[[Any], None]

    @property
    @abc.abstractmethod
    def distributed_model(self) -> DistributedModel:
        """The model on all ranks, replicated or sharded."""

    @property
    @abc.abstractmethod
    def processor(self) -> Any:
        """The tokenizer or processor that is saved and loaded with the model; None if there is none."""

    # Data.

    @property
    @abc.abstractmethod
    def main_input(self) -> str:
        """The column whose elements are counted as tokens."""

    @abc.abstractmethod
    def open_training_data(self) -> Any:
        """Return a loader of this rank's part of ``train_dataset``; calls the method that a subclass may override."""

    @abc.abstractmethod
    def tensors(self, batch: Batch) -> dict[str, Any]:
        """Return a batch as tensors."""

    # Loss and gradients.

    @abc.abstractmethod
    def loss_of_training_step(self, inputs: dict[str, Any]) -> Any:
        """Return a micro-batch's mean loss from ``training_step``, which leaves the gradients in ``parameter.grad``.

        It is a number, or a scalar tensor, which a device may still be computing.
        """

    def loss_of(self, inputs: dict[str, Any]) -> Any:
        """Return a batch's loss from ``compute_loss``, as a training step computes it, without gradients."""
        return self.compute_loss(self.model, inputs)

    @abc.abstractmethod
    def loss_weight(self, inputs: Any) -> float:
        """Return the weight of this micro-batch's loss in the mean over ranks and micro-batches."""

    @abc.abstractmethod
    def evaluation_weight(self, inputs: Any) -> float:
        """Return the weight of a batch's loss in the mean loss of an evaluation."""

    @abc.abstractmethod
    def synchronizer(self, model: Any) -> Synchronizer:
        """Return the synchronizer of ``model``'s trainable parameters; it is rebuilt when they change."""

    @abc.abstractmethod
    def after_optimizer_step(self) -> None:
        """Call the callbacks' ``on_optimizer_step``; the scheduler has not stepped yet."""

    # Logs.

    @abc.abstractmethod
    def logging_off(self) -> contextlib.AbstractContextManager[None]:
        """Let :meth:`log` do nothing in this block, in which the user's loss is computed to compare it."""

    @abc.abstractmethod
    def learning_rate_to_log(self) -> float: ...

    @abc.abstractmethod
    def on_metrics(self, metrics: dict[str, float]) -> None:
        """Handle the metrics of an evaluation that has just run between two updates."""

    # Checkpoints.

    @abc.abstractmethod
    def claim_checkpoint(self) -> None:
        """Record that this run continues the checkpoint that it was resumed from."""

    @abc.abstractmethod
    def write_checkpoint(self, metrics: Optional[dict[str, float]]) -> None:
        """Write a checkpoint of the run, by the method that a subclass may have overridden."""

    @abc.abstractmethod
    def on_checkpoint(self, path: Path, metrics: Optional[dict[str, float]]) -> None:
        """Prepare for a checkpoint at ``path``; ``metrics`` are of an evaluation after the last update, or None."""

    @abc.abstractmethod
    def write_pickled_weights(self, folder: Path) -> None:
        """Write a module's weights as the library does with ``save_safetensors=False``."""

    @abc.abstractmethod
    def load_callback_states(self, saved: Mapping[str, Any]) -> None: ...
