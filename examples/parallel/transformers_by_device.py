#!/usr/bin/env python3
"""Transformers whose layers are on several devices: GPT-2's layers, T5's encoder and decoder.

mindnlp-dp run --nproc 4 examples/parallel/transformers_by_device.py gpt    layers 1|2|3|4 on devices 1|2|3|4
mindnlp-dp run --nproc 2 examples/parallel/transformers_by_device.py t5     the encoder on 1, the decoder on 2

device 1          device 2          device 3          device 4
embedding         layer 2           layer 3           layer 4
layer 1      ▶    h             ▶   h            ▶    norm, output layer
    ▲                                                      │
    └────────── the word embedding is the output layer: its gradients are added up ──────────┘
"""

from __future__ import annotations

import sys

import mindnlp_dp as dp

dp.init_process_group()

import numpy as np  # noqa: E402
from devices import arguments, show  # noqa: E402
from mindnlp.core import optim  # noqa: E402
from mindnlp.transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration  # noqa: E402

VOCABULARY, LENGTH = 500, 16


def main() -> None:
    kind = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in ("gpt", "t5") else "gpt"
    args = arguments(__doc__ or "")
    mesh = dp.init_device_mesh({"pp": -1})
    width = 64 * max(1, round(args.scale**0.5))
    if kind == "gpt":
        model = GPT2LMHeadModel(GPT2Config(VOCABULARY, LENGTH, width, n_layer=max(4, mesh.sizes["pp"]), n_head=4))
    else:
        sizes = {"d_model": width, "d_kv": 16, "d_ff": 4 * width, "num_layers": 2, "num_heads": 4}
        model = T5ForConditionalGeneration(T5Config(VOCABULARY, **sizes, decoder_start_token_id=0, use_cache=False))
    model = dp.parallelize(model, mesh)
    model.set_train(True)
    parameters = list(model.parameters())
    step = dp.make_train_step(
        lambda **batch: model(**batch)[0], optim.AdamW(parameters, lr=1e-3), parameters,
        model=model, accumulation_steps=4, max_grad_norm=1.0,
    )  # fmt: skip
    ids = np.random.default_rng(0).integers(1, VOCABULARY, (4, 8, LENGTH))
    losses = [step([{"input_ids": rows, "labels": rows} for rows in ids]) for _ in range(5)]
    in_flight = mesh.world.all_gather_object(model.parallel.pipeline.most_in_flight)
    # The last stage's output is the same on all of them.
    show(model, mesh, args.scale, losses=losses)
    if mesh.world.is_main:
        print(f"micro-batches in flight, by stage: {in_flight}")


if __name__ == "__main__":
    main()
