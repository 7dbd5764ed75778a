"""Splits the layers of a model over the stages of a pipeline; :func:`~mindnlp_dp.parallelize` calls it.

Modules of other stages are replaced, so that the model's own forward pass still runs, with its heads and losses. In a
stage, the received activations replace the embedding, the layers of earlier stages pass them on unchanged, and the
first layer of the next stage ends the forward pass by raising :class:`StageOutput`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from mindnlp.core import nn

from mindnlp_dp.parallel.parallel_plan import PipelinePlan
from mindnlp_dp.parallel.placement import Placements, PPMissingLayer, every_module, find_module, replace_module
from mindnlp_dp.runtime.named_weights import all_names
from mindnlp_dp.runtime.partition import shard_bounds


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

    def take(self) -> Any:
        if self._received is None:
            raise RuntimeError(
                "the embedding of a model that is split into stages was called twice in a forward pass (as with "
                "GPT-2's token_type_ids), or outside of one; leave such inputs out"
            )
        received, self._received = self._received, None
        return received


class ReceivedActivations(nn.Module):
    """Replaces an embedding or a first layer; returns the activations that the previous stage has sent."""

    def __init__(self, stage_input: StageInput, *, is_layer: bool = False) -> None:
        super().__init__()
        self._stage_input = stage_input
        self._is_layer = is_layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _as_layer(self._stage_input.take()) if self._is_layer else self._stage_input.take()


class ReceivedEncoding(ReceivedActivations):
    """Replaces an encoder; returns the encoder output that the previous stage has sent."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from mindnlp.transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=self._stage_input.take())


class ZeroModule(nn.Module):
    """Replaces a further embedding, which is contained in the received activations; returns 0."""

    def forward(self, *args: Any, **kwargs: Any) -> float:
        return 0.0


class Identity(nn.Module):
    """Replaces a layer of an earlier stage, or a dropout after the embedding; returns its input."""

    def __init__(self, *, is_layer: bool) -> None:
        super().__init__()
        self._is_layer = is_layer

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return _as_layer(hidden_states) if self._is_layer else hidden_states


def _as_layer(hidden_states: Any) -> tuple[Any, ...]:
    """Return the tuple that a layer returns; a model reads the other items by position."""
    return hidden_states, None, None, None, None


class StageEnd(nn.Module):
    """Replaces the first layer of the next stage; ends the forward pass of this stage."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        raise StageOutput(hidden_states)


def partition_stages(
    model: Any, plan: PipelinePlan, placements: Placements, layers_per_stage: Sequence[int] = ()
) -> StageInput:
    """Replace the modules of other stages in ``model``, and record in ``placements`` which stage has which weight.

    Returns:
        The StageInput from which the model takes its received activations.

    Raises:
        ValueError: there are more stages than layers, or ``layers_per_stage`` does not fit, or the plan names a module
            that the model does not have.
    """
    stage_input = StageInput()
    if plan.encoder:
        if layers_per_stage:
            raise ValueError(f"{type(model).__name__} is cut after its encoder; leave layers_per_stage out")
        _cut_after_encoder(model, plan, placements, stage_input)
    else:
        _cut_between_layers(model, plan, placements, stage_input, layers_per_stage)
    return stage_input


def _cut_after_encoder(model: Any, plan: PipelinePlan, placements: Placements, stage_input: StageInput) -> None:
    stage, num_stages = placements.mesh.index("pp"), placements.mesh.sizes["pp"]
    if num_stages != 2:
        raise ValueError(
            f"{type(model).__name__} is cut into two stages, its encoder and its decoder, got pp={num_stages}"
        )
    encoder = find_module(model, plan.encoder, "the encoder")
    _place(model, [[plan.encoder], []], placements)
    if stage == 0:
        _take_out(model, [plan.encoder])
        encoder.forward = _EndsAfter(encoder.forward)
    else:
        replace_module(model, encoder, ReceivedEncoding(stage_input))


def _cut_between_layers(
    model: Any, plan: PipelinePlan, placements: Placements, stage_input: StageInput, layers_per_stage: Sequence[int]
) -> None:
    stage, num_stages = placements.mesh.index("pp"), placements.mesh.sizes["pp"]
    layers = find_module(model, plan.layers, "the list of layers")
    if num_stages > len(layers):
        raise ValueError(
            f"{type(model).__name__} has {len(layers)} layers, which cannot be split over pp={num_stages} stages; "
            "each stage needs at least one"
        )
    for name in plan.first:
        find_module(model, name, "a module of the first stage")
    bounds = _bounds(len(layers), num_stages, layers_per_stage)
    names = [f"{plan.layers}.{number}" for number in range(len(layers))]
    own = [names[begin:end] for begin, end in zip(bounds, bounds[1:])]
    own[0] += plan.first
    _place(model, own, placements)
    for number in range(len(layers)):
        if number < bounds[stage]:
            layers[number] = Identity(is_layer=plan.tuples)
        elif number >= bounds[stage + 1]:
            layers[number] = StageEnd() if number == bounds[stage + 1] else PPMissingLayer()
    if stage > 0 and not plan.first:
        layers[0] = ReceivedActivations(stage_input, is_layer=plan.tuples)
    if stage > 0:
        for number, name in enumerate(plan.first):
            module = find_module(model, name, "a module of the first stage")
            new = ReceivedActivations(stage_input) if number == 0 else ZeroModule()
            if number and not any(True for _ in module.parameters()):
                new = Identity(is_layer=False)
            replace_module(model, module, new)
    if stage < num_stages - 1:
        _take_out(model, [plan.layers, *plan.first])


def _bounds(num_layers: int, num_stages: int, layers_per_stage: Sequence[int]) -> list[int]:
    if not layers_per_stage:
        return shard_bounds(num_layers, num_stages)
    if len(layers_per_stage) != num_stages or sum(layers_per_stage) != num_layers or min(layers_per_stage) < 1:
        raise ValueError(
            f"layers_per_stage must split {num_layers} layers over pp={num_stages} stages, at least one each; "
            f"got {list(layers_per_stage)}"
        )
    return [sum(layers_per_stage[:stage]) for stage in range(num_stages + 1)]


class _EndsAfter:
    """Replaces the forward pass of an encoder that is a stage: runs it and ends the stage with its output."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise StageOutput(self._forward(*args, **kwargs)[0])


def _place(model: Any, own: list[list[str]], placements: Placements) -> None:
    """Record the stage of each parameter: the one whose modules in ``own`` contain it, otherwise the last stage."""
    stages: dict[str, set[int]] = {}
    for name in all_names(model):
        found = [stage for stage, names in enumerate(own) if any(name.startswith(f"{n}.") for n in names)]
        stages.setdefault(placements[name].name, set()).update(found or [len(own) - 1])
    for name, numbers in stages.items():
        placements.change([name], stages=tuple(sorted(numbers)))


def _take_out(model: Any, kept: list[str]) -> None:
    """Replace all modules with parameters, except those in ``kept``, their submodules and the modules around them."""
    for name, module in every_module(model)[1:]:
        holds = any(k == name or k.startswith(f"{name}.") for k in kept)
        is_held = any(name.startswith(f"{k}.") for k in kept)
        held_objects = [m for n, m in every_module(model) if any(n == k or n.startswith(f"{k}.") for k in kept)]
        if holds or is_held or any(module is m for m in held_objects):
            continue
        if any(True for _ in module.parameters()):
            replace_module(model, module, PPMissingLayer())
