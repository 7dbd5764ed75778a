"""Measure PyTorch on one host, with gloo and one core per process, for comparison; other benchmarks run this script.

It runs with a Python that has PyTorch; MindSpore is not needed:

    python benchmarks/gloo.py --kind all_reduce --write FILE
    python benchmarks/gloo.py --kind gradients --shapes FILE --write FILE
    python benchmarks/gloo.py --kind step [--nproc 1] --write FILE          and "step amp", with autocast to bfloat16
    python benchmarks/gloo.py --kind update [--nproc 1] --write FILE
    python benchmarks/gloo.py --kind memory [--nproc 4] --write FILE
    python benchmarks/gloo.py --kind activations --nproc 1 --write FILE     and "activations recomputed"
    python benchmarks/gloo.py --kind "head loss" --nproc 1 --write FILE
    python benchmarks/gloo.py --kind llama [--nproc 1] --write FILE         and "llama lora"

AdamW is the fused one, PyTorch's fastest on a CPU. The kinds that end with "zero" shard its state between the ranks by
ZeroRedundancyOptimizer with parameters_as_bucket_view=True, which makes the exchange of weights three times as fast.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, Callable

from common import median_seconds, peak_bytes, proportional_bytes, reset_peak, resident_bytes


def all_reduce(distributed: Any, torch: Any, _: Any) -> dict[str, Any]:
    from bench_all_reduce import SIZES, repeats_for

    seconds = {}
    for num_bytes in SIZES:
        x = torch.rand(num_bytes // 4)

        def call(x: Any = x) -> None:
            distributed.all_reduce(x.clone())

        seconds[num_bytes] = median_seconds(distributed.barrier, call, repeats_for(num_bytes))
    return {"gloo": seconds}


def gradients(distributed: Any, torch: Any, shapes: list[list[int]]) -> dict[str, Any]:
    """Time DDP's exchange: buckets of 25 MiB like its reducer's, copied in, divided, reduced and copied out."""
    tensors = [torch.rand(shape) for shape in shapes]
    buckets: list[list[Any]] = [[]]
    cap, size = 25 << 20, 0
    for tensor in reversed(tensors):
        if size and size + tensor.numel() * 4 > cap:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.numel() * 4
    flats = [torch.empty(sum(tensor.numel() for tensor in bucket)) for bucket in buckets]

    def exchange() -> None:
        handles = []
        for bucket, flat in zip(buckets, flats):
            torch.cat([tensor.view(-1) for tensor in bucket], out=flat)
            flat.div_(2)
            handles.append(distributed.all_reduce(flat, async_op=True))
        for handle, bucket, flat in zip(handles, buckets, flats):
            handle.wait()
            for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket])):
                tensor.view(-1).copy_(part)

    return {"gloo": median_seconds(distributed.barrier, exchange, 7)}


def bert(torch: Any, **sizes: int) -> Any:
    """Return the BERT of train_bert.py built from PyTorch modules: the same layers, shapes and activation."""
    from train_bert import LABELS, SIZES

    nn: Any = torch.nn
    vocab_size, width, num_layers, num_heads, inner = {**SIZES, **sizes}.values()

    class Bert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.positions, self.types = (nn.Embedding(n, width) for n in (vocab_size, 512, 2))
            self.norm = nn.LayerNorm(width)
            layer = nn.TransformerEncoderLayer(width, num_heads, inner, 0.1, "gelu", batch_first=True)
            self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
            self.pooler = nn.Linear(width, width)
            self.classifier = nn.Linear(width, LABELS)

        def forward(self, ids: Any) -> Any:
            embedded = self.words(ids) + self.positions.weight[: ids.shape[1]] + self.types.weight[0]
            hidden = self.layers(nn.functional.dropout(self.norm(embedded), 0.1, self.training))
            return self.classifier(torch.tanh(self.pooler(hidden[:, 0])))

    return Bert()


def adamw(distributed: Any, torch: Any, parameters: Any, zero: bool) -> Any:
    from train_bert import LEARNING_RATE

    if not zero or distributed.get_world_size() == 1:
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        parameters, torch.optim.AdamW, parameters_as_bucket_view=True, lr=LEARNING_RATE, fused=True
    )


def trained(
    distributed: Any, torch: Any, zero: bool, batch: int, length: int, **sizes: int
) -> Callable[[Callable[[str], Any]], None]:
    """Return a function that does one update of a BERT with DistributedDataParallel and reports each stage."""
    from train_bert import LABELS, MAX_NORM, SIZES

    model: Any = bert(torch, **sizes)
    if distributed.get_world_size() > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = adamw(distributed, torch, list(model.parameters()), zero)
    vocab_size = {**SIZES, **sizes}["vocab_size"]
    ids, labels = torch.randint(vocab_size, (batch, length)), torch.randint(LABELS, (batch,))

    def one(done: Callable[[str], Any]) -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(ids), labels).backward()
        done("backward")
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        done("clip")
        optimizer.step()
        done("update")

    return one


def step(distributed: Any, torch: Any, _: Any, zero: bool = False) -> dict[str, Any]:
    """Return the median time of a training step, as train_bert.py measures it."""
    from train_bert import BATCH, LENGTH

    one = trained(distributed, torch, zero, BATCH, LENGTH)
    return {"step": median_seconds(distributed.barrier, lambda: one(lambda _: None), 7)}


def step_amp(distributed: Any, torch: Any, _: Any) -> dict[str, Any]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return step(distributed, torch, _)


def step_zero(distributed: Any, torch: Any, _: Any) -> dict[str, Any]:
    return step(distributed, torch, _, zero=True)


class MuonAndAdamW:
    """Runs PyTorch's Muon on the matrices of layers, and its AdamW on the rest."""

    def __init__(self, torch: Any, model: Any) -> None:
        from train_bert import LEARNING_RATE

        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        parameters = list(model.parameters())
        matrices = [p for p in parameters if p.ndim == 2 and id(p) not in embeddings]
        rest = [p for p in parameters if p.ndim != 2 or id(p) in embeddings]
        self.both = (
            torch.optim.Muon(matrices, lr=LEARNING_RATE, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=LEARNING_RATE, fused=True),
        )

    def step(self) -> None:
        for optimizer in self.both:
            optimizer.step()


