"""This module lets training continue in the same processes after a rank was lost (``mindnlp-dp run --in-place``).

When the training loop has failed on every surviving rank, :class:`~.base.DataParallelTrainerBase` gets from here the
state for the next loop, the same on every rank and as :func:`~mindnlp_dp.parallel.replicated_model.load_checkpoint`
returns it: that of the last update that any rank has finished, if a rank alone has all of it (``zero_stage=0``), else
the newest checkpoint's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mindnlp_dp.checkpoint.state_tree import pack_state, unpack_state
from mindnlp_dp.communication.replicas import broadcast_parameters
from mindnlp_dp.runtime.job_context import job_id, min_world_size
from mindnlp_dp.training.trainer.best_model import forget_best_model, holds_weights, load_run
from mindnlp_dp.training.trainer.callbacks import FLAGS, STOPS

# The entries of a run's state that each rank takes from its own state, not from another rank's.
_OWN = ("world_size", "losses")


def can_shrink(trainer: Any, error: BaseException) -> bool:
    """Tell whether ``error`` reports a lost rank, and the model is replicated, so that training can continue."""
    return trainer.world.is_rank_failure(error) and trainer.group is trainer.world and not trainer.whole.is_sharded


def state_of_survivors(trainer: Any) -> dict[str, Any]:
    """Shrink the group to the surviving ranks, and return the state to continue with.

    A collective of the surviving ranks; each one enters it after an error that reports a lost rank.

    Raises:
        RuntimeError: too few ranks are left, or no state exists to continue with.
    """
    # If a checkpoint could not be written, an earlier one counts.
    trainer.checkpoint_writer.stop()
    world = trainer.world
    before = world.world_size
    world.shrink()
    if world.world_size < (least := min_world_size(os.environ)):
        left = f"{world.world_size} rank{' is' if world.world_size == 1 else 's are'}"
        raise RuntimeError(f"{left} left of this job, which is to have {least} at least")
    loop = vars(trainer).get("training_loop")
    steps = world.all_gather_object(_step_of(trainer, loop))
    newest = max(steps)
    where = f"in update {newest}" if newest >= 0 else "from the newest checkpoint"
    if world.is_main:
        print(f"{before - world.world_size} of {before} ranks lost; the others continue in place, {where}", flush=True)
    state = _newest_checkpoint(trainer) if newest < 0 else _state_of(trainer, loop, steps.index(newest), steps)
    return {**state, "in_place": True}


def _step_of(trainer: Any, loop: Any) -> int:
    """Return the last update that this rank has finished, if it has all of its state; else -1."""
    if loop is None:
        return -1
    if loop.is_set_up and loop.train_step.num_updates > loop.updates_done:
        # The error was raised after the update was done and before the loop counted it.
        loop.count_update()
    if loop.starts_over:
        return loop.resumed_from["trainer_state"]["global_step"]
    return trainer.state.global_step if loop.is_complete else -1


def _state_of(trainer: Any, loop: Any, source: int, steps: list[int]) -> dict[str, Any]:
    """Return the state of rank ``source``, which is at the latest update, on every rank. A collective."""
    world = trainer.world
    trainer.prepare_output_dir()
    all_have_it = min(steps) == steps[source]
    if not all_have_it:
        if steps[world.rank] < steps[source]:
            loop.abandon()
        broadcast_parameters(trainer.model, world, src=source)
    if all(world.all_gather_object(loop.starts_over)):
        # Another rank was lost before any rank had continued after the first loss.
        state = {**loop.resumed_from, "world_size": world.world_size}
        # Forward passes may have changed the buffers.
        trainer.whole.broadcast_buffers()
        state["digest"] = trainer.whole.assert_in_sync()
    else:
        state = loop.state(keep=True)
        # The actions that were due when the rank was lost: some ranks may have done them, others not.
        state["pending"] = {flag: bool(getattr(trainer.control, flag)) for flag in FLAGS}
        state["metrics"] = loop.metrics
        for flag in STOPS:
            state["flags"][flag] |= state["pending"][flag]
    kept = (*_OWN, "optimizer") if all_have_it else _OWN
    sent = pack_state({name: value for name, value in state.items() if name not in kept})
    state = {**unpack_state(world.broadcast_object(sent, source)), **{name: state[name] for name in kept}}
    best = state["trainer_state"]["best_model_checkpoint"]
    if best is not None and not holds_weights(trainer, Path(best)):
        # It was still being written.
        if world.is_main:
            lost = "the best checkpoint so far, was lost with a rank: the best of the next ones counts"
            print(f"{best}, {lost}", flush=True)
        forget_best_model(state["trainer_state"])
    return state


def _newest_checkpoint(trainer: Any) -> dict[str, Any]:
    trainer.choose_run(trainer.resumed_from, job=job_id(os.environ))
    if trainer.resumed_from is None:
        raise RuntimeError(
            "a rank was lost, and with it a part of the optimizer's state, which is sharded; no checkpoint exists to "
            "continue from. Save more often, or use zero_stage=0"
        )
    return load_run(trainer, trainer.resumed_from)
