"""This module makes a library's Trainer data parallel; the mixins in mindnlp_0_4 and mindnlp_0_5 derive from it.

Every rank ends with the model that one process with the full batch would have trained. The loop is in training_loop.py;
data, gradient exchange and evaluation are in other packages; what differs between the libraries is in their folders.
"""

from __future__ import annotations

import abc
import contextlib
import inspect
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Optional, Union

import numpy as np

from mindnlp_dp.checkpoint.background import BackgroundWriter
from mindnlp_dp.checkpoint.directory import (
    choose_checkpoint,
    claim_checkpoint,
    remove_leftovers,
    remove_unfinished_checkpoints,
)
from mindnlp_dp.checkpoint.folder_lock import FolderLock, lock_folder
from mindnlp_dp.communication.default_group import get_data_group, get_process_group
from mindnlp_dp.data.batches import Batch, Collator, as_tensors
from mindnlp_dp.data.dataset_adapter import IndexedSource, adapt, make_loader
from mindnlp_dp.data.loader import IndexedLoader, PipelineLoader
from mindnlp_dp.data.sampler import check_every_rank_has_a_sample
from mindnlp_dp.data_parallel.synchronizer_base import Synchronizer
from mindnlp_dp.kernels.dispatch import medium_precision
from mindnlp_dp.optim.optimizer_by_name import OWN_OPTIMIZERS, make_optimizer
from mindnlp_dp.parallel.distributed_model import DistributedModel, distributed_model_of, replicated_model_on_all_ranks
from mindnlp_dp.parallel.mixed_precision import mixed_precision_of
from mindnlp_dp.runtime.devices import is_on_cpu
from mindnlp_dp.runtime.job_context import job_if_restarted
from mindnlp_dp.runtime.random_state import restored_generators
from mindnlp_dp.training.trainer.base_arguments import DataParallelArgumentsBase
from mindnlp_dp.training.trainer.callbacks import AFTER_OPTIMIZER, call_optimizer_event, load_callback_states
from mindnlp_dp.training.trainer.evaluation_loop import run_evaluation
from mindnlp_dp.training.trainer.mindnlp_trainer import (
    EVAL_STRATEGY,
    EvalLoopOutput,
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
)
from mindnlp_dp.training.trainer.resuming import load_run
from mindnlp_dp.training.trainer.saving import save_module, save_parts
from mindnlp_dp.training.trainer.trainer_interface import TrainerInterface
from mindnlp_dp.training.trainer.trainer_loss import TrainerLoss
from mindnlp_dp.training.trainer.training_loop import TrainingLoop
from mindnlp_dp.training.uninitialized_weights import check_values

# The packages whose Trainers are not the user's own.
_LIBRARIES = ("mindnlp", "mindnlp_dp", "transformers")

# Methods of a Trainer that are not called here with any library, and what to do instead of overriding them.
_ORDER = "samples are distributed in an order that all ranks know; choose, weigh or order them in the data set"
NOT_CALLED = {
    "_get_train_sampler": _ORDER,
    "_get_eval_sampler": _ORDER,
    "_maybe_log_save_evaluate": "all ranks decide together when to log, evaluate and save; use a callback, or override "
    "log, evaluate or save_model",
}


