"""This module creates the updater for an optimizer, with the ZeRO stage that was asked for or suits this job.

The Trainers and make_train_step call it. Every rank gets the same kind of updater.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from typing import Any, Optional, Union

import mindspore

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.communication.transports.mindspore.mindspore_transport import MindSporeChannel
from mindnlp_dp.data_parallel.model_scope import ModelScope
from mindnlp_dp.data_parallel.multi_group_synchronizer import MultiGroupSynchronizer
from mindnlp_dp.data_parallel.synchronizer import GradientSynchronizer
from mindnlp_dp.data_parallel.synchronizer_base import Synchronizer
from mindnlp_dp.optim.fused.flat_weights import unshare
from mindnlp_dp.optim.multi_group_updater import MultiGroupUpdater
from mindnlp_dp.optim.updater import MindNLPUpdater, MindSporeUpdater, Updater, is_untouched
from mindnlp_dp.runtime.arrays import dtype_name
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api
from mindnlp_dp.runtime.versions import mindnlp_series

ZERO_STAGES = (0, 1, 2, 3, "auto")

# The number of names that a message shows.
_SHOWN = 3


def check_zero_stage(zero_stage: Any) -> Union[int, str]:
    """Return ``zero_stage`` unchanged; raise ValueError if it is not valid."""
    if isinstance(zero_stage, bool) or zero_stage not in ZERO_STAGES:
        raise ValueError(
            f"zero_stage must be 0 (every rank updates everything), 1 (optimizer state is sharded), 2 (gradients too), "
            f'3 (weights too) or "auto", got {zero_stage!r}'
        )
    if zero_stage == 3 and mindnlp_series() != "0.4":
        raise ValueError(f"zero_stage=3 is for models of MindNLP 0.4, and {mindnlp_series()} is installed; use 2")
    return zero_stage


def make_updater(
    optimizer: Any,
    synchronizer: Synchronizer,
    zero_stage: Union[int, str] = "auto",
    scheduler: Any = None,
    scope: Optional[ModelScope] = None,
    *,
    shows_gradients: bool = False,
) -> Updater:
    """Return the updater of ``optimizer`` for gradients that ``synchronizer`` exchanges. A collective.

    ``scope`` names the ranks that the model is sharded over, if it is sharded. With ``shows_gradients``, the averaged
    gradients are at the parameters before each update, and the optimizer's own code updates.

    Raises:
        ValueError: If the update cannot be sharded as ``zero_stage`` says, or this optimizer cannot update a sharded
            model; the message gives the reason.
    """
    check_zero_stage(zero_stage)
    scope = scope or ModelScope()
    _check_scope(optimizer, synchronizer, scope)
    if isinstance(synchronizer, MultiGroupSynchronizer):
        stage = 0 if zero_stage == "auto" else zero_stage
        updaters = [
            make_updater(
                optimizer, each, stage, scheduler if number == 0 else None, scope.part(places),
                shows_gradients=shows_gradients,
            )
            for number, (each, places) in enumerate(zip(synchronizer.synchronizers, synchronizer.places))
        ]  # fmt: skip
        return MultiGroupUpdater(optimizer, synchronizer, updaters)
    _check_agreement(optimizer, synchronizer, zero_stage)
    _warn_of_small_types(optimizer, synchronizer)
    if isinstance(synchronizer, GradientSynchronizer):
        synchronizer.scatter = synchronizer.keeps_tensors = False
        synchronizer.before_packing = lambda: None
    reason = _why_unsharded(optimizer, synchronizer)
    if zero_stage not in (0, "auto") and reason:
        raise ValueError(f"zero_stage={zero_stage} is not supported: {reason}; leave it out, or set it to 0")
    if isinstance(optimizer, mindspore.nn.Optimizer):
        unshare(synchronizer.parameters)
        return MindSporeUpdater(optimizer, synchronizer.parameters)
    rule = None if synchronizer.group.on_device or shows_gradients else rule_for(optimizer, synchronizer)
    stage, why = (
        (0, reason) if zero_stage == "auto" and reason else _stage(zero_stage, synchronizer, has_rule=rule is not None)
    )
    if zero_stage == "auto" and synchronizer.group.world_size > 1 and synchronizer.group.is_main:
        _print_once(f'zero_stage="auto" is {stage} here: {why}')
    from mindnlp_dp.optim.flat_updater import FlatUpdater, return_state

    if rule is not None and isinstance(synchronizer, GradientSynchronizer):
        # Between hosts, weights are more bytes than gradients, whose blocks of zeros are not sent.
        shard_scope = "host" if zero_stage == "auto" else "world"
        may_share = _dispatches_synchronously()
        return FlatUpdater(
            optimizer, synchronizer, rule, stage, scheduler, may_share=may_share, shard_scope=shard_scope, scope=scope
        )
    if not synchronizer.group.on_device:
        return_state(optimizer, synchronizer.parameters)
    # A device slice contains several parameters, and the norm of a sharded model may count only some of them.
    is_full = scope.is_full and not shows_gradients
    if (
        stage
        and is_full
        and isinstance(synchronizer, GradientSynchronizer)
        and _can_be_sharded(optimizer, synchronizer)
    ):
        from mindnlp_dp.optim.zero.device_updater import DeviceUpdater

        return DeviceUpdater(optimizer, synchronizer, stage, scheduler)
    if stage:
        from mindnlp_dp.optim.zero.parameterwise import ParameterwiseZeroUpdater

        _warn_of_unknown_optimizer(optimizer, synchronizer, stage)
        return ParameterwiseZeroUpdater(optimizer, synchronizer.parameters, synchronizer.group, scheduler, scope)
    unshare(synchronizer.parameters)
    return MindNLPUpdater(optimizer, synchronizer.parameters, scheduler, scope)


def _check_scope(optimizer: Any, synchronizer: Synchronizer, scope: ModelScope) -> None:
    """Raise ValueError if this optimizer cannot update a model that is sharded over ranks."""
    if scope.is_full:
        return
    from mindnlp_dp.optim import LAMB, LARS, Muon

    if isinstance(optimizer, mindspore.nn.Optimizer):
        raise ValueError(
            "a model that is sharded over ranks is updated by an optimizer of MindNLP's (mindnlp.core.optim), got "
            f"{type(optimizer).__name__}"
        )
    if not isinstance(synchronizer, (GradientSynchronizer, MultiGroupSynchronizer)):
        raise ValueError("MindSpore's reducer exchanges gradients over all ranks, but some ranks have other shards")
    if isinstance(optimizer, (LAMB, LARS, Muon)) and scope.has_sharded_parameters:
        needed = "full matrices" if isinstance(optimizer, Muon) else "the norm of each whole parameter"
        raise ValueError(
            f"{type(optimizer).__name__} needs {needed}, and each rank has a part of them (tp > 1); "
            "use AdamW, Adam or SGD"
        )


def _check_agreement(optimizer: Any, synchronizer: Synchronizer, zero_stage: Union[int, str]) -> None:
    """Raise ValueError if ranks would update in different ways: they would hang, or their models would differ."""
    mine = {"zero_stage": repr(zero_stage), "the optimizer": type(optimizer).__qualname__}
    if not isinstance(optimizer, mindspore.nn.Optimizer):
        plain = (int, float, str, tuple, list, type(None))
        mine["the settings of its groups"] = repr(
            [{name: v for name, v in sorted(group.items()) if name != "params" and isinstance(v, plain)}
             for group in optimizer.param_groups]
        )  # fmt: skip
        mine["its hooks or step"] = "unchanged" if is_untouched(optimizer) else "others"
    mine["dispatch of operators"] = "synchronous" if _dispatches_synchronously() else "asynchronous"
    for rank, theirs in enumerate(everyone := synchronizer.group.all_gather_object(mine)):
        for what, first in everyone[0].items():
            if theirs.get(what) != first:
                raise ValueError(
                    f"ranks must have the same optimizer settings: {what} is {first} on rank 0, and "
                    f"{theirs.get(what)} on rank {rank}; make the optimizer and the step the same way on every rank"
                )


def warn_of_parameters_left_out(optimizer: Any, named: Iterable[tuple[str, Any]], group: ProcessGroup) -> None:
    """Warn on the main rank that the optimizer has some of these trainable parameters in no group.

    ``named`` are the parameters' names and the parameters.
    """
    known = {id(p) for each in optimizer.param_groups for p in each["params"]}
    left_out = [name for name, p in named if p.requires_grad and id(p) not in known]
    if left_out and group.is_main:
        more = f" and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
        warnings.warn(
            f"trainable parameters are in no group of {type(optimizer).__name__}, which does not change them: "
            f"{', '.join(map(repr, left_out[:_SHOWN]))}{more}. If they were unfrozen, or the model was replaced, make "
            "a new optimizer (in a Trainer: trainer.optimizer = trainer.lr_scheduler = None before train()); if they "
            "are to stay as they are, set requires_grad = False",
            RuntimeWarning,
            stacklevel=3,
        )


def check_matrices(optimizer: Any, model: Any) -> None:
    """Raise ValueError if :class:`~mindnlp_dp.optim.Muon` would orthogonalize an embedding of this model."""
    from mindnlp_dp.optim.muon import embedding_names

    embeddings = embedding_names(model)
    matrices = [id(p) for group in optimizer.param_groups if group.get("use_muon") for p in group["params"]]
    if wrong := [embeddings[p] for p in matrices if p in embeddings]:
        raise ValueError(
            f"{wrong[0]!r} is an embedding, which Muon does not suit; put it into a group with use_muon=False, or take "
            "the groups of mindnlp_dp.optim.muon_groups(model)"
        )


def _warn_of_small_types(optimizer: Any, synchronizer: Synchronizer) -> None:
    """Warn on the main rank that Adam's squared gradients underflow in float16."""
    optim = mindnlp_api().optim
    is_adam = isinstance(optimizer, (optim.Adam, optim.AdamW, mindspore.nn.Adam, mindspore.nn.AdamWeightDecay))
    if is_adam and synchronizer.group.is_main and any(dtype_name(p) == "float16" for p in synchronizer.parameters):
        warnings.warn(
            f"{type(optimizer).__name__} keeps its moments in the parameters' type, and float16 makes zero of the "
            "square of any gradient below 2.4e-4: training differs from training in float32. Train in float32, or "
            "use SGD",
            RuntimeWarning,
            stacklevel=3,
        )


