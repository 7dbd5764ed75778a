"""This module tries what this package does on this machine's devices, for ``mindnlp-dp doctor --devices``.

It writes one Markdown file, to attach to an issue: the machine and its versions, then a line for each check. The jobs
are this package's own: every kind of collective (collectives_job.py), and the recipe for text classification on data
that it makes, which must train the same model, however it is run: on a CPU to the bit, on a device up to rounding.
Everything is written to a scratch folder, which is removed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np

from mindnlp_dp.commands.doctor.findings import Finding, check_machine, installed_versions, requirements
from mindnlp_dp.launch.processes.environment import CLUSTER_VARIABLES
from mindnlp_dp.report.runs import REPORT_FILE
from mindnlp_dp.runtime.atomic_write import atomic_write
from mindnlp_dp.runtime.devices import (
    DEVICES,
    check_visible_devices,
    default_device,
    limit_devices,
    machine,
    visible_devices,
)
from mindnlp_dp.runtime.versions import mindnlp_series

_ROOT = Path(__file__).resolve().parents[3]
JOB_SECONDS = 900
UPDATES, SAVED_AT = 20, 10
_SHOWN_LINES = 30

RECIPE = [
    "--max-length", "12", "--vocab-size", "300", "--hidden-size", "64", "--num-layers", "2", "--num-heads", "4",
    "--intermediate-size", "128", "--global-batch-size", "32", "--eval-batch-size", "64", "--max-steps", str(UPDATES),
    "--logging-steps", "1", "--learning-rate", "1e-3", "--seed", "1",
]  # fmt: skip


@dataclass(frozen=True)
class Tolerance:
    """The largest difference that rounding may make: of losses, and of gradient norms, relative to their size.

    Losses change by less than 0.01 in so few updates, and are logged with four decimals. The norms of gradients show
    more, because they depend on every weight and every sample.
    """

    losses: float
    norms: float

    def __str__(self) -> str:
        return f"losses within {self.losses:g}, gradient norms within {self.norms:.1%}"


# A device may round products to fewer bits than float32 has, and otherwise for batches of another shape.
OTHER_SHAPES, SAME_SHAPES = Tolerance(2e-3, 2e-2), Tolerance(2e-4, 1e-3)


@dataclass
class Check:
    """The result of one check: what was tried, whether it held, why, and the end of a failed job's output."""

    what: str
    holds: bool
    detail: str
    seconds: float = 0.0
    output: str = ""


class CheckError(Exception):
    """A check's job ended with an error, and ``output`` is what it printed at the end; or its result is wrong."""

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.output = "\n".join(output.splitlines()[-_SHOWN_LINES:])


