"""Describes how a model is changed for this rank, as edits that are planned first and then applied all at once.

Tensor, expert and pipeline parallelism read a :class:`ModelIndex` and return edits; they change nothing.
:func:`~mindnlp_dp.parallelize` applies them, or returns them to the user (``dry_run=True``), who can print them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from mindnlp.core import nn

from mindnlp_dp.parallel.placement import Placements


class ModelIndex:
    """The modules of a model by name, at the time when the index was made.

    Attributes:
        model: the model.
        modules: all modules by name, parents first; a module with several names is listed under each.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.modules: dict[str, Any] = {}
        self._names: dict[int, list[str]] = {}
        self._visit("", model)

    def _visit(self, name: str, module: Any) -> None:
        self.modules[name] = module
        self._names.setdefault(id(module), []).append(name)
        for child_name, child in module._modules.items():
            if child is not None:
                self._visit(f"{name}.{child_name}" if name else child_name, child)

    def names_of(self, module: Any) -> tuple[str, ...]:
        return tuple(self._names[id(module)])

    def unique(self) -> list[tuple[str, Any]]:
        """Return each module once, with its first name."""
        return [(names[0], self.modules[names[0]]) for names in self._names.values()]

    def find(self, name: str, what: str) -> Any:
        """Return the module of this name, or raise a ValueError that says ``what`` refers to it."""
        if name not in self.modules:
            raise ValueError(f"{what} is {name!r}, which {type(self.model).__name__} does not have")
        return self.modules[name]


@dataclass(frozen=True)
class Edit:
    """A change of one module of a model.

    Attributes:
        paths: the names at which the module is changed; ``""`` is the model itself.
        module: the new module, or a function that makes it from the old one; None keeps the module.
        forward: a function that makes the new forward method from the old one; None keeps it.
        methods: functions that make new methods from the old ones, by the name of the method.
        attributes: new values of attributes of the module.
        placements: for the names of weights, the changes of their :class:`~.placement.Placement`.
        is_shown: whether ``print`` shows it.
    """

    paths: tuple[str, ...]
    module: Any = None
    forward: Optional[Callable[[Any], Any]] = None
    methods: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    placements: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_shown: bool = True

    def apply(self, model: Any, placements: Placements) -> None:
        for name, changes in self.placements.items():
            placements.change([name], **changes)
        module = module_at(model, self.paths[0])
        for name, value in self.attributes.items():
            setattr(module, name, value)
        for name, make in self.methods.items():
            setattr(module, name, make(getattr(module, name)))
        if self.forward is not None:
            module.forward = self.forward(module.forward)
        if self.module is not None:
            new = self.module if isinstance(self.module, nn.Module) else self.module(module)
            for path in self.paths:
                parent, _, name = path.rpartition(".")
                module_at(model, parent)._modules[name] = new


class ModelEdits(list[Edit]):
    """The edits that give this rank its part of a model, in the order in which they are applied.

    ``print(edits)`` shows a line for each: the module, what replaces it, and the shapes of its weights on this rank.
    """

    def __init__(self, index: ModelIndex, placements: Placements, edits: Iterable[Edit] = ()) -> None:
        super().__init__(edits)
        self._kinds = {name: type(module).__name__ for name, module in index.modules.items()}
        self._model, self._placements = index.model, placements

    def apply(self) -> None:
        """Change the model and the placements of its weights."""
        for edit in self:
            edit.apply(self._model, self._placements)

    def placements_after(self) -> Placements:
        """Return the placements of the weights as they will be."""
        after = self._placements.copy()
        for edit in self:
            for name, changes in edit.placements.items():
                after.change([name], **changes)
        return after

    def __str__(self) -> str:
        mesh, after = self._placements.mesh, self.placements_after()
        shown = [edit for edit in self if edit.is_shown]
        lines = [f"{self._kinds['']} on rank {mesh.world.label()} of {mesh}: {len(shown)} edits"]
        return "\n".join(lines + [f"  {edit.paths[0] or '(model)'}: {self._text(edit, after)}" for edit in shown])

    def _text(self, edit: Edit, after: Placements) -> str:
        kind, found = self._kinds[edit.paths[0]], []
        if edit.module is not None:
            found.append(f"{kind} -> {_class_name(edit.module)}")
        if edit.forward is not None:
            found.append(f"forward -> {_class_name(edit.forward)}")
        found += [f"{name} = {value}" for name, value in edit.attributes.items()]
        here = [name for name in edit.placements if after.is_here(after[name])]
        if edit.paths[0] or self._placements.mesh.sizes["pp"] == 1:
            prefix = f"{edit.paths[0]}." if edit.paths[0] else ""
            found += [f"{n.removeprefix(prefix)} {after[n].shape} -> {after.shape_here(after[n])}" for n in here]
        elif edit.placements:
            found.append(f"this stage has {len(here)} of {len(edit.placements)} weights")
        return ", ".join(found) or f"on rank {self._placements.mesh.world.label()}, unchanged"


def _class_name(made: Any) -> str:
    made = getattr(made, "func", made)
    return made.__name__ if isinstance(made, type) else type(made).__name__


def module_at(model: Any, path: str) -> Any:
    """Return the module of a model at a path, as it is now."""
    for name in filter(None, path.split(".")):
        model = model._modules[name]
    return model


class PPMissingLayer(nn.Module):
    """Replaces a module of another stage, or an expert of another rank, that is never called; raises if called."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("this part of the model is on another stage of the pipeline")
