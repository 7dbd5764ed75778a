"""Prices contiguous layers on a mesh: seconds per micro-batch and per update, and bytes of memory.

:class:`StageCosts` keeps prefix sums over layers, each an affine function of the samples per device, so that any range
of layers and any micro-batch costs one subtraction. The search for candidates and the simulation use it.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindnlp_dp.planner.cost_model.memory_cost import (
    MemoryUse,
    entering_values,
    in_full_at_once,
    layer_inputs,
    parameter_memory,
    recomputed_layers,
    saved_of,
    strategies_of,
    with_gathered,
    with_split_tokens,
)
from mindnlp_dp.planner.cost_model.sharding_strategies import DeviceGroup, DeviceRates, cost_of, layouts, resharding
from mindnlp_dp.planner.profiles.cluster_profile import (
    Cluster,
    Link,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from mindnlp_dp.planner.profiles.operator_graph import (
    BATCH,
    COLUMN,
    EXPERT,
    NONE,
    ROW,
    VOCABULARY,
    Graph,
    Model,
    Operator,
    cluster_layers,
    crossing,
)
from mindnlp_dp.runtime.mesh_spec import Size, mesh_name

# Gradients are exchanged in float32.
GRADIENT_BYTES = 4


@dataclass(frozen=True)
class StageParallelism:
    """Holds the degrees of parallelism within a stage: (dp, tp), or (dp, ep) with expert parallelism; and sp."""

    dp: int = 1
    tp: int = 1
    ep: int = 1
    sp: int = 1

    @property
    def num_devices(self) -> int:
        return self.num_replicas * self.tp

    @property
    def num_data(self) -> int:
        """Return the number of devices with different samples."""
        return self.dp * self.ep

    @property
    def num_replicas(self) -> int:
        """Return the number of devices with the same weights, apart from experts, which exchange their gradients."""
        return self.num_data * self.sp

    def __str__(self) -> str:
        return mesh_name(self.mesh())

    def mesh(self, pp: int = 1) -> dict[str, int]:
        """Return the sizes for ``--mesh``; the axes that communicate most come last, on neighbors within a host."""
        sizes = {"pp": pp, "dp": self.dp, "ep": self.ep, "sp": self.sp, "tp": self.tp}
        return {axis: size for axis, size in sizes.items() if size > 1} or {"dp": 1}


def mesh_of(stages: Sequence[StageParallelism]) -> dict[str, Size]:
    """Return the sizes for ``--mesh`` of a pipeline with these stages."""
    if len(set(stages)) == 1:
        return dict(stages[0].mesh(len(stages)))
    by_axis = {axis: tuple(getattr(s, axis) for s in stages) for axis in ("dp", "ep", "sp", "tp")}
    sizes = {axis: of[0] if len(set(of)) == 1 else of for axis, of in by_axis.items()}
    return {"pp": len(stages), **{axis: size for axis, size in sizes.items() if size != 1}}


def stages_of_mesh(mesh: Mapping[str, Size]) -> list[StageParallelism]:
    """Return the degrees of parallelism of each stage; raise ValueError for sizes that are not a mesh.

    Ranks of the axis "fsdp" are priced as those of "dp", with ``zero_stage=3``.
    """
    if "fsdp" in mesh:
        if mesh.get("dp", 1) != 1 or mesh.get("pp", 1) != 1:
            raise ValueError(f"fsdp is priced without dp and pp, got {dict(mesh)}")
        mesh = {"dp" if axis == "fsdp" else axis: size for axis, size in mesh.items() if axis != "dp"}
    unknown = sorted(set(mesh) - {"dp", "pp", "ep", "sp", "tp"})
    pp = mesh.get("pp", 1)
    sizes = {axis: size if isinstance(size, tuple) else (size,) for axis, size in mesh.items()}
    if (
        unknown
        or any(not isinstance(number, int) or number < 1 for size in sizes.values() for number in size)
        or not isinstance(pp, int)
        or any(len(size) not in (1, pp) for size in sizes.values())
    ):
        raise ValueError(
            f"a mesh has axes dp, pp, ep, fsdp, sp, tp, each at least 1, or of as many stages; got {dict(mesh)}"
        )
    by_stage = {axis: size if len(size) == pp else size * pp for axis, size in sizes.items() if axis != "pp"}
    return [StageParallelism(**{axis: size[stage] for axis, size in by_stage.items()}) for stage in range(pp)]


# Columns of the table: fixed and per-sample seconds (two columns each) of forward compute, backward compute, forward
# collectives and backward collectives; parameters; expert parameters; bytes kept per sample for the backward pass. With
# recomputation: fixed and per-sample seconds of the second forward pass (compute, collectives); bytes kept per sample.
# Of the parameters, those that are frozen; those that Muon updates, and the FLOPs of that (two columns each, the second
# for experts).
_AHEAD, _BACK, _PARAMETERS, _OF_EXPERTS, _KEPT, _AGAIN, _KEPT_INPUTS, _FROZEN, _FROZEN_EXPERTS = (
    4, 6, 8, 9, 10, 11, 15, 16, 17,
)  # fmt: skip
_MATRICES, _MATRIX_FLOPS, _NUM_COLUMNS = 18, 20, 22


_known_kinds: weakref.WeakKeyDictionary[Graph, dict[tuple[str, int], Any]] = weakref.WeakKeyDictionary()
_known_entering: weakref.WeakKeyDictionary[Graph, dict[tuple[int, ...], np.ndarray]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Times:
    """Holds the seconds that some layers take for a micro-batch: compute and collectives of each pass."""

    forward: Any
    backward: Any
    forward_collectives: Any
    backward_collectives: Any

    @property
    def total(self) -> Any:
        return self.forward + self.backward + self.forward_collectives + self.backward_collectives


def layers_of(model: Model, most: int) -> list[int]:
    """Group the operators into at most ``most`` layers between the model's cuts; return the first operator of each."""
    num_layers = min(most, len(model.split_points) + 1)
    flops = [o.flops for o in model.graph.operators]
    return cluster_layers(flops, crossing(model.graph), num_layers, split_points=model.split_points)


