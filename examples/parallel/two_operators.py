#!/usr/bin/env python3
"""A network of two operators that do not fit one device: the three pictures of the textbook.

mindnlp-dp run --nproc 2 examples/parallel/two_operators.py tensor      operator 1 needs 16 GB, a device has 10
mindnlp-dp run --nproc 2 examples/parallel/two_operators.py pipeline    operators of 10 GB each, one a device
mindnlp-dp run --nproc 4 examples/parallel/two_operators.py hybrid      the same, with replicas on devices 3 and 4

tensor                      pipeline                    hybrid
device 1   device 2         device 1     device 2       device 1     device 2
┌────────┬────────┐         ┌─────────┐  ┌─────────┐    operator 1 ▶ operator 2
│ half of operator 1        │operator1│ ▶│operator2│        ║            ║   gradients are averaged
│ half of operator 2        └─────────┘  └─────────┘    operator 1 ▶ operator 2
└────────┴────────┘                                     device 3     device 4
"""

from __future__ import annotations

import math
import sys
from typing import Any

import mindnlp_dp as dp

dp.init_process_group()

import numpy as np  # noqa: E402
from devices import MEGABYTE, arguments, show  # noqa: E402
from mindnlp.core import nn, optim  # noqa: E402
from mindnlp.core.nn import functional  # noqa: E402

from mindnlp_dp.parallel.parallel_plan import PipelinePlan, ShardingPlan, TensorPlan  # noqa: E402

CAPACITY = 10
MESHES = {"tensor": {"tp": 2}, "pipeline": {"pp": 2}, "hybrid": {"dp": 2, "pp": 2}}


class TwoOperators(nn.Module):
    """Matrices of ``sizes`` bytes, one after the other; the loss is how far their output is from ``targets``."""

    def __init__(self, width: int, inner: int, out: int) -> None:
        super().__init__()
        self.operators = nn.ModuleList([nn.Linear(width, inner, bias=False), nn.Linear(inner, out, bias=False)])

    def forward(self, x: Any, targets: Any) -> Any:
        for number, operator in enumerate(self.operators):
            x = operator(x)
            if number == 0:
                x = functional.relu(x)
        return ((x - targets) ** 2).mean()


def main() -> None:
    picture = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in MESHES else "tensor"
    args = arguments(__doc__ or "")
    mesh = dp.init_device_mesh(MESHES[picture])
    gigabyte = args.scale * MEGABYTE / 4
    if picture == "tensor":
        # 16 GB and 4 GB: half of both fits.
        width, out = 256, 64
        inner = int(16 * gigabyte / width)
        plan = ShardingPlan(tensor=TensorPlan({"operators.0": "colwise", "operators.1": "rowwise"}))
    else:
        width = inner = out = math.isqrt(int(10 * gigabyte))
        plan = ShardingPlan(pipeline=PipelinePlan(layers="operators", tuples=False))
    model = dp.parallelize(TwoOperators(width, inner, out), mesh, plan)
    parameters = list(model.parameters())

    def forward(x: Any, targets: Any) -> Any:
        return model(x, targets)

    # The first operator of "tensor" is so wide that an update by AdamW's usual rate would change its output too much.
    optimizer = optim.AdamW(parameters, lr=1e-4 if picture == "tensor" else 1e-3)
    step = dp.make_train_step(forward, optimizer, parameters, model=model, accumulation_steps=4)
    rng = np.random.default_rng(mesh.dp_group.rank)
    losses = []
    for _ in range(5):
        micro_batches = [
            {"x": rng.standard_normal((8, width)).astype(np.float32), "targets": np.ones((8, out), np.float32)}
            for _ in range(4)
        ]
        losses.append(step(micro_batches))
    show(model, mesh, args.scale, CAPACITY, losses)


if __name__ == "__main__":
    main()
