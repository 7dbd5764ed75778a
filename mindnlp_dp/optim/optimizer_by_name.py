"""Makes this package's optimizers by name, for the Trainer's ``optim`` and the recipes' ``--optimizer``.

The libraries' own optimizers, such as AdamW, are chosen by the libraries' Trainers. ``rule_for`` in
updater_factory.py has the flat updates of all of them.
"""

from __future__ import annotations

import ast
from typing import Any, Optional

# The names that the libraries do not know; with another one, also change the messages and help texts that list them.
OWN_OPTIMIZERS = ("muon", "lamb", "lars")


def make_optimizer(
    name: str,
    model: Any,
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    settings: Optional[str] = None,
) -> Any:
    """Return one of ``OWN_OPTIMIZERS`` for the parameters of a model.

    Args:
        betas: of LAMB, and of Muon's AdamW, which updates everything except the matrices of layers.
        epsilon: of that AdamW; LAMB and LARS have their own.
        settings: more arguments of the optimizer, such as "momentum=0.9, ns_steps=6", which replace these.

    Raises:
        ValueError: ``settings`` cannot be read.
    """
    # Importing MindNLP's optimizers takes seconds.
    from mindnlp_dp.optim import LAMB, LARS, Muon, muon_groups, parameter_groups

    given = {"lr": learning_rate, **_arguments_in(settings)}
    if name == "muon":
        options = {"betas": betas, "adamw_eps": epsilon, "adjust_lr_fn": "match_rms_adamw", **given}
        return Muon(muon_groups(model, weight_decay), **options)
    groups = parameter_groups(model, weight_decay)
    return LAMB(groups, **{"betas": betas, **given}) if name == "lamb" else LARS(groups, **given)


def _arguments_in(settings: Optional[str]) -> dict[str, Any]:
    try:
        call: Any = ast.parse(f"dict({settings or ''})", mode="eval").body
        if call.args:
            raise ValueError
        return {each.arg: getattr(each.value, "id", None) or ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError):
        raise ValueError(f"optim_args must be settings such as momentum=0.9,ns_steps=6, got {settings!r}") from None
