"""Estimates the memory that training needs on a device, before anything runs.

Users call :func:`memory_of`; the planner uses its parts. Optimizer states by ZeRO stage follow Rajbhandari et al.,
*ZeRO* (2020). Activations are counted operator by operator, which for a transformer layer in half precision gives
s b h (34 + 5 a s / h) bytes (Korthikanti et al., *Reducing Activation Recomputation*, 2022).
"""

from __future__ import annotations

import bisect
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Optional

from mindnlp_dp.planner.cost_model.sharding_strategies import DeviceGroup, DeviceRates, choose_shardings, layouts
from mindnlp_dp.planner.profiles.cluster_profile import VALUE_BYTES, Link
from mindnlp_dp.planner.profiles.operator_graph import (
    BATCH,
    COLUMN,
    EXPERT,
    FEATURE,
    NONE,
    ROW,
    VOCABULARY,
    Graph,
    Model,
    Operator,
)

# Bytes per parameter: weights, gradients (that of a backward pass, and the sum over an update), two moments.
BYTES = (4, 8, 8)

_CUT = (COLUMN, ROW, VOCABULARY, EXPERT)

_roles_of: weakref.WeakKeyDictionary[object, dict[tuple[str, int], dict[str, str]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class MemoryUse:
    """Holds the bytes that training needs on a device, by kind."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class SavedActivations:
    """Holds what a device keeps of an operator for the backward pass, per sample: values, and masks of 1 byte each."""

    values: float
    masks: float


def memory_of(  # noqa: PLR0917
    model: Model, stage: Optional[tuple[int, int]] = None, tp: int = 1, dp: int = 1, zero_stage: int = 0,
    micro_batch: int = 1, recompute: bool = False, *, ep: int = 1, sp: int = 1, in_flight: int = 1,
    precision: str = "mixed",
) -> MemoryUse:  # fmt: skip
    """Estimate the bytes of a device that runs one stage of a pipeline.

    Args:
        stage: (first, last) of the model's operators, last included; all of them by default.
        tp: tensor-parallel devices.
        dp: data-parallel devices, over which ZeRO shards.
        zero_stage: the ZeRO stage: 1 shards the optimizer state, 2 also the gradients, 3 also the weights, of which
            those that are in no layer, and those of one layer, are gathered, and so are their gradients. Stage 3
            shards over ``dp`` only.
        micro_batch: samples that the device processes at a time.
        recompute: whether layers keep only their inputs and repeat their forward passes before their backward passes.
        ep: expert-parallel devices, which have different samples, too.
        sp: sequence-parallel devices, each with a part of the tokens; ZeRO shards over them, too.
        in_flight: micro-batches between their forward and their backward pass (:func:`most_in_flight`).
        precision: "mixed", in which layers compute with 2 bytes for a value, or "float32".
    """
    if precision not in VALUE_BYTES:
        raise ValueError(f"precision must be one of {', '.join(VALUE_BYTES)}, got {precision!r}")
    first, last = stage or (0, len(model.graph.operators) - 1)
    numbers_from_one = {"tp": tp, "dp": dp, "ep": ep, "sp": sp, "micro_batch": micro_batch, "in_flight": in_flight}
    for name, number in numbers_from_one.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    if not 0 <= first <= last < len(model.graph.operators):
        raise ValueError(f"stage must be operators (first, last) of 0 to {len(model.graph.operators) - 1}, got {stage}")
    if tp > 1 and ep > 1:
        raise ValueError(f"expert parallelism is supported only with data parallelism, got tp={tp} and ep={ep}")
    roles = strategies_of(model, "ep" if ep > 1 else "tp", max(tp, ep))
    model = with_split_tokens(model, sp, tp)
    operators = model.graph.operators[first : last + 1]
    n = max(tp, ep)
    mine = {operator.name for operator in operators}
    counted = [(o, n if roles[o.name] in _CUT else 1, roles[o.name] == EXPERT) for o in operators]
    counted = [each for each in counted if each[0].tied_to not in mine]
    numbers = {
        kind: sum(o.parameters / parts for o, parts, is_expert in counted if is_expert == kind) for kind in (0, 1)
    }
    frozen = {kind: sum(o.frozen / parts for o, parts, is_expert in counted if is_expert == kind) for kind in (0, 1)}
    matrices = [sum(o.matrices / parts for o, parts, is_expert in counted if is_expert == kind) for kind in (0, 1)]
    saved = [saved_of(o, roles[o.name], n) for o in operators]
    value = VALUE_BYTES[precision]
    kept = [value * s.values + s.masks for s in saved]
    if recompute:
        layers = recomputed_layers(model)[first : last + 1]
        inputs = layer_inputs(model)[first : last + 1]
        again = [sum(k for k, of in zip(kept, layers) if of == layer) for layer in set(layers) - {None}]
        kept = [value * i + (k if of is None else 0.0) for k, of, i in zip(kept, layers, inputs)]
        activations = micro_batch * (in_flight * sum(kept) + max(again, default=0.0))
    else:
        activations = micro_batch * in_flight * sum(kept)
    # One shard is the weight.
    zero_stage = 0 if zero_stage == 3 and dp == 1 else zero_stage
    dp, ep = (dp, 1) if zero_stage == 3 else (dp * sp, ep)
    use = parameter_memory(
        numbers[False], numbers[True], frozen[False], frozen[True], dp=dp, ep=ep, zero_stage=zero_stage,
        activations=activations, matrices=matrices,
    )  # fmt: skip
    return with_gathered(use, value, in_full_at_once(model, operators, roles, n)) if zero_stage == 3 else use


class InFull(NamedTuple):
    """How many parameters of a device stage 3 has in full: in no layer, in the largest layer; of both, the trained."""

    in_no_layer: float
    in_layer: float
    trained: float


def with_gathered(use: MemoryUse, size: int, in_full: InFull) -> MemoryUse:
    """Return the memory with what stage 3 has in full: weights, and gradients before they are reduced, in ``size``."""
    weights = use.weights + size * (in_full.in_no_layer + in_full.in_layer)
    return replace(use, weights=weights, gradients=use.gradients + size * in_full.trained)


def in_full_at_once(model: Model, operators: Sequence[Operator], roles: Mapping[str, str], n: int) -> InFull:
    """Return what stage 3 gathers at most; ``n`` devices have parts of the operators that their roles split."""
    layer_of = dict(zip((o.name for o in model.graph.operators), recomputed_layers(model)))
    numbers: dict[Optional[int], float] = {None: 0.0}
    trained: dict[Optional[int], float] = {None: 0.0}
    for operator in operators:
        if operator.tied_to is None:
            layer, parts = layer_of[operator.name], n if roles[operator.name] in _CUT else 1
            numbers[layer] = numbers.get(layer, 0.0) + operator.parameters / parts
            trained[layer] = trained.get(layer, 0.0) + (operator.parameters - operator.frozen) / parts
    in_no_layer, trained_in_no_layer = numbers.pop(None), trained.pop(None)
    most, most_trained = (max(of_layers.values(), default=0.0) for of_layers in (numbers, trained))
    return InFull(in_no_layer, most, trained_in_no_layer + most_trained)


def parameter_memory(
    parameters: float, expert_parameters: float = 0.0, frozen: float = 0.0, frozen_experts: float = 0.0, *, dp: int = 1,
    ep: int = 1, zero_stage: int = 0, activations: float = 0.0,
    matrices: Sequence[float] = (0.0, 0.0),
) -> MemoryUse:  # fmt: skip
    """Return the memory for these parameters; expert ones are replicated over ``dp``, others over ``dp * ep``.

    Of them, ``frozen`` and ``frozen_experts`` have neither a gradient nor an optimizer state, and ``matrices``, dense
    and of experts, have one moment in place of two.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage must be 0, 1, 2 or 3, got {zero_stage}")
    kinds: list[float] = []
    for size, divided_from in zip(BYTES, (3, 2, 1)):
        dense, experts = (
            (parameters, expert_parameters) if not kinds else (parameters - frozen, expert_parameters - frozen_experts)
        )
        needed = size * (dense + experts)
        if zero_stage >= divided_from:
            shards = size * (dense / (dp * ep) + experts / dp)
            # Stage 2 shards the gradients that are exchanged, and not those of the backward pass.
            needed = (needed + shards) / 2 if divided_from == zero_stage == 2 else shards
        kinds.append(needed)
    shares = (dp * ep, dp) if zero_stage else (1, 1)
    kinds[2] -= sum(4 * numel / share for numel, share in zip(matrices, shares))
    return MemoryUse(kinds[0], kinds[1], kinds[2], activations)


def with_split_tokens(model: Model, sp: int, tp: int) -> Model:
    """Return the model of the ``sp`` rank with the most tokens: its layers, and the logits and loss of all tokens.

    In attention it has all tokens of its heads. Ranks that share a head of keys and values have a copy each.
    """
    if sp == 1:
        return model
    share = math.ceil(model.sequence / sp) / model.sequence
    copies = max(1, sp * tp // model.divides.get("num_key_value_heads", sp * tp))
    operators = []
    for o in model.graph.operators:
        is_split = o.layer is not None or (o.name in ("head", "loss") and o.rows == model.sequence)
        repeated = (copies - 1) * (o.width_in - o.width_out) if o.kind == "attention" else 0
        per_device = {
            name: share * getattr(o, name) for name in ("rows", "flops", "traffic", "scores", "saved", "masks")
        }
        operators.append(replace(o, width_in=o.width_in + repeated, **per_device) if is_split else o)
    return replace(model, graph=Graph(operators, model.graph.name))


def recomputed_layers(model: Model) -> list[Optional[int]]:
    """Return the layer of each operator that would be recomputed; None for one that would not.

    A model of operators without transformer layers is recomputed between the places where it may be cut.
    """
    operators = model.graph.operators
    if model.blocks:
        return [o.layer for o in operators]
    return [bisect.bisect_right(model.split_points, place) for place in range(len(operators))]


def layer_inputs(model: Model) -> list[float]:
    """Return the values per sample that recomputation keeps at each operator: the inputs of a layer that begins there.

    A tensor that enters several layers, such as the output of an encoder, counts where it enters the first of them.
    """
    layers, operators = recomputed_layers(model), model.graph.operators
    found = [0.0] * len(operators)
    kept: set[str] = set()
    for place, (operator, layer) in enumerate(zip(operators, layers)):
        if layer is None:
            continue
        for source in operator.inputs:
            if layers[model.graph.place_of[source]] != layer and source not in kept:
                kept.add(source)
                found[place] += model.graph.by_name[source].num_out
    return found


def entering_values(model: Model, first: int) -> float:
    """Return the values per sample that a stage receives if it begins with operator ``first``."""
    operators = model.graph.operators
    before = {o.name for o in operators[:first]}
    used = {source for o in operators[first:] for source in o.inputs if source in before}
    return sum(model.graph.by_name[name].num_out for name in used)


def saved_of(operator: Operator, role: str, n: int) -> SavedActivations:
    """Return what each of ``n`` devices keeps for the backward pass if the operator has this role among them."""
    (_, want), _ = layouts(operator, (NONE, role))
    of_input = operator.num_in / (n if want == FEATURE else 1) if operator.keeps_input else 0.0
    inside = n if role not in (NONE, BATCH) and (operator.kind != "experts" or role == COLUMN) else 1
    return SavedActivations(of_input + operator.saved / inside, operator.masks / inside)


def strategies_of(model: Model, axis: str, n: int) -> dict[str, str]:
    """Return each operator's role among ``n`` devices: for "tp" the roles that exchange the fewest bytes, or "ep"."""
    known = _roles_of.setdefault(model.graph, {})
    if (axis, n) not in known:
        known[axis, n] = _roles(model, axis, n)
    return known[axis, n]


def _roles(model: Model, axis: str, n: int) -> dict[str, str]:
    operators = model.graph.operators
    if n == 1:
        return {o.name: NONE for o in operators}
    if axis == "ep":
        return {o.name: EXPERT if o.kind == "experts" else BATCH for o in operators}
    mesh = DeviceGroup((1, n), (Link(0.0, 1.0), Link(0.0, 1.0)))
    allowed = (None, (COLUMN, ROW, VOCABULARY, FEATURE, NONE))
    _, chosen = choose_shardings(model.graph, mesh, DeviceRates(), 1.0, redundant=False, axes_for=allowed)
    return {name: roles[1] for name, roles in chosen.items()}
