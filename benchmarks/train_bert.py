"""Time training steps of a BERT with 22.7 million parameters in MindNLP, on each rank of a job.

Other benchmarks run this script; gloo.py does the same with PyTorch.

    mindnlp-dp run --nproc 2 benchmarks/train_bert.py --variants compute overlap --write FILE

A step is the forward and backward pass of 32 sequences of 32 tokens, the gradient exchange, clipping and AdamW. The
variants alternate step by step in one process; each has its own model, synchronizer and optimizer.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np

SIZES = {"vocab_size": 30522, "width": 384, "num_layers": 6, "num_heads": 12, "inner": 1536}
BATCH, LENGTH, LABELS = 32, 32, 77
MAX_NORM, LEARNING_RATE = 1.0, 1e-5

# The options of the synchronizer and the update. None: no exchange, every rank trains alone with our update, like a
# single process. OWN: the same with MindNLP's clip_grad_norm_ and AdamW.step.
OWN = "MindNLP's own update"
# "auto" itself, with dropout masks that each rank draws for itself.
PER_RANK = "auto, dropout per rank"
VARIANTS: dict[str, Any] = {
    OWN: None,
    "compute": None,
    "auto": {},
    PER_RANK: {},
    "auto, zero_stage=0": {"zero_stage": 0},
    "after": {"overlap": False, "skip_zeros": False},
    "after, zeros skipped": {"overlap": False},
    "overlap, all bytes": {"overlap": True, "skip_zeros": False},
    "overlap": {"overlap": True},
    "after, fp16, all bytes": {"overlap": False, "skip_zeros": False, "compression": "fp16"},
    "overlap, fp16": {"overlap": True, "compression": "fp16"},
    "overlap, bf16": {"overlap": True, "compression": "bf16"},
    "PowerSGD, rank 4": {"compression": "powersgd"},
}


def make_bert(*, pretrained: Optional[str] = None, **sizes: int) -> Any:
    """Return the BERT, with random weights or those of a folder; ``sizes`` override its sizes."""
    from mindnlp.transformers import BertConfig, BertForSequenceClassification

    if pretrained is not None:
        return BertForSequenceClassification.from_pretrained(pretrained, num_labels=LABELS)
    vocab_size, width, num_layers, num_heads, inner = {**SIZES, **sizes}.values()
    config = BertConfig(
        vocab_size=vocab_size, hidden_size=width, num_hidden_layers=num_layers, num_attention_heads=num_heads,
        intermediate_size=inner, num_labels=LABELS,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def update_stages(optimizer: Any, synchronizer: Any, zero_stage: Any = "auto") -> Callable[[], Iterable[str]]:
    """Return a function that does our update after a backward pass and yields after each of its stages."""
    from mindnlp_dp.optim.updater_factory import make_updater

    updater = make_updater(optimizer, synchronizer, zero_stage=zero_stage)

    def stages() -> Iterable[str]:
        averaged = updater.receive(synchronizer.reduce(in_place=updater.reads_buckets), synchronizer)
        yield "exchange"
        averaged, _ = updater.clip(averaged, MAX_NORM)
        yield "clip"
        updater.update(averaged)
        yield "update"
        updater.finish()
        synchronizer.repack_if_learned()
        yield "finish"

    return stages


class Step:
    """One variant of training; each call trains one step and returns its seconds and the bytes sent."""

    def __init__(self, name: str, group: Any, batch: int = BATCH, pretrained: Optional[str] = None) -> None:
        import mindspore
        from mindnlp.core import optim
        from mindnlp.core.autograd import value_and_grad

        import mindnlp_dp as dp
        from mindnlp_dp.communication.transports.single import SingleProcessTransport
        from mindnlp_dp.runtime.random_state import SampleStreams

        model = make_bert(pretrained=pretrained)
        dp.broadcast_parameters(model)
        model.set_train(True)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.parameters: Sequence[Any] = [p for _, p in named]
        self.batch, self.group = batch, group
        self.optimizer = optim.AdamW(self.parameters, lr=LEARNING_RATE)
        rng = np.random.default_rng(group.rank)
        ids = mindspore.Tensor(rng.integers(0, SIZES["vocab_size"], (batch, LENGTH)))
        labels = mindspore.Tensor(rng.integers(0, LABELS, batch))
        mask = mindspore.Tensor(np.ones((batch, LENGTH), np.int64))
        self.is_own, self.num_steps = name == OWN, 0
        self.run = value_and_grad(
            lambda: model(ids, attention_mask=mask, labels=labels).loss,
            tuple(self.parameters),
            attach_grads=self.is_own,
        )
        self.sync: Any = None
        if not self.is_own:
            alone = dp.ProcessGroup(SingleProcessTransport())
            options = dict(VARIANTS[name] or {})
            positions = np.arange(group.rank * batch, (group.rank + 1) * batch)
            self.streams: Any = SampleStreams(0, positions, frozenset([LENGTH]))
            self.skip_zeros = options.pop("skip_zeros", True)
            zero_stage = options.pop("zero_stage", "auto")
            self.sync = dp.GradientSynchronizer(named, alone if VARIANTS[name] is None else group, **options)
            self.stages = update_stages(self.optimizer, self.sync, zero_stage)

    def __call__(self) -> dict[str, float]:
        self.group.barrier()
        return self._own() if self.is_own else self._ours()

    def _own(self) -> dict[str, float]:
        from mindnlp.core import nn

        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.run()
        nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.optimizer.step()
        return {"step": time.perf_counter() - began, "exposed": 0.0, "sent": 0}

    def _ours(self) -> dict[str, float]:
        from mindnlp_dp.communication.transports.mpi.mpi_transport import MPIChannel
        from mindnlp_dp.runtime.random_state import seeded

        channel = self.sync.channel
        if isinstance(channel, MPIChannel):
            channel.exchange.skip_zeros = self.skip_zeros
        sent_before, seconds_before, began = channel.bytes_sent or 0, self.sync.seconds, time.perf_counter()
        self.num_steps += 1
        if self.streams is not None:
            self.streams.key = self.num_steps
        with seeded(self.num_steps, self.streams), self.sync.backward(self.batch):
            _, gradients = self.run()
        self.sync.accumulate(gradients, self.batch)
        del gradients
        for _ in self.stages():
            pass
        return {
            "step": time.perf_counter() - began,
            "exposed": self.sync.seconds - seconds_before,
            "sent": (channel.bytes_sent or 0) - sent_before,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, required=True)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of every variant")
    parser.add_argument("--warm-up", type=int, default=3, help="steps of every variant before them")
    parser.add_argument("--batch", type=int, default=BATCH, help="sequences per rank")
    parser.add_argument("--pretrained", help="a folder with the weights of a BERT; without one they are random")
    parser.add_argument("--write", type=Path, required=True)
    args = parser.parse_args()

    import mindnlp_dp as dp

    group = dp.init_process_group()
    from mindnlp_dp.data_parallel.overlap import TRIAL_PAIRS

    steps = {name: Step(name, group, args.batch, args.pretrained) for name in args.variants if name != PER_RANK}
    if PER_RANK in args.variants:
        # Another model would lie elsewhere in memory, which makes more of a difference than the masks.
        steps[PER_RANK] = copy.copy(steps["auto"])
        steps[PER_RANK].streams = None
    # In its first steps "auto" measures whether the exchange should overlap; the other variants need fewer steps.
    num_trial_steps = 2 + 2 * TRIAL_PAIRS - args.warm_up if group.world_size > 1 else 0
    for name, step in steps.items():
        for _ in range(num_trial_steps if name.startswith("auto") else 0):
            step()
    measured: dict[str, dict[str, list[float]]] = {name: {} for name in steps}
    for number in range(args.warm_up + args.steps):
        for name, step in steps.items():
            numbers = np.array(list((taken := step()).values()))
            slowest = group.all_reduce(numbers, op="max")
            if number >= args.warm_up:
                for key, value in zip(taken, slowest.tolist()):
                    measured[name].setdefault(key, []).append(value)
    num_bytes = sum(4 * int(np.prod(p.shape)) for p in next(iter(steps.values())).parameters)
    overlaps = {name: step.sync.overlap for name, step in steps.items() if step.sync is not None}
    states = {name: overlap.off_reason or overlap.state.value for name, overlap in overlaps.items()}
    if group.is_main:
        args.write.write_text(json.dumps({"measured": measured, "gradient_bytes": num_bytes, "overlap": states}))


if __name__ == "__main__":
    main()