def _warn_of_unknown_optimizer(optimizer: Any, synchronizer: Synchronizer, stage: int) -> None:
    """Warn on the main rank that each rank runs the user's optimizer on some parameters only."""
    is_known = type(optimizer).__module__.partition(".")[0] in ("mindnlp", "mindtorch", __package__.partition(".")[0])
    if not is_known and synchronizer.group.is_main:
        warnings.warn(
            f"zero_stage={stage}: each rank runs {type(optimizer).__name__}'s own step on some of the parameters. That "
            "gives the same weights only if it updates each parameter by itself, without a norm or a mean over several "
            "of them; if it does not, set zero_stage=0",
            RuntimeWarning,
            stacklevel=3,
        )


def _can_be_sharded(optimizer: Any, synchronizer: GradientSynchronizer) -> bool:
    """Return whether each device can update its slices of flat tensors; if not, full parameters are assigned."""
    return (
        synchronizer.group.on_device
        and isinstance(synchronizer.channel, MindSporeChannel)
        and _is_elementwise(optimizer)
    )


def _why_unsharded(optimizer: Any, synchronizer: Synchronizer) -> str:
    """Return the reason why every rank must update everything, or an empty string if the update can be sharded."""
    if isinstance(optimizer, mindspore.nn.Optimizer):
        return "optimizers of mindspore.nn update all of their parameters in one call"
    if not isinstance(synchronizer, GradientSynchronizer):
        return "MindSpore's reducer gives full gradients to every rank"
    if synchronizer.compression == "powersgd":
        return "PowerSGD gives full gradients to every rank"
    return ""