class StageCosts:
    """Prices every contiguous range of layers for one :class:`StageParallelism`."""

    def __init__(self, model: Model, cluster: Cluster, sharing: StageParallelism, firsts: list[int]) -> None:
        self.model, self.cluster, self.sharing, self.firsts = model, cluster, sharing, firsts
        axis, n = ("ep", sharing.ep) if sharing.ep > 1 else ("tp", sharing.tp)
        roles = strategies_of(model, axis, n)
        model = with_split_tokens(model, sharing.sp, sharing.tp)
        operators = model.graph.operators
        links = (cluster.link(sharing.dp, n * sharing.sp), cluster.link(n, sharing.sp if axis == "ep" else 1))
        of_tokens = cluster.link(sharing.sp, sharing.tp)
        mesh = DeviceGroup((sharing.dp, n), links)
        size = cluster.bytes_per_value
        rates = DeviceRates(
            1 / (cluster.flops * cluster.efficiency), size / cluster.memory_bandwidth, 1 / cluster.score_rate,
            1 / cluster.draw_rate, cluster.call, 1 / cluster.gradient_rate, size,
        )  # fmt: skip
        examples, kinds = _kinds_of(model.graph, roles, (axis, n))
        columns = []
        for operator in examples:
            column = _column(operator, roles[operator.name], mesh, rates)
            column += _token_exchange(model.graph, operator, sharing, of_tokens, size)
            for source in operator.inputs:
                column += reshard_cost(model.graph, roles, (source, operator.name), mesh, size)
            columns.append(column)
        table = np.array(columns)[kinds]
        layers = recomputed_layers(model)
        is_again = np.array([layer is not None for layer in layers])
        table[is_again, _AGAIN : _AGAIN + 2] = table[is_again, :2]
        table[is_again, _AGAIN + 2 : _AGAIN + 4] = table[is_again, _AHEAD : _AHEAD + 2]
        table[:, _KEPT_INPUTS] = np.where(is_again, 0.0, table[:, _KEPT]) + size * np.array(layer_inputs(model))
        kept_by_layer = dict.fromkeys(layers, 0.0)
        for layer, kept in zip(layers, table[:, _KEPT]):
            kept_by_layer[layer] += kept
        most_kept = np.array([0.0 if layer is None else kept_by_layer[layer] for layer in layers])
        bounds = [*firsts, len(operators)]
        ranges = np.array([table[a:b].sum(axis=0) for a, b in zip(bounds, bounds[1:])])
        self._sums = np.concatenate([np.zeros((1, _NUM_COLUMNS)), np.cumsum(ranges, axis=0)])
        peaks = np.array([most_kept[a:b].max() for a, b in zip(bounds, bounds[1:])])
        # Bytes per sample of the largest layer that is recomputed in each range of layers.
        self._peaks = np.array(
            [np.maximum.accumulate(np.where(np.arange(len(peaks)) < a, 0.0, peaks)) for a in range(len(peaks))]
        )
        self.entering = size * _entering(self.model, tuple(firsts))
        self._place_of = {o.name: layer for layer, (a, b) in enumerate(zip(bounds, bounds[1:])) for o in operators[a:b]}
        self._tied = [self._tied_in(a, b, roles, n) for a, b in zip(bounds, bounds[1:])]
        self._in_full = in_full_at_once(model, operators, roles, n)
        self._num_units = len(set(layers))

    def _tied_in(self, first: int, end: int, roles: dict[str, str], n: int) -> list[tuple[str, float, float]]:
        """Return the operators that this layer shares parameters with, and per device those and the frozen of them."""
        found = []
        for o in self.model.graph.operators[first:end]:
            if o.tied_to is not None:
                parts = n if roles[o.name] in (COLUMN, ROW, VOCABULARY) else 1
                found.append((o.tied_to, o.parameters / parts, o.frozen / parts))
        return found

    def _run(self, first: Any, last: Any) -> np.ndarray:
        return self._sums[np.asarray(last) + 1] - self._sums[np.asarray(first)]

    def times(self, first: Any, last: Any, micro_batch: int) -> Times:
        """Return the times of layers first to last, both included (numbers or arrays), for a micro-batch per device."""
        run = self._run(first, last)
        return Times(*(run[..., 2 * i] + micro_batch * run[..., 2 * i + 1] for i in range(4)))

    def parameters(self, first: Any, last: Any) -> tuple[Any, Any]:
        """Return a device's parameters, first the dense and then the expert ones; tied ones count once in a range."""
        run = self._run(first, last)
        return run[..., _PARAMETERS] + self._elsewhere(first, last), run[..., _OF_EXPERTS]

    def frozen(self, first: Any, last: Any) -> tuple[Any, Any]:
        """Return how many of :meth:`parameters` are not trained."""
        run = self._run(first, last)
        return run[..., _FROZEN] + self._elsewhere(first, last, frozen=True), run[..., _FROZEN_EXPERTS]

    def _elsewhere(self, first: Any, last: Any, *, frozen: bool = False) -> Any:
        """Return the number of parameters, or of frozen ones, that are tied to a layer outside of the range."""
        first, last = np.broadcast_arrays(first, last)
        extra = np.zeros(first.shape)
        for layer, tied in enumerate(self._tied):
            for name, *sizes in tied:
                home, size = self._place_of[name], sizes[frozen]
                inside = (first <= layer) & (layer <= last)
                extra += np.where(inside & ~((first <= home) & (home <= last)), size, 0.0)
        return extra

    def tied_parameters(self, first: int, last: int) -> float:
        """Return the parameters per device that another stage has too, so that both must sum up the gradients."""
        return float(self._elsewhere(first, last) - self._elsewhere(first, last, frozen=True))

    def activations(self, first: Any, last: Any, micro_batch: int) -> Any:
        """Return the bytes that a micro-batch keeps for its backward pass."""
        return micro_batch * self._run(first, last)[..., _KEPT]

    def again(self, first: Any, last: Any, micro_batch: int) -> tuple[Any, Any]:
        """Return the seconds of the second forward pass of a micro-batch: compute and collectives."""
        run = self._run(first, last)
        compute, collectives = (run[..., at] + micro_batch * run[..., at + 1] for at in (_AGAIN, _AGAIN + 2))
        return compute, collectives

    def recomputed(self, first: Any, last: Any, micro_batch: int) -> tuple[Any, Any]:
        """Return the bytes that each micro-batch in flight keeps with recomputation, and those of the largest layer."""
        peak = self._peaks[np.asarray(first), np.asarray(last)]
        return micro_batch * self._run(first, last)[..., _KEPT_INPUTS], micro_batch * peak

    def memory(
        self, first: int, last: int, micro_batch: int, *, in_flight: int = 1, zero_stage: int, recompute: bool = False
    ) -> MemoryUse:
        """Return the memory of a stage with ``in_flight`` micro-batches in flight."""
        activations = in_flight * float(self.activations(first, last, micro_batch))
        if recompute:
            kept, peak = self.recomputed(first, last, micro_batch)
            activations = in_flight * float(kept) + float(peak)
        numbers = (float(x) for x in (*self.parameters(first, last), *self.frozen(first, last)))
        s, is_full = self.sharing, zero_stage == 3 and self.sharing.dp > 1
        zero_stage = zero_stage if is_full or zero_stage < 3 else 0
        dp, ep = (s.dp, 1) if is_full else (s.dp * s.sp, s.ep)
        use = parameter_memory(
            *numbers, dp=dp, ep=ep, zero_stage=zero_stage, activations=activations,
            matrices=self._run(first, last)[_MATRICES:_MATRIX_FLOPS].tolist(),
        )  # fmt: skip
        return with_gathered(use, self.cluster.bytes_per_value, self._in_full) if is_full else use

    def gathers(self, first: int, last: int, zero_stage: int) -> tuple[float, float]:
        """Return the seconds of a micro-batch's gathers of weights and reductions of gradients: forward, and backward.

        Each layer is gathered in both passes, and what is in no layer in the forward pass. Gradients are reduced in
        float32. Stages 0 to 2 exchange them once per update (:meth:`update`).
        """
        if zero_stage < 3:
            return 0.0, 0.0
        s = self.sharing
        link = self.cluster.link(s.dp, s.ep * s.sp * s.tp)
        weights = float(sum(self.parameters(first, last)))
        trained = weights - float(sum(self.frozen(first, last)))
        size, num_layers = self.cluster.bytes_per_value, self._num_units - 1
        start = link.alpha if s.dp > 1 else 0.0
        of_layers = (num_layers - 1) * start + all_gather(s.dp, size * (weights - self._in_full.in_no_layer), link)
        of_others = all_gather(s.dp, size * self._in_full.in_no_layer, link)
        reductions = num_layers * start + reduce_scatter(s.dp, GRADIENT_BYTES * trained, link)
        return of_layers + of_others, of_layers + reductions

    def most_in_flight(
        self, first: Any, last: Any, micro_batch: int, *, zero_stage: int, recompute: bool, room: float
    ) -> np.ndarray:
        """Return how many micro-batches of a stage fit into ``room`` bytes at a time; 0 if the stage does not fit."""
        s = self.sharing
        fixed = parameter_memory(
            *self.parameters(first, last), *self.frozen(first, last), dp=s.dp * s.sp, ep=s.ep, zero_stage=zero_stage,
            matrices=[*self._run(first, last)[..., _MATRICES:_MATRIX_FLOPS].T],
        ).total  # fmt: skip
        each, peak = self.activations(first, last, micro_batch), 0.0
        if recompute:
            each, peak = self.recomputed(first, last, micro_batch)
        number = np.floor((room - fixed - peak) / np.maximum(each, 1.0))
        return np.clip(number, 0, 1 << 40).astype(np.int64)

    def update(self, first: int, last: int, zero_stage: int) -> tuple[float, float]:
        """Return the seconds per update of a stage's gradient exchange, and of its optimizer."""
        trained = (a - b for a, b in zip(self.parameters(first, last), self.frozen(first, last)))
        parameters, of_experts = map(float, trained)
        s, size = self.sharing, GRADIENT_BYTES
        # The ranks with the same weights, whose gradients a micro-batch has not reduced yet, and those that share the
        # update; then the same of experts.
        same, shares = s.num_replicas, s.num_replicas if zero_stage else 1
        same_experts, shares_experts = s.dp * s.sp, s.dp * s.sp if zero_stage else 1
        exchanged, stride = 1, s.ep
        if zero_stage == 3:
            same, same_experts = s.ep * s.sp, s.sp
            shares = shares_experts = exchanged = s.dp
            stride = s.tp
        exchange = all_reduce(same, size * parameters / exchanged, self.cluster.link(same, s.tp))
        exchange += all_reduce(same_experts, size * of_experts / exchanged, self.cluster.link(same_experts, stride))
        numbers = parameters / shares + of_experts / shares_experts
        dense, experts = self._run(first, last)[_MATRIX_FLOPS:].tolist()
        flops = dense / shares + experts / shares_experts
        return exchange, numbers / self.cluster.update_rate + flops / (self.cluster.flops * self.cluster.efficiency)