class DataParallelTrainerBase(TrainerInterface):
    """Makes the library's ``Trainer`` data parallel; every ``DataParallelTrainerMixin`` derives from this class."""

    is_data_parallel = True

    # The methods of the library's Trainer that are not called, and what to do instead of overriding them.
    not_called: ClassVar[Mapping[str, str]] = NOT_CALLED

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        for name, instead in self.not_called.items():
            if self._has_own(name):
                raise ValueError(f"{type(self).__name__} has its own {name}, which is not called: {instead}")
        self.group, self.world = get_data_group(), get_process_group()
        self._synchronizer: Optional[Synchronizer] = None
        self._folder_lock: Optional[FolderLock] = None
        self.checkpoint_writer = BackgroundWriter(self.world)
        self.resumed_from = None
        self.trainer_loss = TrainerLoss(self)
        self.current_tokens = 0
        self._logs = True
        self.global_batch_size = None
        super().__init__(*self._with_upgraded_arguments(positional, keywords), **keywords)
        # A constructor may have made its own arguments.
        self.args = self.upgrade_arguments(self.args)
        self._shard_and_cast()
        # Not earlier: model_init may have made the model, and sharded it.
        self.group = (getattr(self.model, "parallel", None) or replicated_model_on_all_ranks(self.model)).group
        # The model whose columns _signature_columns names.
        self._columns_of = self.model
        check_values(list(self.model.named_parameters()), self.world)
        self.distributed_model.broadcast_weights()

    def _with_upgraded_arguments(self, positional: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
        """Return the positional arguments of the next constructor, with training arguments that know their rank.

        The parameters of a user's Trainer may have any order. Those in ``keywords`` are replaced in place.
        """
        found = list(positional)
        parameters = list(inspect.signature(super().__init__).parameters.values())
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
        if "args" in names[: len(found)]:
            index = names.index("args")
            found[index] = self.upgrade_arguments(found[index])
        elif any(p.name == "args" and p.kind is not p.VAR_POSITIONAL for p in parameters):
            keywords["args"] = self.upgrade_arguments(keywords.get("args"))
        else:
            # A constructor that passes on what it is given, or has another name for them.
            found = [self.upgrade_arguments(x) if isinstance(x, TrainingArguments) else x for x in found]
            given = {name: x for name, x in keywords.items() if isinstance(x, TrainingArguments)}
            keywords.update({name: self.upgrade_arguments(x) for name, x in given.items()})
        return found

    def _shard_and_cast(self) -> None:
        """Shard the weights of the model, or let it compute in a 16-bit type, if they are not yet. A collective."""
        args, model = self.args, self.model
        is_stage_3, known = args.zero_stage == 3, mixed_precision_of(model)
        if (is_stage_3 or args.param_dtype) and (args.fp16_full_eval or args.bf16_full_eval):
            raise ValueError(
                "zero_stage=3 and param_dtype need parameters in float32: leave out fp16_full_eval and bf16_full_eval"
            )
        if args.param_dtype and known is not None and known.dtype != args.param_dtype:
            raise ValueError(f"param_dtype={args.param_dtype!r}, and the model computes in {known.dtype} already")
        casts = bool(args.param_dtype) and known is None
        is_sharded = getattr(model, "parallel", None) is not None
        if is_sharded and casts:
            raise ValueError(
                "param_dtype (on a device also bf16=True and fp16=True) with a model that is sharded already: give it "
                "to fully_shard(param_dtype=); with tp, pp and ep it is not supported, so leave it out"
            )
        if is_sharded or not (casts or (is_stage_3 and self.world.world_size > 1)):
            return
        if getattr(self, "model_init", None) is not None:
            name = "fully_shard" if is_stage_3 else "parallelize"
            raise ValueError(f"zero_stage=3 or param_dtype with model_init: return mindnlp_dp.{name}(model) from it")
        from mindnlp_dp.parallel.fully_shard import fully_shard
        from mindnlp_dp.parallel.parallelize import parallelize

        (fully_shard if is_stage_3 else parallelize)(model, param_dtype=args.param_dtype if casts else None)

    # Methods that differ between the libraries.

    @abc.abstractmethod
    def upgrade_arguments(self, args: Any) -> DataParallelArgumentsBase:
        """Turn training arguments into some that know their rank; None: the defaults."""

    @abc.abstractmethod
    def open_evaluation_data(self, returned: Any, *, is_prediction: bool) -> Any:
        """Return a loader of what ``evaluation_loop`` was given, which an overridden method may have made."""

    @abc.abstractmethod
    def _collator(self) -> Optional[Collator]:
        """Return the function that makes a batch of arrays from a list of samples; None: samples are stacked."""

    @property
    def distributed_model(self) -> DistributedModel:
        return distributed_model_of(self.model, self.group)

    # Gradients.

    def loss_weight(self, inputs: Any) -> float:
        """Return the weight of this micro-batch's loss in the mean over ranks and micro-batches.

        By default it is the number of items that the loss is a mean over, which follows from the model's class: rows
        for a classifier, labels other than -100 for a language model. Override it if your ``compute_loss`` or your
        model returns a mean over something else; :func:`~mindnlp_dp.count_labels` counts labels.
        """
        return self.trainer_loss.weight(inputs)

    @contextlib.contextmanager
    def logging_off(self) -> Iterator[None]:
        """Let :meth:`log` do nothing in this block, in which the user's loss is computed to compare it."""
        self._logs = False
        try:
            yield
        finally:
            self._logs = True

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log, as the library's Trainer does."""
        if self._logs:
            super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def evaluation_weight(self, inputs: Any) -> float:
        """Return the weight of a batch's loss in the mean loss of an evaluation."""
        return self.loss_weight(inputs)

    def synchronizer(self, model: Any) -> Synchronizer:
        """Return the gradient exchange for ``model``'s trainable parameters; it is rebuilt when they change."""
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        current, distributed_model = self._synchronizer, distributed_model_of(model, self.group)
        is_same = current is not None and list(map(id, current.parameters)) == [id(p) for _, p in trainable]
        if distributed_model.pipeline is not None:
            # Stages compare which tied weights they train: all of them, or none.
            is_same = all(self.world.all_gather_object(is_same))
        if current is None or not is_same:
            options = ("bucket_cap_mb", "overlap", "compression", "powersgd_rank")
            exchange = {name: getattr(self.args, name) for name in options}
            current = self._synchronizer = distributed_model.make_synchronizer(trainable, **exchange)
        return current

    # Training.

    def choose_run(self, resume_from: Union[str, Path, bool, None]) -> None:
        """Set ``resumed_from`` to the checkpoint that training starts from; None: it starts at update 0. A collective.

        In a job that was restarted, the newest checkpoint that the job itself wrote comes first.
        """
        if not callable(self.loss_weight):
            raise TypeError(
                f"loss_weight of this Trainer is {self.loss_weight!r}, and has to be a method: what a micro-batch "
                "weighs in the mean over ranks; give your own attribute another name"
            )
        if self.args.greater_is_better is None and self.args.metric_for_best_model is not None:
            # The library decides when the arguments are made, and this name was given later.
            self.args.greater_is_better = not self.args.metric_for_best_model.endswith("loss")
        if self.distributed_model.is_sharded and getattr(self.args, "save_on_each_node", False):
            raise ValueError("save_on_each_node with a sharded model: rank 0 gathers and writes it, and no other rank")
        self._check_evaluation()
        if self.distributed_model.is_sharded and not self.args.save_safetensors:
            raise ValueError("save_safetensors=False with a sharded model: its weights are written as safetensors only")
        # An earlier call may have failed in the middle of an exchange, at a different point on each rank.
        self._synchronizer = None
        # MindNLP's training_step caches the model and the optimizer's parameters of its first call in grad_fn.
        vars(self).pop("grad_fn", None)
        self.prepare_output_dir()
        try:
            self.resumed_from, self.run_id = self.world.run_on_rank0(
                lambda: choose_checkpoint(
                    Path(self.args.output_dir), resume_from, self._saves, job=job_if_restarted(os.environ)
                ),
                "looking for a checkpoint",
            )
        except BaseException:
            self._release_output_dir()
            raise

    def _check_evaluation(self) -> None:
        """Raise ValueError if evaluation is set and has no data: an error after the first epoch would be too late."""
        strategy = getattr(self.args, EVAL_STRATEGY)
        strategy = str(getattr(strategy, "value", strategy))
        if strategy == "no" or self.eval_dataset is not None:
            return
        if not any(map(self._has_own, ("evaluate", "get_eval_dataset", "get_eval_dataloader"))):
            raise ValueError(
                f'{EVAL_STRATEGY}="{strategy}" needs data: pass eval_dataset to the {type(self).__name__}, or set '
                f'{EVAL_STRATEGY}="no"'
            )

    def _has_own(self, name: str) -> bool:
        """Return whether this Trainer has a method that is the user's own, and not the library's."""
        method = getattr(self, name, None)
        return method is not None and method.__module__.partition(".")[0] not in _LIBRARIES

    def claim_checkpoint(self) -> None:
        """Let a run that went back to an earlier checkpoint own that one from now on. A collective."""
        path, run = self.resumed_from, self.run_id
        if path is not None and self._saves:
            folder = Path(self.args.output_dir)
            self.world.run_on_rank0(lambda: claim_checkpoint(path, folder, run), "preparing output_dir")

    @property
    def _saves(self) -> bool:
        return self.args.save_strategy != "no"

    def prepare_output_dir(self) -> None:
        """Lock ``output_dir`` if this run saves, and remove what killed writers left there. A collective.

        Raises:
            RuntimeError: on every rank, if another job is writing to the folder.
        """
        folder = Path(self.args.output_dir)

        def prepare() -> None:
            if not self._saves:
                remove_leftovers(folder)
                return
            if self._folder_lock is None:
                self._folder_lock = lock_folder(folder)
            remove_unfinished_checkpoints(folder)

        self.world.run_on(self.args.should_save, prepare, "preparing output_dir")

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
        with contextlib.ExitStack() as at_end:
            at_end.callback(self._unshare_weights)
            at_end.callback(self._release_output_dir)
            # After an error; without one, the loop has waited.
            at_end.callback(self.checkpoint_writer.stop)
            return self._run_training_loop(ignore_keys_for_eval)

    def _unshare_weights(self) -> None:
        # After training, scripts may change the weights in place, independently on each rank.
        if "training_loop" in vars(self):
            self.training_loop.unshare_weights()

    def _run_training_loop(self, ignore_keys_for_eval: Optional[list[str]]) -> Any:
        # Drop the loop of an earlier call.
        vars(self).pop("training_loop", None)
        checkpoint = None if self.resumed_from is None else load_run(self, self.resumed_from)
        self.training_loop = TrainingLoop(self, checkpoint, ignore_keys_for_eval)
        # The loop drops it when it is restored.
        del checkpoint
        # On a device, it is the type of the model's weights while they compute.
        with medium_precision(self.args.bf16 and is_on_cpu()), restored_generators():
            return self.training_loop.run()

    def _training_loader(self, dataset: Any) -> Any:
        """Return a loader of this rank's part of a data set, in the order and the batches that the arguments set."""
        if dataset is None:
            raise ValueError("training needs a train_dataset")
        loader = self._make_loader(
            dataset,
            self._train_batch_size,
            self.args.gradient_accumulation_steps,
            seed=self.args.shuffle_seed,
            shuffle=self.args.dataset_shuffle,
            uneven="drop" if self.args.drops_last else "keep",
            global_batch_size=self.global_batch_size,
            lengths=self._lengths(dataset) if self.args.group_by_length else None,
        )
        if loader.num_samples is not None:
            check_every_rank_has_a_sample(loader.num_samples, self.group.world_size)
        return loader

    def loader_returned(self, returned: Any, method: str) -> Any:
        """Return the loader that a method, which a subclass may override, has returned.

        Raises:
            TypeError: it is not a loader of this package, which splits its batches among the ranks.
        """
        if isinstance(returned, (IndexedLoader, PipelineLoader)):
            return returned
        use = "train_dataset" if "train" in method else "eval_dataset" if "eval" in method else "predict's data set"
        raise TypeError(
            f"{type(self).__name__}.{method} returned a {type(returned).__name__}, whose batches would not be split "
            f"among the ranks: pass its data set as {use} and its collate_fn as data_collator, or return "
            "mindnlp_dp.make_loader(dataset, micro_batch_size, collate=..., shuffle=...)"
        )

    def _lengths(self, dataset: Any) -> np.ndarray:
        """Return the sample lengths that rank 0 reads: the column ``length_column_name``, else the number of tokens."""
        source, names = adapt(dataset), [self.args.length_column_name, self.main_input]
        if not isinstance(source, IndexedSource):
            raise ValueError(f"group_by_length needs a data set with an index, and a {type(dataset).__name__} has none")
        return self.world.run_on_rank0(lambda: source.lengths(*names), "reading the samples' lengths")

    @property
    def main_input(self) -> str:
        """The name of the model's main input column."""
        return getattr(self.model, "main_input_name", None) or "input_ids"

    def _make_loader(self, dataset: Any, micro_batch_size: int, accumulation_steps: int = 1, **options: Any) -> Any:
        columns = None
        if self.args.remove_unused_columns:
            if self._columns_of is not self.model:
                self._signature_columns, self._columns_of = None, self.model
            self._set_signature_columns_if_needed()  # type: ignore[attr-defined]
            columns = list(self._signature_columns)  # type: ignore[call-overload]
        return make_loader(
            dataset,
            micro_batch_size,
            accumulation_steps,
            group=self.group,
            collate=self._collator(),
            columns=columns,
            **options,
        )

    def create_optimizer(self, *args: Any) -> Any:
        """Create the optimizer that the arguments name: one of the library, or Muon, LAMB or LARS."""
        settings = self.args
        if settings.optim not in OWN_OPTIMIZERS or self.optimizer is not None:  # type: ignore[has-type]
            return super().create_optimizer(*args)  # type: ignore[misc]
        self.optimizer = make_optimizer(
            settings.optim, self.model, learning_rate=settings.learning_rate, weight_decay=settings.weight_decay,
            betas=(settings.adam_beta1, settings.adam_beta2), epsilon=settings.adam_epsilon,
            settings=settings.optim_args,
        )  # fmt: skip
        return self.optimizer

    def after_optimizer_step(self) -> None:
        """Call the callbacks' ``on_optimizer_step``; the scheduler has not stepped yet."""
        call_optimizer_event(self, AFTER_OPTIMIZER, TrainerCallback)

    def learning_rate_to_log(self) -> float:
        """Return the learning rate of a line of the log."""
        return self._get_learning_rate()  # type: ignore[attr-defined,no-any-return]

    def store_flos(self) -> None:
        """Add the floating point operations and tokens since the last call, over all ranks, to ``state``."""
        flos = self.world.all_reduce(np.array([self.current_flos], np.float64))[0]  # type: ignore[has-type]
        tokens = self.group.all_reduce(np.array([self.current_tokens], np.float64))[0]
        self.state.total_flos += float(flos)
        self.state.num_input_tokens_seen += int(tokens)
        self.current_flos, self.current_tokens = 0.0, 0

    def tensors(self, batch: Batch) -> dict[str, Any]:
        """Return the batch with tensors in place of arrays, as the model takes it."""
        return as_tensors(batch)

    # Evaluation.

    def _evaluation_loader(self, dataset: Any) -> Any:
        """Return a loader of this rank's slices of every global evaluation batch, in data set order."""
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

        ``compute_metrics`` is called on rank 0 only; its result, or its error, is sent to the other ranks.
        """
        loader = self.open_evaluation_data(dataset, is_prediction=description == "Prediction")
        with medium_precision(self.args.bf16 and is_on_cpu()):
            return run_evaluation(self, loader, prediction_loss_only, ignore_keys, metric_key_prefix)

    # Checkpoints.

    def load_callback_states(self, saved: Mapping[str, Any]) -> None:
        """Restore the callbacks of a saved run, whose ``state`` the Trainer already has."""
        load_callback_states(self.callback_handler.callbacks, saved["callbacks"])  # type: ignore[attr-defined]

    def save_model(self, output_dir: Optional[str] = None, _internal_call: bool = False) -> None:
        """Write the model to ``output_dir`` as one process would. A collective if the model is sharded."""
        if not self.distributed_model.is_sharded:
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
        self.distributed_model.read_weights(Path(self.state.best_model_checkpoint))