def _stage(zero_stage: Union[int, str], synchronizer: Synchronizer, *, has_rule: bool) -> tuple[int, str]:
    if zero_stage != "auto":
        return int(zero_stage), "asked for"
    group = synchronizer.group
    reasons = (
        (group.world_size == 1, "there is one rank"),
        (group.on_device, "on devices a sharded update saves memory; whether it saves time was not measured"),
        (not has_rule, "this optimizer's own code updates whole parameters"),
        (not synchronizer.channel.shares_memory, "ranks share no memory, and new weights would have to be sent"),
        (
            not _dispatches_synchronously(),
            "MindSpore dispatches operators asynchronously, and no weights can be shared",
        ),
        (
            group.local_world_size == 1,
            "between hosts, weights would need more bandwidth than gradients, whose blocks of zeros are not sent",
        ),
    )
    for applies, reason in reasons:
        if applies:
            return 0, reason
    if group.local_world_size < group.world_size:
        return 1, "the ranks of each host share one set of weights, and each updates its slice; so does every host"
    return 2, "the ranks of a host share one set of weights, and each updates its slice"


@functools.cache
def _print_once(message: str) -> None:
    print(message, flush=True)


def _dispatches_synchronously() -> bool:
    from mindspore._c_expression import RuntimeConf

    return bool(RuntimeConf.get_instance().is_launch_blocking())