def update_muon(distributed: Any, torch: Any, _: Any) -> dict[str, Any]:
    return update(distributed, torch, _, muon=True)


def update(distributed: Any, torch: Any, _: Any, muon: bool = False) -> dict[str, Any]:
    """Return the times of clipping and an optimizer as bench_update.py measures them; several ranks shard AdamW."""
    from bench_update import DEVIATION, WARM_UP
    from train_bert import MAX_NORM

    model = bert(torch)
    parameters = list(model.parameters())
    optimizer = MuonAndAdamW(torch, model) if muon else adamw(distributed, torch, parameters, zero=True)
    # All ranks have the same gradients, as after averaging.
    torch.manual_seed(0)
    gradients = [DEVIATION * torch.randn(parameter.shape) for parameter in parameters]
    measured: dict[str, list[float]] = {"exchange": [], "clip": [], "update": [], "both": []}
    for number in range(WARM_UP + 15):
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient.clone()
        distributed.barrier()
        times = [time.perf_counter()]
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        times.append(time.perf_counter())
        optimizer.step()
        times.append(time.perf_counter())
        slowest = torch.tensor([0.0, times[1] - times[0], times[2] - times[1], times[2] - times[0]])
        distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
        if number >= WARM_UP:
            for seconds, value in zip(measured.values(), slowest.tolist()):
                seconds.append(value)
    return {"update": measured}


def memory(distributed: Any, torch: Any, _: Any, zero: bool = False) -> dict[str, Any]:
    """Return the growth of memory after every stage, as bench_memory.py measures it."""
    from bench_memory import LENGTH, SMALL, memory_now

    for _ in range(2):
        trained(distributed, torch, zero, 1, LENGTH, **SMALL)(lambda _: None)
    before = memory_now(distributed.barrier, proportional_bytes)
    one = trained(distributed, torch, zero, 1, LENGTH)
    moments: dict[str, int] = {}
    for _ in range(5):
        one(lambda stage: moments.update({stage: memory_now(distributed.barrier, proportional_bytes) - before}))
    total = torch.tensor(list(moments.values()), dtype=torch.int64)
    distributed.all_reduce(total)
    return {"moments": dict(zip(moments, total.tolist()))}


