"""This module is the ``mindnlp-dp`` command: it parses the command line and runs the subcommand."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.launch.errors import LaunchError
from mindnlp_dp.launch.membership import MinMax
from mindnlp_dp.launch.monitor.status import read_status, status_text
from mindnlp_dp.launch.options import (
    RESTARTS_OF_ELASTIC_JOBS,
    CommandParser,
    JobOptions,
    add_run_options,
    non_negative,
    rendezvous_of,
)
from mindnlp_dp.launch.processes.reaper import adopting_orphans
from mindnlp_dp.launch.run import run_job
from mindnlp_dp.runtime.printable import printable
from mindnlp_dp.runtime.versions import __version__


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run a subcommand and return its exit code."""
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        # The error shows the usage of the subcommand that was typed.
        getattr(args, "parser", parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code = args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except OSError as error:
        if args.run is _run:
            raise
        # The output cannot be written: a full disk, or the reader (head, a pager) has closed the pipe. Without this,
        # Python's flush at exit would fail again.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        print(f"mindnlp-dp: {printable(error)}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mindnlp-dp", description="Data-parallel training for MindNLP and MindSpore.")
    parser.add_argument("--version", action="version", version=f"mindnlp-dp {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=CommandParser)
    run = commands.add_parser(
        "run",
        help="start a script in several processes, on this host or on several",
        description="Start SCRIPT in several processes, show rank 0's output, and end all of them when one fails. The "
        "exit code is that of the rank that failed. With several hosts, type the same line on each.",
        usage="mindnlp-dp run --nproc N [OPTIONS] SCRIPT [ARGS...]",
        # The options of SCRIPT would be taken for abbreviations of these.
        allow_abbrev=False,
    )
    add_run_options(run)
    run.set_defaults(run=_run, parser=run)
    status = commands.add_parser(
        "status",
        help="show the progress of a running job",
        description="Read the log folder of a job that mindnlp-dp run has started on this host: the progress of each "
        "rank, the call that it waits in and since when, and failures.",
    )
    status.add_argument("log_dir", type=Path, metavar="LOG_DIR", help="the job's log folder, which it prints")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(run=_status)
    doctor = commands.add_parser(
        "doctor",
        help="check this machine and environment, and print what to fix",
        description="Check versions, devices, ports and variables, try both backends with two processes, and print "
        "a fix for each problem. Works when MindSpore or MindNLP cannot be imported. "
        "The exit code is 1 if something must be fixed. With --devices, try instead what this package does on these "
        "devices (collectives, equivalence, ZeRO, a killed run, tensor parallelism), and write a report for an issue.",
    )
    doctor.add_argument(
        "--devices",
        type=_numbers,
        metavar="N,N...",
        help="numbers of two or more devices, such as 0,1; on a CPU, as many ranks are started",
    )
    doctor.add_argument(
        "--report", type=Path, metavar="FILE", help="where to write that report (default: device_report.md)"
    )
    doctor.set_defaults(run=_doctor)
    _add_plan(commands)
    _add_estimate(commands)
    _add_export(commands)
    _add_generate(commands)
    report = commands.add_parser(
        "report",
        help="write a page and a picture of one run or several",
        description="Read the report.json of each run and write one self-contained HTML page (loss and "
        "accuracy over updates and over time, throughput, share of communication, confused classes, digests, the "
        "commands to repeat it), and the plots as a PNG beside it.",
    )
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a folder that a run wrote (--output-dir)")
    report.add_argument(
        "--output", type=Path, metavar="FILE", help="the page, an .html file (default: report.html in the first run)"
    )
    report.set_defaults(run=_report)
    return parser


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="find the fastest parallelism for a model on a cluster, before a launch",
        description="Price every way to parallelize a model's training on a cluster, by data, tensors, pipeline "
        "stages and experts; simulate the best, and print their time and memory, why the others were rejected, "
        "and the command to launch. It needs neither the cluster nor MindSpore.",
    )
    _add_model(plan)
    plan.add_argument(
        "--cluster", metavar="CLUSTER", help="ascend-910b-8, a100-80gb-8, v100-16gb-8, this-machine, or a YAML"
    )
    plan.add_argument("--devices", type=_positive, metavar="N", help="number of devices")
    plan.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage (default: 1 where it helps)")
    plan.add_argument(
        "--fill",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="share of a device's memory that may be used (default: 0.9)",
    )
    plan.add_argument("--top", type=_positive, default=5, metavar="N", help="number of plans to print (default: 5)")
    plan.add_argument(
        "--measure", type=Path, metavar="FILE",
        help="measure this machine with as many ranks as --devices says (default: 2), write it to FILE as a cluster, "
        "and plan for it; needs MindSpore and MPI",
    )  # fmt: skip
    plan.add_argument(
        "--json", type=Path, metavar="FILE", help="write all plans and all rejected configurations to this file"
    )
    plan.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the pipeline, memory and cost of the best plan as a PNG"
    )
    plan.set_defaults(run=_plan)


