"""Train a small language model with DPO: of two answers to a prompt, it learns to prefer the one that was chosen.

python examples/preference.py
mindnlp-dp run --nproc 2 examples/preference.py                the same model
mindnlp-dp run --nproc 2 examples/preference.py --lora         adapters; without them the model is its own reference

The loss (Rafailov et al., https://arxiv.org/abs/2305.18290) is a mean over pairs, as a classifier's is over rows, so N
processes train what one process with the full batch trains.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import mindnlp_dp as dp  # isort: skip

from mindnlp.core import no_grad
from mindnlp.engine import set_seed
from mindnlp.peft import LoraConfig, get_peft_model
from mindnlp.transformers import LlamaConfig, LlamaForCausalLM

from mindnlp_dp.language_modeling.preferences import log_probabilities_of_pairs, preference_loss

PAD, END, VOCAB_SIZE, BETA = 0, 1, 40, 0.1
LENGTH = 16


def pair(seed: int) -> dict[str, Any]:
    """Make one sample: the chosen answer repeats the prompt's first token, the rejected one is random."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(2, VOCAB_SIZE, rng.integers(3, 7)).tolist()
    chosen = [prompt[0]] * rng.integers(1, 5) + [END]
    rejected = [*rng.integers(2, VOCAB_SIZE, rng.integers(1, 5)).tolist(), END]
    sample = {}
    for name, answer in {"chosen": chosen, "rejected": rejected}.items():
        padding = LENGTH - len(prompt) - len(answer)
        sample[f"{name}_ids"] = np.array(prompt + answer + [PAD] * padding)
        sample[f"{name}_mask"] = np.array([1] * (LENGTH - padding) + [0] * padding)
        # Only the answer's tokens count.
        sample[f"{name}_labels"] = np.array([-100] * len(prompt) + answer + [-100] * padding)
    return sample


def dpo_loss(model: Any, reference_model: Any, pairs: dict[str, Any]) -> tuple[Any, Any]:
    """Return DPO's loss, the mean over the pairs, and by how much each prefers the chosen answer, of shape (pairs,).

    ``reference_model`` is frozen; None stands for the model without its adapters.
    """
    with no_grad():
        if reference_model is not None:
            reference, _ = log_probabilities_of_pairs(reference_model, pairs)
        else:
            with model.disable_adapter():
                reference, _ = log_probabilities_of_pairs(model, pairs)
    losses, rewards = preference_loss("dpo", *log_probabilities_of_pairs(model, pairs), reference, beta=BETA)
    return losses.mean(), rewards[0] - rewards[1]


class DPOTrainer(dp.DataParallelTrainer):
    """A Trainer whose loss is DPO's; ``reference`` is a frozen model, or None for a model with adapters."""

    reference: Any = None

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False) -> Any:
        loss, margin = dpo_loss(model, self.reference, inputs)
        return (loss, {"margin": margin}) if return_outputs else loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lora", action="store_true", help="train adapters")
    parser.add_argument("--output-dir", default="outputs/preference")
    options = parser.parse_args()

    group = dp.init_process_group()
    set_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=LENGTH, pad_token_id=PAD, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if options.lora:
        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]))
    else:
        DPOTrainer.reference = LlamaForCausalLM(config)
        DPOTrainer.reference.load_state_dict(model.state_dict())
        DPOTrainer.reference.set_train(False)

    args = dp.DataParallelArguments(
        options.output_dir,
        per_device_train_batch_size=16 // group.world_size,
        max_steps=60,
        learning_rate=5e-3,
        logging_steps=20,
        save_strategy="no",
        # The columns are not arguments of the model.
        remove_unused_columns=False,
        label_names=["chosen_labels"],
        disable_tqdm=True,
    )
    trainer = DPOTrainer(
        model,
        args,
        train_dataset=[pair(seed) for seed in range(320)],
        eval_dataset=[pair(seed) for seed in range(1000, 1100)],
        compute_metrics=lambda found: {"preferred": float((found.predictions > 0).mean())},
    )
    trainer.train()
    metrics = trainer.evaluate()
    if group.is_main:
        preferred = f"{metrics['eval_preferred']:.0%}"
        print(f"loss {metrics['eval_loss']:.6f}, the chosen answer is preferred in {preferred} of pairs")


if __name__ == "__main__":
    main()