def _kinds_of(graph: Graph, roles: dict[str, str], among: tuple[str, int]) -> tuple[list[Operator], np.ndarray]:
    """Return an example of each kind of operator that has its own price in these roles, and every operator's kind.

    The layers of a transformer are equal, so there are few kinds, and each is priced once.
    """
    known = _known_kinds.setdefault(graph, {})
    if among not in known:
        numbers: dict[Any, int] = {}
        examples, kinds = [], []
        for operator in graph.operators:
            plain = dataclasses.replace(operator, name="", inputs=(), tied_to=operator.tied_to and "tied", layer=None)
            sources = tuple((s.kind, roles[s.name], s.num_out) for s in map(graph.by_name.__getitem__, operator.inputs))
            key = (plain, roles[operator.name], sources)
            if key not in numbers:
                numbers[key] = len(numbers)
                examples.append(operator)
            kinds.append(numbers[key])
        known[among] = examples, np.array(kinds)
    return known[among]


def _entering(model: Model, firsts: tuple[int, ...]) -> np.ndarray:
    """Return the values per sample that enter each layer, given the first operator of each."""
    known = _known_entering.setdefault(model.graph, {})
    if firsts not in known:
        known[firsts] = np.array([entering_values(model, first) for first in firsts])
    return known[firsts]


