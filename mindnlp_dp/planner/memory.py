"""What training takes of a device's memory, before anything runs.

Goes in: a model, which of its layers a device has, and how they are shared out. Comes out: bytes by kind. States of the
optimizer by ZeRO stage are those of Rajbhandari et al., *ZeRO* (2020); activations are counted operator by operator,
which for a transformer layer is s b h (34 + 5 a s / h) bytes in half precision (Korthikanti et al., *Reducing
Activation Recomputation*, 2022).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Optional

from .cluster import Link
from .operators import BATCH, COLUMN, EXPERT, FEATURE, NONE, ROW, VOCABULARY, Model, Operator
from .roles import Mesh, Work, choose_roles, layouts

# Bytes a parameter: weights, gradients, optimizer. Mixed: weights and gradients of two bytes; the optimizer has weights
# and two moments of four. In float32, a gradient is made by the backward pass, and summed up over a window.
BYTES = {"mixed": (2, 2, 12), "float32": (4, 8, 8)}
_CUT = (COLUMN, ROW, VOCABULARY, EXPERT)
_roles_of: weakref.WeakKeyDictionary[object, dict[tuple[str, int], dict[str, str]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of a device."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class SavedActivations:
    """Values of one sample that a device keeps of an operator for the backward pass, and masks, a byte each."""

    values: float
    masks: float


def memory_of(  # noqa: PLR0917
    model: Model, stage: Optional[tuple[int, int]] = None, tp: int = 1, dp: int = 1, zero_stage: int = 0,
    micro_batch: int = 1, recompute: bool = False, *, ep: int = 1, in_flight: int = 1, precision: str = "mixed",
) -> MemoryUse:  # fmt: skip
    """Bytes of a device that has one stage of a pipeline.

    Args:
        stage: (first, last) of the model's operators, last included; all of them by default.
        tp: devices among which tensors are cut.
        dp: devices with other samples, among which ZeRO divides.
        zero_stage: 1 divides the optimizer, 2 gradients as well, 3 weights as well.
        micro_batch: samples that the device works on at a time.
        recompute: whether a stage keeps its input alone, and does its forward pass again before the backward pass.
        ep: devices among which experts are spread, which have other samples, too.
        in_flight: micro batches between their forward and their backward pass (:func:`most_in_flight`).
        precision: "mixed" or "float32".
    """
    first, last = stage or (0, len(model.graph.operators) - 1)
    numbers_from_one = {"tp": tp, "dp": dp, "ep": ep, "micro_batch": micro_batch, "in_flight": in_flight}
    for name, number in numbers_from_one.items():
        if number < 1:
            raise ValueError(f"{name} must be from 1 on, got {number}")
    if not 0 <= first <= last < len(model.graph.operators):
        raise ValueError(f"stage must be operators (first, last) of 0 to {len(model.graph.operators) - 1}, got {stage}")
    if tp > 1 and ep > 1:
        raise ValueError(f"experts are spread with data parallelism alone, got tp={tp} and ep={ep}")
    operators = model.graph.operators[first : last + 1]
    roles = roles_of(model, "ep" if ep > 1 else "tp", max(tp, ep))
    n = max(tp, ep)
    mine = {operator.name for operator in operators}
    numbers = {
        is_expert: sum(
            o.parameters / (n if roles[o.name] in _CUT else 1)
            for o in operators
            if o.tied_to not in mine and (roles[o.name] == EXPERT) == is_expert
        )
        for is_expert in (False, True)
    }
    saved = [saved_of(o, roles[o.name], n) for o in operators]
    value = 2 if precision == "mixed" else 4
    whole = micro_batch * sum(value * s.values + s.masks for s in saved)
    entering = micro_batch * value * entering_values(model, first)
    activations = in_flight * entering + whole if recompute else in_flight * whole
    return parameter_memory(
        numbers[False], numbers[True], dp=dp, ep=ep, zero_stage=zero_stage, precision=precision, activations=activations
    )


def parameter_memory(
    parameters: float, expert_parameters: float = 0.0, *, dp: int = 1, ep: int = 1, zero_stage: int = 0,
    precision: str = "mixed", activations: float = 0.0,
) -> MemoryUse:  # fmt: skip
    """Of so many parameters on a device; experts' are replicated over ``dp`` alone, others over ``ep`` as well."""
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage must be 0, 1, 2 or 3, got {zero_stage}")
    if precision not in BYTES:
        raise ValueError(f"precision must be one of {', '.join(BYTES)}, got {precision!r}")
    kinds = []
    for size, divided_from in zip(BYTES[precision], (3, 2, 1)):
        is_divided = zero_stage >= divided_from
        kinds.append(
            size * (parameters / (dp * ep if is_divided else 1) + expert_parameters / (dp if is_divided else 1))
        )
    return MemoryUse(kinds[0], kinds[1], kinds[2], activations)


def entering_values(model: Model, first: int) -> float:
    """Of one sample, what a stage that begins with this operator receives."""
    operators = model.graph.operators
    before = {o.name for o in operators[:first]}
    used = {source for o in operators[first:] for source in o.inputs if source in before}
    return sum(model.graph.by_name[name].num_out for name in used)


def saved_of(operator: Operator, role: str, n: int) -> SavedActivations:
    """What a device keeps, where the operator has this role among ``n`` devices."""
    (_, want), _ = layouts(operator, (NONE, role))
    of_input = operator.num_in / (n if want == FEATURE else 1) if operator.keeps_input else 0.0
    inside = n if role not in (NONE, BATCH) and (operator.kind != "experts" or role == COLUMN) else 1
    return SavedActivations(of_input + operator.saved / inside, operator.masks / inside)


def roles_of(model: Model, axis: str, n: int) -> dict[str, str]:
    """By operator, its role among ``n`` devices of the axis "tp" (those that exchange the least bytes) or "ep"."""
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
    mesh = Mesh((1, n), (Link(0.0, 1.0), Link(0.0, 1.0)))
    allowed = (None, (COLUMN, ROW, VOCABULARY, FEATURE, NONE))
    _, chosen = choose_roles(model.graph, mesh, Work(), 1.0, redundant=False, axes_for=allowed)
    return {name: roles[1] for name, roles in chosen.items()}
