"""What makes a Trainer data parallel, whichever library it is of: the seam between its methods and our stages.

Goes in: a model, arguments, data, as for the library's Trainer. Comes out: the model that one process with the whole
batch would have trained, on every rank. The loop is in training_loop.py; reading, exchange and evaluation are the
other packages'; what a library calls otherwise is in a folder of its own.
"""

from __future__ import annotations

import abc
import os
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np

from mindnlp_dp.checkpoint.folder_lock import FolderLock, lock_folder
from mindnlp_dp.checkpoint.folders import choose_checkpoint, put_right, remove_unfinished_checkpoints
from mindnlp_dp.checkpoint.load import load_checkpoint
from mindnlp_dp.checkpoint.manifest import RunId
from mindnlp_dp.checkpoint.whole_model import WholeModel, data_group, whole_model
from mindnlp_dp.communication.process_group import get_data_group, get_process_group
from mindnlp_dp.data.batch_sizes import check_every_rank_has_a_sample
from mindnlp_dp.data.batches import Batch, Collator, as_tensors
from mindnlp_dp.data.loader import IndexedLoader, PipelineLoader, make_loader
from mindnlp_dp.data.source import indexed_source, sample_lengths
from mindnlp_dp.gradients.synchronizer import GradientSynchronizer
from mindnlp_dp.gradients.window import GradientWindow
from mindnlp_dp.launch.environment import job_if_restarted
from mindnlp_dp.replicas.initialized import check_values

from .arguments import RankArguments
from .evaluation_loop import run_evaluation
from .in_place import can_go_on_without_lost, state_without_lost
from .library import EvalLoopOutput, PreTrainedModel
from .passes import Passes
from .saving import save_module, save_parts
from .trainer_loss import TrainerLoss
from .training_loop import TrainingLoop


