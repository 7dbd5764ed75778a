"""Time the operators of a BERT's step on one core, in one library or in several in turns; bench_kernels.py runs it.

    python benchmarks/operators.py --library mindspore --write FILE     our kernels
    python benchmarks/operators.py --library torch --write FILE         with a Python that has PyTorch
    python benchmarks/operators.py --library numpy --write FILE
    python benchmarks/operators.py --library kernels onednn --write FILE
                                             our kernels without autograd, and the primitives that they call

MINDNLP_DP_KERNELS=mindspore selects MindSpore's own kernels. The results are median milliseconds per call: for forward
alone, and the extra time of a backward pass to all inputs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
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
    "softmax": ((BATCH * HEADS * LENGTH, LENGTH),),
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
        "softmax": lambda x: functional.softmax(x, -1),
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


def by_kernels(inputs: dict[str, list[np.ndarray]], ids: np.ndarray) -> dict[str, Calls]:
    from mindnlp_dp.kernels import activations, matmul, normalization, softmax

    def activation(name: str, x: np.ndarray) -> Calls:
        def both() -> None:
            _, slope = activations.forward(name, x, True)
            activations.backward(name, of_y, x, slope)

        of_y = np.ones_like(x)
        return lambda: activations.forward(name, x, True), both

    def product() -> np.ndarray:
        return matmul.matmul(rows_of_q, columns_of_k)

    def product_and_gradients() -> None:
        product()
        matmul.matmul(of_scores, columns_of_k.swapaxes(-1, -2), rows_of_q)
        matmul.matmul(rows_of_q.swapaxes(-1, -2), of_scores, columns_of_k)

    def norm() -> tuple[np.ndarray, normalization.Statistics]:
        return normalization.normalize(x, weight, bias, 1e-5, centered=True)

    def norm_and_gradients() -> None:
        normalization.normalize_backward(of_norm, x, weight, norm()[1], centered=True)

    def softmax_and_gradient() -> None:
        softmax.softmax_backward(of_s, softmax.softmax_of_rows(s))

    q, k = inputs["attention's product"]
    rows_of_q, columns_of_k = q.transpose(0, 2, 1, 3), k.transpose(0, 2, 3, 1)
    of_scores = np.ones((BATCH, HEADS, LENGTH, LENGTH), np.float32)
    x, weight, bias = inputs["layer norm"]
    (s,) = inputs["softmax"]
    of_norm, of_s = np.ones_like(x), np.ones_like(s)
    return {
        "attention's product": (product, product_and_gradients),
        "gelu": activation("gelu", *inputs["gelu"]),
        "gelu, tanh": activation("gelu_tanh", *inputs["gelu, tanh"]),
        "layer norm": (norm, norm_and_gradients),
        "softmax": (lambda: softmax.softmax_of_rows(s), softmax_and_gradient),
    }


def by_primitive(inputs: dict[str, list[np.ndarray]], ids: np.ndarray) -> dict[str, Calls]:
    from mindnlp_dp.kernels import onednn

    def calls(forward: Any, of_forward: list[np.ndarray], backward: Sequence[tuple[Any, list[np.ndarray]]]) -> Calls:
        def run(primitive: Any, arrays: list[np.ndarray]) -> None:
            primitive(*(array.ctypes.data for array in arrays))

        def both() -> None:
            run(forward, of_forward)
            for primitive, arrays in backward:
                run(primitive, arrays)

        return lambda: run(forward, of_forward), both

    def product(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> tuple[Any, list[np.ndarray]]:
        return onednn.products(*map(onednn.strided, (a, b, out))), [a, b, out]

    def activation(name: str, x: np.ndarray) -> Calls:
        y, g, of_x = (np.ones_like(x) for _ in range(3))
        gradient = onednn.activation_backward(name, x.size)
        return calls(onednn.activation(name, x.size), [x, y], [(gradient, [x, g, of_x])])

    q, k = inputs["attention's product"]
    scores, g = np.ones((2, BATCH, HEADS, LENGTH, LENGTH), np.float32)
    of_q, of_k = np.empty_like(q), np.empty_like(k)
    # The results have the factors' memory layout, and contiguous rows: of_k is g' q.
    rows, columns, rows_of_q = (0, 2, 1, 3), (0, 2, 3, 1), q.transpose(0, 2, 1, 3)
    attention = [
        product(g, k.transpose(rows), of_q.transpose(rows)),
        product(g.swapaxes(-1, -2), rows_of_q, of_k.transpose(rows)),
    ]
    x, weight, bias = inputs["layer norm"]
    y, of_y, of_x = (np.ones_like(x) for _ in range(3))
    mean, variance = np.ones((2, TOKENS), np.float32)
    norm = onednn.normalization(TOKENS, INNER, 1e-5, scale=True, shift=True, centered=True)
    of_norm = onednn.normalization_backward(TOKENS, INNER, 1e-5, scale=True)
    of_weight, of_bias = np.ones_like(weight), np.ones_like(bias)
    (s,) = inputs["softmax"]
    p, of_p, of_s = (np.ones_like(s) for _ in range(3))
    return {
        "attention's product": calls(*product(rows_of_q, k.transpose(columns), scores), attention),
        "gelu": activation("gelu", *inputs["gelu"]),
        "gelu, tanh": activation("gelu_tanh", *inputs["gelu, tanh"]),
        "layer norm": calls(
            norm, [x, y, mean, variance, weight, bias],
            [(of_norm, [x, of_y, of_x, mean, variance, weight, of_weight, of_bias])],
        ),
        "softmax": calls(onednn.softmax(*s.shape), [s, p], [(onednn.softmax_backward(*s.shape), [p, of_p, of_s])]),
    }  # fmt: skip


def milliseconds(libraries: Sequence[Calls], repeats: int) -> list[list[float]]:
    """Return for each library the median times of forward and of what backward adds, without the first two rounds."""
    taken: list[list[float]] = []
    for _ in range(repeats + 2):
        ends = [time.perf_counter()]
        for call in itertools.chain.from_iterable(libraries):
            call()
            ends.append(time.perf_counter())
        taken.append([1e3 * (end - begin) for begin, end in zip(ends, ends[1:])])
    medians = [statistics.median(times) for times in zip(*taken[2:])]
    return [[forward, both - forward] for forward, both in zip(medians[::2], medians[1::2])]


def main() -> None:
    libraries: dict[str, Callable[..., dict[str, Calls]]] = {
        "mindspore": by_mindspore,
        "torch": by_torch,
        "numpy": by_numpy,
    }
    libraries |= {"kernels": by_kernels, "onednn": by_primitive}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=libraries, nargs="+", required=True)
    parser.add_argument("--calls", type=int, default=15, help="measured calls of an operator")
    parser.add_argument("--write", type=Path, required=True)
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    inputs = {
        name: [rng.standard_normal(shape, dtype=np.float32) for shape in shapes] for name, shapes in OPERATORS.items()
    }
    ids = rng.integers(0, SIZES["vocab_size"], (BATCH, LENGTH))
    calls = [libraries[library](inputs, ids) for library in args.library]
    times: dict[str, dict[str, list[float]]] = {library: {} for library in args.library}
    for name in calls[0]:
        for library, taken in zip(args.library, milliseconds([each[name] for each in calls], args.calls)):
            times[library][name] = taken
    args.write.write_text(json.dumps(times))


if __name__ == "__main__":
    main()
