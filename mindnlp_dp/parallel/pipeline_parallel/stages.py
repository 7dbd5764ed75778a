"""Splits the layers of a model over the stages of a pipeline; :func:`~mindnlp_dp.parallelize` calls it.

Modules of other stages are replaced, so that the model's own forward pass still runs, with its heads and losses. In a
stage, the received activations replace the output of the first layer, the other layers of earlier stages pass them on
unchanged, and the first layer of the next stage ends the forward pass by raising :class:`StageOutput`. What the model
computes before its layers has no effect on later stages; their embedding returns the received activations, because
models read the batch's shape from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Optional

from mindnlp.core import nn

from mindnlp_dp.parallel.model_edits import Edit, ModelIndex, PPMissingLayer
from mindnlp_dp.parallel.parallel_plan import PipelinePlan
from mindnlp_dp.parallel.placement import Placements
from mindnlp_dp.runtime.named_weights import all_names
from mindnlp_dp.runtime.shard_bounds import stage_bounds


class StageOutput(Exception):  # noqa: N818
    """Ends the forward pass of a stage that is not the last; carries the activations for the next stage."""

    def __init__(self, hidden_states: Any) -> None:
        super().__init__("a stage of a pipeline ends here")
        self.hidden_states = hidden_states


class StageInput:
    """Holds the activations that a stage has received for its next forward pass."""

    def __init__(self) -> None:
        self._received: Optional[Any] = None

    def put(self, hidden_states: Any) -> None:
        self._received = hidden_states

    def peek(self) -> Any:
        if self._received is None:
            raise RuntimeError("a model that is split into stages was called outside of a pipeline's forward pass")
        return self._received

    def take(self) -> Any:
        received = self.peek()
        self._received = None
        return received


class StagePlaceholder(nn.Module):
    """Replaces a module of another stage."""


class ReceivedActivations(StagePlaceholder):
    """Replaces the first layer; returns the activations that the previous stage has sent."""

    is_stage_boundary = True

    def __init__(self, stage_input: StageInput, *, is_layer: bool) -> None:
        super().__init__()
        self._stage_input = stage_input
        self._is_layer = is_layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        received = self._stage_input.take()
        return _as_layer(received) if self._is_layer else received


class ReceivedEncoding(ReceivedActivations):
    """Replaces an encoder; returns the encoder output that the previous stage has sent."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from mindnlp.transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=self._stage_input.take())


class SkippedEmbedding(StagePlaceholder):
    """Replaces a module before the layers, whose output has no effect; returns a tensor of the right shape."""

    def __init__(self, stage_input: StageInput) -> None:
        super().__init__()
        self._stage_input = stage_input

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._stage_input.peek()


class Identity(StagePlaceholder):
    """Replaces a layer of an earlier stage that is not the first; returns its input."""

    def __init__(self, *, is_layer: bool) -> None:
        super().__init__()
        self._is_layer = is_layer

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return _as_layer(hidden_states) if self._is_layer else hidden_states


def _as_layer(hidden_states: Any) -> tuple[Any, ...]:
    """Return the tuple that a layer returns; a model reads the other items by position."""
    return hidden_states, None, None, None, None


class StageEnd(StagePlaceholder):
    """Replaces the first layer of the next stage; ends the forward pass of this stage."""

    is_stage_boundary = True

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        raise StageOutput(hidden_states)


def pipeline_edits(
    index: ModelIndex,
    plan: PipelinePlan,
    placements: Placements,
    stage_input: StageInput,
    layers_per_stage: Optional[Sequence[int]] = None,
) -> list[Edit]:
    """Return the edits that replace the modules of other stages, and say which stage has which weight.

    The model takes its received activations from ``stage_input``.

    Raises:
        ValueError: there are more stages than layers, or ``layers_per_stage`` does not fit, or the plan names a module
            that the model does not have.
    """
    if not plan.encoder:
        return _cut_between_layers(index, plan, placements, stage_input, layers_per_stage)
    if layers_per_stage:
        raise ValueError(f"{type(index.model).__name__} is split after its encoder; leave layers_per_stage out")
    return _cut_after_encoder(index, plan, placements, stage_input)


