#!/usr/bin/env python3
"""Count the host reads of a forward and backward pass, and of an update of a custom loop, as a device would make them.

A host read (``asnumpy``, ``item``, ``float(tensor)``) makes the host wait until a device has done all that was launched
before it. The models run on a CPU with MindSpore's kernels, and MindSpore says that the device is an NPU, so that the
code that a device runs is chosen. A read belongs to the code that makes it: MindNLP, or this package. An update runs on
the simulated device of two ranks of the tests, with AdamW, clipping and overlap::

    python benchmarks/bench_host_reads.py
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import mindspore
import numpy as np
from common import ROOT, print_table, write_json

import mindnlp_dp as dp

READS = ("asnumpy", "item", "tolist", "__float__", "__int__", "__bool__", "__index__", "__array__")

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}

# (4 rows, 4 heads, 160 x 160 scores): the patched operators treat tensors from 65,536 elements differently.
ROWS, LENGTH, VOCABULARY = 4, 160, 128


def models() -> dict[str, Any]:
    """Return a function for each model that makes it, with two layers."""
    from mindnlp import transformers as t

    common = {"vocab_size": VOCABULARY, "max_position_embeddings": 256}
    gpt2 = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 256, "vocab_size": VOCABULARY}
    neo = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    opt = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_dim": 128}
    return {
        "BERT": lambda: t.BertForSequenceClassification(t.BertConfig(**common, **SIZES)),
        "RoBERTa": lambda: t.RobertaForSequenceClassification(t.RobertaConfig(**common, **SIZES)),
        "GPT-2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**gpt2)),
        "GPT-Neo": lambda: t.GPTNeoForCausalLM(t.GPTNeoConfig(**common, **neo)),
        "Llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**common, **SIZES)),
        "Qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**common, **SIZES, num_key_value_heads=2)),
        "OPT": lambda: t.OPTForCausalLM(t.OPTConfig(**common, **opt, word_embed_proj_dim=64)),
    }


def _place_of_read() -> tuple[str, str]:
    """Return the package that reads, and the line: the innermost frame that is not MindSpore's."""
    frame: Optional[types.FrameType] = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        for package in ("mindnlp_dp", "mindnlp"):
            if f"/{package}/" in path:
                return package, f"{package}/{path.rpartition(f'/{package}/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "other", ""


@contextlib.contextmanager
def counted_reads() -> Iterator[collections.Counter[tuple[str, str]]]:
    """Count the host reads in this block by the package and the line that make them, without nested ones."""
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    depth = 0

    def counting(real: Any) -> Any:
        def read(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if depth == 0:
                found[_place_of_read()] += 1
            depth += 1
            try:
                return real(self, *args, **kwargs)
            finally:
                depth -= 1

        return read

    own = {name: vars(mindspore.Tensor).get(name) for name in READS}
    for name in READS:
        setattr(mindspore.Tensor, name, counting(getattr(mindspore.Tensor, name)))
    try:
        yield found
    finally:
        for name, real in own.items():
            setattr(mindspore.Tensor, name, real) if real is not None else delattr(mindspore.Tensor, name)


@contextlib.contextmanager
def as_on_an_npu() -> Iterator[None]:
    """Let MindSpore say in this block that the device is an NPU."""
    real = mindspore.get_context
    mindspore.get_context = lambda key: "Ascend" if key == "device_target" else real(key)
    try:
        yield
    finally:
        mindspore.get_context = real


def reads_of(make: Any) -> collections.Counter[tuple[str, str]]:
    """Return the host reads of the second forward and backward pass of a model."""
    from mindnlp.core import value_and_grad

    model = make()
    model.train()
    ids = mindspore.Tensor(np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, LENGTH)))
    is_classifier = "Classification" in type(model).__name__
    labels = mindspore.Tensor(np.zeros(ROWS, np.int64)) if is_classifier else ids

    def forward() -> Any:
        # A dict with a loss, or a tuple that begins with it.
        return model(input_ids=ids, labels=labels)[0]

    step = value_and_grad(forward, list(model.parameters()))
    with as_on_an_npu():
        step()
        with counted_reads() as found:
            step()
    return found


def reads_of_update(micro_steps: int) -> int:
    """Return the host reads of an update with this many micro-batches, after the first updates."""
    import pytest
    from mindnlp.core import nn, optim

    from mindnlp_dp.communication.process_group import ProcessGroup
    from mindnlp_dp.communication.transports.mindspore.mindspore_transport import MindSporeTransport

    sys.path.insert(0, str(ROOT / "tests"))
    from stand_in_device import StandInDevice

    with pytest.MonkeyPatch.context() as patch:
        StandInDevice(patch, "Ascend")
        weights = [nn.Parameter(mindspore.Tensor(np.ones((20, 10), np.float32))) for _ in range(3)]
        step = dp.make_train_step(
            lambda x: sum((weight * weight).sum() for weight in weights) * x.mean(),
            optim.AdamW(weights, lr=1e-3), weights, group=ProcessGroup(MindSporeTransport()), overlap=True,
            accumulation_steps=micro_steps, max_grad_norm=1.0,
        )  # fmt: skip
        batch = mindspore.Tensor(np.ones((4, 2), np.float32))
        micro_batches = batch if micro_steps == 1 else [batch] * micro_steps
        # In the first updates losses are compared, and the order of the gradients is learned.
        for _ in range(6):
            step(micro_batches)
        with counted_reads() as found:
            step(micro_batches)
    return sum(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--places", action="store_true", help="print the lines that read")
    args = parser.parse_args()
    dp.init_process_group(kernels="mindspore")
    results: dict[str, dict[str, int]] = {}
    for name, make in models().items():
        found = reads_of(make)
        by_package = collections.Counter(package for package, _ in found.elements())
        results[name] = {each: by_package[each] for each in ("mindnlp", "mindnlp_dp", "other")}
        if args.places:
            for (_, place), count in found.most_common():
                print(f"{name}: {count} x {place}")
    rows = [[name, str(found["mindnlp"]), str(found["mindnlp_dp"])] for name, found in results.items()]
    print_table(["forward + backward, 2 layers", "host reads of MindNLP", "of this package"], rows)
    updates = {str(micro_steps): reads_of_update(micro_steps) for micro_steps in (1, 4)}
    print_table(["micro-batches per update", "host reads per update"], list(updates.items()))
    write_json(args.json, {"models": results, "updates": updates})


if __name__ == "__main__":
    main()
