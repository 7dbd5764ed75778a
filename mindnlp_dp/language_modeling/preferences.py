"""This module trains with pairs of a chosen and a rejected answer: DPO, IPO, SimPO and ORPO.

A loss is the mean over pairs, so N processes train what one process with the full batch trains. Scripts import it, too,
after MindNLP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Optional

import numpy as np

import mindnlp_dp as dp
from mindnlp_dp.data.batches import as_tensors
from mindnlp_dp.data.loss_weight import IGNORED
from mindnlp_dp.language_modeling.rows import PairCollator, TokenRows
from mindnlp_dp.runtime.adapters import has_adapters
from mindnlp_dp.runtime.arrays import to_host
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api

# Objectives that compare with the model before training.
WITH_REFERENCE = ("dpo", "ipo")


def log_probabilities(model: Any, ids: Any, labels: Any, mask: Any) -> tuple[Any, Any]:
    """Return the log probability of each row's answer, the sum over its tokens, and their number, of shape (rows,).

    Args:
        ids: the tokens, of shape (rows, length).
        labels: of the same shape; those other than -100 are the answer's tokens.
        mask: the attention mask, of the same shape.
    """
    functional = mindnlp_api().nn.functional
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
    counts = (labels[:, 1:] != IGNORED).to(logits.dtype)
    tokens = labels[:, 1:] * (labels[:, 1:] != IGNORED).long()
    of_tokens = mindnlp_api().ops.gather(functional.log_softmax(logits, -1), 2, tokens.unsqueeze(-1)).squeeze(-1)
    return (of_tokens * counts).sum(-1), counts.sum(-1)


def log_probabilities_of_pairs(model: Any, pairs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return :func:`log_probabilities` of a batch of pairs, of shape (2, pairs): chosen, then rejected answers."""
    api = mindnlp_api()
    columns = [api.ops.cat((pairs[f"chosen_{name}"], pairs[f"rejected_{name}"])) for name in ("ids", "labels", "mask")]
    sums, lengths = log_probabilities(model, *columns)
    return sums.reshape(2, -1), lengths.reshape(2, -1)


def preference_loss(
    objective: str, sums: Any, lengths: Any, reference: Any = None, *, beta: float = 0.1, gamma: float = 0.5
) -> tuple[Any, Any]:
    """Return the loss of each pair, of shape (pairs,), and the rewards of its two answers, of shape (2, pairs).

    - dpo: Rafailov et al. (2023), https://arxiv.org/abs/2305.18290, equation 7.
    - ipo: Azar et al. (2023), https://arxiv.org/abs/2310.12036, equation 17; with means over tokens, as in TRL.
    - simpo: Meng et al. (2024), https://arxiv.org/abs/2405.14734, equation 6.
    - orpo: Hong et al. (2024), https://arxiv.org/abs/2403.07691, equations 6 and 7; beta is its lambda. The first term
      is the mean over the tokens of the chosen answer, as in the paper; in TRL it also has those of the prompt.

    ``softplus(-x)`` is ``-logsigmoid(x)``, of which MindNLP 0.5.1 returns the first element alone.

    Rewards are beta times the log probability, by which the answer is compared; for dpo and ipo, less the reference's.

    Args:
        sums: (2, pairs) the first result of :func:`log_probabilities_of_pairs`.
        lengths: (2, pairs) the second one.
        reference: (2, pairs) the log probabilities of the reference, for dpo and ipo.
    """
    api = mindnlp_api()
    softplus = api.nn.functional.softplus
    if objective in WITH_REFERENCE:
        sums = sums - reference
    compared = sums if objective == "dpo" else sums / lengths
    rewards, margin = beta * compared, compared[0] - compared[1]
    if objective == "dpo":
        return softplus(-beta * margin), rewards
    if objective == "ipo":
        return (margin - 1 / (2 * beta)) ** 2, rewards
    if objective == "simpo":
        return softplus(gamma - beta * margin), rewards
    # 1 - p, which must stay above 0.
    rest = api.ops.log(api.ops.clamp(1 - api.ops.exp(compared), min=1e-7))
    return -compared[0] + beta * softplus(rest[0] - rest[1] - margin), rewards


def with_reference(rows: TokenRows, model: Any, collator: PairCollator, batch_size: int) -> TokenRows:
    """Return rows with the log probabilities of the model, without its adapters; each rank computes its share."""
    api, group = mindnlp_api(), dp.get_device_mesh().dp_group
    model.set_train(False)
    mine = range(group.rank, len(rows), group.world_size)
    found = np.zeros((len(rows), 2), np.float32)
    with api.no_grad(), model.disable_adapter() if has_adapters(model) else contextlib.nullcontext():
        for begin in range(0, len(mine), batch_size):
            numbers = mine[begin : begin + batch_size]
            batch = as_tensors(collator([rows[at] for at in numbers]))
            found[list(numbers)] = to_host(log_probabilities_of_pairs(model, batch)[0]).T
    # A row is computed on one rank, and 0 on the others.
    return replace(rows, reference=np.sum(group.all_gather_object(found), axis=0))


class PreferenceTrainer(dp.DataParallelTrainer):
    """A Trainer of pairs, which logs TRL's metrics of rewards when it evaluates."""

    objective, beta, gamma = "dpo", 0.1, 0.5

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, compute_metrics=metrics_of_rewards, **keywords)

    def loss_weight(self, inputs: Any) -> float:
        """Return the number of pairs, of which the loss is the mean."""
        return float(len(inputs["reference"]))

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Optional[Any] = None
    ) -> Any:
        losses, rewards = preference_loss(
            self.objective, *log_probabilities_of_pairs(model, inputs), inputs["reference"].T, beta=self.beta,
            gamma=self.gamma,
        )  # fmt: skip
        return (losses.mean(), {"rewards": rewards.T}) if return_outputs else losses.mean()


def trainer_of(objective: str, beta: float, gamma: float) -> type[PreferenceTrainer]:
    """Return the Trainer of an objective."""
    return type("PreferenceTrainer", (PreferenceTrainer,), {"objective": objective, "beta": beta, "gamma": gamma})


def metrics_of_rewards(found: Any) -> dict[str, float]:
    """Return how often the chosen answer has the greater reward, by how much on average, and both averages."""
    chosen, rejected = np.asarray(found.predictions, np.float64).T
    return {
        "rewards/chosen": float(chosen.mean()),
        "rewards/rejected": float(rejected.mean()),
        "rewards/accuracies": float((chosen > rejected).mean()),
        "rewards/margins": float((chosen - rejected).mean()),
    }
