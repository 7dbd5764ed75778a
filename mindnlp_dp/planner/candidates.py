"""Enumerates and prices the possible ways to train a model on a cluster, and records why others are impossible.

:func:`~mindnlp_dp.planner.plan` calls it. It prices every valid mesh (dp, pp, ep, sp, tp) with every micro-batch; the
dynamic program partitions the layers into stages that fit into device memory. Stages with different meshes are priced
as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np

from mindnlp_dp.planner.cost_model.resharding_costs import Boundaries
from mindnlp_dp.planner.cost_model.stage_costs import StageCosts, StageParallelism
from mindnlp_dp.planner.integer_program import InfeasibleError
from mindnlp_dp.planner.plan import Rejected
from mindnlp_dp.planner.profiles.cluster_profile import Cluster
from mindnlp_dp.planner.profiles.operator_graph import Model
from mindnlp_dp.planner.stage_partition import Slicing, slice_stages
from mindnlp_dp.runtime.mesh_spec import mesh_name

# The largest micro-batch of a device that is considered; larger ones are not faster.
_MOST_SAMPLES = 1024

# Means any number of stages: more than a pipeline has.
_ANY_NUMBER = 1024


@dataclass
class Candidate:
    """Describes a way to train that is priced by formula, before it is simulated.

    Attributes:
        seconds: time of an update.
        slices: (first layer, last layer, sharing) of each stage.
        firsts: the first operator of each layer.
        micro_batches: samples that a device processes at a time, by stage.
    """

    seconds: float
    slices: list[tuple[int, int, StageParallelism]]
    firsts: list[int]
    micro_batches: list[int]
    num_micro_batches: int
    schedule: str
    recompute: bool
    zero_stage: int


@dataclass
class Candidates:
    """Enumerates and prices the candidate plans of a model on a cluster."""

    model: Model
    cluster: Cluster
    batch: int
    zero_stage: Optional[int]
    schedules: Sequence[str]
    fill: float
    rejected: list[Rejected] = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or self.batch < 1:
            raise ValueError(f"batch must be a number of samples of at least 1, got {self.batch}")
        if not self.fill > 0:
            raise ValueError(f"fill must be a share of the memory above 0, got {self.fill}")
        if self.zero_stage not in (None, 0, 1, 2, 3):
            raise ValueError(f"zero_stage must be 0, 1, 2 or 3, got {self.zero_stage}")
        # Bytes of a device that a plan may use.
        self.room = self.fill * self.cluster.memory
        self.boundaries = Boundaries(self.cluster)
        self._costs: dict[tuple[StageParallelism, tuple[int, ...]], StageCosts] = {}

    def costs(self, sharing: StageParallelism, firsts: list[int]) -> StageCosts:
        key = (sharing, tuple(firsts))
        if key not in self._costs:
            self._costs[key] = StageCosts(self.model, self.cluster, sharing, firsts)
        return self._costs[key]

    def zero(self, sharing: StageParallelism) -> int:
        # With one shard there is nothing to gather.
        if self.zero_stage is not None and (self.zero_stage < 3 or sharing.dp > 1):
            return self.zero_stage
        return 1 if sharing.num_replicas > 1 else 0

    def reject(self, what: str, why: str, needs: Optional[float] = None) -> None:
        self.rejected.append(Rejected(what, why, needs))

    # Meshes that all stages have in common.

    def uniform(self, firsts: list[int]) -> Iterator[Candidate]:
        n = self.cluster.num_devices
        for pp, sharing in meshes(self.model, n, self.batch, len(firsts), self.reject):
            name = mesh_name(sharing.mesh(pp))
            problem = _stage_3_problem(self.model, pp, sharing) if self.zero_stage == 3 else ""
            if problem := problem or device_problem(self.cluster.device, sharing):
                self.reject(name, problem)
                continue
            least_short = math.inf
            found = False
            for micro_batch in divisors(self.batch // sharing.num_data, _MOST_SAMPLES):
                for candidate in self._sliced(sharing, pp, firsts, micro_batch):
                    if isinstance(candidate, float):
                        least_short = min(least_short, candidate)
                    else:
                        found = True
                        yield candidate
            if not found:
                if math.isfinite(least_short):
                    self.reject(
                        name,
                        f"its heaviest stage needs at least {_gib(least_short)} GiB, and a device has "
                        f"{self.room / 2**30:.3g} GiB for it",
                        least_short,
                    )
                else:
                    self.reject(name, "no split of its layers into stages fits into memory")

    def _sliced(self, sharing: StageParallelism, pp: int, firsts: list[int], micro_batch: int) -> Iterator[Any]:
        """Yield the candidates of one mesh and micro-batch; where it does not fit, yield the least bytes it needs."""
        num = self.batch // sharing.num_data // micro_batch
        costs, zero_stage = self.costs(sharing, firsts), self.zero(sharing)
        last = len(firsts) - 1
        if pp == 1:
            update = sum(costs.update(0, last, zero_stage))
            for recompute in (False, True):
                memory = costs.memory(0, last, micro_batch, zero_stage=zero_stage, recompute=recompute)
                if memory.total > self.room:
                    yield memory.total
                    continue
                again = float(sum(costs.again(0, last, micro_batch))) if recompute else 0.0
                gathers = sum(costs.gathers(0, last, zero_stage))
                seconds = num * (float(costs.times(0, last, micro_batch).total) + again + gathers) + update
                yield Candidate(
                    seconds, [(0, last, sharing)], firsts, [micro_batch], num, "", recompute, zero_stage
                )  # fmt: skip
            return
        ways = self.boundary_costs(costs, micro_batch)
        known: dict[bytes, Any] = {}
        priced = {recompute: self._priced(costs, micro_batch, recompute) for recompute in (False, True)}
        for recompute, schedule in itertools.product((False, True), self.schedules):
            cost, fits = priced[recompute]
            allowed = most_following(fits, schedule, num)
            # Schedules with the same memory limits are partitioned in the same way.
            key = cost.tobytes() + np.minimum(allowed, len(firsts)).tobytes()
            if key not in known:
                try:
                    known[key] = slice_stages(
                        cost[:, :, None, None], allowed[:, :, None, None], [1], pp, num, boundary=ways
                    )
                except InfeasibleError:
                    known[key] = None
            found = known[key]
            if found is None:
                yield self._needed(costs, pp, micro_batch, num, recompute)
                continue
            update = max(sum(costs.update(a, b, zero_stage)) for a, b, _, _ in found.stages)
            slices = [(a, b, sharing) for a, b, _, _ in found.stages]
            yield Candidate(
                found.total + update, slices, firsts, [micro_batch] * pp, num, schedule, recompute, zero_stage
            )  # fmt: skip

    def _needed(self, costs: StageCosts, pp: int, micro_batch: int, num: int, recompute: bool) -> float:
        """Return the bytes of the heaviest stage if layers are split evenly and scheduled by 1F1B."""
        share = np.linspace(0, len(costs.firsts), pp + 1).astype(int)
        zero_stage = self.zero(costs.sharing)
        return max(
            costs.memory(
                a, b - 1, micro_batch, in_flight=min(num, pp - i), zero_stage=zero_stage, recompute=recompute
            ).total
            for i, (a, b) in enumerate(zip(share, share[1:]))
        )

    def _priced(self, costs: StageCosts, micro_batch: int, recompute: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return two (L, L) arrays by first and last layer: seconds per micro-batch, and how many of them fit."""
        num_layers = len(costs.firsts)
        upper = np.triu_indices(num_layers)
        seconds, fits = np.full((num_layers, num_layers), np.inf), np.zeros((num_layers, num_layers), np.int64)
        again = sum(costs.again(*upper, micro_batch)) if recompute else 0.0
        seconds[upper] = costs.times(*upper, micro_batch).total + again
        fits[upper] = costs.most_in_flight(
            *upper, micro_batch, zero_stage=self.zero(costs.sharing), recompute=recompute, room=self.room
        )
        return seconds, fits

    def boundary_costs(self, costs: StageCosts, micro_batch: int) -> np.ndarray:
        sharing = costs.sharing
        pair = (sharing.dp, sharing.tp)
        boundary = self.boundaries.between(pair, pair, self._worst_place(sharing))
        return np.array([2 * boundary.time(micro_batch * sharing.dp * float(b)) for b in costs.entering])

    def _worst_place(self, sharing: StageParallelism) -> int:
        """Return a first device for which the next stage is on another host, if there is such a device."""
        per_host = self.cluster.devices_per_host
        return 0 if self.cluster.num_hosts == 1 else max(0, per_host - sharing.num_devices)

    # Stages with different meshes.

    def mixed(self, firsts: list[int], totals: Sequence[int]) -> Iterator[Candidate]:
        """Yield pipelines whose stages may differ in mesh; ``totals`` are samples of a micro-batch over a stage."""
        per_host = self.cluster.devices_per_host
        # Hosts with few devices, not a power of two, are divided in every way.
        is_odd = per_host < 8 and per_host & (per_host - 1)
        sizes = list(range(1, per_host + 1)) if is_odd else divisors(per_host)
        sizes += [per_host * hosts for hosts in range(2, self.cluster.num_hosts + 1)]
        for total in totals:
            if self.batch // total < 2:
                continue
            options = [
                [
                    (sharing, recompute)
                    for tp in divisors(size)
                    if not tensor_problem(self.model, tp)
                    for sharing in [StageParallelism(size // tp, tp)]
                    if total % sharing.dp == 0
                    for recompute in (False, True)
                ]
                for size in sizes
            ]
            ways = np.stack([self._ways_into(size, firsts, total) for size in sizes], axis=1)
            num, num_layers, width = self.batch // total, len(firsts), max(map(len, options))
            cost = np.full((num_layers, num_layers, len(sizes), width), np.inf)
            fits = np.zeros(cost.shape, np.int64)
            for m, of_size in enumerate(options):
                for c, (sharing, recompute) in enumerate(of_size):
                    costs = self.costs(sharing, firsts)
                    cost[:, :, m, c], fits[:, :, m, c] = self._priced(costs, total // sharing.dp, recompute)
            known: dict[bytes, Optional[Slicing]] = {}
            for schedule in self.schedules:
                allowed = most_following(fits, schedule, num)
                key = np.minimum(allowed, num_layers).tobytes()
                if key not in known:
                    try:
                        known[key] = slice_stages(cost, allowed, sizes, self.cluster.num_devices, num, boundary=ways)
                    except InfeasibleError:
                        known[key] = None
                found = known[key]
                if found is not None and len(found.stages) > 1:
                    yield self._mixed(found, firsts, total, options, schedule)

    def _mixed(
        self, found: Slicing, firsts: list[int], total: int, options: list[list[tuple[StageParallelism, bool]]],
        schedule: str,
    ) -> Candidate:  # fmt: skip
        num = self.batch // total
        picked = [(a, b, *options[m][c]) for a, b, m, c in found.stages]
        slices = [(a, b, sharing) for a, b, sharing, _ in picked]
        update = max(sum(self.costs(sharing, firsts).update(a, b, self.zero(sharing))) for a, b, sharing in slices)
        micro_batches = [total // sharing.dp for *_, sharing in slices]
        zero_stage = max(self.zero(sharing) for *_, sharing in slices)
        again = any(recompute for *_, recompute in picked)
        return Candidate(found.total + update, slices, firsts, micro_batches, num, schedule, again, zero_stage)

    def _ways_into(self, size: int, firsts: list[int], total: int) -> np.ndarray:
        boundary = self.boundaries.between((size, 1), (size, 1), self._worst_place(StageParallelism(size)))
        entering = self.costs(StageParallelism(), firsts).entering
        return np.array([2 * boundary.time(total * float(b)) for b in entering])


def most_following(fits: np.ndarray, schedule: str, num: int) -> np.ndarray:
    """Return how many stages may follow a stage with memory for ``fits`` of ``num`` micro-batches.

    -1 means that the stage itself does not fit. GPipe keeps all micro-batches; 1F1B keeps one for the stage and one for
    each stage that follows; eager 1F1B keeps two for each stage that follows.

    >>> most_following(np.array([0, 1, 3, 8]), "1f1b", 8) + 1
    array([   0,    1,    3, 1025])
    >>> most_following(np.array([0, 1, 3, 8]), "eager-1f1b", 8) + 1
    array([   0,    1,    2, 1025])
    """
    stages = {"gpipe": np.zeros_like(fits), "1f1b": fits, "eager-1f1b": (fits + 1) // 2}[schedule]
    return np.where(fits >= num, _ANY_NUMBER, stages - 1)


def meshes(
    model: Model, num_devices: int, batch: int, num_layers: int, reject: Callable[[str, str], None]
) -> Iterator[tuple[int, StageParallelism]]:
    """Yield the number of stages and the sharing of each possible mesh; call ``reject`` with each impossible one."""
    for sp, tp in itertools.product(divisors(num_devices), repeat=2):
        if num_devices % (sp * tp):
            continue
        problem = tensor_problem(model, tp)
        if problem:
            if sp == 1:
                reject(f"tp={tp}", problem)
            continue
        for pp in divisors(num_devices // sp // tp):
            problem = _stage_problem(model, pp, num_layers)
            if problem:
                if tp == sp == 1:
                    reject(f"pp={pp}", problem)
                continue
            for ep in divisors(num_devices // sp // tp // pp):
                sharing = StageParallelism(num_devices // sp // tp // pp // ep, tp, ep, sp)
                problem = mesh_problem(model, pp, sharing, batch, num_layers)
                if not problem:
                    yield pp, sharing
                elif ep == sp == 1 or (tp == pp == 1 and (ep == 1 or model.experts) and (sp == 1 or model.blocks)):
                    reject(mesh_name(sharing.mesh(pp)), problem)


def mesh_problem(model: Model, pp: int, sharing: StageParallelism, batch: int, num_layers: int) -> str:
    """Return why a mesh is impossible, apart from memory; "" if it is possible."""
    return (
        tensor_problem(model, sharing.tp)
        or _stage_problem(model, pp, num_layers)
        or _expert_problem(model, sharing, pp)
        or _sequence_problem(model, sharing, pp)
        or _batch_problem(batch, sharing)
    )


def tensor_problem(model: Model, tp: int) -> str:
    """Return why tensors cannot be sharded over ``tp`` devices; "" if they can."""
    if tp > 1 and any(o.matrices for o in model.graph.operators):
        return "Muon needs full matrices, and each rank would have a part of them"
    for name, number in model.divides.items():
        if number % tp:
            return f"{tp} does not divide {name}, {number}"
    if model.kind == "operators":
        for o in model.graph.operators:
            if o.kind == "matmul" and (o.width_in % tp or o.width_out % tp):
                return f"{tp} does not divide a width of {o.name}"
    return ""


def _stage_3_problem(model: Model, pp: int, sharing: StageParallelism) -> str:
    """Return why weights cannot be sharded over the data-parallel devices; "" if they can."""
    if pp > 1:
        return "zero_stage=3 with pp is not supported"
    if sharing.dp > 1 and any(o.matrices for o in model.graph.operators):
        return "Muon needs full matrices, and with zero_stage=3 each rank would have a shard of them"
    return ""


def device_problem(device: str, sharing: StageParallelism) -> str:
    """Return why the device's library cannot run a mesh; "" if it can."""
    axis = "sp" if sharing.sp > 1 else "ep" if sharing.ep > 1 else ""
    return f"MindSpore's library for GPUs has no all-to-all, which {axis} needs" if axis and device == "GPU" else ""


def _stage_problem(model: Model, pp: int, num_layers: int) -> str:
    most = min(model.most_stages or num_layers, num_layers)
    return f"{model.name} has {most} layers that can be stages" if pp > most else ""


def _expert_problem(model: Model, sharing: StageParallelism, pp: int) -> str:
    if sharing.ep == 1:
        return ""
    if not model.experts or model.experts % sharing.ep:
        return f"{sharing.ep} does not divide {model.experts} experts"
    if sharing.tp > 1 or pp > 1:
        return "expert parallelism is supported only with data parallelism"
    return ""


def _sequence_problem(model: Model, sharing: StageParallelism, pp: int) -> str:
    sp, tp = sharing.sp, sharing.tp
    if sp == 1:
        return ""
    if pp > 1:
        return "sp with pp is not supported"
    if not model.blocks or model.most_stages:
        return "sp needs a model with one list of transformer layers"
    if sp > model.sequence:
        return f"sp={sp} needs rows of at least {sp} tokens, and they have {model.sequence}"
    for name, number in model.divides.items():
        is_repeated = name == "num_key_value_heads" and sp * tp % number == 0
        if number % (sp * tp) and not is_repeated:
            return f"sp={sp}" + (f" times tp={tp}" if tp > 1 else "") + f" does not divide {name}, {number}"
    return ""


def _batch_problem(batch: int, sharing: StageParallelism) -> str:
    return f"{sharing.num_data} does not divide the batch of {batch}" if batch % sharing.num_data else ""


def _gib(num_bytes: float) -> str:
    """Return bytes as GiB with three digits.

    >>> _gib(1.5 * 2**30), _gib(1980.4 * 2**30)
    ('1.5', '1,980')
    """
    return f"{num_bytes / 2**30:.3g}" if num_bytes < 1000 * 2**30 else f"{num_bytes / 2**30:,.0f}"


def divisors(n: int, most: int = 1 << 16) -> list[int]:
    """Return the divisors of ``n`` up to ``most``.

    >>> divisors(12), divisors(12, 3)
    ([1, 2, 3, 4, 6, 12], [1, 2, 3])
    """
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]
