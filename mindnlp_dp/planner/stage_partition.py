"""Partitions layers into pipeline stages, and devices among the stages, so that an update takes the least time.

The search for candidates calls it with the cost of each range of layers on each submesh. It finds the least

    T = sum of the stages' times + (B - 1) x the slowest stage's time.

The dynamic program is that of Zheng et al., *Alpa* (OSDI 2022), section 5.2: given a bound on the slowest stage, it
finds the least sum for the remaining layers, stages and devices. Alpa tries one bound after another. Here, an interval
of bounds is skipped if no bound in it can improve on the best T, and halved otherwise. This finds the same optimum
after a few dynamic programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from mindnlp_dp.planner.integer_program import InfeasibleError


@dataclass(frozen=True)
class Slicing:
    """Holds the partition that :func:`slice_stages` found.

    Attributes:
        total: time of an update, in the unit of the costs.
        slowest: the slowest stage's time for a micro-batch.
        stages: (first layer, last layer, submesh, configuration) of each stage, in order.
    """

    total: float
    slowest: float
    stages: list[tuple[int, int, int, int]]


def slice_stages(
    cost: Any,
    max_in_flight: Optional[Any],
    submesh_sizes: Sequence[int],
    num_devices: int,
    num_microbatches: int,
    *,
    boundary: Optional[Any] = None,
) -> Slicing:
    """Partition L layers into stages on exactly ``num_devices`` devices.

    Args:
        cost: array (L, L, M, C): the time of a micro-batch for layers first to last, both included, on submesh m in
            configuration c; inf if impossible.
        max_in_flight: array of the same shape: how many stages may follow this one, given that it keeps a micro-batch
            in memory for each of them besides its own; -1 if not even its own fits. None: memory has no limit.
        submesh_sizes: devices of each of the M submeshes.
        num_microbatches: B, the micro-batches per update.
        boundary: array (L,) or (L, M): the transfer time of a micro-batch into a stage that begins at a layer (on a
            submesh), added to that stage's time; the entry of layer 0 does not count.

    Raises:
        InfeasibleError: No partition uses all devices and fits into memory; the message says what prevents it.
        ValueError: Shapes do not fit together, or numbers are invalid.
    """
    cost, allowed = _checked(cost, max_in_flight, submesh_sizes, num_devices, num_microbatches)
    if boundary is not None:
        way = np.asarray(boundary, np.float64)
        num_layers, num_submeshes = cost.shape[0], cost.shape[2]
        if way.shape not in ((num_layers,), (num_layers, num_submeshes)) or not (way >= 0).all():
            raise ValueError(
                f"boundary must be times of at least 0, ({num_layers},) or ({num_layers}, {num_submeshes}); "
                f"got {way.shape}"
            )
        way = way.reshape(num_layers, 1, -1, 1).copy()
        way[0] = 0.0
        cost = cost + way
    table = _Table(cost, allowed, submesh_sizes, num_devices)
    slowest, best = _least(table, num_microbatches)
    del slowest
    if best is None:
        raise InfeasibleError(_why(table, cost, allowed, submesh_sizes, num_devices))
    times = [float(cost[stage]) for stage in best]
    total = sum(times) + (num_microbatches - 1) * max(times)
    return Slicing(total, max(times), best)


def _least(table: _Table, num_microbatches: int) -> tuple[float, Optional[list[tuple[int, int, int, int]]]]:
    """Return the least T over all bounds on the slowest stage, and its stages."""
    bounds = table.times()
    best, best_bound = np.inf, None
    if not len(bounds):
        return best, None
    high = len(bounds) - 1
    sums = {high: table.least_sum(bounds[high])}
    best, best_bound = sums[high] + (num_microbatches - 1) * bounds[high], bounds[high]
    if not np.isfinite(sums[high]):
        return best, None
    # In an interval (low, high] of bounds, the sum at high is known, and no bound of the interval has a smaller sum.
    open_ = [(-1, high)]
    while open_:
        low, high = open_.pop()
        if high - low <= 1 or sums[high] + (num_microbatches - 1) * bounds[low + 1] >= best:
            continue
        middle = (low + high) // 2
        sums[middle] = table.least_sum(bounds[middle])
        total = sums[middle] + (num_microbatches - 1) * bounds[middle]
        if total < best:
            best, best_bound = total, bounds[middle]
        # If no partition keeps to a bound, none keeps to a lower one. The lower half is pushed last to be tried first.
        open_.append((middle, high))
        if np.isfinite(sums[middle]):
            open_.append((low, middle))
    return best, table.stages(best_bound)


class _Table:
    """Solves the dynamic program: F(s, k, d) is the least sum for layers k to the end in s stages on d devices."""

    def __init__(self, cost: np.ndarray, allowed: np.ndarray, sizes: Sequence[int], num_devices: int) -> None:
        self.num_layers, _, self.num_submeshes, _ = cost.shape
        first, last = np.indices(cost.shape[:2])
        backwards = (last < first)[:, :, None, None]
        self.cost = np.where(backwards | (allowed < 0) | (np.array(sizes) > num_devices)[:, None], np.inf, cost)
        self.allowed = allowed
        # Count devices in the largest unit of which the submeshes that fit anywhere are multiples.
        fitting = [size for m, size in enumerate(sizes) if np.isfinite(self.cost[:, :, m]).any()]
        unit = math.gcd(num_devices, *fitting)
        self.num_devices = num_devices // unit
        self.sizes = [max(1, size // unit) for size in sizes]
        self.most_stages = min(self.num_layers, num_devices // min(fitting, default=num_devices))
        # If memory never limits the number of stages that follow, one table serves all numbers of stages.
        usable = self.allowed[np.isfinite(self.cost)]
        self.is_bound = bool(len(usable)) and int(usable.min()) < self.most_stages - 1
        levels = np.unique(np.minimum(usable, self.most_stages - 1)) if self.is_bound else np.array([0])
        # The least cost over the configurations that allow so many following stages; constant between two levels.
        self.levels = levels
        self._best = [
            np.where(self.allowed >= level, self.cost, np.inf).min(axis=3) if self.is_bound else self.cost.min(axis=3)
            for level in levels
        ]
        # The same by (number of layers - 1, submesh, first layer), and the least of each row.
        self._by_width = [_by_width(best) for best in self._best]
        self._least_of_rows = [rows.min(axis=2) for rows in self._by_width]

    def times(self) -> np.ndarray:
        """Return the possible times of the slowest stage, ascending."""
        return np.unique(self.cost[np.isfinite(self.cost)])

    def _fill(self, bound: float) -> list[np.ndarray]:
        """Return F, an array (layers + 1, devices + 1) for each number of stages; one array if memory never limits."""
        tables: list[np.ndarray] = []
        shape = (self.num_layers + 1, self.num_devices + 1)
        end = np.full(shape, np.inf)
        end[-1, 0] = 0.0
        if not self.is_bound:
            return [self._any_number(self._diagonals(0, bound), end)]
        if self.num_submeshes == 1:
            return self._one_submesh(bound, end)
        diagonals: dict[int, list[tuple[int, int, np.ndarray]]] = {}
        before = end
        for stages in range(1, self.most_stages + 1):
            level = int(np.searchsorted(self.levels, stages - 1))
            if level == len(self.levels):
                break
            if level not in diagonals:
                diagonals[level] = self._diagonals(level, bound)
            now = np.full(shape, np.inf)
            for width, submesh, times in diagonals[level]:
                size = self.sizes[submesh]
                rows = len(times)
                rest = before[width : width + rows, : shape[1] - size]
                np.minimum(now[:rows, size:], times[:, None] + rest, out=now[:rows, size:])
            if not np.isfinite(now).any():
                break
            tables.append(now)
            before = now
        return tables

    def _any_number(self, diagonals: list[tuple[int, int, np.ndarray]], end: np.ndarray) -> np.ndarray:
        """Return F over any number of stages, filled from the last layer to the first, if memory never limits."""
        table = end.copy()
        for first in range(self.num_layers - 1, -1, -1):
            for width, submesh, times in diagonals:
                if first < len(times):
                    size = self.sizes[submesh]
                    rest = table[first + width, : table.shape[1] - size]
                    np.minimum(table[first, size:], times[first] + rest, out=table[first, size:])
        return table

    def _one_submesh(self, bound: float, end: np.ndarray) -> list[np.ndarray]:
        """Return F of each number of stages if all stages have as many devices: only one column is finite."""
        tables: list[np.ndarray] = []
        size, before = self.sizes[0], end[:, 0]
        for stages in range(1, self.most_stages + 1):
            level = int(np.searchsorted(self.levels, stages - 1))
            if level == len(self.levels):
                break
            times = np.where(self._best[level][:, :, 0] <= bound, self._best[level][:, :, 0], np.inf)
            now = np.append((times + before[None, 1:]).min(axis=1), np.inf)
            if not np.isfinite(now).any():
                break
            tables.append(np.full(end.shape, np.inf))
            tables[-1][:, stages * size] = now
            before = now
        return tables

    def _diagonals(self, level: int, bound: float) -> list[tuple[int, int, np.ndarray]]:
        """Return (number of layers, submesh, times by first layer) for all combinations with a time within a bound."""
        rows, found = self._by_width[level], []
        for width, submesh in np.argwhere(self._least_of_rows[level] <= bound).tolist():
            times = rows[width, submesh, : self.num_layers - width]
            found.append((width + 1, submesh, np.where(times <= bound, times, np.inf)))
        return found

    def least_sum(self, bound: float) -> float:
        return min((float(table[0, self.num_devices]) for table in self._fill(bound)), default=np.inf)

    def stages(self, bound: float) -> list[tuple[int, int, int, int]]:
        """Return the stages with the least sum, by following the tables."""
        tables = self._fill(bound)
        sums = [float(table[0, self.num_devices]) for table in tables]
        left = int(np.argmin(sums)) + 1 if self.is_bound else 0
        first, devices, found = 0, self.num_devices, []
        while first < self.num_layers:
            here = tables[left - 1 if self.is_bound else 0][first, devices]
            first, devices, stage = self._step(tables, (left, first, devices), here, bound)
            found.append(stage)
            left -= 1
        return found

    def _step(
        self, tables: list[np.ndarray], place: tuple[int, int, int], wanted: float, bound: float
    ) -> tuple[int, int, tuple[int, int, int, int]]:
        """Return the next place after (stages left, first layer, devices left), and the stage in between."""
        left, first, devices = place
        for last in range(first, self.num_layers):
            for submesh, size in enumerate(self.sizes):
                if size > devices:
                    continue
                fits = (self.cost[first, last, submesh] <= bound) & (
                    not self.is_bound or self.allowed[first, last, submesh] >= left - 1
                )
                times = np.where(fits, self.cost[first, last, submesh], np.inf)
                configuration = int(np.argmin(times))
                if self.is_bound and left == 1:
                    rest = 0.0 if (last, size) == (self.num_layers - 1, devices) else np.inf
                else:
                    rest = tables[left - 2 if self.is_bound else 0][last + 1, devices - size]
                if times[configuration] + rest == wanted:
                    return last + 1, devices - size, (first, last, submesh, configuration)
        raise AssertionError("the tables hold sums of what is in them")


def _by_width(best: np.ndarray) -> np.ndarray:
    """Return (L, L, M) times by first and last layer as times by (last - first, submesh, first); inf past the end."""
    num_layers = len(best)
    first = np.arange(num_layers)
    last = np.minimum(first + first[:, None], num_layers - 1)
    rows = np.moveaxis(best[first[None, :], last], 2, 1)
    return np.where((first + first[:, None] < num_layers)[:, None, :], rows, np.inf)


def _checked(
    cost: Any, max_in_flight: Any, sizes: Sequence[int], num_devices: int, num_microbatches: int
) -> tuple[np.ndarray, np.ndarray]:
    cost = np.asarray(cost, np.float64)
    if cost.ndim != 4 or cost.shape[0] != cost.shape[1] or 0 in cost.shape:
        raise ValueError(
            f"cost must be an array (layers, layers, submeshes, configurations), none of them 0; got {cost.shape}"
        )
    if cost.shape[2] != len(sizes):
        raise ValueError(f"cost knows {cost.shape[2]} submeshes, and there are {len(sizes)} submesh_sizes")
    upper = cost[np.triu_indices(len(cost))]
    if np.isnan(upper).any() or (upper < 0).any():
        raise ValueError("cost must be times of at least 0, or inf")
    numbers = [*sizes, num_devices, num_microbatches]
    if not all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) and n >= 1 for n in numbers):
        raise ValueError(
            "submesh_sizes, num_devices and num_microbatches must be whole numbers of at least 1; got "
            f"{list(sizes)}, {num_devices}, {num_microbatches}"
        )
    if max_in_flight is None:
        return cost, np.full(cost.shape, np.iinfo(np.int64).max)
    allowed = np.asarray(max_in_flight)
    if allowed.shape != cost.shape:
        raise ValueError(f"max_in_flight must have cost's shape {cost.shape}, got {allowed.shape}")
    # A float inf means that any number of stages may follow.
    return cost, np.where(allowed >= 2**31, 2**31, allowed).astype(np.int64)


def _why(table: _Table, cost: np.ndarray, allowed: np.ndarray, sizes: Sequence[int], num_devices: int) -> str:
    for layer in range(table.num_layers):
        covers = table.cost[: layer + 1, layer:]
        if not np.isfinite(covers).any():
            runs = cost[: layer + 1, layer:]
            full = bool(np.isfinite(runs).any()) and not (allowed[: layer + 1, layer:] >= 0).any()
            reason = "no submesh has enough memory for it" if full else "its cost is inf on every submesh"
            return f"no stage can have layer {layer}: {reason}"
    return (
        f"no slicing of {table.num_layers} layers uses exactly {num_devices} devices in submeshes of "
        f"{sorted(set(sizes))} and keeps to the memory of its stages with the micro-batches in flight"
    )
