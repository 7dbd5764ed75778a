#!/usr/bin/env python3
"""Run the parallel suite as one job, and judge it by the JUnit file of each rank.

    python tests/run_parallel.py --launcher mpi --world-size 2 [pytest arguments]

Launchers: ``mpi`` and ``mindspore`` (both through mindnlp-dp run), and ``msrun``. The exit code of a launcher is not
used: msrun returns 1 after some jobs that succeeded, and 0 after some that failed. Every rank must have run the same
tests, at least one, and passed them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

import psutil

ROOT = Path(__file__).resolve().parent.parent
# If no rank has logged a finished test for so long, the job hangs. A busy machine could exceed a limit for the whole
# job, and pytest's own limit cannot end a rank that hangs inside a communication library.
QUIET_SECONDS = 400
POLL_SECONDS = 0.2
# How long a launcher may take to end its ranks.
END_SECONDS = 20
# The maximum number of tests that are listed with their time, and the minimum time of such a test.
NUM_SLOWEST, SLOW_SECONDS = 25, 0.5


def command(launcher: str, world_size: int, folder: Path, arguments: list[str]) -> list[str]:
    suite = ["-p", "no:cacheprovider", "-x", "-q", f"--rank-junit={folder}", *arguments]
    bin_folder = Path(sys.executable).parent
    if launcher == "msrun":
        return [
            str(bin_folder / "msrun"), f"--worker_num={world_size}", f"--local_worker_num={world_size}",
            f"--master_port={free_port()}", f"--log_dir={folder}", "--join=True", "--cluster_time_out=120",
            str(bin_folder / "pytest"), *suite,
        ]  # fmt: skip
    run = [sys.executable, "-m", "mindnlp_dp", "run", "--nproc", str(world_size), "--log-dir", str(folder)]
    return [*run, "--backend", launcher, "-m", "pytest", *suite]


def free_port() -> int:
    from mindnlp_dp.launch.processes.environment import free_port

    return free_port()


def run(job: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run the job until it ends or hangs, and return its output. Every finished test makes its rank's log grow.

    If this process is interrupted, the job is ended first.
    """
    log = folder / "job.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            job, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    written, since, said = 0, time.monotonic(), ""
    try:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            size = sum(file.stat().st_size for file in folder.rglob("worker_*.log"))
            if size != written:
                written, since = size, time.monotonic()
            elif time.monotonic() - since > QUIET_SECONDS:
                end(process, folder)
                said = f"\nended: no rank finished a test for {QUIET_SECONDS} s"
    except BaseException:
        end(process, folder)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return log.read_text(errors="replace") + said


def end(launcher: subprocess.Popen, folder: Path) -> None:
    """End a job. msrun's ranks outlive msrun; they are found by the folder in their command lines."""
    launcher.terminate()
    try:
        launcher.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(folder) in " ".join(process.cmdline()):
                process.kill()


def judge(folder: Path, world_size: int) -> tuple[int, int, int, list[str]]:
    """Return the numbers of passed, failed and skipped tests (on rank 0), and the list of problems."""
    names: list[list[str]] = []
    wrong: list[str] = []
    passed = failed = skipped = 0
    for rank in range(world_size):
        file = folder / f"rank_{rank}.xml"
        if not file.exists():
            wrong.append(f"rank {rank} left no JUnit file: it did not reach its end")
            continue
        cases = list(ElementTree.parse(file).iter("testcase"))
        names.append([f"{case.get('classname')}.{case.get('name')}" for case in cases])
        bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
        wrong += [f"rank {rank}: {case.get('classname')}.{case.get('name')} failed" for case in bad]
        if rank == 0:
            skipped = sum(case.find("skipped") is not None for case in cases)
            passed, failed = len(cases) - len(bad) - skipped, len(bad)
    if names and not names[0]:
        wrong.append("no test was run")
    if any(others != names[0] for others in names[1:]):
        wrong.append("the ranks did not run the same tests")
    return passed, max(failed, int(bool(wrong))), skipped, wrong


def slowest(folder: Path) -> list[str]:
    """Return a line for each of the slowest tests on rank 0."""
    cases = ElementTree.parse(folder / "rank_0.xml").iter("testcase")
    times = sorted(((float(case.get("time")), case) for case in cases), key=lambda pair: -pair[0])[:NUM_SLOWEST]
    return [
        f"{seconds:6.1f} s  {case.get('classname')}.{case.get('name')}"
        for seconds, case in times
        if seconds >= SLOW_SECONDS
    ]


def exit_by_signal(number: int, _: object) -> None:
    for ignored in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(ignored, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", choices=("mpi", "mindspore", "msrun"), required=True)
    parser.add_argument("--world-size", type=int, required=True)
    args, rest = parser.parse_known_args()
    if {"--collect-only", "--co"} & set(rest):
        parser.error("a job runs its tests; to list them, use: pytest --collect-only tests/parallel")
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, exit_by_signal)

    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}", "GLOG_v": "3"}
    folder = Path(tempfile.mkdtemp(prefix="mindnlp-dp-parallel-"))
    job = command(args.launcher, args.world_size, folder, rest or [str(ROOT / "tests" / "parallel")])
    output = run(job, folder, environment)
    passed, failed, skipped, wrong = judge(folder, args.world_size)
    if wrong:
        print(output[-20000:])
        for log in sorted(folder.rglob("worker_*.log")):
            print(f"--- {log.name} ends:\n{log.read_text(errors='replace')[-4000:]}")
        print("\n".join(wrong))
    else:
        print("the slowest tests:", *slowest(folder), sep="\n")
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{args.launcher}, world size {args.world_size}: {passed} passed, {failed} failed, {skipped} skipped")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
