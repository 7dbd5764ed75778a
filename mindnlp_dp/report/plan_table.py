"""Shows plans for ``mindnlp-dp plan``: a table, the command that launches the best plan, JSON, and a picture."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.pipeline_schedules.schedules import BACKWARD, FORWARD
from mindnlp_dp.planner import load_cluster, load_model, plan
from mindnlp_dp.planner.plan import Plan, Plans, StagePlan
from mindnlp_dp.planner.profiles.operator_graph import Model
from mindnlp_dp.report.outputs import write_outputs

PARTS = ("compute", "collectives", "transfers", "bubble", "gradients", "optimizer")
_COLORS = ("#0072B2", "#D55E00", "#CC79A7", "#BBBBBB", "#56B4E9", "#009E73")
_PASSES = {FORWARD: "#0072B2", BACKWARD: "#E69F00"}
_MOST_REJECTED = 12
_MOST_DRAWN = 14
# A plan that leaves less than this fraction of the memory gets a note.
_TIGHT = 0.2
_GIB = 2**30
_PRECISIONS = {"mixed": "values of 2 bytes, parameters of float32", "float32": "float32"}


def run_plan(args: argparse.Namespace, cluster_keys: Optional[Mapping[str, Any]] = None) -> int:
    """Run ``mindnlp-dp plan``: find plans, print them and write the requested files; return the exit code.

    Args:
        cluster_keys: keys of a cluster that was just measured, used in place of ``args.cluster``.
    """
    model = load_model(args.model, sequence=args.sequence, lora_rank=args.lora_rank, optimizer=args.optimizer)
    cluster = load_cluster(args.cluster if cluster_keys is None else cluster_keys)
    if args.devices:
        cluster = cluster.resized(args.devices)
    plans = plan(model, cluster, args.batch, zero_stage=args.zero_stage, fill=args.fill)
    print(text_of(plans, args.top))
    return 0 if write_outputs(as_dict(plans), args.json, lambda path: draw(plans, path, args.top), args.plot) else 1


def text_of(plans: Plans, top: int = 5) -> str:
    """Return the text that ``mindnlp-dp plan`` prints: the model, the cluster, and the ``top`` plans."""
    model, cluster, best = plans.model, plans.cluster, plans[0]
    lines = [
        f"model    {model.name}: {_amount(model.parameters)} parameters{_of_them_trained(model)}, "
        f"{model.sequence} tokens per sample, {plans.batch} samples per update",
        f"cluster  {cluster.name}: {cluster.num_hosts} x {cluster.devices_per_host} devices with "
        f"{cluster.memory / _GIB:.1f} GiB, {cluster.flops * cluster.efficiency / 1e12:.3g} TFLOP/s in matrix products, "
        f"{1e-9 / cluster.inside.beta:.3g} GB/s inside a host"
        + (f", {1e-9 / cluster.between.beta:.3g} GB/s between" if cluster.num_hosts > 1 else "")
        + f"; {_PRECISIONS[cluster.precision]}",
    ]
    if cluster.source:
        lines.append(f"         {cluster.source}")
    lines += ["", *_table(plans[:top]), ""]
    lines.append(
        f"{plans.num_priced} configurations costed; the best of {len(plans)} meshes simulated. Columns from compute to "
        "optimizer are\nshares of the time of the slowest stage; memory is that of the heaviest stage."
    )
    samples = plans.batch / best.seconds
    lines += ["", f"best     {best}: {samples:.4g} samples/s, {best.speedup:.3g} times one device with "
              f"unlimited memory; Amdahl's bound for {best.num_devices} devices is {best.amdahl:.3g}"]  # fmt: skip
    if len(best.stages) > 1:
        shown = " | ".join(_stage(stage) for stage in best.stages)
        lines.append(f"stages   {shown}")
    if best.margin < _TIGHT:
        lines.append(
            f"note     only {100 * best.margin:.0f} % of a device's memory is left; every measured run had enough "
            "memory\n         when the estimate left 20 %: plan for that with --fill 0.8"
        )
    if cluster.precision == "mixed" and not param_dtype(best, plans):
        lines.append(
            "note     this counts 2 bytes for a value, and the recipes compute in float32 with tp, pp and ep: for "
            "them, plan\n         with precision: float32 in the cluster's YAML"
        )
    lines.append(f"launch   {launch_command(best, plans) or _in_code(best, plans)}")
    if plans.rejected:
        lines += ["", "rejected"]
        lines += [f"  {r.what:<18} {r.why}" for r in plans.rejected[:_MOST_REJECTED]]
        if len(plans.rejected) > _MOST_REJECTED:
            lines.append(f"  and {len(plans.rejected) - _MOST_REJECTED} more, which --json lists")
    return "\n".join(lines)


def _table(plans: list[Plan]) -> list[str]:
    width = max(len(str(plan)) for plan in plans) + 2
    head = f"   {'mesh':<{width}}{'schedule':<12}{'micro-batches':>14}{'zero':>5}{'ms per update':>14}"
    head += "".join(f"{part:>{max(9, len(part) + 1)}}" for part in PARTS) + f"{'memory':>11}{'left':>6}"
    lines = [head]
    for number, found in enumerate(plans, 1):
        micro = f"{found.num_micro_batches} x {found.micro_batch_size}"
        schedule = found.schedule + ("*" if found.recompute else "") if found.schedule else "-"
        line = (
            f"{number:<3}{found!s:<{width}}{schedule:<12}{micro:>14}{found.zero_stage:>5}{1e3 * found.seconds:>14.1f}"
        )
        line += "".join(f"{100 * found.parts[p] / found.seconds:>{max(9, len(p) + 1) - 2}.1f} %" for p in PARTS)
        lines.append(line + f"{found.heaviest.memory.total / _GIB:>7.1f} GiB{100 * found.margin:>4.0f} %")
    if any(found.recompute for found in plans):
        lines.append("   * with recomputation: layers keep their inputs, and compute their activations again")
    return lines


def _stage(stage: StagePlan) -> str:
    first, last = stage.blocks or stage.operators
    what = f"layers {first}-{last - 1}" if stage.blocks else f"operators {first}-{last}"
    return f"{what}: {1e3 * (stage.forward + stage.backward):.3g} ms, {stage.memory.total / _GIB:.3g} GiB"


def param_dtype(found: Plan, plans: Plans) -> str:
    """Return the type that a run must compute in to need a plan's memory and time; "" for float32."""
    others = {axis for axis, size in found.mesh.items() if size != 1} - {"dp", "fsdp", "sp"}
    return "bfloat16" if plans.cluster.precision == "mixed" and not others else ""


