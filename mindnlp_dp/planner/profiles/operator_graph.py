"""Defines a model as a graph of operators, and the roles in which each operator may be sharded over a mesh.

A mesh has two axes. On each axis an operator has a role: it splits the samples ("batch"), its output ("column"), its
input ("row"), its words ("vocabulary"), its experts ("expert"), its heads or features ("feature"), or it splits nothing
and all devices repeat it ("none"). On each axis an activation is sharded by samples or by features, or replicated.
Forward and backward pass are one node: the cost of a role is the communication of both.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np

BATCH, COLUMN, ROW, VOCABULARY, EXPERT, FEATURE, NONE = (
    "batch", "column", "row", "vocabulary", "expert", "feature", "none",
)  # fmt: skip

# The layouts of inputs and of the output, by kind and role.
ROLES: dict[str, dict[str, tuple[str, str]]] = {
    "matmul": {BATCH: (BATCH, BATCH), COLUMN: (NONE, FEATURE), ROW: (FEATURE, NONE), NONE: (NONE, NONE)},
    "embedding": {BATCH: (BATCH, BATCH), VOCABULARY: (NONE, NONE), COLUMN: (NONE, FEATURE), NONE: (NONE, NONE)},
    "attention": {BATCH: (BATCH, BATCH), FEATURE: (FEATURE, FEATURE), NONE: (NONE, NONE)},
    "elementwise": {BATCH: (BATCH, BATCH), FEATURE: (FEATURE, FEATURE), NONE: (NONE, NONE)},
    "reduction": {BATCH: (BATCH, BATCH), NONE: (NONE, NONE)},
    "loss": {BATCH: (BATCH, BATCH), FEATURE: (FEATURE, NONE), NONE: (NONE, NONE)},
    "experts": {BATCH: (BATCH, BATCH), EXPERT: (BATCH, BATCH), COLUMN: (NONE, NONE), NONE: (NONE, NONE)},
}  # fmt: skip

KINDS = tuple(ROLES)


@dataclass(frozen=True)
class Operator:
    """Describes one operator; sizes are per sample (sequence).

    Attributes:
        kind: one of :data:`KINDS`.
        inputs: names of the operators whose outputs it takes.
        rows: rows of its input: the tokens of a sequence.
        width_in: features per row of its input, however many inputs it has.
        width_out: features per row of its output.
        flops: FLOPs of the forward pass; the backward pass has twice as many.
        parameters: its parameters.
        frozen: number of its parameters that are not trained.
        matrices: number of its parameters that Muon updates.
        traffic: values that the forward pass reads and writes, for memory-bound operators.
        scores: attention scores, one for each pair of tokens and head.
        calls: number of operators that a framework starts for it in the forward pass.
        saved: values kept for the backward pass besides its input, sharded like its output.
        masks: dropout mask entries; each draws a random number and keeps one byte.
        copies: number of experts that each row is sent to.
        keeps_input: whether the backward pass needs its input.
        rows_out: rows of its output; by default those of its input.
        tied_to: the operator whose parameters it shares.
        only: the roles that it may have; by default all roles of its kind.
        layer: number of the transformer layer that it belongs to; None before, between and after the layers.
    """

    name: str
    kind: str
    inputs: tuple[str, ...] = ()
    rows: float = 1
    width_in: float = 0
    width_out: float = 0
    flops: float = 0
    parameters: float = 0
    frozen: float = 0
    matrices: float = 0
    traffic: float = 0
    scores: float = 0
    calls: float = 1
    saved: float = 0
    masks: float = 0
    copies: float = 1
    keeps_input: bool = True
    rows_out: Optional[float] = None
    tied_to: Optional[str] = None
    only: Optional[tuple[str, ...]] = None
    layer: Optional[int] = None

    def __post_init__(self) -> None:
        if self.kind not in ROLES:
            raise ValueError(f"operator {self.name!r}: kind must be one of {', '.join(KINDS)}, got {self.kind!r}")

    @property
    def trained(self) -> float:
        """Return the number of its parameters that are trained."""
        return self.parameters - self.frozen

    @property
    def update_flops(self) -> float:
        """Return the FLOPs of Muon's five Newton-Schulz steps; those of adapters are few, and not counted."""
        small, large = sorted((self.width_in, self.width_out))
        return 0.0 if self.frozen or not large else 10 * self.matrices * (2 * small + small * small / large)

    @property
    def num_in(self) -> float:
        """Return the number of values of its input, per sample."""
        return self.rows * self.width_in

    @property
    def num_out(self) -> float:
        return (self.rows if self.rows_out is None else self.rows_out) * self.width_out


