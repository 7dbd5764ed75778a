"""What the examples share: devices of a size, shrunk to what a laptop has, and a table of what each of them holds."""

from __future__ import annotations

import argparse
from typing import Any

import mindnlp_dp as dp
from mindnlp_dp.parallel.model_memory import memory_of

# Of a picture's gigabyte, bytes here.
MEGABYTE = 2**20


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="so many megabytes here stand for a gigabyte in the picture"
    )
    return parser.parse_args()


def show(model: Any, mesh: dp.DeviceMesh, scale: float, capacity: float = 0.0, losses: Any = ()) -> None:
    """Print what each device holds, in the picture's gigabytes, and check that the count is what is really there."""
    counted = memory_of(model)
    held = sum(p.asnumpy().nbytes for p in model.parameters())
    assert counted.weights >= held >= counted.weights - MEGABYTE, "what is counted is what is held, buffers aside"
    kinds = [name for name, module in model.named_modules() if module._parameters and list(module.parameters())]
    shown = ", ".join(kinds[:3]) + (f", ... ({len(kinds)} in all)" if len(kinds) > 3 else "")
    lines = mesh.world.all_gather_object((mesh.label(mesh.coordinates), held / MEGABYTE / scale, shown))
    if mesh.world.is_main:
        for device, (place, gigabytes, names) in enumerate(lines, 1):
            fits = f" of {capacity:g}" if capacity else ""
            print(f"device {device} ({place}): {gigabytes:5.1f}{fits} GB of weights: {names}")
            if capacity and gigabytes > capacity:
                raise SystemExit(f"device {device} has {capacity:g} GB: this does not fit")
        if len(losses):
            print(f"loss: {losses[0]:.4f}, after {len(losses)} updates {losses[-1]:.4f}")
