"""This module writes the results of a run: report.json, a plot, the model, and the lines of its summary.

The recipes call it after training. Each file is written under a temporary name and then moved, so that it is either
complete or missing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindnlp_dp.finetuning.saved_model import MODEL_FOLDER
from mindnlp_dp.finetuning.settings import RunConfig
from mindnlp_dp.report.figures import draw_png
from mindnlp_dp.report.pipeline_figure import pipeline_of
from mindnlp_dp.report.runs import REPORT_FILE, RecordedRun, RunReport
from mindnlp_dp.runtime.atomic_write import atomic_write
from mindnlp_dp.runtime.devices import machine, peak_memory

if TYPE_CHECKING:
    # A recipe reports wrong settings before MindSpore is imported.
    from mindnlp_dp.finetuning.recorder import TimeRecorder

PLOT_FILE, INITIAL_MODEL_FOLDER = "training.png", "initial_model"


def make_report(
    trainer: Any, output: Any, recorder: TimeRecorder, config: RunConfig, *, train_samples: int, eval_samples: int
) -> RunReport:
    """Return the report of a run that has ended with an evaluation, by MindNLP's Trainer or by ours.

    This is a collective: every rank must call it, because it compares the current weights of all ranks.
    """
    evaluation = next(row for row in reversed(trainer.state.log_history) if "eval_loss" in row)
    metrics, args = output.metrics, trainer.args
    peaks, backend, global_batch_size = (
        [peak_memory()],
        "single",
        args.per_device_train_batch_size * args.gradient_accumulation_steps,
    )
    if hasattr(trainer, "distributed_model"):
        # For a sharded model, every rank computes the digest of the full model.
        backend, global_batch_size = trainer.world.backend, trainer.training_loop.loader.global_batch_size
        digests = trainer.world.all_gather_object(trainer.distributed_model.digest())
        peaks = trainer.world.all_gather_object(peak_memory())
    else:
        # Imported here because it imports MindSpore.
        from mindnlp_dp.communication.replicas import replica_digest

        digests = [replica_digest(trainer.model)]
    # MindNLP's Trainer includes evaluations in its training time; the recorder does not.
    is_ours = "train_seconds" in metrics
    report: RunReport = {
        "world_size": args.world_size,
        "backend": backend,
        "train_samples_per_second": metrics["train_samples_per_second"] if is_ours else recorder.samples_per_second,
        "gradient_sync_share": metrics.get("gradient_sync_share", 0.0),
        "peak_memory_bytes": max(peaks),
        "eval_loss": evaluation["eval_loss"],
        "replicas_in_sync": len(set(digests)) == 1,
        "replica_digest": digests[0],
        "replica_digests": digests,
        "train_seconds": metrics["train_seconds"] if is_ours else recorder.train_seconds,
        "train_loss": output.training_loss,
        "steps": output.global_step,
        "global_batch_size": global_batch_size,
        "train_samples": train_samples,
        "eval_samples": eval_samples,
        "command": command_line(args.world_size, backend),
        "machine": machine(),
        "config": vars(config),
        "metrics": metrics if is_ours else {},
        "history": trainer.state.log_history,
    }
    trace, schedule = getattr(config, "trace", ""), getattr(config, "pipeline_schedule", "")
    stages = pipeline_of(Path(trace), schedule) if trace and Path(trace).exists() else None
    if stages is not None:
        report["pipeline"] = stages
    return report


def command_line(world_size: int, backend: str) -> str:
    """Return the command that starts this job again from the current folder."""
    script = os.path.relpath(sys.argv[0]) if Path(sys.argv[0]).exists() else sys.argv[0]
    arguments = shlex.join([script, *sys.argv[1:]])
    if world_size == 1:
        return f"python {arguments}"
    return f"mindnlp-dp run --nproc {world_size} --backend {'mpi' if backend == 'mpi' else 'mindspore'} {arguments}"


def write_results(folder: Path, report: RunReport, save_model: Callable[[str], None], title: str) -> None:
    """Write the model, the plot (if matplotlib is installed) and, last, the report."""
    with atomic_write(folder / MODEL_FOLDER) as model_folder:
        save_model(str(model_folder))
    if importlib.util.find_spec("matplotlib") is None:
        print('no plot was drawn, for matplotlib is missing; pip install "mindnlp-dp[quickstart]"')
    else:
        with atomic_write(folder / PLOT_FILE) as plot:
            title += "; {world_size} ranks over {backend}, {global_batch_size} samples per update".format_map(report)
            draw_png(plot, [RecordedRun(folder.name, report)], title)
    with atomic_write(folder / REPORT_FILE) as file:
        text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
        # A name of a file may have bytes that are not UTF-8; JSON has an escape for them.
        file.write_bytes(text.encode("utf-8", "backslashreplace"))


def summary(report: RunReport, folder: Path, evaluation: str) -> str:
    """Return the report as the lines that are printed at the end of a run."""
    replicas = f"yes, digest {report['replica_digest']}"
    if not report["replicas_in_sync"]:
        replicas = f"NO, digests by rank {', '.join(report['replica_digests'])}"
    rows = {
        "world size": report["world_size"],
        "backend": report["backend"],
        "training": f"{_speed(report)}, {report['steps']} updates of {report['global_batch_size']} samples in "
        f"{report['train_seconds']:.1f} s",
        "learning rate": f"{report['config']['learning_rate']:g} at its peak",
        **({"plan": _beside_plan(report["plan"])} if "plan" in report else {}),
        "gradient sync": f"{100 * report['gradient_sync_share']:.1f} % of the training time",
        "peak memory": f"{report['peak_memory_bytes'] / 2**30:.2f} GiB on the rank that needs most",
        "evaluation": evaluation,
        "replicas in sync": replicas,
        "written to": folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder,
    }
    return "\n".join(f"{name:<18}{value}" for name, value in rows.items())


def _speed(report: RunReport) -> str:
    samples, metrics = report["train_samples_per_second"], report.get("metrics", {})
    parts = [f"{samples:.0f} samples/s" if samples >= 10 else f"{samples:.2g} samples/s"]
    if "train_input_tokens_per_second" in metrics:
        parts.append(f"{metrics['train_input_tokens_per_second']:.0f} tokens/s")
    if "train_mfu" in metrics:
        parts.append(f"MFU {100 * metrics['train_mfu']:.1f} %")
    return ", ".join(parts)


def _beside_plan(plan: Mapping[str, float]) -> str:
    predicted, measured = plan["predicted"], plan["measured"]
    return (
        f"predicted {1e3 * predicted:.1f} ms an update, measured {1e3 * measured:.1f} ms: the prediction is "
        f"{100 * (predicted / measured - 1):+.0f} %"
    )