@dataclass(eq=False)
class Graph:
    """Holds operators in an order in which they can run.

    Raises:
        ValueError: An operator takes the output of a later one, or two operators have the same name.
    """

    operators: list[Operator]
    name: str = ""
    by_name: dict[str, Operator] = field(init=False)
    place_of: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.by_name = {}
        self.place_of = {operator.name: place for place, operator in enumerate(self.operators)}
        for operator in self.operators:
            for source in operator.inputs:
                if source not in self.by_name:
                    raise ValueError(f"operator {operator.name!r}: input {source!r} is not an operator before it")
            if operator.tied_to is not None and operator.tied_to not in self.by_name:
                raise ValueError(
                    f"operator {operator.name!r}: tied_to {operator.tied_to!r} is not an operator before it"
                )
            if operator.name in self.by_name:
                raise ValueError(f"two operators are named {operator.name!r}")
            self.by_name[operator.name] = operator


@dataclass
class Model:
    """Describes the model that a plan is made for.

    Attributes:
        sequence: tokens per sample.
        kind: ``model_type`` of the configuration; "operators" for a YAML file.
        split_points: positions of the operators before which a pipeline may be split.
        blocks: number of transformer layers before the first operator, before each cut, and at the end; empty without
            transformer layers.
        divides: numbers that the tensor-parallel degree must divide, by name.
        experts: number of experts of a layer.
        most_stages: largest number of pipeline stages.
        train_flags: flags with which ``scripts/finetune.py`` trains this model; empty if it cannot.
    """

    name: str
    graph: Graph
    sequence: int
    kind: str = "operators"
    split_points: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    divides: dict[str, int] = field(default_factory=dict)
    experts: int = 0
    most_stages: Optional[int] = None
    train_flags: str = ""

    @property
    def parameters(self) -> float:
        """Return the number of parameters of the model, tied ones counted once."""
        return sum(o.parameters for o in self.graph.operators if o.tied_to is None)

    @property
    def trained(self) -> float:
        """Return the number of parameters that are trained, tied ones counted once."""
        return sum(o.trained for o in self.graph.operators if o.tied_to is None)

    @property
    def flops(self) -> float:
        """Return the FLOPs per sample, forward and backward."""
        return 3 * sum(o.flops for o in self.graph.operators)


def with_lora(model: Model, rank: int) -> Model:
    """Return a model with frozen weights and LoRA adapters of this rank in all products of its layers.

    A product from k to n features gets r (k + n) trained parameters (Hu et al., *LoRA*, 2021). Products that every
    device repeats, such as a router, and experts get none.
    """
    if rank < 1:
        raise ValueError(f"the rank of LoRA's adapters must be at least 1, got {rank}")
    operators = []
    for o in model.graph.operators:
        new = dataclasses.replace(o, frozen=o.parameters)
        if o.kind == "matmul" and o.layer is not None and COLUMN in (o.only or ROLES[o.kind]):
            # An operator may stand for several products, each with a first matrix of its own.
            inner = o.flops / (2 * o.rows * o.width_out)
            added = rank * (o.calls * inner + o.width_out)
            new = dataclasses.replace(
                new, parameters=o.parameters + added, flops=o.flops + 2 * o.rows * added, calls=o.calls + 3,
                saved=o.saved + rank * o.rows,
            )  # fmt: skip
        operators.append(new)
    return dataclasses.replace(model, graph=Graph(operators, model.graph.name), train_flags="")