def launch_command(found: Plan, plans: Plans) -> Optional[str]:
    """Return the command that launches a plan on the user's FILE; None if ``scripts/finetune.py`` cannot train it."""
    if not plans.model.train_flags:
        return None
    cluster, n = plans.cluster, found.num_devices
    if cluster.num_hosts == 1:
        start = f"mindnlp-dp run --nproc {n}"
    else:
        start = (
            f"mindnlp-dp run --nnodes {cluster.num_hosts} --nproc {cluster.devices_per_host} "
            "--rdzv-endpoint HOST0:29400"
        )
    settings = {
        "mesh": f"'{found}'" if "|" in str(found) else found, "global-batch-size": plans.batch,
        "micro-batch-size": found.micro_batch_size,
        "zero-stage": found.zero_stage,
    }  # fmt: skip
    if len(found.stages) > 1:
        settings["pipeline-schedule"] = found.schedule
        layers = [stage.blocks or (0, 0) for stage in found.stages]
        settings["pipeline-layers"] = ",".join(str(end - first) for first, end in layers)
    if found.recompute:
        settings["gradient-checkpointing"] = "true"
    if dtype := param_dtype(found, plans):
        settings["param-dtype"] = dtype
    flags = [plans.model.train_flags, *(f"--{name} {value}" for name, value in settings.items())]
    return " ".join([start, "scripts/finetune.py --train-file FILE --test-fraction 0.1", *flags])


def _in_code(found: Plan, plans: Plans) -> str:
    """Return how to use the plan in a custom training script."""
    if plans.model.kind == "operators":
        return "only the operators of this model are known; mindnlp_dp.parallelize() takes your own plan for it"
    options = ""
    if len(found.stages) > 1:
        layers = [end - first for first, end in (stage.blocks or (0, 0) for stage in found.stages)]
        # A model with an encoder and a decoder is split between the two.
        of_stages = "" if plans.model.kind == "t5" else f", layers_per_stage={layers}"
        options = f", schedule={found.schedule!r}{of_stages}"
    options += ", recompute=True" * found.recompute
    options += f", param_dtype={param_dtype(found, plans)!r}" if param_dtype(found, plans) else ""
    return (
        f"in your script: dp.parallelize(model, dp.init_device_mesh({found.mesh}){options}), and "
        f"{found.num_micro_batches} micro-batches of {found.micro_batch_size} samples, zero_stage={found.zero_stage}"
    )


def _of_them_trained(model: Model) -> str:
    return "" if model.trained == model.parameters else f" ({_amount(model.trained)} trained)"


def _amount(number: float) -> str:
    """Return a large number with a word for its size.

    >>> _amount(1.75e11), _amount(355.4e6), _amount(1234.0)
    ('175 billion', '355.4 million', '1234')
    """
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.4g} {name}"
    return f"{number:.0f}"


def as_dict(plans: Plans) -> dict[str, Any]:
    """Return all plans as JSON-ready values; times in seconds, memory in bytes."""
    return {
        "model": {
            "name": plans.model.name,
            "parameters": plans.model.parameters,
            "trained": plans.model.trained,
            "sequence": plans.model.sequence,
            "optimizer": "muon" if any(o.matrices for o in plans.model.graph.operators) else "adamw",
        },
        "cluster": {"name": plans.cluster.name, "devices": plans.cluster.num_devices, "source": plans.cluster.source},
        "batch": plans.batch,
        "priced": plans.num_priced,
        "plans": [plan_dict(found, plans) for found in plans],
        "rejected": [{"what": r.what, "why": r.why} for r in plans.rejected],
    }