def memory_zero(distributed: Any, torch: Any, _: Any) -> dict[str, Any]:
    return memory(distributed, torch, _, zero=True)


def activations(distributed: Any, torch: Any, _: Any, recompute: bool = False) -> dict[str, Any]:
    """Return the activations of an update in bytes, as bench_memory.py measures them, and its seconds."""
    from bench_memory import DEPTH, measure_activations
    from torch.utils.checkpoint import checkpoint
    from train_bert import LABELS, MAX_NORM, SIZES

    model: Any = bert(torch, num_layers=DEPTH)
    for layer in model.layers.layers if recompute else ():
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    optimizer = adamw(distributed, torch, list(model.parameters()), False)

    def update(rows: int, length: int) -> None:
        optimizer.zero_grad()
        ids, labels = torch.randint(SIZES["vocab_size"], (rows, length)), torch.randint(LABELS, (rows,))
        torch.nn.functional.cross_entropy(model(ids), labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()

    return measure_activations(update)


def activations_recomputed(distributed: Any, torch: Any, _: Any) -> dict[str, Any]:
    return activations(distributed, torch, _, recompute=True)


def head_loss(distributed: Any, torch: Any, _: Any) -> dict[str, Any]:
    """Measure the output layer and the loss of bench_head_loss.py."""
    from bench_head_loss import TOKENS, WIDTH, WORDS, measure_pass

    def make(words: int, tokens: int) -> Callable[[], Any]:
        x, weight = (torch.randn(n, WIDTH).div_(32).requires_grad_() for n in (tokens, words))
        labels = torch.randint(words, (tokens,))

        def run() -> None:
            x.grad = weight.grad = None
            torch.nn.functional.cross_entropy(x @ weight.T, labels).backward()

        return run

    return measure_pass(make, WORDS, TOKENS)


def llama(distributed: Any, torch: Any, _: Any, is_lora: bool = False) -> dict[str, Any]:
    """Measure the training of bench_llm.py: seconds of an update, and growth of the peak memory."""
    from torch_llama import trained

    before = resident_bytes()
    reset_peak()
    seconds = median_seconds(distributed.barrier, trained(distributed, torch, is_lora), 8)
    measured = torch.tensor([seconds, peak_bytes() - before], dtype=torch.float64)
    distributed.all_reduce(measured, op=distributed.ReduceOp.MAX)
    return dict(zip(("seconds", "bytes"), measured.tolist()))


def llama_lora(distributed: Any, torch: Any, _: Any) -> dict[str, Any]:
    return llama(distributed, torch, _, is_lora=True)


KINDS = {
    function.__name__.replace("_", " ", 1) if function is not all_reduce else "all_reduce": function
    for function in (
        all_reduce, gradients, step, step_amp, step_zero, update, update_muon, memory, memory_zero, activations,
        activations_recomputed, head_loss, llama, llama_lora,
    )
}  # fmt: skip


def work(rank: int, world_size: int, port: int, kind: str, shapes: Any, file: str) -> None:  # noqa: PLR0917
    import torch
    from torch import distributed

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    measured = KINDS[kind](distributed, torch, shapes)
    if rank == 0:
        Path(file).write_text(json.dumps(measured))
    distributed.barrier()
    distributed.destroy_process_group()


def main() -> None:
    import torch.multiprocessing

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--shapes", type=Path, help="a JSON list of the gradients' shapes")
    parser.add_argument("--write", required=True)
    args = parser.parse_args()
    shapes = json.loads(args.shapes.read_text()) if args.shapes else None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(work, (args.nproc, port, args.kind, shapes, args.write), nprocs=args.nproc)


if __name__ == "__main__":
    main()
