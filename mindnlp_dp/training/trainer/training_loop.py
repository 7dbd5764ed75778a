"""This module is the Trainer's training loop; :class:`~.base.DataParallelTrainerBase` runs it for each ``train()``.

It trains the trainer's model, the same on every rank, and returns MindNLP's ``TrainOutput``. MindNLP's own loop cannot
be used: it steps in the middle of a short update, does not let a rank without samples take part, and reads its data
from the start when it resumes.

On every rank::

    epoch ── update ── training_step a micro-batch ── train_step.py ── callbacks ── log, evaluate, save
       └ next …   └ next …                                       (decisions: callbacks.py)

It replaces ``Trainer._inner_training_loop`` and ``Trainer._maybe_log_save_evaluate`` of MindNLP
0.4.1 (engine/trainer/base.py, lines 886 to 1239 and 1526 to 1581).
"""

from __future__ import annotations

import functools
import logging
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.checkpoint.background import WriterStatus
from mindnlp_dp.checkpoint.directory import checkpoint_path, remove_old_checkpoints
from mindnlp_dp.data.loss_weight import loss_mean
from mindnlp_dp.data.sampler import plan_updates
from mindnlp_dp.data_parallel.synchronizer_base import MicroStep
from mindnlp_dp.optim.updater import Updater
from mindnlp_dp.optim.updater_factory import check_matrices, make_updater, warn_of_parameters_left_out
from mindnlp_dp.parallel.mixed_precision import MixedPrecision, mixed_precision_of
from mindnlp_dp.runtime import heartbeat
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api
from mindnlp_dp.runtime.random_state import MaskRecord, seed_between_updates
from mindnlp_dp.runtime.recompute import enable_recompute
from mindnlp_dp.training.adapter_gradients import adapter_check
from mindnlp_dp.training.forward_backward import ForwardBackward, across_ranks
from mindnlp_dp.training.fused_cross_entropy import fuse_cross_entropy
from mindnlp_dp.training.loss_check import LossCheck
from mindnlp_dp.training.metrics import Activity, LossMeter, SpeedMeter, count_input_tokens, count_label_tokens
from mindnlp_dp.training.run_state import Position, Run
from mindnlp_dp.training.timeline import StepTimeline
from mindnlp_dp.training.train_step import TrainStep
from mindnlp_dp.training.trainer.best_model import holds_weights
from mindnlp_dp.training.trainer.callbacks import (
    BEFORE_OPTIMIZER,
    ControlAgreement,
    call_optimizer_event,
    callback_states,
    show_in_progress_bars,
    takes_event,
)
from mindnlp_dp.training.trainer.mindnlp_trainer import Trainer, TrainerCallback, TrainerState, TrainOutput, has_length
from mindnlp_dp.training.trainer.resuming import make_epoch_loader, restore_run
from mindnlp_dp.training.trainer.trainer_interface import TrainerInterface