def plan_dict(found: Plan, plans: Plans) -> dict[str, Any]:
    """Return a plan as a dictionary for JSON."""
    return {
        "mesh": found.mesh, "schedule": found.schedule, "micro_batch": found.micro_batch,
        "micro_batch_size": found.micro_batch_size,
        "num_micro_batches": found.num_micro_batches, "recompute": found.recompute, "zero_stage": found.zero_stage,
        "seconds": found.seconds, "parts": found.parts, "speedup": found.speedup, "amdahl": found.amdahl,
        "margin": found.margin, "param_dtype": param_dtype(found, plans), "launch": launch_command(found, plans),
        "stages": [
            {
                "sharing": str(stage.sharing), "layers": stage.blocks, "operators": stage.operators,
                "forward": stage.forward, "backward": stage.backward,
                "memory": {**vars(stage.memory), "total": stage.memory.total},
            }
            for stage in found.stages
        ],
    }  # fmt: skip


def draw(plans: Plans, path: Path, top: int = 5) -> None:
    """Draw the best plan's pipeline and memory over time, and the parts of the best plans' times, as a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, figsize=(10, 9), layout="constrained", height_ratios=(3, 2, 3))
    _draw_timeline(axes[0], plans[0])
    _draw_memory(axes[1], plans[0])
    _draw_parts(axes[2], plans[:top])
    title = f"{plans.model.name} on {plans.cluster.num_devices} devices of {plans.cluster.name}, {plans.batch} samples"
    figure.suptitle(title)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def _until(found: Plan) -> float:
    """Return up to which second an update is drawn: the time of a few micro-batches, or all of it."""
    if found.num_micro_batches <= _MOST_DRAWN:
        return found.timeline.makespan
    last = found.timeline.of_stage(0)
    return next(e.ended for e in last if e.kind != FORWARD and e.number == _MOST_DRAWN - 1)


def _draw_timeline(axes: Any, found: Plan) -> None:
    until = _until(found)
    for event in found.timeline.events:
        if event.began < until:
            color = _PASSES[event.kind]
            width = event.ended - event.began
            axes.barh(
                event.stage, 1e3 * width, left=1e3 * event.began, height=0.86, color=color, edgecolor="white",
                linewidth=0.6,
            )  # fmt: skip
            if width > 0.012 * until:
                axes.text(
                    1e3 * (event.began + event.ended) / 2, event.stage, str(event.number), ha="center", va="center",
                    fontsize=7, color="white",
                )  # fmt: skip
    axes.set_yticks(range(len(found.stages)), [f"stage {i}" for i in range(len(found.stages))])
    axes.invert_yaxis()
    axes.set_xlim(0, 1e3 * until)
    part = "" if until == found.timeline.makespan else f", the first {_MOST_DRAWN} of {found.num_micro_batches}"
    what = f"{found}, {found.schedule}" if found.schedule else str(found)
    axes.set(xlabel="ms (blue: forward, orange: backward, numbers: micro-batches)", title=f"{what}{part}")


def _draw_memory(axes: Any, found: Plan) -> None:
    until = _until(found)
    for place, stage in enumerate(found.stages):
        events = found.timeline.of_stage(place)
        each = stage.memory.activations / max(1, found.timeline.in_flight[place])
        fixed = stage.memory.total - stage.memory.activations
        changes = sorted([(e.began, each) if e.kind == FORWARD else (e.ended, -each) for e in events])
        times, level = [0.0], [fixed]
        for time, change in changes:
            times += [time, time]
            level += [level[-1], level[-1] + change]
        axes.plot(
            [1e3 * t for t in times], [x / _GIB for x in level], linewidth=1.2, label=f"stage {place}",
            color=_color(place, len(found.stages)),
        )  # fmt: skip
    axes.axhline(found.capacity / _GIB, color="#444444", linestyle="--", linewidth=1)
    axes.text(0, found.capacity / _GIB, " memory of a device", va="bottom", fontsize=8, color="#444444")
    axes.set_xlim(0, 1e3 * until)
    axes.set_ylim(0, 1.15 * found.capacity / _GIB)
    axes.set(xlabel="ms", ylabel="GiB per device", title="memory over time: weights, gradients, optimizer, activations")
    if len(found.stages) <= 16:
        axes.legend(frameon=False, fontsize=7, ncols=4, loc="lower right")


def _color(place: int, of: int) -> Any:
    from matplotlib import colormaps

    return colormaps["viridis"](0.9 * place / max(1, of - 1))


def _draw_parts(axes: Any, plans: list[Plan]) -> None:
    begin = [0.0] * len(plans)
    for part, color in zip(PARTS, _COLORS):
        widths = [1e3 * found.parts[part] for found in plans]
        axes.barh(range(len(plans)), widths, left=begin, height=0.7, color=color, label=part)
        begin = [b + w for b, w in zip(begin, widths)]
    axes.set_yticks(range(len(plans)), [str(found) for found in plans], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="ms per update", title="time by operation")
    axes.legend(frameon=False, fontsize=8, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.14))
