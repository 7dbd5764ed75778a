"""Measure how many samples per second a small RoBERTa trains at one number of ranks; scaling.py starts this job.

It measures twice: with a constant global batch, of which each rank's part shrinks (Amdahl), and with a constant batch
on each rank, so that the global batch grows (Gustafson).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import mindnlp_dp as dp

VOCAB_SIZE, LENGTH, LABELS = 4000, 24, 29

# Updates before the measurement, which include the trial that decides on overlap.
WARM_UP = 20


def main() -> None:
    """Measure the training throughput of this job's ranks; rank 0 writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, required=True, help="samples of one rank alone")
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--write", type=Path, required=True)
    args = parser.parse_args()
    # A single rank gets one core, as each of several ranks does.
    if os.environ.get("OMPI_COMM_WORLD_SIZE") == "1":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    group = dp.init_process_group()
    batches = {"global batch stays": max(args.batch // group.world_size, 1), "rank's batch stays": args.batch}
    rates = {name: _samples_per_second(group, rows, args.updates) for name, rows in batches.items()}
    if group.is_main:
        args.write.write_text(json.dumps({"world_size": group.world_size, "samples_per_second": rates}))


def _samples_per_second(group: Any, rows: int, num_updates: int) -> float:
    import mindspore
    from mindnlp.core import optim
    from mindnlp.transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512,
        hidden_act="relu", num_labels=LABELS, max_position_embeddings=LENGTH + 2,
    )  # fmt: skip
    model = RobertaForSequenceClassification(config)
    dp.broadcast_parameters(model)
    model.set_train(True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    rng = np.random.default_rng(group.rank)
    ids = mindspore.Tensor(rng.integers(5, VOCAB_SIZE, (rows, LENGTH)))
    labels = mindspore.Tensor(rng.integers(0, LABELS, rows))
    step = dp.make_train_step(
        lambda ids, labels: model(ids, labels=labels).loss,
        optim.AdamW(parameters, lr=1e-4),
        parameters,
        model=model,
        max_grad_norm=1.0,
    )
    times = []
    for number in range(WARM_UP + num_updates):
        group.barrier()
        began = time.perf_counter()
        step((ids, labels))
        if number >= WARM_UP:
            times.append(time.perf_counter() - began)
    slowest = group.all_reduce(np.array(times), op="max").tolist()
    return rows * group.world_size / statistics.median(slowest)


if __name__ == "__main__":
    main()