class TrainingLoop:
    """Runs one call of ``train()``: :meth:`run` trains ``trainer.model``. Every rank calls every method.

    ``checkpoint`` is what :meth:`state` returned in the run to resume, the same on every rank; the model already has
    the weights of that run.
    """

    def __init__(
        self, trainer: TrainerInterface, checkpoint: Optional[dict[str, Any]], ignore_keys_for_eval: Optional[list[str]]
    ) -> None:
        self.trainer = trainer
        self.group, self.world = trainer.group, trainer.world
        self.checkpoint = checkpoint
        # Whether the train step exists and the run is restored.
        self.is_set_up = False
        self.ignore_keys_for_eval = ignore_keys_for_eval
        self.loader, self.batch_schedule = make_epoch_loader(trainer, checkpoint)
        # A global batch that was set, or the checkpoint's, may be smaller than the micro-batches that were asked for.
        trainer._train_batch_size = self.loader.micro_batch_size
        self.args = trainer.args
        self.position = Position()
        self.agree = ControlAgreement(self.world)
        self.speed = SpeedMeter(self.world, self.group, self.args.peak_teraflops)
        self.timeline = StepTimeline(self.world, *self.args.timeline())
        self.losses = LossMeter(self.group)
        self.across_ranks = across_ranks(self.group, self.args.router_loss, trainer.model)
        self.masks = MaskRecord()
        self.check_columns = trainer.trainer_loss.column_checks()
        self.loss_check = self._loss_check()
        mean = loss_mean(trainer.model)
        self.is_shifted = mean is not None and mean.is_shifted
        self.grad_norm: Optional[float] = None
        # The metrics of an evaluation since the last update.
        self.metrics: Optional[dict[str, float]] = None
        # The checkpoint of the last update, if it has one.
        self.saved_as: Optional[Path] = None

    # Setup.

    def run(self) -> TrainOutput:
        trainer, args = self.trainer, self.args
        self.updates_per_epoch = len(self.loader) if has_length(self.loader) else None
        planned, num_epochs = plan_updates(self.batch_schedule.planned_per_epoch, args.num_train_epochs, args.max_steps)
        trainer.distributed_model.broadcast_weights()
        if args.recomputed is not False:
            enable_recompute(trainer.model, args.recomputed)
        if args.fused_cross_entropy:
            fuse_cross_entropy(trainer.model)
        if trainer._created_lr_scheduler:
            trainer.lr_scheduler = None
            trainer._created_lr_scheduler = False
        trainer.create_optimizer_and_scheduler(num_training_steps=planned)
        self.synchronizer = trainer.synchronizer(trainer.model)
        named = zip(self.synchronizer.names, self.synchronizer.parameters)
        warn_of_parameters_left_out(trainer.optimizer, named, self.group)
        check_matrices(trainer.optimizer, trainer.model)
        self.train_step = self._make_train_step()
        self.run_state = Run(trainer.distributed_model, self.train_step)
        trainer.state = TrainerState()
        trainer._globalstep_last_logged = 0
        is_over = False
        if self.checkpoint is not None:
            resumed = restore_run(trainer, self.run_state, self.batch_schedule, self.checkpoint, planned)
            self.position, self.grad_norm, is_over = resumed
            self.saved_as = trainer.resumed_from
        self.is_set_up = True
        state = trainer.state
        max_steps = self.batch_schedule.total(planned, state.global_step, self.position)
        if not is_over and state.global_step < max_steps:
            trainer.claim_checkpoint()
        self._describe_run(max_steps, num_epochs)
        handler = trainer.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler
        handler.train_dataset = handler.train_dataloader = self.loader

        self._log_settings()
        began = time.time()
        # What an interrupted loop has counted is not this one's.
        trainer.store_flos()
        self.tokens_before, self.flos_before = state.num_input_tokens_seen, state.total_flos
        self.speed.start()
        trainer.control = handler.on_train_begin(args, state, trainer.control)
        self._follow_optimizer()
        self.agree(trainer.control)
        while not is_over and self.position.epoch < num_epochs:
            self._run_epoch()
            # A run that is resumed after its last update makes none, and its stop flag is cleared.
            is_over = self.agree.agreed["should_training_stop"] or state.global_step >= max_steps
            if not is_over:
                self.position = Position(self.position.epoch + 1)
        self.speed.stop()
        return self._finish(began)

    def _describe_run(self, max_steps: int, num_epochs: int) -> None:
        """Put the run's batch size, lengths and intervals into ``trainer.state``, where callbacks look for them."""
        trainer, state = self.trainer, self.trainer.state
        state.train_batch_size = trainer._train_batch_size
        state.max_steps, state.num_train_epochs = max_steps, num_epochs
        state.is_local_process_zero = trainer.is_local_process_zero()
        state.is_world_process_zero = trainer.is_world_process_zero()
        state.epoch = state.epoch or 0
        for name in ("logging_steps", "eval_steps", "save_steps"):
            interval = self.args.absolute_interval(name, max_steps)
            if interval is not None:
                setattr(state, name, interval)

    def _log_settings(self) -> None:
        """Log the size of the run, where ``log_level="info"`` shows it."""
        trainer, loader, state = self.trainer, self.loader, self.trainer.state
        num_weights = sum(math.prod(parameter.shape) for parameter in self.synchronizer.parameters)
        lines = {
            "Num examples": "unknown" if loader.num_samples is None else f"{loader.num_samples:,}",
            "Num Epochs": f"{state.num_train_epochs:,}",
            "Instantaneous batch size per device": f"{trainer._train_batch_size:,}",
            "Total train batch size (w. parallel, distributed & accumulation)": f"{loader.global_batch_size:,}",
            "Number of ranks": f"{self.world.world_size:,}",
            "Gradient Accumulation steps": f"{loader.micro_steps:,}",
            "Total optimization steps": f"{state.max_steps:,}",
            "Number of trainable parameters": f"{num_weights:,}",
        }
        # The library's logger, whose level log_level sets; the names are those of its own Trainer.
        logger = logging.getLogger(Trainer.__module__)
        logger.info("***** Running training *****")
        for name, value in lines.items():
            logger.info("  %s = %s", name, value)

    def _make_train_step(self) -> TrainStep:
        trainer, args = self.trainer, self.args
        callbacks = trainer.callback_handler.callbacks
        # With gradients at the parameters the optimizer's own code updates: all ranks or none.
        is_watched = any(
            self.world.all_gather_object(any(takes_event(c, BEFORE_OPTIMIZER, TrainerCallback) for c in callbacks))
        )
        self.shows_gradients = is_watched
        # Not a method of this loop, which must be free as soon as the trainer drops it.
        before = functools.partial(call_optimizer_event, trainer, BEFORE_OPTIMIZER, TrainerCallback)
        return TrainStep(
            self.synchronizer, self._make_updater(), self.losses,
            max_grad_norm=args.max_grad_norm, leave_out_bad_losses=args.logging_nan_inf_filter, timeline=self.timeline,
            resync_tied_weights=trainer.distributed_model.resync_tied_weights,
            adapters=adapter_check(trainer.model, self.synchronizer.parameters, trainer.world),
            before_update=before if is_watched else None,
            after_update=trainer.after_optimizer_step,
            precision=self._precision(),
        )  # fmt: skip

    def _precision(self) -> Optional[MixedPrecision]:
        precision = mixed_precision_of(self.trainer.model)
        if precision is not None:
            precision.check_parameters()
            # The scale of an earlier train() says nothing about this one.
            precision.load_state(None)
        return precision

    def _make_updater(self) -> Updater:
        trainer = self.trainer
        trainer.distributed_model.check_optimizer(trainer.optimizer, self.synchronizer.parameters)
        scope = trainer.distributed_model.scope(self.synchronizer.parameters)
        return make_updater(
            trainer.optimizer, self.synchronizer, trainer.distributed_model.zero_stage(self.args.zero_stage),
            trainer.lr_scheduler, scope,
            shows_gradients=self.shows_gradients,
        )  # fmt: skip

    def _follow_optimizer(self) -> None:
        """Rebuild the updater if a callback has replaced the optimizer's ``step``. A collective."""
        before = self.train_step.updater
        if all(self.world.all_gather_object(before.follows_optimizer())):
            return
        state = before.optimizer_state()
        before.unshare()
        self.train_step.updater = self._make_updater()
        self.train_step.updater.load_optimizer_state(state)

    # An epoch.

    def _run_epoch(self) -> None:
        trainer, args, position = self.trainer, self.args, self.position
        self.batch_schedule.set_rate(trainer.optimizer, trainer.lr_scheduler, position)
        if args.past_index >= 0:
            trainer._past = None
        trainer.control = trainer.callback_handler.on_epoch_begin(args, trainer.state, trainer.control)
        updates = self.loader.updates(position.epoch, position.update, position.offset)
        self.restore_stop_flags()
        self.agree(trainer.control)
        while not self._stops():
            # The same on all ranks, because callbacks decide with what they draw.
            seed_between_updates(args.seed, 0, trainer.state.global_step)
            micro_batches = next(updates, None)
            if micro_batches is None:
                position.epoch_done = True
                break
            trainer.control = trainer.callback_handler.on_step_begin(args, trainer.state, trainer.control)
            sync_seconds = self.synchronizer.seconds
            with self.timeline.operators(trainer.state.global_step):
                norm = self.train_step(micro_batches, trainer.state.global_step, self._run_passes)
            self.speed.add_update(self.synchronizer.seconds - sync_seconds)
            if args.sync_stats and self.world.is_main:
                print(f"update {trainer.state.global_step}: {self.synchronizer.last_exchange}", flush=True)
            self.grad_norm = self.grad_norm if norm is None else norm
            self._count_update()
            self.timeline.end_update(trainer.state.global_step)
            self._log_evaluate_save()
        if position.epoch_done and position.update == 0:
            if self.world.is_main:
                print(
                    f"the data set is empty in epoch {position.epoch}; training stops at step "
                    f"{trainer.state.global_step}"
                )
            trainer.control.should_training_stop = True
        position.ending_epoch = True
        position.epoch_done |= self.agree.agreed["should_epoch_stop"] or position.update == self.updates_per_epoch
        trainer.control = trainer.callback_handler.on_epoch_end(args, trainer.state, trainer.control)
        self._log_evaluate_save()

    def _count_update(self) -> None:
        """Record an update: advance the position, set the learning rate and call ``on_step_end``."""
        trainer, position = self.trainer, self.position
        self.metrics = self.saved_as = None
        position.update += 1
        trainer.state.global_step += 1
        trainer.state.epoch = position.epoch + position.update / (self.updates_per_epoch or trainer.state.max_steps)
        self.batch_schedule.set_rate(trainer.optimizer, trainer.lr_scheduler, position)
        trainer.control = trainer.callback_handler.on_step_end(self.args, trainer.state, trainer.control)

    def _stops(self) -> bool:
        agreed, state = self.agree.agreed, self.trainer.state
        return agreed["should_epoch_stop"] or agreed["should_training_stop"] or state.global_step >= state.max_steps

    def _run_passes(self, micro_batches: Sequence[Optional[Any]], step: int) -> Iterator[MicroStep]:
        """Run this rank's micro-batches of one global batch, and yield their losses and gradients one by one."""
        trainer = self.trainer
        self._check_parameters()
        # Not kept: it refers to this loop, whose memory must be free as soon as the trainer drops it.
        forward_backward = ForwardBackward(
            trainer.distributed_model, self.synchronizer, self._gradients_of, self._loss_of, trainer.loss_weight,
            self.timeline, self.across_ranks, inputs_of=trainer.tensors, after_batch=self._count,
            after_micro_step=self._end_substep, dropout=trainer.args.dropout, masks=self.masks,
            check_columns=self.check_columns, loss_check=self.loss_check,
        )  # fmt: skip
        with trainer.trainer_loss.span_loss().correct_losses(micro_batches):
            yield from forward_backward.micro_steps(micro_batches, step, trainer.args.seed)
        # The exchange holds this rank's gradients now; free their memory before the averaged ones are allocated.
        trainer.model.zero_grad()

    def _gradients_of(self, inputs: Any) -> tuple[float, list[Any]]:
        """Run a micro-batch by ``training_step``, which a subclass of the Trainer may override."""
        trainer = self.trainer
        trainer.model.zero_grad()
        loss = trainer.loss_of_training_step(inputs)
        return loss, [parameter.grad for parameter in self.synchronizer.parameters]

    def _loss_of(self, inputs: Any) -> Any:
        """Compute the loss of a pipeline's micro-batch by ``compute_loss``."""
        trainer = self.trainer
        trainer.model.train()
        return trainer.compute_loss(trainer.model, trainer._prepare_inputs(inputs))

    def _loss_check(self) -> Optional[LossCheck]:
        trainer = self.trainer
        # In 16 bits, two halves of a batch differ by more than a check tolerates.
        in_16_bits = mixed_precision_of(trainer.model) is not None
        if trainer.trainer_loss.is_known or trainer.distributed_model.is_sharded or in_16_bits:
            return None

        def loss_of(inputs: Any) -> Any:
            with trainer.logging_off():
                return trainer.loss_of(trainer._prepare_inputs(inputs))

        whose = f"the loss of {type(trainer).__name__}"
        return LossCheck(
            loss_of, trainer.loss_weight, [trainer.model], self.across_ranks, whose, inputs_of=trainer.tensors
        )

    def _end_substep(self) -> None:
        trainer = self.trainer
        trainer.control = trainer.callback_handler.on_substep_end(self.args, trainer.state, trainer.control)

    def _count(self, batch: Any, inputs: Any) -> None:
        """Count the samples, floating point operations and tokens of a micro-batch that this rank has trained on."""
        trainer, args = self.trainer, self.args
        self.speed.add_batch(
            len(batch.indices),
            count_input_tokens(batch, trainer.main_input),
            count_label_tokens(batch, shifted=self.is_shifted),
        )
        trainer.current_flos += float(trainer.floating_point_ops(inputs)) / trainer.distributed_model.loss_replication
        if args.include_num_input_tokens_seen or args.include_tokens_per_second:
            trainer.current_tokens += batch[trainer.main_input].size

    def _check_parameters(self) -> None:
        """Raise RuntimeError if the model has trainable parameters that the optimizer and the exchange do not know."""
        known = set(map(id, self.synchronizer.parameters))
        for name, parameter in self.trainer.model.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise RuntimeError(
                    f"{name!r} is new in the model before update {self.trainer.state.global_step} (rank "
                    f"{self.group.label()}): neither the optimizer nor the exchange knows it. Replace parameters, as "
                    "resize_token_embeddings does, and unfreeze them, before train()"
                )

    # Between updates.

    def _log_evaluate_save(self) -> None:
        trainer = self.trainer
        self._handle_launcher_request()
        writer = trainer.checkpoint_writer
        agreed = self.agree(trainer.control, writer=writer.status)
        if self.agree.writer is WriterStatus.FAILED:
            self.world.run_on(True, writer.check, "writing a checkpoint")
        elif self.agree.writer is WriterStatus.IDLE:
            writer.complete()
        if agreed["should_log"] and trainer.state.global_step > trainer._globalstep_last_logged:
            self._log_loss()
            # Callbacks that saw the log may have set flags.
            agreed = self.agree(trainer.control)
        if agreed["should_evaluate"]:
            with self.speed.during(Activity.EVALUATION):
                agreed = self._evaluate()
        if agreed["should_save"]:
            with self.speed.during(Activity.CHECKPOINT):
                self._save()

    def _evaluate(self) -> dict[str, bool]:
        """Evaluate the model, and return the flags that all ranks agree on after it."""
        trainer = self.trainer
        # A subclass may add metrics of its rank's rows, by which ranks would decide differently.
        metrics = self.metrics = self.world.broadcast_object(trainer.evaluate(ignore_keys=self.ignore_keys_for_eval))
        trainer.on_metrics(metrics)
        if isinstance(trainer.lr_scheduler, mindnlp_api().optim.lr_scheduler.ReduceLROnPlateau):
            trainer.lr_scheduler.step(self.args.metric_to_watch(metrics))
        return self.agree(trainer.control)

    def _save(self) -> None:
        trainer = self.trainer
        # Checkpoints do not hold the compression's error feedback: drop it, so that a resumed run is the same.
        self.synchronizer.reset_error_feedback()
        trainer.write_checkpoint(self.metrics)
        self.saved_as = checkpoint_path(Path(self.args.output_dir), trainer.state.global_step)
        trainer.control = trainer.callback_handler.on_save(self.args, trainer.state, trainer.control)
        self.agree(trainer.control)

    def _handle_launcher_request(self) -> None:
        """Set ``should_save`` if the launcher asks rank 0 for a checkpoint, as it does before it adds ranks."""
        if not self.world.is_main or not heartbeat.wants_checkpoint() or self.trainer.checkpoint_writer.is_busy:
            return
        if self.args.save_strategy != "no" and not self.args.save_only_model:
            self.trainer.control.should_save = True

    def _log_loss(self) -> None:
        trainer = self.trainer
        numbers = {"loss": round(self.losses.mean_since_log(), 4), "grad_norm": self.grad_norm}
        # Without a loss there is no mean. JSON has neither NaN nor infinity, and a warning has named them.
        logs = {name: x for name, x in numbers.items() if x is not None and math.isfinite(x)}
        logs["learning_rate"] = trainer.learning_rate_to_log()
        trainer._globalstep_last_logged = trainer.state.global_step
        trainer.store_flos()
        self._set_flos()
        speed = self.speed.since_log()
        if "step_seconds" in speed:
            heartbeat.report_speed(speed)
        show_in_progress_bars(trainer.callback_handler.callbacks, {**logs, **speed})
        trainer.log({**logs, **speed})
        # MindNLP resets it only on a rank that writes the log.
        trainer.control.should_log = False

    def _set_flos(self) -> None:
        """Tell the meter the operations so far; ranks that hold shards count replicated parts several times."""
        if not self.trainer.distributed_model.is_sharded:
            self.speed.set_flos(self.trainer.state.total_flos - self.flos_before)

    # End of training.

    def unshare_weights(self) -> None:
        """Move the weights out of the memory that the ranks of a host share."""
        if self.is_set_up:
            self.train_step.updater.unshare()

    def _finish(self, began: float) -> TrainOutput:
        trainer, args, state = self.trainer, self.args, self.trainer.state
        if args.past_index >= 0 and hasattr(trainer, "_past"):
            del trainer._past
        trainer.distributed_model.broadcast_buffers()
        digest = trainer.distributed_model.assert_in_sync()
        with self.speed.during(Activity.CHECKPOINT):
            trainer.checkpoint_writer.wait()
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            if holds_weights(trainer, Path(state.best_model_checkpoint)):
                trainer._load_best_model()
                digest = trainer.distributed_model.assert_in_sync()
            elif self.world.is_main:
                warnings.warn(
                    f"{state.best_model_checkpoint}, the best checkpoint, is not there any more: the model keeps the "
                    "weights of the last update",
                    RuntimeWarning,
                    stacklevel=3,
                )

        train_loss = self.losses.mean_of_run()
        trainer.store_flos()
        self._set_flos()
        metrics = {
            "train_runtime": round(time.time() - began, 4),
            **self.speed.of_run(),
            "total_flos": state.total_flos,
            "train_loss": train_loss,
        }
        if args.include_tokens_per_second:
            # Transformers' metric, which counts padding too.
            tokens = state.num_input_tokens_seen - self.tokens_before
            metrics["train_tokens_per_second"] = round(tokens / max(metrics["train_seconds"], 1e-9), 3)
        trainer.is_in_train = False
        trainer.log({name: x for name, x in metrics.items() if math.isfinite(x)})
        if state.best_model_checkpoint is not None and args.save_total_limit == 1:
            folder, best = Path(args.output_dir), Path(state.best_model_checkpoint)
            self.world.run_on(
                args.should_save,
                lambda: remove_old_checkpoints(folder, 1, [best], trainer.run_id, step=state.global_step),
                "removing all checkpoints but the best",
            )
        self.timeline.write()
        self.unshare_weights()
        trainer.control = trainer.callback_handler.on_train_end(args, state, trainer.control)
        if trainer.neftune_noise_alpha is not None:
            trainer._deactivate_neftune(trainer.model)
        trainer.replica_digest = digest
        return TrainOutput(state.global_step, train_loss, metrics)

    # Saving and resuming.

    def state(self, *, sharded: bool = False) -> dict[str, Any]:
        """Return the full state of this run, except the model's weights; the same on every rank.

        Only ranks that save keep the optimizer's arrays. With ``sharded``, every rank has its pieces of those arrays
        that the ranks shard.
        """
        trainer = self.trainer
        return {
            **self.run_state.state(keep=self.args.should_save, sharded=sharded),
            "callbacks": callback_states(trainer.callback_handler.callbacks),
            "data": self.args.data_order(self.loader),
            "settings": self.args.result_settings(),
            "global_batch_size": self.loader.global_batch_size,
            "planned_batch_size": self.batch_schedule.planned,
            "is_scaled": self.batch_schedule.is_scaled,
            "position": asdict(self.position),
            "flags": dict(self.agree.agreed),
            "trainer_state": asdict(trainer.state),
            "last_logged": trainer._globalstep_last_logged,
            "grad_norm": self.grad_norm,
        }

    def restore_stop_flags(self) -> None:
        """Restore the saved stop flags, which ``on_*_begin`` callbacks may have changed."""
        saved, self.checkpoint = self.checkpoint, None
        if saved is not None and not saved["position"]["ending_epoch"]:
            for flag in ("should_training_stop", "should_epoch_stop"):
                setattr(self.trainer.control, flag, saved["flags"][flag])
