#!/usr/bin/env python3
"""Run the quickstart as one elastic job of 1 to 3 ranks, with many faults at random moments.

    python tests/failure/soak.py [--faults 200] [--backend mpi] [--hang-timeout 8] [--num-epochs N]
                                  [--zero-stage 3] [--seed 0] [--json FILE]

Each fault hits a job that has made an update since the last fault: SIGKILL, SIGTERM, SIGSTOP (which the job must detect
as a hang) or SIGINT to a rank, or SIGKILL to mpirun. After the last fault the job runs to its end. It must end with 0,
with all updates done, an accuracy like an undisturbed run's, and nothing left: no process, no file in /dev/shm or the
folder of temporary files, no incomplete checkpoint. Prints a summary; the exit code is 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import json
import mmap
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from conftest import BACKENDS, ROOT, processes_of
from mindnlp_dp.launch.log_dir import RECORD
from mindnlp_dp.launch.processes import reaper
from mindnlp_dp.launch.processes.worker import HEARTBEATS_FILE
from mindnlp_dp.runtime import heartbeat

FAULTS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}
# Between two faults some of the 233 updates of an epoch are made, eleven on a fast machine: the job must outlast all.
FAULTS_AN_EPOCH = 15
# A fault after which nothing has changed for so long had no effect.
PATIENCE_SECONDS = 120


def command(place: Path, options: argparse.Namespace, num_epochs: int) -> list[str]:
    return [
        sys.executable, "-m", "mindnlp_dp", "run", "--nproc", "1:3", "--grow-after", "4", "--max-restarts", "100000",
        "--hang-timeout", str(options.hang_timeout), "--backend", options.backend, "--tee", "none",
        "--log-dir", str(place / "logs"),
        str(ROOT / "scripts/finetune.py"), "--config", str(ROOT / "configs/quickstart_cpu.yaml"), "--output-dir",
        str(place / "out"), "--save-steps", "5", "--num-epochs", str(num_epochs), "--zero-stage", options.zero_stage,
    ]  # fmt: skip


def left_over() -> set[str]:
    """Return the files in /dev/shm and the temporary folder, without those of running launchers."""
    there = {path for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).iterdir()}
    return {str(path) for path in there if not is_in_use(path / "lock")}


def is_in_use(lock: Path) -> bool:
    try:
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


class Job:
    """Starts the job, disturbs it, and counts the faults."""

    def __init__(self, place: Path, options: argparse.Namespace, chance: random.Random) -> None:
        num_epochs = options.num_epochs or 1 + options.faults // FAULTS_AN_EPOCH
        self._logs, self._chance = place / "logs", chance
        with open(place / "launcher.out", "w") as out:
            job = command(place, options, num_epochs)
            self.launcher = subprocess.Popen(job, stdout=out, stderr=out, cwd=place)
        self._faults = [*FAULTS, *(["mpirun"] if options.backend == "mpi" else [])]
        self._hang_timeout = options.hang_timeout
        self.happened: collections.Counter[str] = collections.Counter()
        self.sizes: collections.Counter[int] = collections.Counter()
        self.seconds: list[float] = []
        self.without_effect: list[str] = []

    def ranks(self) -> list:
        """Return the live ranks. A rank that has not begun has pid 0, and a signal to 0 would hit this process."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return self._ranks_of(psutil.Process(self.launcher.pid).children())
        return []

    def _ranks_of(self, children: list[psutil.Process]) -> list:
        for child in children:
            with contextlib.suppress(psutil.Error, OSError, ValueError):
                path = Path(child.environ().get(reaper.VARIABLE, "/none"), HEARTBEATS_FILE)
                with open(path, "r+b") as file:
                    return [rank for rank in heartbeat.read(mmap.mmap(file.fileno(), 0)) if rank.state]
        return []

    def num_failures(self) -> int:
        try:
            return len((self._logs / RECORD).read_text().splitlines())
        except OSError:
            return 0

    def wait_for_an_update(self) -> bool:
        """Wait until all ranks have joined and one has made an update; return False if the job has ended."""
        before = {rank.pid: rank.update for rank in self.ranks()}
        while self.launcher.poll() is None:
            ranks = self.ranks()
            have_met = bool(ranks) and all(rank.has_joined for rank in ranks)
            if have_met and any(rank.update > before.get(rank.pid, 0) for rank in ranks):
                return True
            time.sleep(0.02)
        return False

    def disturb(self) -> bool:
        """Cause one fault; return False if the job has ended."""
        self.wait_for_an_update()
        time.sleep(self._chance.uniform(0, 0.5))
        ranks, num_failures = self.ranks(), self.num_failures()
        how, rank = self._chance.choice(self._faults), self._chance.choice(ranks) if ranks else None
        if self.launcher.poll() is not None:
            return False
        if rank is None or not all(other.has_joined for other in ranks):
            # The job is between two attempts. A rank that is stopped before all have joined is named two minutes later.
            return True
        try:
            if how == "mpirun":
                runs = [p for p in psutil.Process(self.launcher.pid).children() if p.name() in ("mpirun", "prterun")]
                runs[0].kill()
            else:
                os.kill(rank.pid, FAULTS[how])
        except (ProcessLookupError, psutil.Error, IndexError):
            # The job was between two attempts.
            return True
        at = time.monotonic()
        self.happened[how] += 1
        self.sizes[len(ranks)] += 1
        pids = {other.pid for other in ranks}
        # If the launcher ends the attempt in order to grow, no failure is recorded.
        while self.num_failures() == num_failures and pids & {other.pid for other in self.ranks()}:
            if self.launcher.poll() is not None:
                return False
            if time.monotonic() - at > PATIENCE_SECONDS:
                self.without_effect.append(how)
                return True
            time.sleep(0.02)
        if not self.wait_for_an_update():
            return False
        self.seconds.append(time.monotonic() - at - self._hang_timeout * (how == "stop"))
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--backend", choices=BACKENDS, default="mpi")
    # Longer than rank 0 takes to prepare the data while the others wait.
    parser.add_argument("--hang-timeout", type=float, default=8, help="seconds; more where other programs run")
    parser.add_argument("--num-epochs", type=int, help="of the job, which must outlast the faults")
    parser.add_argument("--zero-stage", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wrong: list[str] = []
    # A script in the background ignores SIGINT, and all processes that it starts would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        place, before, began = Path(folder), left_over(), time.monotonic()
        job = Job(place, options, random.Random(options.seed))
        while sum(job.happened.values()) < options.faults and job.disturb():
            print(f"{sum(job.happened.values())} faults in {time.monotonic() - began:.0f} s", file=sys.stderr)
        exit_code = job.launcher.wait()
        said = (place / "launcher.out").read_text()
        wrong += [f"nothing came of it: {how}" for how in job.without_effect]
        if exit_code:
            wrong.append(f"exit code {exit_code}: {said[-1000:]}")
        if sum(job.happened.values()) < options.faults:
            wrong.append(f"the job was over after {sum(job.happened.values())} faults")
        report = {}
        if (place / "out/report.json").exists():
            report = json.loads((place / "out/report.json").read_text())
        else:
            wrong.append("the report is missing")
        wrong += [f"process left: {process}" for process in processes_of(place)]
        wrong += [f"left: {path}" for path in sorted(left_over() - before)]
        wrong += [f"half a checkpoint: {path}" for path in (place / "out").glob(".*")]
        failures = [json.loads(line) for line in (place / "logs/failures.jsonl").read_text().splitlines()]
    summary = {
        "backend": options.backend, "faults": dict(job.happened), "ranks_when_it_happened": dict(job.sizes),
        "failures_recorded": len(failures),
        "grown": said.count("the job continues with") - said.count("\nrestart "),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "seconds_to_the_next_update": {
            "median": round(statistics.median(job.seconds or [0]), 2), "most": round(max(job.seconds, default=0), 2),
        },
        "accuracy": report.get("eval_accuracy"), "updates": report.get("steps"), "wrong": wrong,
    }  # fmt: skip
    print(json.dumps(summary, indent=2))
    if options.json:
        options.json.write_text(json.dumps(summary, indent=2))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