def _column(operator: Operator, role: str, mesh: DeviceGroup, rates: DeviceRates) -> np.ndarray:
    """Return an operator's entries of the table: seconds of four kinds, parameters, expert parameters, kept bytes."""
    dp, n = mesh.shape
    roles = (BATCH if dp > 1 else NONE, role)
    num_data = dp * (n if role in (BATCH, EXPERT) else 1)
    is_first = not operator.inputs
    costs = []
    for per_device in (1, 2):
        full = cost_of(operator, roles, mesh, rates, per_device * num_data, input_has_gradient=not is_first)
        ahead = cost_of(operator, roles, mesh, rates, per_device * num_data, backwards=False)
        backward = full.compute - ahead.compute
        costs.append([ahead.compute, backward, full.collectives, full.backward_collectives])
    (one, two) = np.array(costs)
    slope = two - one
    seconds = np.stack([one - slope, slope], axis=1).reshape(-1)
    parameters = operator.parameters / (n if role in (COLUMN, ROW, VOCABULARY, EXPERT) else 1)
    mine = 0.0 if operator.tied_to is not None else parameters
    saved = saved_of(operator, role, n)
    kept = rates.bytes_per_value * saved.values + saved.masks
    parts = [*seconds, 0.0 if role == EXPERT else mine, mine if role == EXPERT else 0.0, kept]
    column = np.array(parts + [0.0] * (_NUM_COLUMNS - len(parts)))
    share = operator.frozen / operator.parameters if operator.parameters else 0.0
    column[[_FROZEN, _FROZEN_EXPERTS]] = share * column[[_PARAMETERS, _OF_EXPERTS]]
    if mine:
        of_kind = slice(_MATRICES + (role == EXPERT), None, 2)
        column[of_kind] = np.array([operator.matrices, operator.update_flops]) * mine / operator.parameters
    return column


