"""Stop a job at random moments, resume it, and check that it ends like a job that was not stopped.

    python tests/failure/interrupt_and_resume.py --stops 100 --kills 50

``--stops``: a rank dies after a random update; ``--lines``: before a random line of Python that a random update runs.
``--kills``: a rank gets SIGKILL at a random moment, while training, evaluating or saving (the model is larger then, and
saved after every update). After each stop, the newest checkpoint must be complete. At the end of every run, weights and
losses must equal those of the run without stops, to the bit. The run without stops does not shard its updates; every
process lifetime of the others uses another ``zero_stage``, and writes checkpoints at once or by a thread, by rank 0
or by all ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from interruptible import NUM_STEPS

from mindnlp_dp.checkpoint.directory import checkpoints_in
from mindnlp_dp.checkpoint.manifest import check_checkpoint

HERE = Path(__file__).resolve().parent
# A job that writes no file (log or checkpoint) for so long hangs. Imports take about five seconds, and many times that
# on a busy machine; a limit for the whole job would depend on the machine more than on the job.
QUIET_SECONDS = 120
STOPS_IN_A_RUN = 5
# The approximate number of Python lines of an update; a rank whose update has fewer lines dies after it.
MOST_LINES = 4500
LARGE = ("--hidden-size", "384")
# A kill that comes after the job's end is repeated; so many late kills are not a coincidence.
MOST_LATE_KILLS = 10


class Job:
    """Starts the job in ``folder``, and waits for it or kills a rank: one lifetime from start to stop or end."""

    def __init__(self, folder: Path, arguments: tuple[str, ...], backend: str) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.began = folder, time.time()
        for pid in folder.glob("pid_*"):
            pid.unlink()
        command = [sys.executable, "-m", "mindnlp_dp", "run", "--nproc", "2", "--log-dir", str(folder / "logs")]
        self.process = subprocess.Popen(
            [*command, "--backend", backend, str(HERE / "interruptible.py"), str(folder), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        )  # fmt: skip

    def finish(self) -> str:
        while True:
            try:
                return self.process.communicate(timeout=1)[0]
            except subprocess.TimeoutExpired:
                self.check_that_it_goes_on()

    def wait_until_it_trains(self) -> None:
        while len(list(self.folder.glob("pid_*"))) < 2:
            if self.process.poll() is not None:
                raise AssertionError(f"the job never began to train:\n{self.finish()}")
            self.check_that_it_goes_on()
            time.sleep(0.01)

    def check_that_it_goes_on(self) -> None:
        last = self.began
        for folder, _, names in os.walk(self.folder):
            for name in [".", *names]:
                with contextlib.suppress(FileNotFoundError):  # a checkpoint that just got its name
                    last = max(last, os.stat(os.path.join(folder, name)).st_mtime)
        if time.time() - last > QUIET_SECONDS:
            # The ranks end with their launcher.
            self.process.kill()
            raise AssertionError(f"the job hangs: no file for {QUIET_SECONDS} s\n{self.process.communicate()[0]}")

    def kill_rank(self, rank: int) -> None:
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int((self.folder / f"pid_{rank}").read_text()), signal.SIGKILL)

    def result(self) -> dict:
        output, file = self.finish(), self.folder / "result.json"
        assert file.exists(), f"the run did not come to its end:\n{output}"
        return json.loads(file.read_text())


@dataclass
class Whole:
    """Holds the result and the duration of the run without stops."""

    result: dict
    seconds: float


@functools.cache
def run_without_stops(*arguments: str) -> Whole:
    """Run the reference for all runs, under MPI; the other backend must give the same bits."""
    with tempfile.TemporaryDirectory(prefix="whole-") as folder:
        job = Job(Path(folder), arguments, backend="mpi")
        job.wait_until_it_trains()
        began = time.monotonic()
        return Whole(job.result(), time.monotonic() - began)


def check_newest(folder: Path) -> None:
    found = checkpoints_in(folder)
    if found:
        check_checkpoint(found[-1])


def any_settings(rng: random.Random) -> tuple[str, ...]:
    return "--zero-stage", str(rng.randrange(3)), *rng.choice(((), ("--async-save",), ("--sharded-checkpoints",)))


def stop_at_random(
    folder: Path, backend: str, rng: random.Random, num_stops: int, whole: Whole, *, within: bool
) -> None:
    """Make one run in which a rank dies after random updates, or ``within`` them, in rising order."""
    for step in sorted(rng.sample(range(1, NUM_STEPS + 1), num_stops)):
        rank, line = rng.randrange(2), rng.randint(1, MOST_LINES) if within else 0
        where = ("--stop-at", str(step), "--at-line", str(line), "--on-rank", str(rank))
        Job(folder, (*where, *any_settings(rng)), backend).finish()
        assert not (folder / "result.json").exists(), f"nothing stopped rank {rank} at step {step}"
        check_newest(folder)
    assert Job(folder, any_settings(rng), backend).result() == whole.result


def kill_at_random(folder: Path, backend: str, rng: random.Random, num_kills: int, whole: Whole) -> tuple[int, int]:
    """Make one run with up to ``num_kills`` kills; return how many hit a training job, and how many hit a save."""
    hits = saves = 0
    for _ in range(num_kills):
        job = Job(folder, (*LARGE, *any_settings(rng)), backend)
        job.wait_until_it_trains()
        # At most a third of a run at a time, so that one run can be killed several times.
        time.sleep(rng.uniform(0, whole.seconds / 3))
        # Mostly kill the rank that writes checkpoints.
        job.kill_rank(0 if rng.random() < 0.8 else 1)
        job.finish()
        if (folder / "result.json").exists():
            break
        hits += 1
        saves += any(folder.glob(".mindnlp_dp-checkpoint-*"))
        check_newest(folder)
    assert Job(folder, (*LARGE, *any_settings(rng)), backend).result() == whole.result
    return hits, saves


def main(argv: Optional[list[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=100)
    parser.add_argument("--lines", type=int, default=100)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--backend", choices=["mpi", "mindspore"], default="mpi")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    rng, root = random.Random(options.seed), Path(tempfile.mkdtemp(prefix="interrupt-"))
    began = time.monotonic()

    for wanted, kind in ((options.stops, "stops"), (options.lines, "lines")):
        done = 0
        whole = run_without_stops() if wanted else None
        while done < wanted:
            folder, count = root / f"{kind}_{done}", min(STOPS_IN_A_RUN, wanted - done)
            stop_at_random(folder, options.backend, rng, count, whole, within=kind == "lines")
            shutil.rmtree(folder)
            done += count
            print(f"{done} of {wanted} {kind}: {whole.result['digest']} every time", flush=True)
    hits = saves = runs = 0
    whole = run_without_stops(*LARGE) if options.kills else None
    while hits < options.kills:
        folder = root / f"killed_{runs}"
        count = min(STOPS_IN_A_RUN, options.kills - hits)
        more, while_saving = kill_at_random(folder, options.backend, rng, count, whole)
        shutil.rmtree(folder)
        hits, saves, runs = hits + more, saves + while_saving, runs + 1
        assert runs < options.kills + MOST_LATE_KILLS, "the jobs are done before they are killed"
        digest = whole.result["digest"]
        print(f"{hits} of {options.kills} kills, {saves} of them in a save: {digest} every time", flush=True)
    shutil.rmtree(root)
    print(f"every run ended as one that was not stopped; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
