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
        betas, adamw_eps: settings of AdamW.
        num_packed, packed_axis: parameters have so many matrices of equal size side by side along this axis; each is
            orthogonalized by itself.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Optional[str] = None,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        use_muon: bool = True,
        num_packed: int = 1,
        packed_axis: int = 0,
    ) -> None:
        self._of_matrices = {
            "momentum": momentum, "nesterov": nesterov, "ns_coefficients": tuple(ns_coefficients), "eps": eps,
            "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn, "num_packed": num_packed, "packed_axis": packed_axis,
        }  # fmt: skip
        self._use_muon = use_muon
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
        whole = [group["params"] for group in groups]
        try:
            for group, everything in zip(groups, whole):
                group["params"] = [p for p in everything if p.grad is not None and not group["use_muon"]]
            super().step()
        finally:
            for group, everything in zip(groups, whole):
                group["params"] = everything
        for group in groups:
            for parameter in group["params"] if group["use_muon"] else ():
                if parameter.grad is not None:
                    self._move(parameter, self.state[parameter], group)

    @staticmethod
    def _move(parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        ops = mindspore.ops
        gradient = parameter.grad.astype(mindspore.float32)
        momentum = state.get("momentum_buffer")
        momentum, direction = directions(gradient, ops.zeros_like(gradient) if momentum is None else momentum, group)
        state["momentum_buffer"] = momentum
        parts = []
        for part in ops.chunk(direction, group["num_packed"], group["packed_axis"]):
            # Squares of the largest float32 numbers would overflow.
            largest = ops.maximum(part.abs().max(), 1e-30)
            length = ((part / largest) ** 2).sum().sqrt() * largest
            parts.append(orthogonalize(part, ops.maximum(length, float(group["eps"])), group, ops.matmul))
        step = group["lr"] * adjustment(parameter.shape, group)
        moved = parameter * (1 - group["lr"] * group["weight_decay"]) - step * ops.cat(parts, group["packed_axis"])
        set_weight(parameter, moved.astype(parameter.dtype))


def _check_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError if the settings or the parameters of a group for matrices are wrong."""
    if not 0 <= group["momentum"] < 1:
        raise ValueError(f"momentum must be from 0 to below 1, got {group['momentum']}")
    if len(group["ns_coefficients"]) != 3:
        raise ValueError(f"ns_coefficients must be 3 numbers, got {group['ns_coefficients']!r}")
    if group["ns_steps"] < 1:
        raise ValueError(f"ns_steps must be at least 1, got {group['ns_steps']}")
    if group["adjust_lr_fn"] not in (None, *ADJUSTMENTS):
        raise ValueError(f"adjust_lr_fn must be None or one of {ADJUSTMENTS}, got {group['adjust_lr_fn']!r}")
    if group["packed_axis"] not in (0, 1) or group["num_packed"] < 1:
        raise ValueError(
            f"num_packed must be at least 1 and packed_axis 0 or 1, got {group['num_packed']} and "
            f"{group['packed_axis']}"
        )
    for parameter in group["params"]:
        shape = tuple(parameter.shape)
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
    a library's model, which is what is outside of its ``base_model``; convolutions; biases and the weights of
    normalization layers, which have no weight decay. In other models no head is known: take its parameters out of the
    first group if there is one.

    Args:
        packed: patterns of the names of modules whose output consists of several projections of equal size, and their
            number; by default GPT-2's ``c_attn``.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    body = {id(p) for p in getattr(inner, "base_model", inner).parameters()} - set(embedding_names(model))
    groups: dict[Any, dict[str, Any]] = {}
    taken: set[int] = set()
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if id(weight) not in body or id(weight) in taken or not weight.requires_grad or weight.ndim != 2:
            continue
        taken.add(id(weight))
        number = next(
            (n for pattern, n in (PACKED if packed is None else packed).items() if re.search(pattern, name)), 1
        )
        # The outputs of GPT-2's Conv1D are columns.
        axis = int(number > 1 and type(module).__name__ == "Conv1D")
        group = {"use_muon": True, "weight_decay": weight_decay, "num_packed": number, "packed_axis": axis}
        groups.setdefault((number, axis), {"params": [], **group})["params"].append(weight)
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    for decay, params in (
        (weight_decay, [p for p in rest if p.ndim > 1]),
        (0.0, [p for p in rest if p.ndim <= 1]),
    ):
        groups[decay, "adamw", len(groups)] = {"params": params, "use_muon": False, "weight_decay": decay}
    return [group for group in groups.values() if group["params"]]
