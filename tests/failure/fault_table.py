#!/usr/bin/env python3
"""Every fault at every moment of a job, under both engines: ended, named, started again, and right in the end?

    python tests/failure/fault_table.py [--backend mpi mindspore in-place] [--fault ...] [--moment ...] [--json FILE]

For each cell a job of two ranks is started with one fault in it (faulty.py), ``--max-restarts 2`` and a
``--hang-timeout`` of 3 s under MPI, 10 s under MindSpore. It must name the rank and what became of it, be started again
once, and end with an undisturbed job's digest; nothing may be left. Printed are the seconds from the fault to the next
update, or, where there is none, to the job's end, which contain that time-out where one hangs. "!" marks a cell in
which something else came out; the exit code is 1 then. With a fork server (MINDNLP_DP_FORK_SERVER) all tries begin
fast.

"disk" is one that is full: a small one for checkpoints, mounted for the cell, which needs root. It is the next
checkpoint that fails, whose time counts, and the next try that finds room again.

"in-place" is MPI with three ranks, of which one is lost and two go on in their processes (``--in-place``), where there
are updates to go on from: nothing is started again, and no update is made twice.

A rank that hangs or is stopped before all have met is named two minutes later, which is not waited for here; one that
is busy when the others have come to their end may be so for good reasons.
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

from faulty import FAULTS, MOMENTS, NUM_STEPS

from conftest import BACKENDS, ROOT, processes_of

# Under MindSpore's cluster ranks import behind their first collective, each for itself, where none is forked.
HANG_SECONDS = {"mpi": 3, "mindspore": 10}
NOT_JUDGED = {("stop", "start"), ("hang", "start"), ("hang", "end"), ("disk", "end")}
# Who fails: rank 0 alone writes checkpoints.
RANK = {"checkpoint": 0, "disk": 0}
# In place, ranks that hang or stop are no loss, one that leaves by os._exit is not noticed, and an error of rank 0, who
# saves, is one of all ranks.
IN_PLACE = {(fault, moment) for fault in ("raise", "kill") for moment in MOMENTS[2:6]}
IN_PLACE -= {("raise", "checkpoint")}
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
    size = ["--nproc", "2", "--backend", backend]
    if backend == "in-place":
        size = ["--nproc", "2:3", "--grow-after", "600", "--in-place"]
    done = subprocess.run(
        [
            sys.executable, "-m", "mindnlp_dp", "run", *size, "--max-restarts", "2",
            "--hang-timeout", str(HANG_SECONDS.get(backend, 3)), "--tee", "none", "--log-dir", str(folder / "logs"),
            *job,
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
    )  # fmt: skip
    return done.returncode, done.stdout


def cell(folder: Path, backend: str, fault: str, moment: str, digest: str) -> tuple[float, str]:
    """Seconds until it went on, and what is wrong, if anything."""
    rank = RANK.get(fault, RANK.get(moment, 1))
    exit_code, said = run(folder, backend, "--fault", fault, "--moment", moment, "--rank", str(rank))
    ended = time.time()
    if exit_code:
        return 0.0, f"exit code {exit_code}: {said[-300:]}"
    failed = [json.loads(line) for line in (folder / "logs/failures.jsonl").read_text().splitlines()]
    # In a collective that all have come to, nobody can tell who keeps it from ending.
    blamed = (0, 1) if (fault, moment) == ("hang", "collective") else (rank,)
    in_place = backend == "in-place"
    # Of one that was killed nobody but mpirun knows the signal.
    code = 1 if in_place else CODES[fault]
    if len(failed) != 1 or failed[0]["rank"] not in blamed or failed[0]["exit_code"] != code:
        return 0.0, f"failures {[(f['rank'], f['exit_code'], f['what']) for f in failed]}"
    steps = [int(line.split()[0]) for line in (folder / "updates").read_text().splitlines()]
    if in_place and (not failed[0].get("in_place") or steps != list(range(1, NUM_STEPS + 1))):
        return 0.0, f"not in place: {failed[0]}, updates {steps}"
    # Two ranks draw other dropout than three.
    if not in_place and json.loads((folder / "result.json").read_text())["digest"] != digest:
        return 0.0, "another digest"
    half = [path.name for path in (folder / "checkpoints").iterdir() if not re.fullmatch(r"checkpoint-\d+", path.name)]
    if left := [*processes_of(folder), *half]:
        return 0.0, f"left: {left}"
    # Ranks go on with a full disk until there is something to write.
    at = failed[0]["time"] if fault == "disk" else float((folder / "fault").read_text())
    updates = [float(line.split()[1]) for line in (folder / "updates").read_text().splitlines()]
    return min((when for when in updates if when > at), default=ended) - at, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines = (*BACKENDS, "in-place")
    parser.add_argument("--backend", nargs="+", choices=engines, default=engines)
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
                    left_out = (fault, moment) in NOT_JUDGED or (fault == "disk" and os.geteuid() != 0)
                    if left_out or (backend == "in-place" and (fault, moment) not in IN_PLACE):
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