def _add_estimate(commands: Any) -> None:
    estimate = commands.add_parser(
        "estimate",
        help="estimate the memory of a training run, before a launch",
        description="Print the memory that training needs on a device: weights, gradients, optimizer state and "
        "activations, these also with gradient checkpointing, for each mesh and ZeRO stage. Needs no MindSpore.",
    )
    _add_model(estimate)
    estimate.add_argument(
        "--micro-batch-size", type=_positive, metavar="B",
        help="samples per device at a time (default: all of its samples; with stages, divided by their number)",
    )  # fmt: skip
    estimate.add_argument(
        "--devices",
        type=_positive,
        default=1,
        metavar="N",
        help="number of devices, all in dp, tp, pp or ep (default: 1)",
    )
    estimate.add_argument(
        "--mesh", nargs="+", default=[], metavar="MESH", help="estimate these meshes instead, such as dp=2,tp=2"
    )
    estimate.add_argument("--precision", choices=("float32", "mixed"), default="float32", help="of values in layers")
    estimate.add_argument("--json", type=Path, metavar="FILE", help="write the numbers, in bytes, to this file")
    estimate.set_defaults(run=_estimate)


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write the model of a run as one folder for other libraries",
        description="Write the model of a run, a classifier or a language model, with its tokenizer into a new folder, "
        "which MindNLP and Transformers open. Adapters are merged into their model.",
    )
    _add_run(export)
    export.add_argument("destination", type=Path, metavar="DEST", help="the folder to write")
    export.add_argument("--merge-lora", action="store_true", help="merge the adapters into the model's weights")
    export.set_defaults(run=_export)


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser(
        "generate",
        help="let the model of a run answer a prompt",
        description="Print what the language model of a run answers to PROMPT, by its most likely tokens, on one "
        "process. The prompt is written with the template of the training.",
    )
    _add_run(generate)
    generate.add_argument("prompt", metavar="PROMPT", help="what the user says, or the beginning of a text")
    generate.add_argument(
        "--max-new-tokens",
        type=_positive,
        default=128,
        metavar="N",
        help="maximum number of tokens of the answer (default: 128)",
    )
    generate.add_argument(
        "--temperature", type=non_negative, default=0.0, metavar="T",
        help="sampling temperature (default: 0, no sampling)",
    )  # fmt: skip
    generate.add_argument("--raw", action="store_true", help="complete the prompt as typed, without a chat template")
    generate.set_defaults(run=_generate)


def _add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument("output_dir", type=Path, metavar="OUT", help="a run's --output-dir, or a folder with a model")
    command.add_argument(
        "--base", default="", metavar="MODEL", help="the model of the adapters (default: the one that they name)"
    )
    command.add_argument(
        "--trust-pickle", action="store_true", help="also load weights that are pickles, which may run code"
    )


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", required=True, metavar="MODEL",
        help="a name (roberta-large, gpt2-xl, llama-2-7b, qwen2-7b, gemma-2b, mixtral-8x7b ...), a config.json, a "
        "folder with one, or a YAML of operators",
    )  # fmt: skip
    command.add_argument(
        "--batch", type=_positive, required=True, metavar="B", help="global batch size (samples per update)"
    )
    command.add_argument(
        "--sequence", type=_positive, metavar="S", help="tokens per sample (default: the model's positions)"
    )
    command.add_argument(
        "--optimizer", choices=("adamw", "muon"), default="adamw", help="of the matrices of layers (default: adamw)"
    )
    command.add_argument(
        "--lora-rank", type=_positive, metavar="R",
        help="train LoRA adapters of this rank in all linear layers, and freeze all other weights",
    )  # fmt: skip


