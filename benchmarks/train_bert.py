"""Training steps of a BERT of 22.7 million parameters in MindNLP, as one rank of a job does them: the others' side of a
comparison is in gloo.py.

    mindnlp-dp run --nproc 2 benchmarks/train_bert.py --variants compute overlap --write FILE

A step is a forward and a backward pass of 32 sequences of 32 tokens, the exchange, clipping and AdamW. Variants take
turns, step by step, in one process; each has a synchroniser of its own, and all train one model.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

VOCAB_SIZE, WIDTH, LAYERS, HEADS, INNER = 30522, 384, 6, 12, 1536
BATCH, LENGTH, LABELS = 32, 32, 77

# What a synchroniser is made with; None trains without any exchange.
VARIANTS: dict[str, Any] = {
    "compute": None,
    "auto": {},
    "after": {"overlap": False, "skip_zeros": False},
    "after, zeros skipped": {"overlap": False},
    "overlap, all bytes": {"overlap": True, "skip_zeros": False},
    "overlap": {"overlap": True},
    "after, fp16, all bytes": {"overlap": False, "skip_zeros": False, "compression": "fp16"},
    "overlap, fp16": {"overlap": True, "compression": "fp16"},
    "overlap, bf16": {"overlap": True, "compression": "bf16"},
    "PowerSGD, rank 4": {"compression": "powersgd"},
}


class Step:
    """One way to train; a call is one step and returns what it took."""

    def __init__(self, parameters: Any, optimizer: Any, options: Any, group: Any) -> None:
        import mindnlp_dp as dp

        self.parameters = [p for _, p in parameters]
        self.optimizer = optimizer
        self.group = group
        self.skip_zeros = True
        self.sync = None
        if options is not None:
            options = dict(options)
            self.skip_zeros = options.pop("skip_zeros", True)
            self.sync = dp.GradientSynchronizer(parameters, group, **options)

    def _bytes_sent(self) -> int:
        return 0 if self.sync is None else self.sync.channel.bytes_sent or 0

    def __call__(self, run: Any) -> dict[str, float]:
        from mindnlp.core import nn

        from mindnlp_dp.communication.transports.mpi import MPIChannel

        channel = None if self.sync is None else self.sync.channel
        if isinstance(channel, MPIChannel):
            channel.exchange.skip_zeros = self.skip_zeros
        for parameter in self.parameters:
            parameter.grad = None
        self.group.barrier()
        sent_before, began = self._bytes_sent(), time.perf_counter()
        exposed = 0.0
        if self.sync is None:
            run()
        else:
            seconds_before = self.sync.seconds
            with self.sync.backward(BATCH):
                run()
            self.sync.accumulate([p.grad for p in self.parameters], BATCH)
            for parameter, gradient in zip(self.parameters, self.sync.reduce()):
                parameter.grad = gradient
            exposed = self.sync.seconds - seconds_before
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return {
            "step": time.perf_counter() - began,
            "exposed": exposed,
            "sent": self._bytes_sent() - sent_before,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, required=True)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of every variant")
    parser.add_argument("--warm-up", type=int, default=3, help="steps of every variant before them")
    parser.add_argument("--write", type=Path, required=True)
    args = parser.parse_args()

    import mindnlp_dp as dp

    group = dp.init_process_group()
    import mindspore
    from mindnlp.core import optim
    from mindnlp.core.autograd import value_and_grad
    from mindnlp.transformers import BertConfig, BertForSequenceClassification

    from mindnlp_dp.gradients.overlap import TRIAL_PAIRS

    config = BertConfig(
        vocab_size=VOCAB_SIZE, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=INNER, num_labels=LABELS,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    dp.broadcast_parameters(model)
    model.set_train(True)
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = optim.AdamW([p for _, p in parameters], lr=1e-5)
    rng = np.random.default_rng(group.rank)
    ids = mindspore.Tensor(rng.integers(0, VOCAB_SIZE, (BATCH, LENGTH)))
    labels = mindspore.Tensor(rng.integers(0, LABELS, BATCH))
    mask = mindspore.Tensor(np.ones((BATCH, LENGTH), np.int64))
    weights = tuple(p for _, p in parameters)
    run = value_and_grad(lambda: model(ids, attention_mask=mask, labels=labels).loss, weights, attach_grads=True)

    steps = {name: Step(parameters, optimizer, VARIANTS[name], group) for name in args.variants}
    # "auto" has decided by then.
    warm_up = 2 + 2 * TRIAL_PAIRS if "auto" in steps and group.world_size > 1 else args.warm_up
    measured: dict[str, dict[str, list[float]]] = {name: {} for name in steps}
    for number in range(warm_up + args.steps):
        for name, step in steps.items():
            numbers = np.array(list((taken := step(run)).values()))
            slowest = group.all_reduce(numbers, op="max")
            if number >= warm_up:
                for key, value in zip(taken, slowest.tolist()):
                    measured[name].setdefault(key, []).append(value)
    num_bytes = sum(4 * int(np.prod(p.shape)) for _, p in parameters)
    states = {name: step.sync.overlap.state for name, step in steps.items() if step.sync is not None}
    if group.is_main:
        args.write.write_text(json.dumps({"measured": measured, "gradient_bytes": num_bytes, "overlap": states}))


if __name__ == "__main__":
    main()
