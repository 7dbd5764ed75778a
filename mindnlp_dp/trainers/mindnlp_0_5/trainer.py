"""Transformers' Trainer under MindNLP 0.5, data parallel: what is called otherwise there than elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

import numpy as np

from mindnlp_dp.arrays.conversion import to_host
from mindnlp_dp.data.batches import Collator
from mindnlp_dp.runtime.torch_like import torch_like
from mindnlp_dp.trainers.library import Trainer
from mindnlp_dp.trainers.rank_trainer import RankTrainer

from .arguments import DataParallelArguments, upgrade_arguments

# What Transformers' losses leave out.
_IGNORED = -100


class DataParallelTrainerMixin(RankTrainer):
    """Makes a subclass of Transformers' ``Trainer`` data parallel::

        class MyTrainer(dp.DataParallelTrainerMixin, transformers.Trainer): ...

    Call ``mindnlp_dp.init_process_group()`` before the model is built. Overridden methods such as ``compute_loss``,
    ``training_step`` and ``prediction_step`` are called as ever, on this rank's part of the batch. What is promised is
    what the mixin for MindNLP 0.4 promises: N ranks train the model that one process with the whole batch trains.
    """

    args: DataParallelArguments
    data_collator: Any
    processing_class: Any

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, **kwargs: Any) -> None:
        if args is None:
            args = DataParallelArguments(output_dir="tmp_trainer")
        super().__init__(model, upgrade_arguments(args), *rest, **kwargs)

    def collator(self) -> Optional[Collator]:
        def collate(samples: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
            return {name: to_host(values) for name, values in self.data_collator(list(samples)).items()}

        return collate

    @property
    def beside_model(self) -> Any:
        return self.processing_class

    # Gradients.

    def loss_weight(self, inputs: Any) -> float:
        """What this micro batch's loss weighs in the mean over ranks and micro steps.

        Of a model whose loss is a mean over tokens, the number of labels that count; else the number of samples.
        """
        if self.model_accepts_loss_kwargs and "labels" in inputs:  # type: ignore[attr-defined]
            return float(np.count_nonzero(to_host(inputs["labels"]) != _IGNORED))
        return super().loss_weight(inputs)

    def loss_of_training_step(self, inputs: dict[str, Any]) -> float:
        # By these training_step() would divide once more.
        self.current_gradient_accumulation_steps = 1
        num_items = []
        if self.model_accepts_loss_kwargs and "labels" in inputs:  # type: ignore[attr-defined]
            num_items = [torch_like().tensor(self.loss_weight(inputs))]
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
        """Train; every rank calls it, and returns the same ``TrainOutput``.

        ``resume_from_checkpoint`` is a checkpoint's folder, or True for the newest complete one in ``output_dir``. Only
        rank 0 reads it. Damaged ones are passed over with a warning.

        Raises:
            CheckpointError: the checkpoint is not complete, there is none, or it is not one of this model.
            ValueError: it cannot be taken up with this data, or by this number of ranks.
            FloatingPointError: a loss or a gradient is no number, and ``logging_nan_inf_filter`` is False.
        """
        self.choose_run(resume_from_checkpoint)
        return super().train(None, trial, ignore_keys_for_eval, **kwargs)  # type: ignore[misc]

    def open_training_data(self) -> Any:
        return self.get_train_dataloader()

    def get_train_dataloader(self) -> Any:
        """A loader of this rank's part of ``train_dataset``."""
        dataset = self.train_dataset  # type: ignore[attr-defined]
        if dataset is None:
            raise ValueError("training needs a train_dataset")
        return self.training_loader(dataset)

    # Evaluation.

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """A loader of this rank's slices of every global evaluation batch, in data set order."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]  # type: ignore[attr-defined]
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset  # type: ignore[attr-defined]
        if dataset is None:
            raise ValueError("evaluation needs an eval_dataset")
        return self.get_test_dataloader(dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The same for :meth:`predict`."""
        return self.evaluation_loader(test_dataset)


class DataParallelTrainer(DataParallelTrainerMixin, Trainer):
    """Transformers' ``Trainer``, data parallel."""
