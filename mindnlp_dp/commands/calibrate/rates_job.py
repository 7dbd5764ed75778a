"""Times training steps of small models on every rank, and all-reduces; ``mindnlp-dp plan --measure`` runs this job.

All ranks compute at the same time but independently, so that they compete for the machine as in a real run. The models
differ in width, depth and vocabulary, and none of them is a model that a plan is for.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mindnlp_dp as dp

# Hidden size, layers, feed-forward size, words, tokens, sequences, whether it is a masked language model, dropout. They
# differ in products, in memory traffic, in calls and in parameters.
SHAPES: dict[str, tuple[int, int, int, int, int, int, bool, float]] = {
    "narrow": (64, 2, 256, 500, 32, 8, False, 0.1),
    "deep": (64, 8, 256, 500, 32, 8, False, 0.1),
    "wide": (768, 1, 3072, 500, 32, 8, False, 0.1),
    "rows": (384, 2, 1536, 1000, 32, 32, False, 0.1),
    "few rows": (384, 2, 1536, 1000, 32, 2, False, 0.1),
    "long": (128, 2, 512, 500, 128, 8, False, 0.1),
    "words": (128, 1, 256, 30000, 32, 8, True, 0.1),
    "many words": (384, 1, 512, 40000, 32, 4, True, 0.1),
    "few words": (256, 3, 1024, 8000, 32, 16, True, 0.0),
    "wide without dropout": (512, 3, 2048, 500, 32, 8, False, 0.0),
    "long without dropout": (128, 3, 512, 500, 128, 8, False, 0.0),
}

HEADS = 4

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 21, 1 << 23)


def main() -> None:
    """Measure the rates of this machine on the ranks of this job; rank 0 prints them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", type=Path, required=True)
    args = parser.parse_args()
    group = dp.init_process_group()
    _be_quiet()
    alone = group.split([group.rank]) if group.world_size > 1 else group
    steps = []
    for name, shape in SHAPES.items():
        for num_micro_batches in (1, 3):
            step, micro_batches = _step(shape, num_micro_batches, alone)
            seconds = _median(group, lambda s=step, w=micro_batches: s(w), args.repeats)  # type: ignore[misc]
            steps.append({"name": name, "micro_batches": num_micro_batches, "seconds": seconds})
    links = [] if group.world_size == 1 else _all_reduces(group, args.repeats)
    if group.is_main:
        numbers = {
            "world_size": group.world_size,
            "device": os.environ.get("DEVICE_TARGET", "CPU"),
            "steps": steps,
            "all_reduces": links,
        }
        args.write.write_text(json.dumps(numbers))


def _be_quiet() -> None:
    """Silence MindNLP's warnings for authors of models, which are not useful in a measurement."""
    from mindnlp.utils import logging

    logging.set_verbosity_error()


def _step(shape: tuple[Any, ...], num_micro_batches: int, group: Any) -> tuple[Any, Any]:
    from mindnlp.core import optim
    from mindnlp.transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    hidden, layers, inner, words, length, rows, guesses, dropout = shape
    config = BertConfig(
        vocab_size=words, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=HEADS,
        intermediate_size=inner, max_position_embeddings=length, num_labels=2,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    model = (BertForMaskedLM if guesses else BertForSequenceClassification)(config)
    dp.broadcast_parameters(model, group)
    model.set_train(True)
    parameters = list(model.parameters())
    rng = np.random.default_rng(0)
    ids = rng.integers(5, words, (rows, length))
    batch = {"input_ids": ids, "labels": ids if guesses else rng.integers(0, 2, rows)}
    step = dp.make_train_step(
        lambda **inputs: model(**inputs)[0], optim.AdamW(parameters, lr=1e-4), parameters,
        accumulation_steps=num_micro_batches, max_grad_norm=1.0, zero_stage=0, overlap=False, group=group,
    )  # fmt: skip
    return step, [batch] * num_micro_batches if num_micro_batches > 1 else batch


def _all_reduces(group: Any, repeats: int) -> list[dict[str, float]]:
    """Time all-reduces of activations, as tensor parallelism runs them; return seconds by size."""
    import mindspore

    from mindnlp_dp.communication.autograd_ops import reduce_from

    found = []
    for size in SIZES:
        x = mindspore.Tensor(np.ones(size // 4, np.float32))
        times = max(1, (1 << 21) // size)

        def many(x: Any = x, times: int = times) -> None:
            for _ in range(times):
                reduce_from(x, group)

        found.append({"bytes": size, "seconds": _median(group, many, repeats) / times})
    return found


def _median(group: Any, function: Callable[[], Any], repeats: int) -> float:
    """Return the median over calls of the slowest rank's seconds; all ranks start together, and two calls warm up."""
    times = []
    for number in range(repeats + 2):
        group.barrier()
        began = time.perf_counter()
        function()
        if number >= 2:
            times.append(time.perf_counter() - began)
    return statistics.median(group.all_reduce(np.array(times), op="max").tolist())


if __name__ == "__main__":
    main()
