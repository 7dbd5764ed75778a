"""MindNLP's Trainer, data parallel: the seam between its methods and our stages.

Goes in: a model, arguments, data, as for MindNLP's Trainer. Comes out: the model
that one process with the whole batch would have trained, on every rank. The loop is
in training_loop.py; reading, exchange and evaluation are the other packages'.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
from mindnlp.engine import Trainer
from mindnlp.engine.utils import EvalLoopOutput
from mindnlp.transformers import PreTrainedModel

from mindnlp_dp.checkpoint.folders import choose_checkpoint, remove_unfinished_checkpoints
from mindnlp_dp.checkpoint.load import load_checkpoint
from mindnlp_dp.checkpoint.whole_model import WholeModel, whole_model
from mindnlp_dp.checkpoint.write import write_module
from mindnlp_dp.communication.process_group import get_data_group, get_process_group
from mindnlp_dp.data.batch_sizes import check_every_rank_has_a_sample
from mindnlp_dp.data.batches import Batch, Collator, as_tensors, num_rows
from mindnlp_dp.data.loader import IndexedLoader, PipelineLoader, make_loader
from mindnlp_dp.data.source import mapped
from mindnlp_dp.gradients.synchronizer import GradientSynchronizer
from mindnlp_dp.gradients.window import GradientWindow
from mindnlp_dp.launch.environment import began_if_restarted

from .arguments import DataParallelArguments, upgrade_arguments
from .evaluation_loop import run_evaluation
from .passes import Passes
from .saving import save_checkpoint
from .training_loop import TrainingLoop


class DataParallelTrainerMixin:
    """Makes a subclass of MindNLP's ``Trainer`` data parallel::

        class MyTrainer(dp.DataParallelTrainerMixin, Trainer): ...

    Call ``mindnlp_dp.init_process_group()`` before the model is built. Arguments are
    the Trainer's, and ``data_collator``: a function that makes a batch (a dict of arrays) from a list
    of samples (dicts); by default they are stacked. Overridden methods such as ``compute_loss``,
    ``training_step`` and ``prediction_step`` are called as ever, on this rank's part of the batch.

    What is promised, and where it is tested (tests/parallel, at 1, 2 and 4 ranks):

    * N ranks with batch B/N, or with k micro steps of batch B/(N*k), train the model that one process with batch B
      trains (test_equivalence, test_models); gradients are exchanged once an update (test_trainer).
    * ``evaluate`` and ``predict`` see every sample once, and return the same on every rank, in data set order
      (test_trainer, test_evaluation).
    * Loss, gradient norm, throughput and tokens in the log are those of all ranks (test_trainer, test_decisions).
    * Decisions are rank 0's, on all ranks: flags, best model, early stop, learning rate (test_decisions).
    * A run that is killed and resumed ends with the same weights, to the bit, and the same log (test_resuming,
      failure/test_interruptions); another number of ranks keeps its global batches and their order, but not dropout.
    * A loss that is NaN or infinite on any rank is reported on all, and left out or the end (test_bad_losses).
    * What MindNLP 0.4.1 gets wrong in several processes is right here (test_against_upstream).
    """

    is_data_parallel = True
    args: DataParallelArguments
    model: Any
    state: Any
    tokenizer: Any
    training_loop: TrainingLoop

    def __init__(
        self, model: Any = None, args: Any = None, *rest: Any, data_collator: Optional[Collator] = None, **kwargs: Any
    ) -> None:
        # Those that share out the samples; and all, who may have parts of the model.
        self.group, self.world = get_data_group(), get_process_group()
        self.data_collator = data_collator
        self._synchronizer: Optional[GradientWindow] = None
        self._hook_is_suspended = False
        self.current_tokens = 0
        # Samples in an update, where the number of ranks is not to change it.
        self.global_batch_size: Optional[int] = None
        if args is None:
            args = DataParallelArguments(output_dir="tmp_trainer")
        super().__init__(model, upgrade_arguments(args), *rest, **kwargs)  # type: ignore[call-arg]
        self.whole.broadcast_weights()

    @property
    def whole(self) -> WholeModel:
        """The model as a whole, whatever ranks have of it."""
        return whole_model(self.model, self.group)

    @property
    def passes(self) -> Passes:
        """Its forward and backward passes."""
        return Passes(getattr(self.model, "parallel", None))

    # Gradients.

    def loss_weight(self, inputs: Any) -> float:
        """What this micro batch's loss weighs in the mean over ranks and micro steps: its number of samples.

        Override it where the loss is a mean of something else, such as tokens that are not ignored.
        """
        return float(num_rows(inputs))

    def update_gradient_by_distributed_type(self, model: Any) -> None:
        """MindNLP's hook: leave ``all_reduce(grad) / rank_size`` on every parameter that has a gradient.

        A collective; all ranks call it. Within the training loop, which exchanges once an update and
        weighs by samples, the call that MindNLP makes after every micro step does nothing.
        """
        if not self._hook_is_suspended:
            synchronizer = self.synchronizer(model)
            gradients = synchronizer([parameter.grad for parameter in synchronizer.parameters])
            for parameter, gradient in zip(synchronizer.parameters, gradients):
                parameter.grad = gradient

    @contextlib.contextmanager
    def hook_suspended(self) -> Iterator[None]:
        """Within it, MindNLP's hook leaves gradients alone."""
        self._hook_is_suspended = True
        try:
            yield
        finally:
            self._hook_is_suspended = False

    def synchronizer(self, model: Any) -> GradientWindow:
        """The exchange for ``model``'s trainable parameters; made anew when they change."""
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        current = self._synchronizer
        if current is None or list(map(id, current.parameters)) != [id(p) for _, p in trainable]:
            args = self.args
            exchange: dict[str, Any] = {
                "bucket_cap_mb": args.bucket_cap_mb,
                "overlap": args.overlap,
                "compression": args.compression,
                "powersgd_rank": args.powersgd_rank,
            }
            parallel = getattr(model, "parallel", None)
            if parallel is None:
                self._synchronizer = GradientSynchronizer(trainable, self.group, **exchange)
            else:
                self._synchronizer = parallel.window(trainable, **exchange)
        assert self._synchronizer is not None
        return self._synchronizer

    # Training.

    def train(
        self,
        resume_from_checkpoint: Union[str, bool, None] = None,
        ignore_keys_for_eval: Optional[list[str]] = None,
        **kwargs: Any,
    ) -> Any:
        """Train; every rank calls it, and returns the same ``TrainOutput``.

        ``resume_from_checkpoint`` is a checkpoint's folder, or True for the newest complete one in ``output_dir``. Only
        rank 0 reads it. Damaged ones are passed over with a warning. In a job that was restarted
        (``mindnlp-dp run --max-restarts``), the newest that it has written itself comes first.

        Raises:
            CheckpointError: the checkpoint is not complete, there is none, or it is not one of this model.
            ValueError: it cannot be taken up with this data, or by this number of ranks.
            FloatingPointError: a loss or a gradient is no number, and ``logging_nan_inf_filter`` is False.
        """
        # An earlier call may have failed with an exchange under way, on some ranks further than on others.
        self._synchronizer = None
        folder, saves = Path(self.args.output_dir), self.args.save_strategy != "no"
        self.world.call_where(
            self.args.should_save, lambda: remove_unfinished_checkpoints(folder), "removing unfinished checkpoints"
        )
        self._resume_from = self.world.call_on_main(
            lambda: choose_checkpoint(folder, resume_from_checkpoint, saves, began=began_if_restarted(os.environ)),
            "looking for a checkpoint",
        )
        return super().train(None, ignore_keys_for_eval, **kwargs)  # type: ignore[misc]

    def _inner_training_loop(
        self,
        batch_size: Optional[int] = None,
        args: Any = None,
        resume_from_checkpoint: Optional[str] = None,
        ignore_keys_for_eval: Optional[list[str]] = None,
    ) -> Any:
        if batch_size is not None:
            self._train_batch_size = batch_size
        checkpoint = None
        if self._resume_from is not None:
            checkpoint = load_checkpoint(self._resume_from, self.whole)
        self.training_loop = TrainingLoop(self, checkpoint, ignore_keys_for_eval)
        return self.training_loop.run()

    def get_train_dataset(self) -> Any:
        """A loader of this rank's part of ``train_dataset``."""
        dataset = self.train_dataset  # type: ignore[attr-defined]
        if dataset is None:
            raise ValueError("training needs a train_dataset")
        loader = self._make_loader(
            mapped(dataset, self.data_map_fn),  # type: ignore[attr-defined]
            self._train_batch_size,
            self.args.gradient_accumulation_steps,
            seed=self.args.order_seed,
            shuffle=self.args.dataset_shuffle,
            uneven="drop" if self.args.dataset_drop_last else "keep",
            global_batch_size=self.global_batch_size,
        )
        if loader.num_samples is not None:
            check_every_rank_has_a_sample(loader.num_samples, self.group.world_size)
        return loader

    def _make_loader(self, dataset: Any, micro_batch_size: int, accumulation_steps: int = 1, **options: Any) -> Any:
        columns = None
        if self.args.remove_unused_columns:
            self._set_signature_columns_if_needed()  # type: ignore[attr-defined]
            columns = list(self._signature_columns)  # type: ignore[attr-defined]
        return make_loader(
            dataset,
            micro_batch_size,
            accumulation_steps,
            group=self.group,
            collate=self.data_collator,
            columns=columns,
            **options,
        )

    def store_flos(self) -> None:
        """Add the floating point operations and tokens since the last call, of all ranks, to the state's."""
        flos = self.world.all_reduce(np.array([self.current_flos], np.float64))[0]  # type: ignore[has-type]
        tokens = self.group.all_reduce(np.array([self.current_tokens], np.float64))[0]
        self.state.total_flos += float(flos)
        self.state.num_input_tokens_seen += int(tokens)
        self.current_flos, self.current_tokens = 0.0, 0

    def tensors(self, batch: Batch) -> dict[str, Any]:
        """A batch as the model takes it."""
        return as_tensors(batch)

    # Evaluation.

    def get_eval_dataset(self, eval_dataset: Any = None) -> Any:
        """A loader of this rank's slices of every global evaluation batch, in data set order."""
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset  # type: ignore[attr-defined]
        if dataset is None:
            raise ValueError("evaluation needs an eval_dataset")
        return self.get_test_dataset(dataset)

    def get_test_dataset(self, test_dataset: Any) -> Any:
        """The same for :meth:`predict`."""
        if isinstance(test_dataset, (IndexedLoader, PipelineLoader)):
            return test_dataset
        return self._make_loader(test_dataset, self.args.eval_batch_size)

    def evaluation_loop(
        self,
        dataset: Any,
        description: str,
        prediction_loss_only: Optional[bool] = None,
        ignore_keys: Optional[list[str]] = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run the model over a loader; predictions, labels and metrics are the same on every rank.

        ``compute_metrics`` is called on rank 0, which tells the others what it returned, or raised.
        """
        return run_evaluation(self, dataset, prediction_loss_only, ignore_keys, metric_key_prefix)

    preprocess_logits_for_metrics: Any

    # Checkpoints.

    def _save_checkpoint(self, model: Any, metrics: Optional[dict[str, float]] = None) -> None:
        """Write the run as it stands; one rank writes, the others return when it has, or raise what it raised."""
        save_checkpoint(self, model, metrics)

    def save_model(self, output_dir: Optional[str] = None, _internal_call: bool = False) -> None:
        """Write the model, as one process would, to ``output_dir``. Of a model that is cut, a collective."""
        if not self.whole.is_parted:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        folder = Path(output_dir or self.args.output_dir)
        write = self.whole.model_writer(folder, lambda folder: None, [self.tokenizer])
        self.world.call_where(self.world.is_main, lambda: write(folder), "writing the model")

    def _save(self, output_dir: Optional[str] = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        if isinstance(self.model, PreTrainedModel):
            super()._save(str(folder), state_dict)  # type: ignore[misc]
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_module(self.model, folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(str(folder))

    def _load_best_model(self) -> None:
        self.whole.read_weights(Path(self.state.best_model_checkpoint))


class DataParallelTrainer(DataParallelTrainerMixin, Trainer):
    """MindNLP's ``Trainer``, data parallel."""
