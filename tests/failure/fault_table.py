#!/usr/bin/env python3
"""Cause every fault at every moment of a job, under both engines, and check message, restart and result.

    python tests/failure/fault_table.py [--backend mpi mindspore] [--fault ...] [--moment ...] [--json FILE]

For each cell, a job of two ranks with one fault is started (faulty.py), with ``--max-restarts 2`` and a
``--hang-timeout`` of 3 s under MPI, 10 s under MindSpore. The job must name the failed rank and its fault, restart
once, and end with the digest of an undisturbed job; nothing may be left. Each cell shows the seconds from the fault to
the next update, or to the end of the job if there is none; they include the time-out if a rank hangs. "!" marks a cell
with another result; the exit code is then 1. With tests/forked_ranks.py
(MINDNLP_DP_PYTHON) all attempts start fast.

"disk" is a full disk: a small disk for checkpoints is mounted for the cell, which needs root. The next checkpoint
fails, and the time counts from that failure; the next attempt finds free space again.

Two kinds of cells are left empty. A rank that hangs or stops before all ranks have joined is reported only after two
minutes. A rank that is busy after the others have finished may have good reasons.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from faulty import FAULTS, MOMENTS

from conftest import BACKENDS, ROOT, processes_of

# Under MindSpore's cluster, ranks that are not forked import after their first collective, each at its own speed.
HANG_SECONDS = {"mpi": 3, "mindspore": 10}
NOT_JUDGED = {("stop", "start"), ("hang", "start"), ("hang", "end"), ("disk", "end")}
# The rank that fails if it is not rank 1: only rank 0 writes checkpoints.
RANK = {"checkpoint": 0, "disk": 0}
CODES = {"raise": 1, "exit": 3, "kill": 137, "stop": 124, "hang": 124, "disk": 1}
DISK_MB = 4


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def run(folder: Path, backend: str, *flags: str) -> tuple[int, str]:
    job = [str(ROOT / "tests/failure/faulty.py"), str(folder), *flags]
    done = subprocess.run(
        [
            sys.executable, "-m", "mindnlp_dp", "run", "--nproc", "2", "--backend", backend, "--max-restarts", "2",
            "--hang-timeout", str(HANG_SECONDS[backend]), "--tee", "none", "--log-dir", str(folder / "logs"), *job,
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
    )  # fmt: skip
    return done.returncode, done.stdout


def cell(folder: Path, backend: str, fault: str, moment: str, digest: str) -> tuple[float, str]:
    """Return the seconds until the job continued, and what is wrong ("" if nothing)."""
    rank = RANK.get(fault, RANK.get(moment, 1))
    exit_code, said = run(folder, backend, "--fault", fault, "--moment", moment, "--rank", str(rank))
    ended = time.time()
    if exit_code:
        return 0.0, f"exit code {exit_code}: {said[-300:]}"
    failed = [json.loads(line) for line in (folder / "logs/failures.jsonl").read_text().splitlines()]
    # In a collective that all ranks have reached, it is unknown which rank keeps it from ending.
    blamed = (0, 1) if (fault, moment) == ("hang", "collective") else (rank,)
    if len(failed) != 1 or failed[0]["rank"] not in blamed or failed[0]["exit_code"] != CODES[fault]:
        return 0.0, f"failures {[(f['rank'], f['exit_code'], f['what']) for f in failed]}"
    if json.loads((folder / "result.json").read_text())["digest"] != digest:
        return 0.0, "another digest"
    half = [path.name for path in (folder / "checkpoints").iterdir() if not re.fullmatch(r"checkpoint-\d+", path.name)]
    if left := [*processes_of(folder), *half]:
        return 0.0, f"left: {left}"
    # Ranks continue with a full disk until they write the next checkpoint.
    at = failed[0]["time"] if fault == "disk" else float((folder / "fault").read_text())
    updates = [float(line.split()[1]) for line in (folder / "updates").read_text().splitlines()]
    return min((when for when in updates if when > at), default=ended) - at, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--fault", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--moment", nargs="+", choices=MOMENTS, default=MOMENTS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results, wrong = [], []
    with tempfile.TemporaryDirectory() as place:
        for backend in options.backend:
            Path(place, backend).mkdir()
            assert run(Path(place, backend), backend)[0] == 0, f"the undisturbed job failed under {backend}"
            digest = json.loads(Path(place, backend, "result.json").read_text())["digest"]
            print(f"\n{backend}, {os.cpu_count()} cores; seconds from the fault to the next update")
            print("| " + " | ".join(["fault", *options.moment]) + " |")
            print("|" + "---|" * (len(options.moment) + 1), flush=True)
            for fault in options.fault:
                shown = []
                for moment in options.moment:
                    if (fault, moment) in NOT_JUDGED or (fault == "disk" and os.geteuid() != 0):
                        shown.append("")
                        continue
                    folder = Path(place, f"{backend}_{fault}_{moment}")
                    folder.mkdir()
                    with small_disk(folder / "checkpoints") if fault == "disk" else contextlib.nullcontext():
                        seconds, problem = cell(folder, backend, fault, moment, digest)
                    shown.append("!" if problem else f"{seconds:.1f}")
                    results.append({"backend": backend, "fault": fault, "moment": moment, "seconds": seconds,
                                    "problem": problem})  # fmt: skip
                    if problem:
                        wrong.append(f"{backend}, {fault}, {moment}: {problem}")
                        print(wrong[-1], file=sys.stderr, flush=True)
                print(f"| {fault} | " + " | ".join(shown) + " |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
