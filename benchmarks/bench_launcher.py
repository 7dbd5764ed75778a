#!/usr/bin/env python3
"""What launchers take: from a crash to the end of the job, to the first collective, to a hang's name, to a restart.

    python benchmarks/bench_launcher.py --json outputs/bench_launcher.json

Two ranks on this host, medians of ``--rounds`` in turns:

* crash: rank 1 is killed (SIGKILL) while rank 0 waits for it in a collective; until the launcher has ended.
* first: from the command to the end of the first all-reduce, in a script that imports MindSpore; with MPI's own choice
  of ways to a neighbour beside ours.
* hang: rank 1 sleeps for ever, rank 0 waits; from the end of ``--hang-timeout`` until the launcher has ended.
* step: from the command to the end of the first update of a small RoBERTa, whose imports are MindSpore's and MindNLP's.
* restart: from SIGKILL of rank 1 to the first all-reduce of the job's next try.
* forked: either with a fork server, which has imported both.
* waiting: the launcher's own time on a core while ranks work, over the time.
* reports: what ranks say of their progress in an update, counted, times what one costs, over the update.

msrun waits for its scheduler's time-out, half a minute, in every round: once is taken. torchrun starts the same script
with PyTorch's gloo in place of our group (``--torch-python``), and looks at its ranks every tenth of a second, as its
newer versions do by themselves.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

import psutil
from common import TORCH_HINT, has_torch, machine, write_json

HANG_SECONDS = 2.0
MEET = {
    "ours": """
import mindnlp_dp as dp
group = dp.init_process_group()
""",
    "torch": """
import os
import torch
import torch.distributed as dist
# What ranks of an earlier try have left in torchrun's store is not for this one.
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
class group:
    rank = dist.get_rank()
    all_reduce = staticmethod(lambda x: dist.all_reduce(torch.from_numpy(x)))
""",
}
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import numpy as np
x = np.ones(3, np.float32)
group.all_reduce(x)
folder, what = Path(sys.argv[1]), sys.argv[2]
with open(folder / f"first_{group.rank}", "a") as file:
    print(time.time(), file=file)
if what == "wait":
    for _ in range(80):
        time.sleep(0.1)
        group.all_reduce(x)
is_first = len((folder / f"first_{group.rank}").read_text().splitlines()) == 1
if group.rank == 1 and what in ("crash", "restart") and is_first:
    time.sleep(0.3)
    (folder / "killed").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
if group.rank == 1 and what == "hang":
    (folder / "killed").write_text(str(time.time()))
    time.sleep(600)
group.all_reduce(x)
"""
# An update as the quickstart's, small.
STEP = """
import sys, time, statistics
from pathlib import Path
import numpy as np
import mindnlp_dp as dp
group = dp.init_process_group()
from mindnlp.core import optim
from mindnlp.transformers import RobertaConfig, RobertaForSequenceClassification
from mindnlp_dp.runtime.progress import read
from mindnlp_dp.launch.status import PROGRESS
model = RobertaForSequenceClassification(RobertaConfig(
    vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128))
parameters = list(model.parameters())
step = dp.make_train_step(lambda **batch: model(**batch)[0], optim.AdamW(parameters, lr=1e-4), parameters)
batch = {"input_ids": np.ones((16, 24), np.int64), "labels": np.zeros(16, np.int64)}
times, log_dir = [], Path(sys.argv[1]) / "logs"
for number in range(30):
    before, began = read(log_dir / PROGRESS)[group.rank].changes, time.perf_counter()
    step(batch)
    times.append(time.perf_counter() - began)
    if number == 0:
        Path(sys.argv[1], f"first_{group.rank}").write_text(str(time.time()))
reports = read(log_dir / PROGRESS)[group.rank].changes - before
if group.is_main:
    (Path(sys.argv[1]) / "step").write_text(f"{statistics.median(times[5:])} {reports}")
"""


class Round:
    """One job in a folder of its own."""

    torch_python = sys.executable

    def __init__(self, script: str, what: str, launcher: str, *flags: str, **environ: str) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if script is SCRIPT:
                script = MEET["torch" if launcher == "torchrun" else "ours"] + script
            (folder / "script.py").write_text(script)
            arguments = [str(folder / "script.py"), str(folder), what]
            beside = Path(sys.executable).parent
            command = {
                "mpi": [sys.executable, "-m", "mindnlp_dp", "run", "--nproc", "2", "--backend", "mpi"],
                "mindspore": [sys.executable, "-m", "mindnlp_dp", "run", "--nproc", "2", "--backend", "mindspore"],
                "mpirun": [str(beside / "mpirun"), "-n", "2", "--oversubscribe", "--bind-to", "none"],
                "torchrun": [
                    self.torch_python,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    "--nproc_per_node=2",
                    "--monitor_interval=0.1",
                ],
                "msrun": [str(beside / "msrun"), "--worker_num=2", "--local_worker_num=2", "--join=True"],
            }[launcher]
            if launcher in ("mpi", "mindspore"):
                command += ["--log-dir", str(folder / "logs"), *flags]
            elif launcher == "torchrun":
                command += flags
            elif launcher == "mpirun":
                command += ["--allow-run-as-root"] * (os.geteuid() == 0) + [sys.executable]
            else:
                command += ["--master_port=8131", f"--log_dir={folder}/logs"]
            self.began = time.time()
            job = subprocess.Popen(
                [*command, *arguments], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env={**os.environ, **environ},
            )  # fmt: skip
            self.waiting: Optional[float] = None
            if what == "wait":
                self.waiting = _share_of_a_core(job.pid, folder)
            job.wait(300)
            self.ended = time.time()
            first = folder / "first_0"
            self.firsts = [float(line) for line in first.read_text().splitlines()] if first.exists() else []
            killed, step = folder / "killed", folder / "step"
            self.killed = float(killed.read_text()) if killed.exists() else 0.0
            self.step = tuple(map(float, step.read_text().split())) if step.exists() else (0.0, 0.0)