def _token_exchange(graph: Graph, operator: Operator, sharing: StageParallelism, link: Link, size: int) -> np.ndarray:
    """Return the table entries of the exchanges of tokens among the ranks of the axis "sp".

    Queries, keys, values and the output of attention take an all-to-all each; the last layer's output is gathered.
    """
    sp, column = sharing.sp, np.zeros(_NUM_COLUMNS)
    one = two = 0.0
    if operator.kind == "attention":
        keys = (operator.num_in - operator.num_out) / 2
        moved = [size * sp * values / sharing.tp for values in (operator.num_out, keys, keys, operator.num_out)]
        one, two = (sum(all_to_all(sp, samples * b, link) for b in moved) for samples in (1, 2))
    elif operator.layer is None:
        moved = [size * sp * s.num_out for s in map(graph.by_name.get, operator.inputs) if s and s.layer is not None]
        one, two = (sum(all_gather(sp, samples * b, link) for b in moved) for samples in (1, 2))
    column[_AHEAD : _AHEAD + 2] = column[_BACK : _BACK + 2] = one - (two - one), two - one
    return column


def reshard_cost(
    graph: Graph, roles: dict[str, str], edge: tuple[str, str], mesh: DeviceGroup, size: int
) -> np.ndarray:
    """Return the table entries of the resharding between two operators of a stage, zero if their layouts agree."""
    source, to = edge
    have = layouts(graph.by_name[source], (NONE, roles[source]))[1][1]
    want = layouts(graph.by_name[to], (NONE, roles[to]))[0][1]
    column = np.zeros(_NUM_COLUMNS)
    if have == want or mesh.shape[1] == 1:
        return column
    alone = DeviceGroup((1, mesh.shape[1]), mesh.links)
    for row, (a, b) in ((_AHEAD, (have, want)), (_BACK, (want, have))):
        one, two = (
            resharding(alone, (NONE, a), (NONE, b), size * samples * graph.by_name[source].num_out)
            for samples in (1.0, 2.0)
        )
        column[row : row + 2] = one - (two - one), two - one
    return column
