"""This module makes MindNLP 0.4.1's Trainer data parallel; it implements the methods that differ in that library."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Optional, Union

import numpy as np
from mindnlp.configs import WEIGHTS_NAME
from mindnlp.core.serialization import save_checkpoint as save_checkpoint_of_mindnlp

from mindnlp_dp.data.batches import Collator
from mindnlp_dp.data.dataset_adapter import mapped
from mindnlp_dp.data.loader import IndexedLoader, PipelineLoader
from mindnlp_dp.runtime.arrays import number_of, to_host
from mindnlp_dp.training.trainer.base_trainer import NOT_CALLED, DataParallelTrainerBase
from mindnlp_dp.training.trainer.mindnlp_0_4.arguments import DataParallelArguments, upgrade_arguments
from mindnlp_dp.training.trainer.mindnlp_trainer import Trainer
from mindnlp_dp.training.trainer.saving import save_checkpoint
from mindnlp_dp.training.trainer.trackers import TrackerCallback, tracker_names


class DataParallelTrainerMixin(DataParallelTrainerBase):
    """Makes a subclass of MindNLP's ``Trainer`` data parallel.

    Example::

        class MyTrainer(dp.DataParallelTrainerMixin, Trainer): ...

    Call ``mindnlp_dp.init_process_group()`` before the model is built. The arguments are
    the Trainer's, and ``data_collator``: a function that makes a batch (a dict of arrays) from a list
    of samples of any kind; by default samples are dicts, and are stacked. Overridden methods such as ``compute_loss``,
    ``training_step`` and ``prediction_step`` are called as usual, on this rank's part of the batch.

    The guarantees, and their tests (tests/parallel, at 1, 2 and 4 ranks):

    * N ranks with batch B/N, or with k micro steps of batch B/(N*k), train the model that one process with batch B
      trains (test_equivalence, test_models); gradients are exchanged once per update (test_trainer).
    * ``evaluate`` and ``predict`` see every sample once, and return the same results on every rank, in data set order
      (test_trainer, test_evaluation).
    * Loss, gradient norm, throughput and tokens in the log are those of all ranks (test_trainer, test_decisions).
    * All ranks follow rank 0's decisions: flags, best model, early stop, learning rate (test_decisions).
    * A run that is killed and resumed ends with the same weights, to the bit, and the same log (test_resuming,
      failure/test_interruptions); with another number of ranks they are equal to rounding (test_dropout).
    * A loss that is NaN or infinite on any rank is reported on all, and left out or ends training (test_bad_losses).
    * What MindNLP 0.4.1 does wrong with several processes is right here (test_against_upstream).
    """

    args: DataParallelArguments
    tokenizer: Any
    # The methods of Transformers' Trainer that open data have other names here.
    not_called: ClassVar[Mapping[str, str]] = {
        **NOT_CALLED,
        **{f"get_{each}_dataloader": f"override get_{each}_dataset" for each in ("train", "eval", "test")},
    }

    def __init__(self, *positional: Any, data_collator: Optional[Collator] = None, **keywords: Any) -> None:
        if any(kind.__module__ == "mindnlp.trl.trainer.dpo_trainer" for kind in type(self).__mro__):
            raise NotImplementedError(
                "MindNLP 0.4.1's DPOTrainer does not train with DPO: it adds up logits in place of log probabilities "
                "(get_batch_logps has no log_softmax), and a model with adapters is its own reference; write the loss "
                "as compute_loss of a dp.DataParallelTrainer, as examples/preference.py does"
            )
        self.data_collator = data_collator
        self._hook_is_suspended = False
        if data_collator is not None and self._next_constructor_takes("data_collator"):
            keywords["data_collator"] = data_collator
        super().__init__(*positional, **keywords)
        if self.data_collator is None:
            self.data_collator = data_collator
        self._check_generation()
        if names := tracker_names(self.args.report_to):
            self.add_callback(TrackerCallback(names, lambda: self.run_id))  # type: ignore[attr-defined]

    def _next_constructor_takes(self, name: str) -> bool:
        """Tell whether a user's Trainer, after this class in the method resolution order, has this parameter."""
        order = type(self).__mro__
        for kind in order[order.index(DataParallelTrainerBase) + 1 :]:
            if "__init__" in vars(kind):
                parameters = inspect.signature(vars(kind)["__init__"]).parameters
                if name in parameters:
                    return True
                if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
                    return False
        return False

    def upgrade_arguments(self, args: Any) -> DataParallelArguments:
        return upgrade_arguments(DataParallelArguments("tmp_trainer") if args is None else args)

    def _collator(self) -> Optional[Collator]:
        return self.data_collator

    @property
    def processor(self) -> Any:
        return self.tokenizer

    # Gradients.

    def update_gradient_by_distributed_type(self, model: Any) -> None:
        """MindNLP's hook: leave ``all_reduce(grad) / rank_size`` on every parameter that has a gradient.

        A collective; all ranks call it. In the training loop, which exchanges once per update and weights each loss by
        the number of items in its mean, the call that MindNLP makes after every micro step does nothing.
        """
        if not self._hook_is_suspended:
            synchronizer = self.synchronizer(model)
            gradients = synchronizer([parameter.grad for parameter in synchronizer.parameters])
            for parameter, gradient in zip(synchronizer.parameters, gradients):
                parameter.grad = gradient

    @contextlib.contextmanager
    def hook_suspended(self) -> Iterator[None]:
        """Keep MindNLP's hook from changing gradients within this block."""
        self._hook_is_suspended = True
        try:
            yield
        finally:
            self._hook_is_suspended = False

    def loss_of_training_step(self, inputs: dict[str, Any]) -> Any:
        with self.hook_suspended():
            loss = self.training_step(self.model, inputs)  # type: ignore[attr-defined]
        # MindNLP's training_step returns the loss divided by the accumulation steps.
        steps = self.args.gradient_accumulation_steps
        is_deferred = self._synchronizer is not None and self._synchronizer.defers_losses
        return (loss if is_deferred else number_of(loss)) * steps

    # Training.

    def train(
        self,
        resume_from_checkpoint: Union[str, bool, None] = None,
        ignore_keys_for_eval: Optional[list[str]] = None,
        **kwargs: Any,
    ) -> Any:
        """Train the model; every rank calls this, and gets the same ``TrainOutput``.

        ``resume_from_checkpoint`` is a checkpoint's folder, or True for the newest complete one in ``output_dir``. Only
        rank 0 reads it. Damaged checkpoints are skipped with a warning. In a job that was restarted
        (``mindnlp-dp run --max-restarts``), the newest checkpoint that the job itself wrote comes first.

        Raises:
            CheckpointError: the checkpoint is not complete, there is none, or it is not one of this model.
            ValueError: the run cannot be resumed with this data, or with this number of ranks.
            FloatingPointError: a loss or gradient is NaN or infinite, and ``logging_nan_inf_filter`` is False.
        """
        self.choose_run(resume_from_checkpoint)
        return super().train(None, ignore_keys_for_eval, **kwargs)  # type: ignore[misc]

    def open_training_data(self) -> Any:
        # MindNLP's own method returns a data set, and so may a user's.
        returned = self.get_train_dataset()
        return returned if isinstance(returned, (IndexedLoader, PipelineLoader)) else self._training_loader(returned)

    def open_evaluation_data(self, returned: Any, *, is_prediction: bool) -> Any:
        return self._evaluation_loader(returned)

    def get_train_dataset(self) -> Any:
        """Return a loader of this rank's part of ``train_dataset``."""
        dataset = self.train_dataset  # type: ignore[attr-defined]
        if dataset is not None:
            dataset = mapped(dataset, self.data_map_fn)  # type: ignore[attr-defined]
        return self._training_loader(dataset)

    def write_checkpoint(self, metrics: Optional[dict[str, float]]) -> None:
        self._save_checkpoint(self.model, metrics=metrics)

    def _save_checkpoint(self, model: Any, metrics: Optional[dict[str, float]] = None) -> None:
        """Write a checkpoint of the run; one rank writes, the others return when it is written, or raise its error."""
        save_checkpoint(self, model, metrics)

    def on_metrics(self, metrics: dict[str, float]) -> None:
        # MindNLP 0.4 looks for the best model when it saves; these metrics may be of a model that is saved already.
        if (path := self.training_loop.saved_as) is not None:
            self.on_checkpoint(path, metrics)

    def on_checkpoint(self, path: Path, metrics: Optional[dict[str, float]]) -> None:
        args, state = self.args, self.state
        if metrics is not None and args.metric_for_best_model is not None:
            value = args.metric_to_watch(metrics)
            if args.is_better(value, state.best_metric):
                state.best_metric, state.best_model_checkpoint = value, str(path)

    def write_pickled_weights(self, folder: Path) -> None:
        save_checkpoint_of_mindnlp(self.model, str(folder / WEIGHTS_NAME))

    # Evaluation.

    def get_eval_dataset(self, eval_dataset: Any = None) -> Any:
        """Return a loader of this rank's slices of every global evaluation batch, in data set order."""
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset  # type: ignore[attr-defined]
        return self.get_test_dataset(dataset)

    def get_test_dataset(self, test_dataset: Any) -> Any:
        """Return such a loader for :meth:`predict`."""
        return self._evaluation_loader(test_dataset)

    def _check_generation(self) -> None:
        if not self.args.predict_with_generate:
            return
        if not getattr(self.model.config, "is_encoder_decoder", False):
            raise ValueError(
                f"predict_with_generate is for encoder-decoder models, and {type(self.model).__name__} is not one; "
                "call model.generate() in your own prediction_step"
            )
        if self.distributed_model.is_sharded:
            raise ValueError(
                "predict_with_generate: a sharded model cannot generate; load its checkpoint in one process"
            )

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Optional[list[str]] = None
    ) -> tuple[Any, Any, Any]:
        """Return the loss, the predictions and the labels of a batch, with ``predict_with_generate`` generated rows.

        All generated rows are padded to their maximum length, so that they do not depend on the batch and its rank.
        """
        if prediction_loss_only or not self.args.predict_with_generate:
            return super().prediction_step(  # type: ignore[misc,no-any-return]
                model, inputs, prediction_loss_only, ignore_keys
            )
        labels = inputs.get("labels")
        loss = None
        if labels is not None:
            loss, _, _ = super().prediction_step(model, dict(inputs), True, ignore_keys)  # type: ignore[misc]
        settings = self._generation_settings(model)
        texts = {name: x for name, x in inputs.items() if name != "labels" and not name.startswith("decoder_")}
        new_tokens = settings.max_new_tokens
        length = settings.max_length if new_tokens is None else new_tokens + 1
        # Without the argument, a maximum that happens to be the default would be one token more.
        limit = {"max_length": length} if new_tokens is None else {}
        rows = to_host(model.generate(**texts, generation_config=settings, **limit))
        missing = max(0, length - rows.shape[1])
        rows = np.pad(rows, [(0, 0), (0, missing)], constant_values=settings.pad_token_id)
        return loss, rows, labels

    def _generation_settings(self, model: Any) -> Any:
        # A field of MindNLP's Seq2SeqTrainingArguments: settings, or a folder with them.
        given = getattr(self.args, "generation_config", None) or model.generation_config
        if isinstance(given, (str, Path)):
            given = type(model.generation_config).from_pretrained(str(given))
        settings = copy.deepcopy(given)
        if self.args.generation_max_length is not None:
            settings.max_length, settings.max_new_tokens = self.args.generation_max_length, None
        if self.args.generation_num_beams is not None:
            settings.num_beams = self.args.generation_num_beams
        if settings.pad_token_id is None:
            raise ValueError(
                "predict_with_generate: set model.generation_config.pad_token_id, which pads generated rows"
            )
        return settings


class DataParallelTrainer(DataParallelTrainerMixin, Trainer):
    """MindNLP's ``Trainer``, made data parallel; scripts use it in place of the original."""
