"""This module makes Transformers' Trainer data parallel under MindNLP 0.5; it implements the methods that differ."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Optional, Union

import mindnlp  # noqa: F401 -- puts mindtorch in PyTorch's place
from transformers import TrainerControl
from transformers.trainer import TRAINING_ARGS_NAME, WEIGHTS_NAME
from transformers.trainer_callback import ExportableState

from mindnlp_dp.data.batches import Collator, ColumnCollator
from mindnlp_dp.data.loss_weight import count_labels
from mindnlp_dp.runtime.arrays import to_host
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api
from mindnlp_dp.training.trainer.base_trainer import NOT_CALLED, DataParallelTrainerBase
from mindnlp_dp.training.trainer.mindnlp_0_5.arguments import DataParallelArguments, upgrade_arguments
from mindnlp_dp.training.trainer.mindnlp_trainer import PreTrainedModel, Trainer, TrainerState
from mindnlp_dp.training.trainer.saving import save_checkpoint


def _check_labels(samples: Sequence[Mapping[str, Any]]) -> None:
    """Raise TypeError if some samples have a label and others have None, which Transformers takes for no labels."""
    for name in ("label", "label_ids"):
        if len({sample.get(name) is None for sample in samples if name in sample}) > 1:
            raise TypeError(f"some {name} are None")


class DataParallelTrainerMixin(DataParallelTrainerBase):
    """Makes a subclass of Transformers' ``Trainer`` data parallel.

    Example::

        class MyTrainer(dp.DataParallelTrainerMixin, transformers.Trainer): ...

    Call ``mindnlp_dp.init_process_group()`` before the model is built. Overridden methods such as ``compute_loss``,
    ``training_step`` and ``prediction_step`` are called as usual, on this rank's part of the batch. The guarantees are
    those of the mixin for MindNLP 0.4: N ranks train the model that one process with the full batch trains.
    """

    args: DataParallelArguments
    data_collator: Any
    processing_class: Any
    callback_handler: Any
    control: TrainerControl
    not_called: ClassVar[Mapping[str, str]] = {
        **NOT_CALLED,
        "_get_dataloader": "override get_train_dataloader, get_eval_dataloader or get_test_dataloader",
        "get_batch_samples": "the loader makes the micro-batches of an update; override get_train_dataloader",
    }
    # The learning rate of the last update; None before the first.
    _rate_of_update: Optional[float] = None

    def upgrade_arguments(self, args: Any) -> DataParallelArguments:
        return upgrade_arguments(DataParallelArguments("tmp_trainer") if args is None else args)

    def _collator(self) -> Optional[Collator]:
        # Not at the top: mindnlp, which is imported first, puts mindtorch in PyTorch's place.
        from transformers import DataCollatorWithPadding, default_data_collator

        collator = self.data_collator
        is_default = collator is default_data_collator or type(collator) is DataCollatorWithPadding

        def collate(samples: Sequence[Any]) -> Mapping[str, Any]:
            if is_default:
                _check_labels(samples)
            batch = collator(list(samples))
            if not isinstance(batch, Mapping):
                return batch  # The loader says what is wrong with it.
            return {name: to_host(values) if hasattr(values, "dtype") else values for name, values in batch.items()}

        return ColumnCollator(collate) if is_default else collate

    @property
    def processor(self) -> Any:
        return self.processing_class

    # Gradients.

    def loss_weight(self, inputs: Any) -> float:
        """Return the weight of this micro-batch's loss in the mean over ranks and micro-batches.

        If the loss is a sum over labels divided by ``num_items_in_batch``, the weight is that number: the labels that
        are not -100. Else it is the same as with MindNLP 0.4.
        """
        is_smoothed = self.label_smoother is not None and self.compute_loss_func is None  # type: ignore[attr-defined]
        return count_labels(inputs) if self._counts_labels(inputs) and not is_smoothed else super().loss_weight(inputs)

    def evaluation_weight(self, inputs: Any) -> float:
        """Return the weight of a batch's loss in an evaluation, where the loss gets no ``num_items_in_batch``."""
        if not self.trainer_loss.is_weighed_by_default:
            return self.loss_weight(inputs)
        if self.compute_loss_func is not None and "labels" in inputs:  # type: ignore[attr-defined]
            return count_labels(inputs)
        return super().loss_weight(inputs)

    def _counts_labels(self, inputs: Any) -> bool:
        """Tell whether the loss is a sum over labels, divided by their number ``num_items_in_batch``."""
        takes_it = self.model_accepts_loss_kwargs or self.compute_loss_func is not None  # type: ignore[attr-defined]
        return takes_it and "labels" in inputs

    def loss_of(self, inputs: dict[str, Any]) -> Any:
        if not self._counts_labels(inputs):
            return super().loss_of(inputs)
        number = mindnlp_api().tensor(self.loss_weight(inputs))
        return self.compute_loss(self.model, inputs, num_items_in_batch=number)  # type: ignore[attr-defined]

    def loss_of_training_step(self, inputs: dict[str, Any]) -> Any:
        # training_step() divides the loss by this number; the exchange weights it already.
        self.current_gradient_accumulation_steps = 1
        num_items = []
        if self._counts_labels(inputs):
            num_items = [mindnlp_api().tensor(self.loss_weight(inputs))]
        return self.training_step(self.model, inputs, *num_items)  # type: ignore[attr-defined]

    # Training.

    def after_optimizer_step(self) -> None:
        super().after_optimizer_step()
        # Transformers logs the rate of the update, and MindNLP 0.4 that of the next one.
        self._rate_of_update = self._get_learning_rate()  # type: ignore[attr-defined]

    def learning_rate_to_log(self) -> float:
        return super().learning_rate_to_log() if self._rate_of_update is None else self._rate_of_update

    def train(
        self,
        resume_from_checkpoint: Union[str, bool, None] = None,
        trial: Any = None,
        ignore_keys_for_eval: Optional[list[str]] = None,
        **kwargs: Any,
    ) -> Any:
        """Train the model; every rank calls this, and gets the same ``TrainOutput``.

        ``resume_from_checkpoint`` is a checkpoint's folder, or True for the newest complete one in ``output_dir``. Only
        rank 0 reads it. Damaged checkpoints are skipped with a warning.

        Raises:
            CheckpointError: the checkpoint is not complete, there is none, or it is not one of this model.
            ValueError: the run cannot be resumed with this data, or with this number of ranks.
            FloatingPointError: a loss or gradient is NaN or infinite, and ``logging_nan_inf_filter`` is False.
        """
        self._rate_of_update = None
        self.choose_run(resume_from_checkpoint)
        return super().train(None, trial, ignore_keys_for_eval, **kwargs)  # type: ignore[misc]

    def open_training_data(self) -> Any:
        return self.loader_returned(self.get_train_dataloader(), "get_train_dataloader")

    def open_evaluation_data(self, returned: Any, *, is_prediction: bool) -> Any:
        return self.loader_returned(returned, "get_test_dataloader" if is_prediction else "get_eval_dataloader")

    def get_train_dataloader(self) -> Any:
        """Return a loader of this rank's part of ``train_dataset``."""
        return self._training_loader(self.train_dataset)  # type: ignore[attr-defined]

    def write_checkpoint(self, metrics: Optional[dict[str, float]]) -> None:
        self._save_checkpoint(self.model, None)

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        """Write a checkpoint of the run; one rank writes, the others return when it is written, or raise its error."""
        save_checkpoint(self, model, None)

    def on_metrics(self, metrics: dict[str, float]) -> None:
        # metric_to_watch() raises the same error message with either library. Transformers' method would replace no
        # value by NaN, but the first one by infinity.
        if self.args.metric_for_best_model is None or math.isnan(self.args.metric_to_watch(metrics)):
            return
        self._determine_best_metric(metrics, None)  # type: ignore[attr-defined]
        if (path := self.training_loop.saved_as) is not None:
            # These metrics are of a model that is saved already.
            self.on_checkpoint(path, metrics)

    def on_checkpoint(self, path: Path, metrics: Optional[dict[str, float]]) -> None:
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(path)
        # TrainerState collects the states of the callbacks that it gets.
        callbacks = [*self.callback_handler.callbacks, self.control]
        exporting = [callback for callback in callbacks if isinstance(callback, ExportableState)]
        self.state.stateful_callbacks = TrainerState(stateful_callbacks=exporting).stateful_callbacks

    def load_callback_states(self, saved: Mapping[str, Any]) -> None:
        control = self.control
        self._load_callback_state()  # type: ignore[attr-defined]
        # The flags are agreed on by all ranks.
        self.control = control
        super().load_callback_states(saved)

    def write_pickled_weights(self, folder: Path) -> None:
        mindnlp_api().save(self.model.state_dict(), str(folder / WEIGHTS_NAME))

    def _save(self, output_dir: Optional[str] = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if not isinstance(self.model, PreTrainedModel):
            # Transformers writes them beside every model.
            mindnlp_api().save(self.args, os.path.join(output_dir or self.args.output_dir, TRAINING_ARGS_NAME))

    # Evaluation.

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a loader of this rank's slices of every global evaluation batch, in data set order."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]  # type: ignore[attr-defined]
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset  # type: ignore[attr-defined]
        return self.get_test_dataloader(dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return such a loader for :meth:`predict`."""
        return self._evaluation_loader(test_dataset)


class DataParallelTrainer(DataParallelTrainerMixin, Trainer):
    """Transformers' ``Trainer``, made data parallel; scripts use it in place of the original."""