def _positive(text: str) -> int:
    if not text.lstrip("-").isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text}")
    return int(text)


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"must be numbers separated by commas, such as 0,1, got {text}")
    return [int(part) for part in parts]


def _run(args: argparse.Namespace) -> int:
    # A -- in front of SCRIPT, which some versions of Python keep.
    command = args.command[1:] if args.command[0] == "--" else args.command
    command = ["-m", *command] if args.module else command
    # One process is enough for the help text of a script.
    nproc = MinMax(1, 1) if "--help" in command[1:] and args.nnodes == MinMax(1, 1) else args.nproc
    try:
        most = args.max_restarts
        if most is None:
            most = RESTARTS_OF_ELASTIC_JOBS if args.nproc.is_elastic or args.nnodes.is_elastic else 0
        options = JobOptions(
            hang_timeout=args.hang_timeout, max_restarts=most, tee=args.tee, grow_after=args.grow_after,
            grace_period=args.grace_period, log_mb=args.log_mb, scale_batch=args.scale_batch,
        )  # fmt: skip
        with adopting_orphans():
            return run_job(
                nproc, command, backend=args.backend, log_dir=args.log_dir, options=options, nnodes=args.nnodes,
                rendezvous=rendezvous_of(args), node_rank=args.node_rank,
            )  # fmt: skip
    except LaunchError as error:
        print(f"mindnlp-dp run: {error}", file=sys.stderr)
        return error.exit_code


def _status(args: argparse.Namespace) -> int:
    try:
        status = read_status(args.log_dir)
    except ValueError as error:
        print(f"mindnlp-dp status: {printable(error)}", file=sys.stderr)
        return 2
    try:
        text = json.dumps(status, indent=2) if args.json else status_text(status)
    except (ValueError, LookupError, TypeError, AttributeError):
        print(
            f"mindnlp-dp status: {printable(args.log_dir)} has a status file that was not written by a launcher",
            file=sys.stderr,
        )
        return 2
    print(text)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    if args.devices is None and args.report is None:
        from mindnlp_dp.commands.doctor.findings import run_doctor

        return run_doctor()
    from mindnlp_dp.commands.doctor.device_report import run_device_report

    try:
        return run_device_report(args.devices or [0, 1], args.report or Path("device_report.md"))
    except (ValueError, OSError) as error:
        print(f"mindnlp-dp doctor: {error}", file=sys.stderr)
        return 2


def _plan(args: argparse.Namespace) -> int:
    from mindnlp_dp.report.plan_table import run_plan

    try:
        if (args.cluster is None) == (args.measure is None):
            raise ValueError("give --cluster, or --measure to plan for this machine")
        keys = None
        if args.measure is not None:
            from mindnlp_dp.commands.calibrate.fit import measure_to

            keys = measure_to(args.measure, args.devices or 2)
        return run_plan(args, keys)
    except (LaunchError, ValueError, RuntimeError, OSError, TimeoutError) as error:
        print(f"mindnlp-dp plan: {error}", file=sys.stderr)
        return 2


def _estimate(args: argparse.Namespace) -> int:
    from mindnlp_dp.report.memory_table import run_estimate

    try:
        return run_estimate(args)
    except (ValueError, OSError) as error:
        print(f"mindnlp-dp estimate: {error}", file=sys.stderr)
        return 2


def _export(args: argparse.Namespace) -> int:
    from mindnlp_dp.commands.export import run_export

    try:
        return run_export(args.output_dir, args.destination, args.merge_lora, args.base, trust_pickle=args.trust_pickle)
    except (ValueError, OSError) as error:
        print(f"mindnlp-dp export: {error}", file=sys.stderr)
        return 2


def _generate(args: argparse.Namespace) -> int:
    from mindnlp_dp.commands.generate import run_generate

    try:
        return run_generate(
            args.output_dir, args.prompt, max_new_tokens=args.max_new_tokens, temperature=args.temperature,
            raw=args.raw, base=args.base, trust_pickle=args.trust_pickle,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        print(f"mindnlp-dp generate: {error}", file=sys.stderr)
        return 2


def _report(args: argparse.Namespace) -> int:
    from mindnlp_dp.report.page import run_report

    try:
        return run_report(args.runs, args.output)
    except (ValueError, OSError) as error:
        print(f"mindnlp-dp report: {printable(error)}", file=sys.stderr)
        return 2
