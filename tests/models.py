"""Build small models and data that several suites train on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

VOCAB_SIZE, LENGTH, NUM_LABELS = 50, 8, 3


def tiny_config(num_layers: int = 1, dropout: float = 0.0) -> Any:
    from mindnlp.transformers import RobertaConfig

    return RobertaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH + 4,
        hidden_act="relu",
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=NUM_LABELS,
    )


def tiny_roberta(seed: int = 0, num_layers: int = 1, dropout: float = 0.0) -> Any:
    """Build a RoBERTa classifier whose weights depend on ``seed`` only."""
    from library import set_seed
    from mindnlp.transformers import RobertaForSequenceClassification

    set_seed(seed)
    return RobertaForSequenceClassification(tiny_config(num_layers, dropout))


class Rows:
    """Data set of ``num_samples`` random samples; ``read`` lists the indices that were read for a batch."""

    def __init__(self, num_samples: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.input_ids = rng.integers(5, VOCAB_SIZE, (num_samples, LENGTH))
        self.labels = rng.integers(0, NUM_LABELS, num_samples)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        self.read += indices
        return [self[index] for index in indices]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "input_ids": self.input_ids[index],
            "attention_mask": np.ones(LENGTH, np.int64),
            "label": int(self.labels[index]),
            "row": f"sample {index}",
        }


def train(model: Any, rows: Any, output_dir: Any, trainer_class: Any = None, **settings: Any) -> Any:
    """Train ``model`` on ``rows`` without progress bars; return the trainer.

    ``settings`` are training arguments, the trainer's own arguments, and ``resume``.
    """
    from library import settings_here

    import mindnlp_dp as dp

    settings = {"num_train_epochs": 1, "learning_rate": 1e-2, "save_strategy": "no", "disable_tqdm": True, **settings}
    resume = settings.pop("resume", None)
    names = ("eval_dataset", "compute_metrics", "callbacks", "data_collator", "optimizers")
    extra = {name: settings.pop(name) for name in names if name in settings}
    args = dp.DataParallelArguments(str(output_dir), **settings_here(**settings))
    trainer = (trainer_class or dp.DataParallelTrainer)(model, args, train_dataset=rows, **extra)
    trainer.output = trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(model: Any) -> dict[str, np.ndarray]:
    return {name: p.asnumpy().copy() for name, p in model.named_parameters()}


@contextlib.contextmanager
def alone() -> Iterator[Any]:
    """Make this process a group of one rank within the context, to compute what one process computes."""
    from mindnlp_dp.communication import default_group
    from mindnlp_dp.communication.transports.single import SingleProcessTransport

    together = default_group._group, default_group._data_group
    default_group._group, default_group._data_group = default_group.ProcessGroup(SingleProcessTransport()), None
    try:
        yield default_group._group
    finally:
        default_group._group, default_group._data_group = together


def assert_same_sums(mine: Any, expected: Any) -> None:
    """Check equality to the bit, or nearly for MCCL with 3 or more ranks, where buckets change the order of adding."""
    import mindnlp_dp as dp

    group = dp.get_process_group()
    is_exact = group.backend != "mccl" or group.world_size <= 2
    for one, other in zip(mine, expected, strict=True):
        if is_exact or one is None:
            np.testing.assert_array_equal(one, other)
        else:
            # Half precision types amplify differences in the last bits of a sum.
            tolerance = 2e-3 if one.dtype == np.float16 else 2e-6
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
