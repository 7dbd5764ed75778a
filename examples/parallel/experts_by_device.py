#!/usr/bin/env python3
"""A mixture of experts, one expert a device, and data parallelism over all the devices for the rest.

mindnlp-dp run --nproc 4 examples/parallel/experts_by_device.py

device 1        device 2        device 3        device 4
attention       attention       attention       attention        the same weights; gradients are averaged
router          router          router          router
   ╲╱──────────────╲╱──────────────╲╱──────────────╲╱            tokens go to their experts, and come back
expert 1        expert 2        expert 3        expert 4
"""

from __future__ import annotations

import mindnlp_dp as dp

dp.init_process_group()

import numpy as np  # noqa: E402
from devices import arguments, show  # noqa: E402
from mindnlp.core import optim  # noqa: E402
from mindnlp.transformers import MixtralConfig, MixtralForCausalLM  # noqa: E402

VOCABULARY, LENGTH = 500, 16


def main() -> None:
    args = arguments(__doc__ or "")
    mesh = dp.init_device_mesh({"ep": -1})
    width = 64 * max(1, round(args.scale**0.5))
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=mesh.sizes["ep"],
        num_experts_per_tok=min(2, mesh.sizes["ep"]), max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    model = dp.parallelize(MixtralForCausalLM(config), mesh)
    model.set_train(True)
    parameters = list(model.parameters())
    step = dp.make_train_step(
        lambda **batch: model(**batch)[0], optim.AdamW(parameters, lr=1e-3), parameters, model=model, max_grad_norm=1.0
    )
    ids = np.random.default_rng(mesh.dp_group.rank).integers(1, VOCABULARY, (8, LENGTH))
    losses = [step({"input_ids": ids, "labels": ids}) for _ in range(5)]
    show(model, mesh, args.scale, losses=losses)
    if mesh.world.is_main and model.parallel is not None:
        for number, load in enumerate(model.parallel.loads()):
            print(f"layer {number}: tokens by expert {load.tokens}; the busiest has {load.balance:.2f} times the mean")


if __name__ == "__main__":
    main()