def _cut_after_encoder(
    index: ModelIndex, plan: PipelinePlan, placements: Placements, stage_input: StageInput
) -> list[Edit]:
    stage, num_stages = placements.mesh.index("pp"), placements.mesh.sizes["pp"]
    if num_stages != 2:
        raise ValueError(
            f"{type(index.model).__name__} is split into two stages, its encoder and its decoder, got pp={num_stages}"
        )
    encoder = index.names_of(index.find(plan.encoder, "the encoder"))
    placed = _stages_of(index.model, [[plan.encoder], []], placements)
    if stage == 1:
        return [placed, Edit(encoder, ReceivedEncoding(stage_input, is_layer=False))]
    return [placed, *_without(index, [plan.encoder]), Edit(encoder, forward=_EndsAfter)]


def _cut_between_layers(
    index: ModelIndex,
    plan: PipelinePlan,
    placements: Placements,
    stage_input: StageInput,
    layers_per_stage: Optional[Sequence[int]],
) -> list[Edit]:
    stage, num_stages = placements.mesh.index("pp"), placements.mesh.sizes["pp"]
    num_layers = len(index.find(plan.layers, "the list of layers"))
    if num_stages > num_layers:
        raise ValueError(
            f"{type(index.model).__name__} has {num_layers} layers, which cannot be split over pp={num_stages} stages; "
            "each stage needs at least one"
        )
    first = [index.find(name, "a module of the first stage") for name in plan.first]
    bounds = stage_bounds(num_layers, num_stages, layers_per_stage)
    names = [f"{plan.layers}.{number}" for number in range(num_layers)]
    own = [names[begin:end] for begin, end in zip(bounds, bounds[1:])]
    own[0] += plan.first
    begin, end = bounds[stage : stage + 2]
    edits = [_stages_of(index.model, own, placements)]
    # These come before the layers, because a layer may hold one of these modules, too.
    edits += [Edit(index.names_of(module), SkippedEmbedding(stage_input)) for module in first if stage > 0]
    # A layer may have further names, at which it stays: only the list is run.
    edits += [Edit((name,), ReceivedActivations(stage_input, is_layer=plan.tuples)) for name in names[: min(begin, 1)]]
    edits += [Edit((name,), Identity(is_layer=plan.tuples)) for name in names[1:begin]]
    edits += [Edit((name,), StageEnd()) for name in names[end : end + 1]]
    edits += [Edit((name,), PPMissingLayer()) for name in names[end + 1 :]]
    if stage < num_stages - 1:
        edits += _without(index, [plan.layers, *plan.first])
    return edits


class _EndsAfter:
    """Replaces the forward pass of an encoder that is a stage: runs it and ends the stage with its output."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise StageOutput(self._forward(*args, **kwargs)[0])


def _stages_of(model: Any, own: list[list[str]], placements: Placements) -> Edit:
    """Return the stage of each parameter: the one whose modules in ``own`` contain it, otherwise the last stage."""
    stages: dict[str, set[int]] = {}
    for name in all_names(model):
        found = [stage for stage, names in enumerate(own) if any(name.startswith(f"{n}.") for n in names)]
        stages.setdefault(placements[name].name, set()).update(found or [len(own) - 1])
    return Edit(("",), placements={name: {"stages": tuple(sorted(numbers))} for name, numbers in stages.items()})


def _without(index: ModelIndex, kept: list[str]) -> list[Edit]:
    """Return edits that take out all modules with parameters, except ``kept`` ones, their submodules and parents."""

    def is_within(name: str, parents: Iterable[str]) -> bool:
        return any(name == parent or name.startswith(f"{parent}.") for parent in parents)

    held = {id(module) for name, module in index.modules.items() if is_within(name, kept)}
    taken: list[str] = []
    for name, module in index.modules.items():
        holds_one = name == "" or any(is_within(one, [name]) for one in kept)
        if holds_one or id(module) in held or is_within(name, taken):
            continue
        if any(True for _ in module.parameters()):
            taken.append(name)
    return [Edit((name,), PPMissingLayer()) for name in taken]
