"""This module saves and restores a run's state, except its weights, as plain data; Trainers and FunctionalRun use it.

The state is that of the train step (optimizer, schedule, losses and gradient exchange) and the position in the data, as
trees of plain data (state_tree.py). All ranks call these functions; to restore, every rank passes the same tree.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from mindnlp_dp.checkpoint.manifest import CheckpointError
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.parallel.distributed_model import DistributedModel
from mindnlp_dp.training.train_step import TrainStep


@dataclass
class Position:
    """How far a run has read its data, and whether it is ending an epoch.

    ``update`` counts the updates of ``epoch`` that are done; the next one begins ``offset`` samples later than usual if
    some updates had another size. ``epoch_done`` says that the epoch was read to its end, or is to be left;
    ``ending_epoch`` says that its last evaluation and checkpoint have begun.
    """

    epoch: int = 0
    update: int = 0
    epoch_done: bool = False
    ending_epoch: bool = False
    offset: int = 0

    def resume_point(self) -> Position:
        """Return where a run saved at this position continues: after an epoch that is done, else within it."""
        if self.ending_epoch and self.epoch_done:
            return Position(self.epoch + 1)
        return Position(self.epoch, self.update, offset=self.offset)


@dataclass
class Run:
    """Saves and restores the state of a run's model and train step, for the Trainers and FunctionalRun."""

    model: DistributedModel
    train_step: TrainStep

    @property
    def group(self) -> ProcessGroup:
        return self.model.world

    def state(self, *, keep: bool = True, sharded: bool = False) -> dict[str, Any]:
        """Return the run's state, the same on every rank, after broadcasting rank 0's buffers. A collective.

        A rank that does not write the checkpoint need not ``keep`` the optimizer's arrays, which may be sharded, but it
        takes part in gathering them. With ``sharded``, such arrays are not gathered, and every rank writes its pieces.

        Raises:
            ReplicaMismatchError: the ranks' weights differ, so no checkpoint can hold them.
        """
        step = self.train_step
        self.model.broadcast_buffers()
        # Each stage of a sharded model packs its own gradients, and its order does not fit another mesh.
        keeps_order = not self.model.is_sharded
        own = {
            "parameters": step.updater.parameter_names(self.model.model),
            **step.updater.optimizer_state(keep=keep or self.model.is_sharded, sharded=sharded),
        }
        return {
            "world_size": self.group.world_size,
            "digest": self.model.assert_in_sync(),
            "optimizer": self.model.full_optimizer_state(own, keep=keep, sharded=sharded),
            "scheduler": None if step.updater.scheduler is None else step.updater.scheduler.state_dict(),
            "bucket_order": step.synchronizer.order if keeps_order else None,
            "losses": self.model.group.all_gather_object(step.losses.state()),
            "mixed_precision": None if step.precision is None else step.precision.state(),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore a saved state; the model must already have the saved weights.

        Raises:
            ValueError: the model is not the one that was saved, or the optimizer is another one, or updates other
                parameters.
        """
        digest = self.model.digest()
        if digest != saved["digest"]:
            raise ValueError(
                f"the model is not the one that was saved: with the checkpoint's weights its digest is {digest}, and "
                f"was {saved['digest']}; frozen weights and buffers must be those of the run that is resumed"
            )
        step = self.train_step
        mine = step.updater.parameter_names(self.model.model)
        optimizer = self.model.local_optimizer_state(saved["optimizer"], mine)
        saved_in = optimizer
        optimizer = _in_groups_of(step.updater.optimizer, mine, saved_in)
        theirs, error = optimizer["parameters"], None
        if mine != theirs:
            ours, others = (sum(map(len, groups)) for groups in (mine, theirs))
            error = ValueError(
                f"the saved optimizer updates {others} parameters in {len(theirs)} groups, this one {ours} in "
                f"{len(mine)}, and they are not the same; freeze and group them as in the run that is resumed"
            )
        error = error or _other_optimizer(step.updater.optimizer, optimizer.get("param_groups", ()))
        error = error or _other_scheduler(step.updater.scheduler, saved.get("scheduler"))
        # With a sharded model, ranks may come to different results.
        self.group.raise_on_all_ranks(error, "restoring the optimizer")
        # Older checkpoints do not have a bucket order.
        if saved.get("bucket_order") is not None and not self.model.is_sharded:
            step.synchronizer.pack_in_order(saved["bucket_order"])
        optimizer_state = {key: value for key, value in optimizer.items() if key != "parameters"}
        step.updater.load_optimizer_state(optimizer_state)
        if step.updater.scheduler is not None:
            groups = getattr(step.updater.optimizer, "param_groups", [])
            state = _of_groups(saved["scheduler"], len(groups))
            step.updater.scheduler.load_state_dict(state)
            if optimizer is not saved_in or state != saved["scheduler"]:
                _set_rates_of_groups(step.updater.scheduler, groups)
        step.losses.load_states(saved["losses"])
        if step.precision is not None:
            step.precision.load_state(saved.get("mixed_precision"))


def _in_groups_of(optimizer: Any, names: Sequence[Sequence[str]], saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved state in the groups of ``names``, if it has the same options for the parameters of each of these.

    A checkpoint of a pipeline joins the groups of its stages. Groups with other options are not joined or divided, so
    that a user who has changed the groups is told so.
    """
    flat = [name for group in names for name in group]
    old = [name for group in saved["parameters"] for name in group]
    if names == saved["parameters"] or sorted(flat) != sorted(old) or not hasattr(optimizer, "param_groups"):
        return saved
    options_of: dict[str, dict[str, Any]] = {}
    for group, options in zip(saved["parameters"], saved["param_groups"]):
        mine = {key: x for key, x in options.items() if key != "params"}
        options_of.update((name, mine) for name in group)
    own_of: dict[str, str] = {}
    param_groups, begin = [], 0
    for group, own in zip(names, optimizer.param_groups):
        found = {repr(sorted(options_of[name].items())): options_of[name] for name in group}
        # Rates are the checkpoint's.
        shown = repr(sorted((key, x) for key, x in own.items() if key not in ("params", "lr", "initial_lr")))
        if len(found) > 1 or any(own_of.setdefault(each, shown) != shown for each in found):
            return saved
        options = next(iter(found.values()), {key: x for key, x in own.items() if key != "params"})
        param_groups.append({**options, "params": list(range(begin, begin + len(group)))})
        begin += len(group)
    number_of = {name: number for number, name in enumerate(flat)}
    state = {number_of[old[int(number)]]: entry for number, entry in saved["state"].items()}
    return {**saved, "parameters": [list(group) for group in names], "state": state, "param_groups": param_groups}


# What schedulers have for each parameter group.
_BY_GROUP = ("base_lrs", "_last_lr", "min_lrs", "max_lrs", "lr_lambdas")


def _of_groups(saved: Mapping[str, Any], num_groups: int) -> dict[str, Any]:
    """Return a scheduler's state without the lists of another number of groups, as the first stage may have it."""
    state: dict[str, Any] = {}
    for name, value in saved.items():
        if name == "_schedulers":
            state[name] = [_of_groups(each, num_groups) for each in value]
        elif name not in _BY_GROUP or not num_groups or len(value) == num_groups:
            state[name] = value
        elif name == "lr_lambdas":
            # Required; None leaves a function as it is.
            state[name] = [None] * num_groups
    return state


def _set_rates_of_groups(scheduler: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Give a restored scheduler the rates of this optimizer's groups: the state has those of the first stage."""
    for each in getattr(scheduler, "_schedulers", ()):
        _set_rates_of_groups(each, groups)
    if groups and all("initial_lr" in group for group in groups):
        for name, key in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
            if name in vars(scheduler):
                setattr(scheduler, name, [group[key] for group in groups])


def _other_scheduler(scheduler: Any, saved: Optional[Mapping[str, Any]]) -> Optional[ValueError]:
    """Return an error if the saved state is that of another kind of learning-rate scheduler, by its public names."""
    states = [None if scheduler is None else scheduler.state_dict(), saved]
    mine, theirs = (
        "none" if state is None else ", ".join(sorted(name for name in state if not name.startswith("_")))
        for state in states
    )
    if mine == theirs:
        return None
    return ValueError(
        f"the run that is resumed has another learning-rate scheduler (its state: {theirs}) than this one ({mine}); "
        "resume with the scheduler of that run"
    )


def _other_optimizer(optimizer: Any, saved_groups: Iterable[Mapping[str, Any]]) -> Optional[ValueError]:
    """Return an error if saved parameter groups have settings of another optimizer, which would fail in its step.

    Settings that are off do not count: newer versions of an optimizer may have more of them.
    """
    for mine, theirs in zip(getattr(optimizer, "param_groups", ()), saved_groups):
        settings = {**theirs, **mine}
        others = {name for name in mine.keys() ^ theirs.keys() if settings[name]} - {"params", "initial_lr"}
        if others:
            return ValueError(
                f"the checkpoint was saved with another optimizer than {type(optimizer).__name__}: only one of the two "
                f"has {', '.join(sorted(others))}; resume with the optimizer that saved it"
            )
    return None


def check_same_data(now: Mapping[str, Any], then: Mapping[str, Any], way_out: str) -> None:
    """Raise CheckpointError, with the hint ``way_out``, unless the data and its order are as in the saved run."""
    differences = []
    for key in now:
        if isinstance(now[key], Mapping) and isinstance(then.get(key), Mapping):
            names = [name for name in {**then[key], **now[key]} if then[key].get(name) != now[key].get(name)]
            differences += [f"{key} differ in {name!r}" for name in names]
        elif now[key] != then.get(key):
            differences.append(f"{key} was {then.get(key)} and is {now[key]}")
    if differences:
        raise CheckpointError(
            f"the checkpoint's run cannot be resumed with these data: {'; '.join(differences)}. Resume with what "
            f"it was trained with, or {way_out}"
        )


def warn_of_other_settings(now: Mapping[str, Any], then: Mapping[str, Any]) -> None:
    """Warn of settings that differ from those that the run was saved with."""
    differences = [f"{key} was {then[key]} and is {now[key]}" for key in now if key in then and now[key] != then[key]]
    if differences:
        warnings.warn(
            f"resuming with other settings: {'; '.join(differences)}. The optimizer and its schedule continue with "
            "the checkpoint's, the rest with the new ones: this is not the run that would have continued",
            RuntimeWarning,
            stacklevel=3,
        )
