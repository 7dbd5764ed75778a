"""The Trainer's loop, once, whole.

Goes in: a trainer (its model, arguments, callbacks and loader). Comes out: its
trained model, the same on every rank, and MindNLP's ``TrainOutput``. MindNLP's own
loop cannot be steered where it matters: it steps in the middle of a short window, cannot
let a rank without samples take part, and reads its data from the start when it resumes.

One update, on every rank::

    window ── micro batch ── training_step ── accumulate (weight = samples)     no communication
       │           └ next …
       └── reduce ── clip ── optimizer ── scheduler ── callbacks ── log, evaluate, save
           (1 all-reduce a bucket)                       (decisions are rank 0's)
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from typing import Any, Optional

import numpy as np
from mindnlp.core import nn, optim
from mindnlp.engine.callbacks import TrainerState
from mindnlp.engine.trainer.base import TRAINER_STATE_NAME
from mindnlp.engine.utils import TrainOutput, has_length

from .replicas import assert_replicas_in_sync, broadcast_parameters
from .runtime import seeded, step_seed
from .throughput import TrainingTimer

_CONTROL_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


def run_training_loop(
    trainer: Any, resume_from_checkpoint: Optional[str] = None, ignore_keys_for_eval: Optional[list[str]] = None
) -> TrainOutput:
    """Train ``trainer.model``; every rank calls this, and every rank returns the same."""
    return _TrainingLoop(trainer, ignore_keys_for_eval).run(resume_from_checkpoint)


class _TrainingLoop:
    def __init__(self, trainer: Any, ignore_keys_for_eval: Optional[list[str]]) -> None:
        self.trainer = trainer
        self.args = trainer.args
        self.group = trainer.group
        self.ignore_keys_for_eval = ignore_keys_for_eval
        self.loader = trainer.get_train_dataset()
        self.timer = TrainingTimer()
        # Sums of loss * weight and of weight: over this rank since the last log line, and over all ranks.
        self.loss_since_log = np.zeros(2)
        self.loss_of_run = np.zeros(2)
        self.samples_seen = 0
        self.updates_done = 0
        self.grad_norm: Optional[float] = None

    # Before.

    def run(self, resume_from_checkpoint: Optional[str]) -> TrainOutput:
        trainer, args = self.trainer, self.args
        updates_per_epoch, max_steps, num_epochs = self._plan()
        broadcast_parameters(trainer.model, self.group)

        if trainer._created_lr_scheduler:
            trainer.lr_scheduler = None
            trainer._created_lr_scheduler = False
        trainer.create_optimizer_and_scheduler(num_training_steps=max_steps)
        trainer.state = self._initial_state(resume_from_checkpoint, max_steps)
        trainer._load_optimizer_and_scheduler(resume_from_checkpoint)
        trainer.state.max_steps = max_steps
        trainer.state.num_train_epochs = num_epochs
        trainer.state.is_local_process_zero = trainer.is_local_process_zero()
        trainer.state.is_world_process_zero = trainer.is_world_process_zero()
        trainer._globalstep_last_logged = trainer.state.global_step

        handler = trainer.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler
        handler.train_dataset = self.loader

        # A stream is one endless epoch.
        epochs_done, position = divmod(trainer.state.global_step, updates_per_epoch or sys.maxsize)
        if args.ignore_data_skip:
            position = 0

        began = time.time()
        self.synchronizer = trainer.synchronizer(trainer.model)
        sync_seconds_before = self.synchronizer.seconds
        self.timer.start()
        trainer.control = handler.on_train_begin(args, trainer.state, trainer.control)
        self._agree_on_control()
        for epoch in range(epochs_done, num_epochs):
            self._run_epoch(epoch, position if epoch == epochs_done else 0, updates_per_epoch or max_steps)
            if trainer.control.should_training_stop:
                break
        self.timer.stop()
        self.sync_seconds = self.synchronizer.seconds - sync_seconds_before
        return self._finish(began)

    def _plan(self) -> tuple[Optional[int], int, int]:
        """Updates in an epoch (None for a stream), updates in all, epochs."""
        args = self.args
        if not has_length(self.loader):
            if args.max_steps <= 0:
                raise ValueError(f"the training data has no length, so set max_steps, got {args.max_steps}")
            return None, args.max_steps, sys.maxsize
        per_epoch = len(self.loader)
        if args.max_steps > 0:
            return per_epoch, args.max_steps, math.ceil(args.max_steps / per_epoch)
        return per_epoch, math.ceil(args.num_train_epochs * per_epoch), math.ceil(args.num_train_epochs)

    def _initial_state(self, checkpoint: Optional[str], max_steps: int) -> TrainerState:
        state = TrainerState()
        state_file = os.path.join(checkpoint, TRAINER_STATE_NAME) if checkpoint is not None else ""
        if os.path.isfile(state_file):
            state = TrainerState.load_from_json(state_file)
        state.train_batch_size = self.trainer._train_batch_size
        for name in ("logging_steps", "eval_steps", "save_steps"):
            interval = getattr(self.args, name)
            if interval is not None:
                # Below 1 it is a share of the whole run.
                setattr(state, name, math.ceil(max_steps * interval) if interval < 1 else interval)
        state.epoch = state.epoch or 0
        return state

    # An epoch.

    def _run_epoch(self, epoch: int, start: int, updates_in_epoch: int) -> None:
        trainer, args = self.trainer, self.args
        if args.past_index >= 0:
            trainer._past = None
        trainer.control = trainer.callback_handler.on_epoch_begin(args, trainer.state, trainer.control)
        updates_before = self.updates_done
        for update, window in enumerate(self.loader.windows(epoch, start), start):
            trainer.control = trainer.callback_handler.on_step_begin(args, trainer.state, trainer.control)
            self._update(window)
            self.updates_done += 1
            trainer.state.global_step += 1
            trainer.state.epoch = epoch + (update + 1) / updates_in_epoch
            trainer.control = trainer.callback_handler.on_step_end(args, trainer.state, trainer.control)
            self._log_evaluate_save()
            if trainer.control.should_epoch_stop or trainer.control.should_training_stop:
                break
        if self.updates_done == updates_before:
            if self.group.is_main:
                print(f"epoch {epoch} holds no more batches; training stops at step {trainer.state.global_step}")
            trainer.control.should_training_stop = True
        trainer.control = trainer.callback_handler.on_epoch_end(args, trainer.state, trainer.control)
        self._log_evaluate_save()

    def _update(self, window: list[Any]) -> None:
        """One optimizer step from this rank's micro batches of one global batch."""
        trainer, args = self.trainer, self.args
        trainer.model.zero_grad()
        with trainer.accumulation_window():
            for micro_step, batch in enumerate(window):
                if batch is not None:
                    self._micro_step(batch, micro_step)
                if micro_step + 1 < len(window):
                    trainer.control = trainer.callback_handler.on_substep_end(args, trainer.state, trainer.control)
        trainer._write_gradients(self.synchronizer.reduce())

        if args.max_grad_norm is not None and args.max_grad_norm > 0:
            norm = nn.utils.clip_grad_norm_(trainer.model.parameters(), args.max_grad_norm)
            self.grad_norm = float(norm.asnumpy())
        trainer.optimizer.step()
        if not isinstance(trainer.lr_scheduler, optim.lr_scheduler.ReduceLROnPlateau):
            trainer.lr_scheduler.step()
        trainer.model.zero_grad()

    def _micro_step(self, batch: Any, micro_step: int) -> None:
        trainer, args = self.trainer, self.args
        inputs = trainer.tensors(batch)
        weight = trainer.loss_weight(inputs)
        if weight == 0:
            # Nothing in it counts, such as a batch of nothing but ignored tokens, whose mean loss is 0 / 0.
            return
        with seeded(step_seed(args.seed, self.group.rank, trainer.state.global_step, micro_step)):
            loss = trainer.training_step(trainer.model, inputs)
        self.synchronizer.accumulate([parameter.grad for parameter in self.synchronizer.parameters], weight)
        trainer.model.zero_grad()
        # training_step returns its part of the window's mean, by MindNLP's contract.
        value = float(loss.asnumpy()) * args.gradient_accumulation_steps
        if math.isfinite(value) or not args.logging_nan_inf_filter:
            self.loss_since_log += value * weight, weight
        self.samples_seen += len(next(iter(batch.values())))
        trainer.current_flos += float(trainer.floating_point_ops(inputs))

    # Between updates.

    def _agree_on_control(self) -> None:
        """Every rank follows rank 0's flags: one rank that stops or evaluates alone hangs the others."""
        control = self.trainer.control
        flags = np.array([getattr(control, flag) for flag in _CONTROL_FLAGS], np.int32)
        for flag, value in zip(_CONTROL_FLAGS, self.group.broadcast(flags)):
            setattr(control, flag, bool(value))

    def _log_evaluate_save(self) -> None:
        trainer = self.trainer
        self._agree_on_control()
        if trainer.control.should_log and trainer.state.global_step > trainer._globalstep_last_logged:
            self._log_loss()
        metrics = None
        if trainer.control.should_evaluate or trainer.control.should_save:
            with self.timer.paused():
                if trainer.control.should_evaluate:
                    metrics = trainer.evaluate(ignore_keys=self.ignore_keys_for_eval)
                    self._step_plateau_scheduler(metrics)
                if trainer.control.should_save:
                    trainer._save_checkpoint(trainer.model, metrics=metrics)
                    trainer.control = trainer.callback_handler.on_save(self.args, trainer.state, trainer.control)
            self._agree_on_control()

    def _log_loss(self) -> None:
        trainer = self.trainer
        total, weight = self.group.all_reduce(self.loss_since_log)
        self.loss_of_run += total, weight
        self.loss_since_log[:] = 0
        logs = {"loss": round(total / weight, 4) if weight else float("nan")}
        if self.grad_norm is not None:
            logs["grad_norm"] = self.grad_norm
        logs["learning_rate"] = trainer._get_learning_rate()
        trainer._globalstep_last_logged = trainer.state.global_step
        trainer.store_flos()
        trainer.log(logs)

    def _step_plateau_scheduler(self, metrics: dict[str, float]) -> None:
        trainer = self.trainer
        if isinstance(trainer.lr_scheduler, optim.lr_scheduler.ReduceLROnPlateau):
            name = self.args.metric_for_best_model
            trainer.lr_scheduler.step(metrics[name if name.startswith("eval_") else f"eval_{name}"])

    # After.

    def _finish(self, began: float) -> TrainOutput:
        trainer, args, state = self.trainer, self.args, self.trainer.state
        if args.past_index >= 0 and hasattr(trainer, "_past"):
            del trainer._past
        digest = assert_replicas_in_sync(trainer.model, self.group)
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            trainer._load_best_model()
            digest = assert_replicas_in_sync(trainer.model, self.group)

        total, weight = self.loss_of_run + self.group.all_reduce(self.loss_since_log)
        train_loss = float(total / weight) if weight else float("nan")
        samples, seconds, sync_seconds = self.group.all_reduce(
            np.array([self.samples_seen, self.timer.seconds, self.sync_seconds])
        )
        seconds, sync_seconds = seconds / self.group.world_size, sync_seconds / self.group.world_size
        trainer.store_flos()
        metrics = {
            "train_runtime": round(time.time() - began, 4),
            "train_seconds": round(seconds, 4),
            "train_samples_per_second": round(samples / seconds, 3),
            "train_steps_per_second": round(self.updates_done / seconds, 3),
            "gradient_sync_share": round(sync_seconds / seconds, 4),
            "total_flos": state.total_flos,
            "train_loss": train_loss,
        }
        trainer.is_in_train = False
        trainer.log(dict(metrics))
        self._delete_all_but_best()
        trainer.control = trainer.callback_handler.on_train_end(args, state, trainer.control)
        if trainer.neftune_noise_alpha is not None:
            trainer._deactivate_neftune(trainer.model)
        trainer.replica_digest = digest
        return TrainOutput(state.global_step, train_loss, metrics)

    def _delete_all_but_best(self) -> None:
        trainer, args, best = self.trainer, self.args, self.trainer.state.best_model_checkpoint
        if args.should_save and best is not None and args.save_total_limit == 1:
            for checkpoint in trainer._sorted_checkpoints(use_mtime=False, output_dir=args.output_dir):
                if not os.path.samefile(checkpoint, best):
                    shutil.rmtree(checkpoint)