def with_muon(model: Model) -> Model:
    """Return a model of which Muon updates the trained matrices of layers, and AdamW the rest."""
    operators = [
        dataclasses.replace(o, matrices=o.trained if o.kind in ("matmul", "experts") and o.layer is not None else 0)
        for o in model.graph.operators
    ]
    flags = model.train_flags and f"{model.train_flags} --optimizer muon"
    name = f"{model.name} with Muon"
    return dataclasses.replace(model, name=name, graph=Graph(operators, model.graph.name), train_flags=flags)


# Layers group operators; a pipeline may be cut between layers. The rule is that of Zheng et al., Alpa (OSDI 2022),
# section 5.2: minimize the largest activation that crosses a cut, where no layer's work exceeds the average by more
# than a given fraction; of equal solutions, take the most even one.


def crossing(graph: Graph) -> np.ndarray:
    """Return (operators + 1,) values per sample that are computed before each place and used after it."""
    places = graph.place_of
    last_use = [v for v, _ in enumerate(graph.operators)]
    for v, operator in enumerate(graph.operators):
        for source in operator.inputs:
            last_use[places[source]] = max(last_use[places[source]], v)
    values = np.zeros(len(graph.operators) + 1)
    for v, operator in enumerate(graph.operators):
        values[v + 1 : last_use[v] + 1] += operator.num_out
    return values


def cluster_layers(
    work: Any, across: Any, num_layers: int, *, slack: float = 0.5, split_points: Any = None
) -> list[int]:
    """Group n operators into layers; return the first operator of each.

    Args:
        work: (n,) the work of each operator.
        across: (n + 1,) the values that cross the place before each operator; those at both ends do not count.
        slack: fraction by which a layer may exceed the average work; more if a single operator exceeds it.
        split_points: positions where a split is allowed; all by default.

    >>> cluster_layers([1, 1, 1, 1], [0, 5, 1, 5, 0], 2)
    [0, 2]
    """
    n = len(work)
    places = [0, *sorted(set(range(1, n) if split_points is None else split_points)), n]
    if not 1 <= num_layers <= len(places) - 1:
        raise ValueError(f"{n} operators with {len(places) - 2} cuts do not make {num_layers} layers")
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(work, np.float64))])[places]
    price = np.asarray(across, np.float64)[places]
    limit = max((1 + slack) * sums[-1] / num_layers, _least_largest(sums, num_layers)) * (1 + 1e-12)
    num = len(places)
    # best[j]: (largest crossing, sum of squares) of the operators before place j in so many layers.
    crossed, squares = np.full(num, np.inf), np.full(num, np.inf)
    crossed[0], squares[0] = 0.0, 0.0
    before: list[np.ndarray] = []
    for layer in range(num_layers):
        new_crossed, new_squares, source = np.full(num, np.inf), np.full(num, np.inf), np.zeros(num, np.int64)
        for j in range(layer + 1, num):
            share = sums[j] - sums[:j]
            here = np.where(share <= limit, np.maximum(crossed[:j], np.where(np.arange(j) > 0, price[:j], 0.0)), np.inf)
            evenness = squares[:j] + share**2
            i = int(np.lexsort((evenness, here))[0])
            new_crossed[j], new_squares[j], source[j] = here[i], evenness[i], i
        before.append(source)
        crossed, squares = new_crossed, new_squares
    firsts, at = [], num - 1
    for source in reversed(before):
        at = int(source[at])
        firsts.append(places[at])
    return firsts[::-1]


def _least_largest(sums: np.ndarray, num_layers: int) -> float:
    """Return the smallest possible work of the largest layer, for ``num_layers`` layers."""
    largest = sums[1:] - sums[0]
    for layer in range(1, num_layers):
        new = np.full(len(largest), np.inf)
        for j in range(layer, len(largest)):
            new[j] = np.maximum(largest[layer - 1 : j], sums[j + 1] - sums[layer : j + 1]).min()
        largest = new
    return float(largest[-1])
