"""This module makes Transformers' Trainer data parallel under MindNLP 0.5; it implements the methods that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, Union

from mindnlp_dp.data.batches import Collator
from mindnlp_dp.data.loss_weight import count_labels
from mindnlp_dp.runtime.arrays import to_host
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api
from mindnlp_dp.training.trainer.base import DataParallelTrainerBase
from mindnlp_dp.training.trainer.mindnlp_0_5.arguments import DataParallelArguments, upgrade_arguments
from mindnlp_dp.training.trainer.mindnlp_trainer import Trainer
from mindnlp_dp.training.trainer.resuming import save_checkpoint


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

    def upgrade_arguments(self, args: Any) -> DataParallelArguments:
        return upgrade_arguments(DataParallelArguments("tmp_trainer") if args is None else args)

    def _collator(self) -> Optional[Collator]:
        def collate(samples: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
            batch = self.data_collator(list(samples))
            return {name: to_host(values) if hasattr(values, "dtype") else values for name, values in batch.items()}

        return collate

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

    def loss_of_training_step(self, inputs: dict[str, Any]) -> float:
        # training_step() divides the loss by this number; the exchange weights it already.
        self.current_gradient_accumulation_steps = 1
        num_items = []
        if self._counts_labels(inputs):
            num_items = [mindnlp_api().tensor(self.loss_weight(inputs))]
        loss = self.training_step(self.model, inputs, *num_items)  # type: ignore[attr-defined]
        return float(loss.asnumpy())

    # Training.

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
        # MindNLP's training_step caches the model and parameters of its first call in grad_fn.
        self.__dict__.pop("grad_fn", None)
        self.choose_run(resume_from_checkpoint)
        return super().train(None, trial, ignore_keys_for_eval, **kwargs)  # type: ignore[misc]

    def open_training_data(self) -> Any:
        return self.get_train_dataloader()

    def get_train_dataloader(self) -> Any:
        """Return a loader of this rank's part of ``train_dataset``."""
        self._check_sampler("_get_train_sampler")
        return self._training_loader(self.train_dataset)  # type: ignore[attr-defined]

    def write_checkpoint(self, metrics: Optional[dict[str, float]]) -> None:
        self._save_checkpoint(self.model, None)

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        """Write a checkpoint of the run; one rank writes, the others return when it is written, or raise its error."""
        save_checkpoint(self, model, None)

    def on_metrics(self, metrics: dict[str, float]) -> None:
        if self.args.metric_for_best_model is not None:
            # It raises the same error message with either library.
            self.args.metric_to_watch(metrics)
        self._determine_best_metric(metrics, None)  # type: ignore[attr-defined]

    def on_checkpoint(self, path: Path, metrics: Optional[dict[str, float]]) -> None:
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(path)

    # Evaluation.

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a loader of this rank's slices of every global evaluation batch, in data set order."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]  # type: ignore[attr-defined]
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset  # type: ignore[attr-defined]
        return self.get_test_dataloader(dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return such a loader for :meth:`predict`."""
        self._check_sampler("_get_eval_sampler")
        return self._evaluation_loader(test_dataset)

    def _check_sampler(self, name: str) -> None:
        if getattr(type(self), name) is not getattr(Trainer, name):
            raise ValueError(
                f"{type(self).__name__} has its own {name}, which is not called: samples are distributed in an "
                "order that all ranks know; choose, weigh or order them in the data set"
            )


class DataParallelTrainer(DataParallelTrainerMixin, Trainer):
    """Transformers' ``Trainer``, made data parallel; scripts use it in place of the original."""
