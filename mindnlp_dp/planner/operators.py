"""A model as a graph of operators, and the ways in which each may be shared out over a mesh.

Goes in: operators with their sizes a sample. Comes out: a graph, and by kind of operator its roles.

A mesh has two axes. On each of them an operator takes a role: it shares out the samples ("batch"), what it puts out
("column"), what it takes in ("row"), its words ("vocabulary"), its experts ("expert"), its heads or features
("feature"), or it shares out nothing and does the same on all devices ("none"). An activation lies on an axis cut by
samples, cut by features, or whole. Forward and backward pass are one node: what a role costs is what both exchange.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

BATCH, COLUMN, ROW, VOCABULARY, EXPERT, FEATURE, NONE = (
    "batch", "column", "row", "vocabulary", "expert", "feature", "none",
)  # fmt: skip

# By kind and role: how inputs must lie, and how the output does.
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
    """One operator; sizes are of one sample (sequence).

    Attributes:
        kind: one of :data:`KINDS`.
        inputs: the operators whose outputs it takes.
        rows: of its input; tokens of a sequence.
        width_in: features of a row of its input, all inputs alike.
        width_out: features of a row of its output.
        flops: of the forward pass; the backward pass has twice as many.
        parameters: that it has, and are updated.
        traffic: values that the forward pass reads and writes, for what is bound by memory.
        scores: of attention, one for each pair of tokens and head.
        calls: operators that a framework starts for it, forward.
        saved: values kept for the backward pass besides its input, cut as its output is.
        masks: of dropouts, a random number each, of which a byte is kept.
        copies: of each row, to how many experts it goes.
        keeps_input: whether the backward pass needs its input.
        rows_out: of its output; by default those of its input.
        tied_to: the operator whose parameters it shares.
        only: the roles that it may take; by default all of its kind.
    """

    name: str
    kind: str
    inputs: tuple[str, ...] = ()
    rows: float = 1
    width_in: float = 0
    width_out: float = 0
    flops: float = 0
    parameters: float = 0
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

    def __post_init__(self) -> None:
        if self.kind not in ROLES:
            raise ValueError(f"operator {self.name!r}: kind must be one of {', '.join(KINDS)}, got {self.kind!r}")

    @property
    def num_in(self) -> float:
        """Values of its input, of one sample."""
        return self.rows * self.width_in

    @property
    def num_out(self) -> float:
        return (self.rows if self.rows_out is None else self.rows_out) * self.width_out


@dataclass(eq=False)
class Graph:
    """Operators in an order in which they can run.

    Raises:
        ValueError: an operator takes what comes behind it, or two have one name.
    """

    operators: list[Operator]
    name: str = ""
    by_name: dict[str, Operator] = field(init=False)

    def __post_init__(self) -> None:
        self.by_name = {}
        for operator in self.operators:
            for source in operator.inputs:
                if source not in self.by_name:
                    raise ValueError(f"operator {operator.name!r}: input {source!r} is no operator before it")
            if operator.tied_to is not None and operator.tied_to not in self.by_name:
                raise ValueError(f"operator {operator.name!r}: tied_to {operator.tied_to!r} is no operator before it")
            if operator.name in self.by_name:
                raise ValueError(f"two operators are named {operator.name!r}")
            self.by_name[operator.name] = operator


@dataclass
class Model:
    """What a plan is made of.

    Attributes:
        sequence: tokens of a sample.
        kind: ``model_type`` of the configuration; "operators" of a YAML.
        cuts: where a pipeline may cut: before the operators with these places.
        blocks: at those cuts and at both ends, how many transformer layers lie before; empty where there are none.
        divides: numbers that tensor parallelism must divide, with what they are of.
        experts: how many there are in a layer.
        most_stages: of a pipeline.
        train_flags: with which ``scripts/finetune.py`` trains this model; empty where it cannot.
    """

    name: str
    graph: Graph
    sequence: int
    kind: str = "operators"
    cuts: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    divides: dict[str, int] = field(default_factory=dict)
    experts: int = 0
    most_stages: Optional[int] = None
    train_flags: str = ""

    @property
    def parameters(self) -> float:
        """Of the model; tied ones once."""
        return sum(o.parameters for o in self.graph.operators if o.tied_to is None)

    @property
    def flops(self) -> float:
        """Of one sample, forward and backward."""
        return 3 * sum(o.flops for o in self.graph.operators)
