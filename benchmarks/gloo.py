"""PyTorch on one host, a core for each process, with gloo between them: the other side of the comparisons.

Runs in a Python that has PyTorch, which need not have MindSpore:

    python benchmarks/gloo.py --kind all_reduce --write FILE
    python benchmarks/gloo.py --kind gradients --shapes FILE --write FILE
    python benchmarks/gloo.py --kind step [--nproc 1] --write FILE
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from pathlib import Path
from typing import Any

from common import median_seconds


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
    """DDP's exchange: its reducer's own buckets of 25 MiB, copied in, reduced, divided and copied out."""
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


def bert(torch: Any) -> Any:
    """The BERT of train_bert.py from PyTorch's own parts: the same layers, shapes and activation."""
    from train_bert import HEADS, INNER, LABELS, LAYERS, VOCAB_SIZE, WIDTH

    nn: Any = torch.nn

    class Bert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.positions, self.types = (nn.Embedding(n, WIDTH) for n in (VOCAB_SIZE, 512, 2))
            self.norm = nn.LayerNorm(WIDTH)
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, 0.1, "gelu", batch_first=True)
            self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
            self.pooler = nn.Linear(WIDTH, WIDTH)
            self.classifier = nn.Linear(WIDTH, LABELS)

        def forward(self, ids: Any) -> Any:
            embedded = self.words(ids) + self.positions.weight[: ids.shape[1]] + self.types.weight[0]
            hidden = self.layers(nn.functional.dropout(self.norm(embedded), 0.1, self.training))
            return self.classifier(torch.tanh(self.pooler(hidden[:, 0])))

    return Bert()


def step(distributed: Any, torch: Any, _: Any) -> dict[str, Any]:
    """What train_bert.py does, with DistributedDataParallel as a user gets it."""
    from train_bert import BATCH, LABELS, LENGTH, VOCAB_SIZE

    model: Any = bert(torch)
    if distributed.get_world_size() > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids, labels = torch.randint(VOCAB_SIZE, (BATCH, LENGTH)), torch.randint(LABELS, (BATCH,))

    def one() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(ids), labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"step": median_seconds(distributed.barrier, one, 7)}


KINDS = {"all_reduce": all_reduce, "gradients": gradients, "step": step}


def work(rank: int, world_size: int, port: int, kind: str, shapes: Any, file: str) -> None:  # noqa: PLR0917
    import torch
    from torch import distributed

    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    measured = KINDS[kind](distributed, torch, shapes)
    if rank == 0:
        Path(file).write_text(json.dumps(measured))
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