@dataclass
class Jobs:
    """Starts this report's jobs, in a scratch folder, on devices of this host.

    Attributes:
        devices: the numbers of the devices; on a CPU only how many they are.
        scratch: an empty folder.
        device: CPU, Ascend or GPU.
    """

    devices: Sequence[int]
    scratch: Path
    device: str
    reports: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def command(self, name: str, num_ranks: int, *arguments: str) -> list[str]:
        run = [sys.executable, "-m", "mindnlp_dp", "run", "--nproc", str(num_ranks), "--backend", "mindspore"]
        return [*run, "--log-dir", str(self.scratch / f"{name}-logs"), "-m", *arguments]

    def environment(self, num_ranks: int) -> dict[str, str]:
        environ = {name: value for name, value in os.environ.items() if name not in CLUSTER_VARIABLES}
        device = self.device
        environ["DEVICE_TARGET"] = device
        environ.update(limit_devices(device, self.devices[:num_ranks]))
        # Ascend's own log would go to the home folder.
        environ["ASCEND_PROCESS_LOG_PATH"] = str(self.scratch / "ascend")
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [environ.get("PYTHONPATH", ""), str(_ROOT)]))
        return environ

    def start(self, name: str, num_ranks: int, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(name, num_ranks, *arguments), cwd=self.scratch, env=self.environment(num_ranks),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, name: str, num_ranks: int, *arguments: str) -> str:
        """Run a job and return its output; raise CheckError if it fails, or does not end."""
        with self.start(name, num_ranks, *arguments) as job:
            try:
                output, _ = job.communicate(timeout=JOB_SECONDS)
            except subprocess.TimeoutExpired:
                # The launcher ends its ranks.
                job.terminate()
                raise CheckError(f"not done after {JOB_SECONDS} s", job.communicate()[0]) from None
        if job.returncode:
            raise CheckError(f"ended with exit code {job.returncode}", output)
        return output

    def recipe(self, name: str, *flags: str) -> list[str]:
        """Return the module and arguments of the recipe, whose results go to the folder ``name``."""
        data = ["--train-file", "train.csv", "--test-file", "test.csv"]
        return ["mindnlp_dp.text_classification.finetune_classifier", *data, *RECIPE, "--output-dir", name, *flags]

    def train(self, name: str, num_ranks: int, *flags: str) -> Mapping[str, Any]:
        """Run the recipe and return its report; the same run is not repeated."""
        if name not in self.reports:
            self.run(name, num_ranks, *self.recipe(name, *flags))
            self.reports[name] = json.loads((self.scratch / name / REPORT_FILE).read_text(encoding="utf-8"))
        return self.reports[name]

    @property
    def num_ranks(self) -> int:
        return len(self.devices)

    def single(self) -> Mapping[str, Any]:
        return self.train("one", 1)

    def replicated(self) -> Mapping[str, Any]:
        return self.train("zero_0", self.num_ranks, "--zero-stage", "0")


def write_data(folder: Path) -> None:
    """Write two small files of texts, whose label is the one word of a list that occurs in them."""
    rng = random.Random(0)
    marks, fillers = ["red", "green", "blue", "black"], [f"word{number}" for number in range(40)]
    for name, rows in (("train", 512), ("test", 64)):
        lines = ["text,label"]
        for _ in range(rows):
            label = rng.choice(marks)
            words = [*rng.choices(fillers, k=5), label]
            rng.shuffle(words)
            lines.append(f"{' '.join(words)},{label}")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


# The checks. Each returns what to say if it holds, and raises CheckError otherwise.


