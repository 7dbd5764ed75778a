"""Shows the estimated memory of training on several meshes, for ``mindnlp-dp estimate``."""

from __future__ import annotations

import argparse
from typing import Any

from mindnlp_dp.planner import load_model
from mindnlp_dp.planner.cost_model.memory_cost import MemoryUse
from mindnlp_dp.planner.estimate_memory import estimate
from mindnlp_dp.report.outputs import write_outputs
from mindnlp_dp.runtime.mesh_spec import Size, mesh_name, parse_mesh

_ZERO_STAGES = (0, 1, 2, 3)
_COLUMNS = ("weights", "gradients", "optimizer", "activations")


def _stages_of(mesh: dict[str, Size]) -> tuple[int, ...]:
    """Return the ZeRO stages that differ on a mesh; the third is for data parallelism alone, and for "fsdp"."""
    if "fsdp" in mesh:
        return _ZERO_STAGES[3:]
    if set(mesh) <= {"tp", "pp"} or mesh == {"dp": 1}:
        return _ZERO_STAGES[:1]
    return _ZERO_STAGES if set(mesh) == {"dp"} else _ZERO_STAGES[:3]


def run_estimate(args: argparse.Namespace) -> int:
    """Run ``mindnlp-dp estimate``: print a row for each mesh and ZeRO stage; return the exit code."""
    model = load_model(args.model, sequence=args.sequence, lora_rank=args.lora_rank, optimizer=args.optimizer)
    meshes: list[dict[str, Size]] = [dict(parse_mesh(text)) for text in args.mesh]
    if not all(meshes):
        raise ValueError("--mesh is empty; one device is dp=1")
    is_given = bool(meshes)
    if not is_given:
        n = args.devices
        meshes = [{"dp": n}, *({axis: n} for axis in ("tp", "pp", "ep", "sp") if n > 1)]
    options = {"micro_batch": args.micro_batch_size, "precision": args.precision}
    rows: list[dict[str, Any]] = []
    for mesh in meshes:
        try:
            rows += [
                {"mesh": mesh_name(mesh), "zero_stage": stage,
                 "kept": estimate(model, args.batch, mesh, zero_stage=stage, **options),
                 "recomputed": estimate(model, args.batch, mesh, zero_stage=stage, recompute=True, **options)}
                for stage in _stages_of(mesh)
            ]  # fmt: skip
        except ValueError:
            # Of the usual meshes, those are shown that this model and batch can have.
            if is_given or mesh == meshes[0]:
                raise
    trained = "" if model.trained == model.parameters else f" ({model.trained / 1e6:.1f} trained)"
    print(
        f"{model.name}: {model.parameters / 1e6:.1f} million parameters{trained}, {model.sequence} tokens per sample, "
        f"{args.batch} samples per update, {args.precision}; MiB per device of the heaviest stage"
    )
    width = max(len(row["mesh"]) for row in rows) + 2
    head = "".join(f"{name:>13}" for name in (*_COLUMNS, "total", "recomputed", "total"))
    print(f"{'mesh':<{width}}{'zero':>4}{head}")
    for row in rows:
        kept, recomputed = row["kept"], row["recomputed"]
        values = [*(getattr(kept, name) for name in _COLUMNS), kept.total, recomputed.activations, recomputed.total]
        shown = (f"{value / 2**20:,.{0 if kept.total > 2**30 else 2}f}" for value in values)
        print(f"{row['mesh']:<{width}}{row['zero_stage']:>4}" + "".join(f" {text:>12}" for text in shown))
    print('"recomputed" are the activations with gradient checkpointing. Libraries need some hundred MiB more.')
    written = [{**row, "kept": _bytes(row["kept"]), "recomputed": _bytes(row["recomputed"])} for row in rows]
    content = {
        "model": model.name, "parameters": model.parameters, "trained": model.trained, "sequence": model.sequence,
        "batch": args.batch,
    }  # fmt: skip
    return 0 if write_outputs({**content, "precision": args.precision, "rows": written}, args.json) else 1


def _bytes(use: MemoryUse) -> dict[str, float]:
    return {**vars(use), "total": use.total}