def _share_of_a_core(pid: int, folder: Path) -> float:
    while not all((folder / f"first_{rank}").exists() for rank in range(2)):
        time.sleep(0.1)
    launcher, began = psutil.Process(pid), time.perf_counter()
    before = sum(launcher.cpu_times()[:2])
    time.sleep(5)
    return (sum(launcher.cpu_times()[:2]) - before) / (time.perf_counter() - began)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has PyTorch")
    parser.add_argument("--without-msrun", action="store_true", help="leave out the one that takes half a minute")
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    rows: list[tuple[str, str, float]] = []
    # The jobs run in folders of their own.
    Round.torch_python = shutil.which(args.torch_python) or args.torch_python
    Round.torch_python = os.path.abspath(Round.torch_python)
    is_torch_here = has_torch(args.torch_python)
    if not is_torch_here:
        print(TORCH_HINT)

    def row(what: str, launcher: str, value: float) -> None:
        rows.append((what, launcher, value))
        print(f"{what:<44}{launcher:<26}{value:>10.4g}", flush=True)

    def after_kill(launcher: str, what: str = "crash", *flags: str) -> float:
        done = Round(SCRIPT, what, launcher, *flags)
        return done.ended - done.killed

    def first(launcher: str = "mpi", **environ: str) -> float:
        done = Round(SCRIPT, "first", launcher, **environ)
        return done.firsts[0] - done.began

    def first_step(launcher: str = "mpi", **environ: str) -> float:
        done = Round(STEP, "step", launcher, **environ)
        return done.firsts[0] - done.began

    def restart(launcher: str = "mpi", **environ: str) -> float:
        done = Round(SCRIPT, "restart", launcher, "--max-restarts=1", **environ)
        return done.firsts[1] - done.killed

    print(machine())
    for launcher in ("mpi", "mindspore", "mpirun", *(["torchrun"] if is_torch_here else [])):
        name = f"mindnlp-dp run, {launcher}" if launcher in ("mpi", "mindspore") else launcher
        taken = [after_kill(launcher) for _ in range(args.rounds)]
        row("crash to the end of the job, s", name, statistics.median(taken))
    if not args.without_msrun:
        row("crash to the end of the job, s", "msrun", after_kill("msrun"))
    for launcher in ("mpi", "mindspore"):
        limit = ("--hang-timeout", str(HANG_SECONDS))
        taken = [after_kill(launcher, "hang", *limit) - HANG_SECONDS for _ in range(args.rounds)]
        row("hang, behind its time-out, to the end, s", f"mindnlp-dp run, {launcher}", statistics.median(taken))
    ours, theirs = [], []
    for _ in range(args.rounds):
        ours.append(first())
        theirs.append(first(OMPI_MCA_btl="^openib"))
    row("command to first all-reduce, s", "mindnlp-dp run, mpi", statistics.median(ours))
    row("command to first all-reduce, s", "with MPI's own choice", statistics.median(theirs))
    if is_torch_here:
        for what, measure in (("command to first all-reduce, s", first),
                              ("killed rank to the next try's all-reduce, s", restart)):  # fmt: skip
            row(what, "torchrun", statistics.median(measure("torchrun") for _ in range(args.rounds)))
    with _fork_server() as forked:
        for what, measure in (("command to first update, s", first_step),
                              ("killed rank to the next try's all-reduce, s", restart)):  # fmt: skip
            cold, fast = zip(*((measure(), measure(**forked)) for _ in range(args.rounds)))
            row(what, "cold", statistics.median(cold))
            row(what, "forked", statistics.median(fast))
    waiting = Round(SCRIPT, "wait", "mpi").waiting
    assert waiting is not None, "measured in this one"
    row("launcher while it waits, of a core", "mindnlp-dp run, mpi", waiting)
    seconds, reports = Round(STEP, "step", "mpi").step
    each = _report_seconds()
    row("reports in an update", "counted", reports)
    row("reports in an update, of its time", f"{1e6 * each:.1f} us each", reports * each / seconds)
    if args.json:
        result: dict[str, Any] = {"machine": machine(), "rows": [dict(zip(("what", "of", "value"), r)) for r in rows]}
        write_json(args.json, result)


@contextmanager
def _fork_server() -> Iterator[dict[str, str]]:
    """The environment in which workers find one that is ready."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "socket")
        server = subprocess.Popen([sys.executable, "-m", "mindnlp_dp.launch.fork_server", str(path)])
        try:
            while not path.exists():
                time.sleep(0.1)
            yield {"MINDNLP_DP_FORK_SERVER": str(path)}
        finally:
            server.kill()
            server.wait()


def _report_seconds() -> float:
    from mindnlp_dp.runtime import progress

    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "progress")
        progress.create(path, 1)
        progress.report_to(path, 0)
        return min(timeit.repeat(progress.step, number=10000, repeat=5)) / 10000


if __name__ == "__main__":
    main()
