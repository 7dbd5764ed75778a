"""This module implements Muon for MindNLP: an optimizer that orthogonalizes the momentum of each matrix.

Names, defaults and arithmetic are those of ``torch.optim.Muon``, but the iteration is in float32. Other parameters are
updated by AdamW, in the same optimizer. Train steps update both kinds by shards (fused/rules.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Optional

import mindspore

from mindnlp_dp.optim.newton_schulz import ADJUSTMENTS, adjustment, directions, orthogonalize
from mindnlp_dp.runtime.arrays import set_weight
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api

# Patterns of the names of modules whose weight has several matrices of equal size side by side, and their number.
PACKED = {r"(^|\.)c_attn$": 3}


class Muon(mindnlp_api().optim.AdamW):  # type: ignore[misc]
    """The Muon optimizer for matrices, and AdamW for the parameters of groups with ``use_muon=False``.

    For a matrix with weights w and gradient g, an update computes::

        m = m + (1 - momentum) (g - m)
        u = g + momentum (m - g)            (with nesterov; else u = m)
        w = (1 - lr weight_decay) w - lr scale orthogonalize(u)

    Args:
        params: parameters, or groups of them; :func:`~mindnlp_dp.optim.muon_groups` returns those of a model.
        ns_coefficients: the coefficients of the Newton-Schulz iteration, of which there are ``ns_steps`` steps.
        eps: the least norm by which a matrix is divided.
        adjust_lr_fn: the scale; None or "original": sqrt(max(1, rows / columns)); "match_rms_adamw": 0.2
            sqrt(max(rows, columns)), with which learning rate and weight decay of AdamW suit matrices, too.
        betas: the two decay rates of AdamW's moments.
        adamw_eps: AdamW's epsilon.
        num_packed: number of matrices of equal size that each parameter has side by side; each is orthogonalized by
            itself.
        packed_axis: the axis along which they are side by side.
    """

    param_groups: list[dict[str, Any]]

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95, *,
        nesterov: bool = True, ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7, ns_steps: int = 5, adjust_lr_fn: Optional[str] = None,
        betas: tuple[float, float] = (0.9, 0.999), adamw_eps: float = 1e-8, use_muon: bool = True,
        num_packed: int = 1, packed_axis: int = 0,
    ) -> None:  # fmt: skip
        self._use_muon = use_muon
        self._of_matrices = {
            "momentum": momentum, "nesterov": nesterov, "ns_coefficients": tuple(ns_coefficients), "eps": eps,
            "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn, "num_packed": num_packed, "packed_axis": packed_axis,
        }  # fmt: skip
        super().__init__(params, lr=lr, betas=tuple(betas), eps=adamw_eps, weight_decay=weight_decay)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; it is for matrices unless it has ``use_muon=False``.

        Raises:
            ValueError: A setting is out of range, or a parameter of a group for matrices is not one.
        """
        if param_group.setdefault("use_muon", self._use_muon):
            for name, value in self._of_matrices.items():
                param_group.setdefault(name, value)
        super().add_param_group(param_group)
        if param_group["use_muon"]:
            _check_group(param_group)

    def step(self, grads: Any = None) -> None:
        """Update every parameter that has a ``grad``; ``grads`` only matches MindNLP's signature and is not used."""
        groups = self.param_groups
        used = [{**group, "params": [p for p in group["params"] if p.grad is not None]} for group in groups]
        try:
            self.param_groups = [group for group in used if not group["use_muon"]]
            super().step()
        finally:
            self.param_groups = groups
        for group in used:
            for parameter in group["params"] if group["use_muon"] else ():
                self._move(parameter, self.state[parameter], group)

    @staticmethod
    def _move(parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        ops, axis = mindspore.ops, group["packed_axis"]
        gradient = parameter.grad.astype(mindspore.float32)
        momentum, direction = directions(gradient, state.get("momentum_buffer", 0.0), group)
        state.update(momentum_buffer=momentum, step=state.get("step", 0) + 1)
        parts = [orthogonalize(part, group, ops.matmul) for part in ops.chunk(direction, group["num_packed"], axis)]
        size = group["lr"] * adjustment(parameter.shape, group)
        moved = parameter * (1 - group["lr"] * group["weight_decay"]) - size * ops.cat(parts, axis)
        set_weight(parameter, moved.astype(parameter.dtype))


def _check_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError if the settings or the parameters of a group for matrices are wrong."""
    for name, is_valid, expected in (
        ("momentum", 0 <= group["momentum"] < 1, "from 0 to below 1"),
        ("ns_coefficients", len(group["ns_coefficients"]) == 3, "3 numbers"),
        ("ns_steps", group["ns_steps"] in range(1, 100), "from 1 to 99"),
        ("adjust_lr_fn", group["adjust_lr_fn"] in ADJUSTMENTS, f"one of {ADJUSTMENTS}"),
        ("num_packed", isinstance(group["num_packed"], int) and group["num_packed"] >= 1, "at least 1"),
        ("packed_axis", group["packed_axis"] in (0, 1), "0 or 1"),
        ("maximize", not group["maximize"], "False"),
    ):
        if not is_valid:
            raise ValueError(f"{name} must be {expected}, got {group[name]!r}")
    for shape in (tuple(parameter.shape) for parameter in group["params"]):
        if len(shape) != 2 or 0 in shape:
            raise ValueError(
                f"Muon orthogonalizes matrices, and a group with use_muon=True has a parameter of shape {shape}; put "
                "it into a group with use_muon=False, or take the groups of mindnlp_dp.optim.muon_groups(model)"
            )
        if shape[group["packed_axis"]] % group["num_packed"]:
            raise ValueError(
                f"a parameter of shape {shape} cannot be split into num_packed={group['num_packed']} equal matrices "
                f"along axis {group['packed_axis']}"
            )


def embedding_names(model: Any) -> dict[int, str]:
    """Return the names of a model's embedding weights, by the parameters' ids."""
    kind = mindnlp_api().nn.Embedding
    modules = model.named_modules() if hasattr(model, "named_modules") else ()
    return {id(module.weight): f"{name}.weight" for name, module in modules if isinstance(module, kind)}


def muon_groups(
    model: Any, weight_decay: float = 0.1, packed: Optional[Mapping[str, int]] = None
) -> list[dict[str, Any]]:
    """Return a model's trainable parameters in groups for :class:`Muon`.

    Muon gets the weights of linear layers. AdamW gets the rest: embeddings, also one that the head shares; the head of
    a library's model, which is its output layer and what is outside of its ``base_model``; convolutions; biases and the
    weights of normalization layers, which have no weight decay. In other models no head is known: move its parameters
    to a group with ``use_muon=False``.

    Args:
        packed: patterns of the names of modules whose output consists of several projections of equal size, and their
            number; by default GPT-2's ``c_attn``.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    body = {id(p) for p in getattr(inner, "base_model", inner).parameters() if p.requires_grad and p.ndim == 2}
    body -= {*embedding_names(model), id(getattr(head, "weight", None))}
    groups: dict[tuple[int, int], dict[str, Any]] = {}
    matrices: set[int] = set()
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if id(weight) in body - matrices:
            patterns = (PACKED if packed is None else packed).items()
            number = next((number for pattern, number in patterns if re.search(pattern, name)), 1)
            # The outputs of GPT-2's Conv1D are columns, also in a shard of it, which is refused later.
            axis = int(number > 1 and (type(module).__name__ == "Conv1D" or weight.shape[0] % number > 0))
            group = {"params": [], "use_muon": True, "num_packed": number, "packed_axis": axis}
            groups.setdefault((number, axis), {**group, "weight_decay": weight_decay})["params"].append(weight)
            matrices.add(id(weight))
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in matrices]
    found = [
        *groups.values(),
        {"params": [p for p in rest if p.ndim > 1], "use_muon": False, "weight_decay": weight_decay},
        {"params": [p for p in rest if p.ndim <= 1], "use_muon": False, "weight_decay": 0.0},
    ]
    return [group for group in found if group["params"]]