def check_collectives(jobs: Jobs) -> str:
    """Compare the results of all collectives with NumPy's."""
    output = jobs.run("collectives", jobs.num_ranks, "mindnlp_dp.commands.doctor.collectives_job")
    found = json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{")))
    wrong = [f"{call['call']} of {call['dtype']}: {call['wrong']}" for call in found["calls"] if call["wrong"]]
    require(not wrong, "; ".join(wrong))
    times = ", ".join(f"{size} MiB in {taken:.1f} ms" for size, taken in found["milliseconds"].items())
    return f"{len(found['calls'])} calls over {found['backend']} as NumPy computes them; sums of {times}"


def check_equivalence(jobs: Jobs) -> str:
    """Compare the losses of all ranks with those of one process."""
    require_same_weights(jobs.replicated())
    return f"{compare_trainings(jobs.replicated(), jobs.single(), OTHER_SHAPES)}, as in one process"


def check_zero(stage: int) -> Callable[[Jobs], str]:
    """Return a check that compares a run with ZeRO's ``stage`` with that of stage 0."""

    def check(jobs: Jobs) -> str:
        sharded = jobs.train(f"zero_{stage}", jobs.num_ranks, "--zero-stage", str(stage))
        return same_training(jobs, sharded, "with stage 0")

    return check


def check_tensor_parallel(jobs: Jobs) -> str:
    """Compare the losses of a model that is sharded over two ranks with those of one process."""
    mesh = f"dp={jobs.num_ranks // 2},tp=2" if jobs.num_ranks > 2 else "tp=2"
    sharded = jobs.train("tp", jobs.num_ranks, "--mesh", mesh)
    return f"{mesh}: {compare_trainings(sharded, jobs.single(), OTHER_SHAPES)}, as in one process"


def check_resuming(jobs: Jobs) -> str:
    """Kill a run after a checkpoint, resume it, and compare it with a run that was not killed."""
    flags = ["--zero-stage", "0", "--save-steps", "5"]
    with jobs.start("killed", jobs.num_ranks, *jobs.recipe("killed", *flags)) as job:
        checkpoint = jobs.scratch / "killed" / f"checkpoint-{SAVED_AT}"
        deadline = time.monotonic() + JOB_SECONDS
        while not checkpoint.is_dir() and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        job.send_signal(signal.SIGKILL)
        output, _ = job.communicate()
    if not checkpoint.is_dir():
        raise CheckError("no checkpoint was written", output)
    resumed = jobs.train("killed", jobs.num_ranks, *flags, "--resume")
    return same_training(jobs, resumed, "without a kill")


def require(holds: bool, otherwise: str) -> None:
    """Raise CheckError if something does not hold; not an assertion, which Python may be told to skip."""
    if not holds:
        raise CheckError(otherwise)


def require_same_weights(report: Mapping[str, Any]) -> None:
    """Raise CheckError if the ranks of a run ended with different weights."""
    require(report["replicas_in_sync"], f"the ranks have different weights: {', '.join(report['replica_digests'])}")


def same_training(jobs: Jobs, report: Mapping[str, Any], of: str) -> str:
    """Require that a run trained what the run with stage 0 did: to the bit on a CPU, up to rounding on a device.

    A device may sum in another order in each call, and stages 1 and 2 compute the norm that clips gradients from their
    slices. So equal bits are reported there, but not required.
    """
    require_same_weights(report)
    ours, expected = report["replica_digest"], jobs.replicated()["replica_digest"]
    if jobs.device == "CPU":
        require(ours == expected, f"digest {ours}, and {expected} {of}: the weights differ")
        return f"digest {ours}, as {of}"
    same = compare_trainings(report, jobs.replicated(), SAME_SHAPES)
    bits = "are equal to the bit" if ours == expected else "differ in bits"
    return f"{same}, as {of} (for information: the weights {bits})"


def compare_trainings(report: Mapping[str, Any], other: Mapping[str, Any], tolerance: Tolerance) -> str:
    """Return how much the losses and gradient norms of two runs differ; raise CheckError if it is too much."""
    ours, theirs = (
        np.array([(row["loss"], row["grad_norm"]) for row in each["history"] if "loss" in row], float)
        for each in (report, other)
    )
    require(len(ours) == len(theirs) == UPDATES, f"{len(ours)} and {len(theirs)} losses were logged, not {UPDATES}")
    # NaN is the largest of all for NumPy, and above any tolerance.
    losses, norms = (abs(ours - theirs) / (theirs * [0, 1] + [1, 0])).max(0)
    require(
        losses <= tolerance.losses and norms <= tolerance.norms,
        f"the losses differ by {losses:.1e}, and the gradient norms by {norms:.2%}; allowed are {tolerance}",
    )
    return f"losses of {UPDATES} updates within {losses:.1e}, gradient norms within {norms:.2g} of their size"


def checks_for(num_ranks: int) -> Iterator[tuple[str, Callable[[Jobs], str]]]:
    """Yield the name of each check and the check, in the order in which they run."""
    yield "collectives", check_collectives
    yield "equivalence with one process", check_equivalence
    for stage in (1, 2):
        yield f"ZeRO stage {stage}", check_zero(stage)
    yield "killed and resumed", check_resuming
    if mindnlp_series() == "0.4" and num_ranks % 2 == 0:
        yield "tensor parallelism", check_tensor_parallel


def try_check(what: str, check: Callable[[Jobs], str], jobs: Jobs) -> Check:
    """Run a check; an error of its jobs is its result."""
    began = time.monotonic()
    try:
        result = Check(what, True, check(jobs))
    except CheckError as error:
        result = Check(what, False, str(error), output=error.output)
    except (OSError, ValueError, KeyError, StopIteration) as error:
        result = Check(what, False, f"its result cannot be read: {type(error).__name__}: {error}")
    result.seconds = time.monotonic() - began
    return result


def run_device_report(devices: Sequence[int], path: Path) -> int:
    """Run all checks, print each at once, and write the report; return 0 if all held, else 1.

    Raises:
        ValueError: there are fewer than two devices, one is named twice, or one is not visible.
    """
    if len(devices) < 2 or len(set(devices)) != len(devices):
        given = ",".join(map(str, devices))
        raise ValueError(f"--devices takes two or more different numbers, such as 0,1; got {given}")
    device = default_device(os.environ)
    if device not in DEVICES:
        raise ValueError(f"DEVICE_TARGET is {device}, expected {', '.join(DEVICES)}")
    if wrong := check_visible_devices(os.environ):
        raise ValueError(wrong)
    # CUDA's list may hold names instead of numbers.
    visible = None if device == "CPU" else visible_devices(device, os.environ)
    is_numbers = visible is not None and all(id_.isdecimal() for id_ in visible)
    if visible is not None and is_numbers and (hidden := sorted({str(number) for number in devices} - set(visible))):
        raise ValueError(
            f"--devices names {', '.join(hidden)}, but the visible ones are {', '.join(visible) or 'none'}"
        )
    # CANN takes them in this order only.
    devices = sorted(devices)
    # Before the checks: an hour's work must not end with a file that cannot be written.
    with atomic_write(path) as file:
        file.write_text("this report is being made\n", encoding="utf-8")
    scratch = Path(tempfile.mkdtemp(prefix="mindnlp-dp-doctor-"))
    checks = []
    try:
        write_data(scratch)
        jobs = Jobs(devices, scratch, device)
        for what, check in checks_for(len(devices)):
            checks.append(try_check(what, check, jobs))
            print(f"  {'ok  ' if checks[-1].holds else 'FAIL'} {what}: {checks[-1].detail}", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with atomic_write(path) as file:
            file.write_text(render(devices, checks, None if checks else "no check has finished"), encoding="utf-8")
    print(f"written to {path}")
    return int(not all(check.holds for check in checks))


def what_is_required(device: str) -> str:
    """Return a sentence that says which results a run has to repeat, and which are information."""
    common = f"required: the ranks of a run end with equal bits, and train what one process does ({OTHER_SHAPES})"
    if device == "CPU":
        return f"{common}; ZeRO's stages and a resumed run end with the bits of stage 0"
    return (
        f"{common}; ZeRO's stages and a resumed run train what stage 0 does ({SAME_SHAPES}); for information: whether "
        "they end with its bits"
    )


def render(devices: Sequence[int], checks: Sequence[Check], note: Optional[str] = None) -> str:
    """Return the report as Markdown."""
    device = default_device(os.environ)
    asked = requirements()
    versions = ", ".join(f"{name} {version}" for name, version in installed_versions(asked).items())
    about: list[Finding] = list(check_machine(sys.version_info[:2], os.environ))
    lines = [
        f"# mindnlp_dp on {len(devices)} devices: {device}",
        "",
        f"- {time.strftime('%Y-%m-%d')}, {machine()}",
        *(f"- {finding.what}" for finding in about),
        f"- {versions}",
        f"- devices {', '.join(map(str, devices))}" + (" (on a CPU: their number)" if device == "CPU" else ""),
        f"- {what_is_required(device)}",
        "",
        "| check | verdict | seconds | |",
        "|---|---|---|---|",
    ]
    for check in checks:
        detail = check.detail.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {check.what} | {'holds' if check.holds else '**fails**'} | {check.seconds:.1f} | {detail} |")
    for check in checks:
        if check.output:
            lines += ["", f"## The end of the output of: {check.what}", "", "```", check.output, "```"]
    return "\n".join([*lines, *(["", note] if note else []), ""])