def rule_for(optimizer: Any, synchronizer: Synchronizer) -> Optional[Any]:
    """Return the rule that does in flat arrays what ``optimizer`` does; None if no rule is known to.

    A subclass has no rule, because it may compute something else, nor has an optimizer with step hooks.
    """
    if not isinstance(synchronizer, GradientSynchronizer) or synchronizer.compression == "powersgd":
        return None
    from mindnlp_dp.optim import LAMB, LARS, Muon
    from mindnlp_dp.optim.fused.rules import AdamRule, LAMBRule, LARSRule, MuonRule, SGDRule

    optim, kind, groups = mindnlp_api().optim, type(optimizer), optimizer.param_groups
    if any(dtype_name(p) != "float32" or isinstance(p, mindspore.Parameter) for p in synchronizer.parameters):
        return None
    if not is_untouched(optimizer):
        return None
    if kind in (optim.AdamW, optim.Adam, Muon):
        # MindNLP 0.5's groups contain this setting.
        decoupled = {bool(group.get("decoupled_weight_decay", kind is not optim.Adam)) for group in groups}
        betas = [beta for group in groups for beta in group["betas"]]
        if len(decoupled) > 1 or not all(isinstance(beta, (int, float)) for beta in betas):
            return None
        rule = MuonRule if kind is Muon else AdamRule
        return rule(decoupled=decoupled.pop(), epsilon_is_corrected=mindnlp_series() == "0.5")
    if kind is optim.SGD:
        return SGDRule(has_momentum=any(group["momentum"] for group in groups))
    if kind is LAMB:
        return LAMBRule()
    return LARSRule() if kind is LARS else None


def _is_elementwise(optimizer: Any) -> bool:
    """Return whether the optimizer is known to update each element independently, so that parameters can be split."""
    return updates_each_element_alone(optimizer) and is_untouched(optimizer)


def updates_each_element_alone(optimizer: Any) -> bool:
    """Return whether the optimizer's class is known to update each element by itself."""
    optim = mindnlp_api().optim
    return type(optimizer) in (optim.AdamW, optim.Adam, optim.SGD)