class RankTrainer(abc.ABC):
    """What makes a library's ``Trainer`` data parallel, of which it is a first base class."""

    is_data_parallel = True
    args: RankArguments
    model: Any
    state: Any
    # Whose checkpoints train() writes.
    run_id: RunId
    preprocess_logits_for_metrics: Any
    training_loop: TrainingLoop

    def __init__(self, model: Any, args: RankArguments, *rest: Any, **kwargs: Any) -> None:
        # Those that share out the samples; and all, who may have parts of the model.
        self.group, self.world = get_data_group(), get_process_group()
        self._synchronizer: Optional[GradientWindow] = None
        self._folder_lock: Optional[FolderLock] = None
        self.resumed_from: Optional[Path] = None
        self.trainer_loss = TrainerLoss(self)
        self.current_tokens = 0
        # Samples in an update, where the number of ranks is not to change it.
        self.global_batch_size: Optional[int] = None
        # How many micro steps that has made of how many.
        self.accumulation_steps_set = self.accumulation_steps_asked = 0
        super().__init__(model, args, *rest, **kwargs)  # type: ignore[call-arg]
        # Only now: model_init may have made the model, and cut it.
        self.group = data_group(getattr(self.model, "parallel", None))
        check_values(list(self.model.named_parameters()), self.world)
        self.whole.broadcast_weights()

    # What the library calls otherwise.

    @abc.abstractmethod
    def open_training_data(self) -> Any:
        """A loader of this rank's part of ``train_dataset``, by the method that a subclass may have overridden."""

    @abc.abstractmethod
    def loss_of_training_step(self, inputs: dict[str, Any]) -> float:
        """The mean loss of a micro batch, by ``training_step``, which leaves its gradients at the parameters."""

    @abc.abstractmethod
    def _collator(self) -> Optional[Collator]:
        """What makes a batch of arrays from a list of samples; None: they are stacked."""

    @property
    @abc.abstractmethod
    def beside_model(self) -> Any:
        """What is saved with the model, and read with it: a tokenizer or a processor; None where there is none."""

    @abc.abstractmethod
    def write_checkpoint(self, metrics: Optional[dict[str, float]]) -> None:
        """Write the run as it stands, by the method that a subclass may have overridden."""

    @abc.abstractmethod
    def note_metrics(self, metrics: dict[str, float]) -> None:
        """An evaluation between two updates has come to its end."""

    @abc.abstractmethod
    def note_checkpoint(self, path: Path, metrics: Optional[dict[str, float]]) -> None:
        """The model is about to be saved there; ``metrics`` are this update's, where it was evaluated behind it."""

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
        """Return what this micro batch's loss weighs in the mean over ranks and micro batches.

        By default that is the number of whatever the loss is a mean of, by the model's class: rows of a classifier,
        labels that are not -100 of a language model. Override it where the loss of your ``compute_loss`` or of your
        model is a mean of something else; :func:`~mindnlp_dp.count_labels` counts labels.
        """
        return self.trainer_loss.weight(inputs)

    def evaluation_weight(self, inputs: Any) -> float:
        """Return what a batch's loss weighs in the mean loss of an evaluation."""
        return self.loss_weight(inputs)

    def synchronizer(self, model: Any) -> GradientWindow:
        """The exchange for ``model``'s trainable parameters; made anew when they change."""
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        current = self._synchronizer
        if current is None or list(map(id, current.parameters)) != [id(p) for _, p in trainable]:
            options = ("bucket_cap_mb", "overlap", "compression", "powersgd_rank")
            exchange = {name: getattr(self.args, name) for name in options}
            parallel = getattr(model, "parallel", None)
            if parallel is None:
                self._synchronizer = GradientSynchronizer(trainable, self.group, **exchange)
            else:
                self._synchronizer = parallel.window(trainable, **exchange)
        assert self._synchronizer is not None
        return self._synchronizer

    # Training.

    def choose_run(self, resume_from: Union[str, Path, bool, None], *, job: Optional[str] = None) -> None:
        """Decide what training begins with: ``resumed_from``, a checkpoint, or nothing. A collective.

        Of a ``job`` that was restarted, or lost a rank, the newest checkpoint of its own comes first.
        """
        if not callable(self.loss_weight):
            raise TypeError(
                f"loss_weight of this Trainer is {self.loss_weight!r}, and has to be a method: what a micro batch "
                "weighs in the mean over ranks; give your own attribute another name"
            )
        # An earlier call may have failed with an exchange under way, on some ranks further than on others.
        self._synchronizer = None
        self.prepare_output_dir()
        try:
            self.resumed_from, self.run_id = self.world.call_on_main(
                lambda: choose_checkpoint(
                    Path(self.args.output_dir), resume_from, self._saves, job=job or job_if_restarted(os.environ)
                ),
                "looking for a checkpoint",
            )
        except BaseException:
            self._release_output_dir()
            raise

    @property
    def _saves(self) -> bool:
        return self.args.save_strategy != "no"

    def prepare_output_dir(self) -> None:
        """Become the one job that writes checkpoints there, and remove what killed writers left. A collective.

        Raises:
            RuntimeError: on every rank, when another job is writing to it.
        """
        folder = Path(self.args.output_dir)

        def prepare() -> None:
            if not self._saves:
                put_right(folder)
                return
            if self._folder_lock is None:
                self._folder_lock = lock_folder(folder)
            remove_unfinished_checkpoints(folder)

        self.world.call_where(self.args.should_save, prepare, "preparing output_dir")

    def _release_output_dir(self) -> None:
        lock, self._folder_lock = self._folder_lock, None
        if lock is not None:
            lock.release()

    def _inner_training_loop(
        self,
        batch_size: Optional[int] = None,
        args: Any = None,
        resume_from_checkpoint: Optional[str] = None,
        trial: Any = None,
        ignore_keys_for_eval: Optional[list[str]] = None,
    ) -> Any:
        if batch_size is not None:
            self._train_batch_size = batch_size
        try:
            return self._run_training_loop(ignore_keys_for_eval)
        finally:
            self._release_output_dir()
            # Scripts go on to change the weights in place, each rank for itself.
            if "training_loop" in vars(self):
                self.training_loop.make_weights_private()

    def _run_training_loop(self, ignore_keys_for_eval: Optional[list[str]]) -> Any:
        checkpoint = None
        if self.resumed_from is not None:
            checkpoint = load_checkpoint(self.resumed_from, self.whole)
        # That of an earlier call is not this one's.
        vars(self).pop("training_loop", None)
        while True:
            try:
                self.training_loop = TrainingLoop(self, checkpoint, ignore_keys_for_eval)
                checkpoint = None
                return self.training_loop.run()
            except Exception as error:  # noqa: BLE001
                # Looked at behind this handler, where other errors do not count as its consequences.
                caught = error
            checkpoint = self._state_without_lost(caught)
            # With it goes the loop that it came from, and all that belongs to it.
            del caught

    def _state_without_lost(self, error: Exception) -> dict[str, Any]:
        """What to go on with where ``error`` tells of a lost rank; else it is raised. More may be lost meanwhile."""
        while can_go_on_without_lost(self, error):
            self._synchronizer = None
            try:
                return state_without_lost(self)
            except Exception as another:  # noqa: BLE001
                caught = another
            error = caught
        raise error

    def _training_loader(self, dataset: Any) -> Any:
        """A loader of this rank's part of a data set, in the order and the batches that the arguments ask for."""
        if dataset is None:
            raise ValueError("training needs a train_dataset")
        loader = self._make_loader(
            dataset,
            self._train_batch_size,
            self.args.gradient_accumulation_steps,
            seed=self.args.order_seed,
            shuffle=self.args.dataset_shuffle,
            uneven="drop" if self.args.drops_last else "keep",
            global_batch_size=self.global_batch_size,
            lengths=self._lengths(dataset) if self.args.group_by_length else None,
        )
        if loader.num_samples is not None:
            check_every_rank_has_a_sample(loader.num_samples, self.group.world_size)
        return loader

    def _lengths(self, dataset: Any) -> np.ndarray:
        """The samples' lengths, as rank 0 reads them: a column of that name, else the number of tokens."""
        source, names = indexed_source(dataset), [self.args.length_column_name, self.main_input]
        if source is None:
            raise ValueError(f"group_by_length needs a data set with an index, and a {type(dataset).__name__} has none")
        return self.world.call_on_main(lambda: sample_lengths(source, *names), "reading the samples' lengths")

    @property
    def main_input(self) -> str:
        """The column that the model reads first."""
        return getattr(self.model, "main_input_name", None) or "input_ids"

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
            collate=self._collator(),
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

    def _evaluation_loader(self, dataset: Any) -> Any:
        """A loader of this rank's slices of every global evaluation batch, in data set order."""
        if dataset is None:
            raise ValueError("evaluation needs an eval_dataset")
        if isinstance(dataset, (IndexedLoader, PipelineLoader)):
            return dataset
        return self._make_loader(dataset, self.args.eval_batch_size)

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

    # Checkpoints.

    def save_model(self, output_dir: Optional[str] = None, _internal_call: bool = False) -> None:
        """Write the model, as one process would, to ``output_dir``. Of a model that is cut, a collective."""
        if not self.whole.is_parted:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        save_parts(self, Path(output_dir or self.args.output_dir))

    def _save(self, output_dir: Optional[str] = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        if isinstance(self.model, PreTrainedModel):
            super()._save(str(folder), state_dict)  # type: ignore[misc]
        else:
            save_module(self, folder)

    def _load_best_model(self) -> None:
        self.whole.read_weights(Path(self.state.best_model_checkpoint))
