"""Time the operators of a BERT's step on one core in one library; bench_kernels.py runs it.

    python benchmarks/operators.py --library mindspore --write FILE     our kernels
    python benchmarks/operators.py --library torch --write FILE         with a Python that has PyTorch
    python benchmarks/operators.py --library numpy --write FILE

MINDNLP_DP_KERNELS=mindspore selects MindSpore's own kernels. The results are median milliseconds per call: for forward
alone, and the extra time of a backward pass to all inputs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, Callable

import numpy as np
from train_bert import BATCH, LENGTH, SIZES

TOKENS, WIDTH, INNER, HEADS = BATCH * LENGTH, SIZES["width"], SIZES["inner"], SIZES["num_heads"]
# The input shapes of each operator.
OPERATORS: dict[str, tuple[tuple[int, ...], ...]] = {
    "linear": ((TOKENS, WIDTH), (INNER, WIDTH), (INNER,)),
    "attention's product": ((BATCH, LENGTH, HEADS, WIDTH // HEADS),) * 2,
    "gelu": ((TOKENS, INNER),),
    "gelu, tanh": ((TOKENS, INNER),),
    "layer norm": ((TOKENS, INNER), (INNER,), (INNER,)),
    "dropout": ((TOKENS, INNER),),
    "embedding": ((SIZES["vocab_size"], WIDTH),),
}
# The calls of an operator: forward alone, and forward with backward.
Calls = tuple[Callable[[], Any], Callable[[], Any]]


def same_functions(library: Any, functional: Any, ids: Any) -> dict[str, Callable[..., Any]]:
    """Return the operators, which have the same API in MindNLP and PyTorch."""
    return {
        "linear": functional.linear,
        "attention's product": lambda q, k: library.matmul(q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1)),
        "gelu": functional.gelu,
        "gelu, tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "layer norm": lambda x, weight, bias: functional.layer_norm(x, (INNER,), weight, bias),
        "dropout": lambda x: functional.dropout(x, 0.1),
        "embedding": lambda weight: functional.embedding(ids, weight),
    }


def by_mindspore(inputs: dict[str, list[np.ndarray]], ids: np.ndarray) -> dict[str, Calls]:
    import mindspore

    import mindnlp_dp as dp

    dp.init_process_group()
    from mindnlp.core import ops
    from mindnlp.core.nn import functional

    def calls(name: str, function: Callable[..., Any]) -> Calls:
        tensors = [mindspore.Tensor(array) for array in inputs[name]]
        seed = mindspore.ops.ones_like(function(*tensors))
        differentiate = mindspore.ops.GradOperation(get_all=True, sens_param=True)
        return lambda: function(*tensors), lambda: differentiate(function)(*tensors, seed)

    functions = same_functions(ops, functional, mindspore.Tensor(ids))
    return {name: calls(name, function) for name, function in functions.items()}


def by_torch(inputs: dict[str, list[np.ndarray]], ids: np.ndarray) -> dict[str, Calls]:
    import torch

    torch.set_num_threads(1)

    def calls(name: str, function: Callable[..., Any]) -> Calls:
        tensors = [torch.from_numpy(array).requires_grad_() for array in inputs[name]]
        seed = torch.ones_like(function(*tensors))
        return lambda: function(*tensors), lambda: torch.autograd.grad(function(*tensors), tensors, seed)

    functions = same_functions(torch, torch.nn.functional, torch.from_numpy(ids))
    return {name: calls(name, function) for name, function in functions.items()}


def by_numpy(inputs: dict[str, list[np.ndarray]], ids: np.ndarray) -> dict[str, Calls]:
    x, weight, bias = inputs["linear"]
    g = np.ones((TOKENS, INNER), np.float32)

    def forward() -> Any:
        return x @ weight.T + bias

    return {"linear": (forward, lambda: (forward(), g @ weight, g.T @ x, g.sum(0)))}


def milliseconds(calls: Calls, repeats: int) -> list[float]:
    """Return the median times of forward and of what backward adds, measured in turns without the first two."""
    taken: list[tuple[float, ...]] = []
    for _ in range(repeats + 2):
        ends = [time.perf_counter()]
        for call in calls:
            call()
            ends.append(time.perf_counter())
        taken.append(tuple(1e3 * (end - begin) for begin, end in zip(ends, ends[1:])))
    forward, both = (statistics.median(times) for times in zip(*taken[2:]))
    return [forward, both - forward]


def main() -> None:
    libraries = {"mindspore": by_mindspore, "torch": by_torch, "numpy": by_numpy}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=libraries, required=True)
    parser.add_argument("--calls", type=int, default=15, help="measured calls of an operator")
    parser.add_argument("--write", type=Path, required=True)
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    inputs = {
        name: [rng.standard_normal(shape, dtype=np.float32) for shape in shapes] for name, shapes in OPERATORS.items()
    }
    ids = rng.integers(0, SIZES["vocab_size"], (BATCH, LENGTH))
    calls = libraries[args.library](inputs, ids)
    args.write.write_text(json.dumps({name: milliseconds(both, args.calls) for name, both in calls.items()}))


if __name__ == "__main__":
    main()
