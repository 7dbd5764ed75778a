"""What a run consists of besides its weights, as plain data, and a run set back to it.

Goes in: the training step (its optimizer, schedule, losses and exchange), how far the data was read. Comes out: trees
of plain data (state_tree.py) for a checkpoint; and, when a run is taken up, the same objects as they were. All ranks
call these functions, and those that restore get the same tree on every rank.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindnlp_dp.communication.collectives import ProcessGroup
from mindnlp_dp.step.train_step import TrainStep

from .whole_model import WholeModel


@dataclass
class Position:
    """How far the data has been read, and what is being done.

    ``update`` counts the updates of ``epoch`` that are done; the next one begins ``offset`` samples later than usual,
    where some had another size. ``epoch_done`` says that the epoch was read to its end, or is to be left;
    ``ending_epoch`` that its last evaluation and checkpoint have begun.
    """

    epoch: int = 0
    update: int = 0
    epoch_done: bool = False
    ending_epoch: bool = False
    offset: int = 0

    def where_to_go_on(self) -> Position:
        """Where a run begins that was saved here: behind an epoch whose end was saved, else in the midst of it."""
        if self.ending_epoch and self.epoch_done:
            return Position(self.epoch + 1)
        return Position(self.epoch, self.update, offset=self.offset)


@dataclass
class Run:
    """The parts of a run that a checkpoint must hold."""

    model: WholeModel
    train_step: TrainStep

    @property
    def group(self) -> ProcessGroup:
        return self.model.world

    def state(self, *, keep: bool = True) -> dict[str, Any]:
        """Their state, the same on every rank, which has rank 0's buffers from then on.

        A rank that writes no checkpoint need not ``keep`` the optimizer's arrays, of which it may have no more than its
        part; it takes part in putting them together.

        Raises:
            ReplicaMismatchError: the ranks' weights differ, so that no checkpoint can hold them.
        """
        step = self.train_step
        self.model.broadcast_buffers()
        # Of a model that is cut, every stage packs its own gradients: the order is no other mesh's.
        keeps_order = not self.model.is_parted
        own = {
            "parameters": step.updater.parameter_names(self.model.model),
            **step.updater.optimizer_state(keep=keep or self.model.is_parted),
        }
        return {
            "world_size": self.group.world_size,
            "digest": self.model.assert_in_sync(),
            "optimizer": self.model.whole_optimizer(own, keep=keep),
            "scheduler": None if step.updater.scheduler is None else step.updater.scheduler.state_dict(),
            "bucket_order": step.synchronizer.order if keeps_order else None,
            "ranks": self.group.all_gather_object({"random": random_state()}),
            "losses": self.model.group.all_gather_object(step.losses.state()),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over a saved state; the model has its weights already.

        Random states are for :meth:`restore_random_state`, when everything that draws is set up.

        Raises:
            ValueError: the model is not the one that was saved, or the optimizer updates other parameters.
        """
        digest = self.model.digest()
        if digest != saved["digest"]:
            raise ValueError(
                f"the model is not the one that was saved: with the checkpoint's weights its digest is {digest}, and "
                f"was {saved['digest']}; frozen weights and buffers must be those of the run that is resumed"
            )
        step = self.train_step
        mine = step.updater.parameter_names(self.model.model)
        optimizer = self.model.own_optimizer(saved["optimizer"], mine)
        theirs, error = optimizer["parameters"], None
        if mine != theirs:
            ours, others = (sum(map(len, groups)) for groups in (mine, theirs))
            error = ValueError(
                f"the saved optimizer updates {others} parameters in {len(theirs)} groups, this one {ours} in "
                f"{len(mine)}, and they are not the same; freeze and group them as in the run that is resumed"
            )
        # Ranks that have other parts of the model may find something else.
        self.group.raise_together(error, "taking up the optimizer")
        # Older checkpoints do not have it.
        if saved.get("bucket_order") is not None and not self.model.is_parted:
            step.synchronizer.pack_in_order(saved["bucket_order"])
        optimizer_state = {key: value for key, value in optimizer.items() if key != "parameters"}
        step.updater.load_optimizer_state(optimizer_state)
        if step.updater.scheduler is not None:
            step.updater.scheduler.load_state_dict(saved["scheduler"])
        losses = saved.get("losses") or [rank["losses"] for rank in saved["ranks"]]
        step.losses.load_states(losses)

    def restore_random_state(self, saved: Mapping[str, Any]) -> None:
        """Set this rank's generators; left alone where the number of ranks is another one."""
        if saved["world_size"] == self.group.world_size:
            set_random_state(saved["ranks"][self.group.rank]["random"])


def check_same_data(now: Mapping[str, Any], then: Mapping[str, Any], way_out: str) -> None:
    """Raise ValueError unless two descriptions of the data, and of its order, are the same."""
    differences = []
    for key in now:
        if isinstance(now[key], Mapping) and isinstance(then.get(key), Mapping):
            names = [name for name in {**then[key], **now[key]} if then[key].get(name) != now[key].get(name)]
            differences += [f"{key} differ in {name!r}" for name in names]
        elif now[key] != then.get(key):
            differences.append(f"{key} was {then.get(key)} and is {now[key]}")
    if differences:
        raise ValueError(
            f"the checkpoint's run cannot be resumed with these data: {'; '.join(differences)}. Resume with what "
            f"it was trained with, or {way_out}"
        )


def warn_of_other_settings(now: Mapping[str, Any], then: Mapping[str, Any]) -> None:
    """Warn where settings of a run are not those that it was saved with."""
    differences = [f"{key} was {then[key]} and is {now[key]}" for key in now if key in then and now[key] != then[key]]
    if differences:
        warnings.warn(
            f"resuming with other settings: {'; '.join(differences)}. The optimizer and its schedule continue with "
            "the checkpoint's, the rest with the new ones: this is not the run that would have gone on",
            RuntimeWarning,
            stacklevel=3,
        )


def random_state() -> dict[str, Any]:
    """This process's state of Python's and NumPy's generators.

    MindSpore's is not among them: it is a function of the step (:func:`mindnlp_dp.step.seeds.step_seed`).
    """
    version, words, gauss = random.getstate()
    return {"python": (version, np.array(words, np.uint32), gauss), "numpy": np.random.get_state(legacy=False)}


def set_random_state(state: Mapping[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(state["numpy"])
