#!/usr/bin/env python3
"""Time launchers: from a crash to the end of the job, to the first collective, to the report of a hang, to a restart.

    python benchmarks/bench_launcher.py --json outputs/bench_launcher.json

Two ranks run on this host; the results are medians of ``--rounds`` rounds:

* crash: from SIGKILL of rank 1, while rank 0 is blocked in a collective, until the launcher has ended.
* first: from the command to the end of the first all-reduce, in a script that imports MindSpore; with our and with
  MPI's own choice of transport between ranks.
* hang: rank 1 sleeps for ever, rank 0 is blocked; from the end of ``--hang-timeout`` until the launcher has ended.
* step: from the command to the end of the first update of a small RoBERTa, which imports MindSpore and MindNLP.
* restart: from SIGKILL of rank 1 to the first all-reduce of the job's next attempt, which starts a second later,
  because the attempt before it completed no update.
* lost: from SIGKILL of rank 1, in update 110 of a small RoBERTa, to the end of the next update: of the next attempt,
  from a checkpoint.
* waiting: the launcher's CPU time while ranks work, divided by the elapsed time.
* reports: the number of progress reports of a rank in an update, times the cost of one, divided by the update's time.

msrun waits half a minute for its scheduler's time-out in every round, so it runs only once. torchrun starts the same
script with PyTorch's gloo instead of our group (``--torch-python``), and polls its ranks every tenth of a second, which
is the default of its newer versions.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import psutil
from common import machine, run_benchmark

HANG_SECONDS = 2.0
LOST_AT = 110
NAMES = {
    "mpi": "mindnlp-dp run, mpi", "mindspore": "mindnlp-dp run, mindspore", "mpirun": "mpirun", "torchrun": "torchrun",
}  # fmt: skip
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
# A small update, similar to the quickstart's.
STEP = """
import sys, time, statistics
from pathlib import Path
import numpy as np
import mindnlp_dp as dp
group = dp.init_process_group()
from mindnlp.core import optim
from mindnlp.transformers import RobertaConfig, RobertaForSequenceClassification
from mindnlp_dp.runtime import heartbeat
model = RobertaForSequenceClassification(RobertaConfig(
    vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128))
parameters = list(model.parameters())
step = dp.make_train_step(lambda **batch: model(**batch)[0], optim.AdamW(parameters, lr=1e-4), parameters, model=model)
batch = {"input_ids": np.ones((16, 24), np.int64), "labels": np.zeros(16, np.int64)}
times, reports, report = [], [], heartbeat.writer.step
heartbeat.writer.step = lambda: (reports.append(1), report())
for number in range(30):
    reports.clear()
    began = time.perf_counter()
    step(batch)
    times.append(time.perf_counter() - began)
    if number == 0:
        Path(sys.argv[1], f"first_{group.rank}").write_text(str(time.time()))
if group.is_main:
    (Path(sys.argv[1]) / "step").write_text(f"{statistics.median(times[5:])} {len(reports)}")
"""


# Ours uses the Trainer; PyTorch's uses DistributedDataParallel with a model of the same size.
LOST = {
    "ours": """
from mindnlp.engine import TrainerCallback
from mindnlp.transformers import RobertaConfig, RobertaForSequenceClassification

class Rows:
    def __len__(self):
        return 6400
    def __getitem__(self, index):
        return {"input_ids": np.full(24, index % 1000), "labels": index % 2}

class Watched(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        finish(state.global_step, group.rank)

model = RobertaForSequenceClassification(RobertaConfig(
    vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128))
args = dp.DataParallelArguments(str(folder / "out"), per_device_train_batch_size=16, max_steps=140, disable_tqdm=True,
    save_strategy="steps", save_steps=50, evaluation_strategy="no", logging_steps=50)
dp.DataParallelTrainer(model, args, train_dataset=Rows(), callbacks=[Watched()]).train()
""",
    "torch": """
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(1000, 64)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)
        self.classifier = nn.Linear(64, 2)
    def forward(self, ids):
        return self.classifier(self.encoder(self.embeddings(ids))[:, 0])

torch.set_num_threads(1)
model = nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
saved, begin = folder / "saved", 0
if saved.exists():
    state = torch.load(saved)
    begin = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
for step in range(begin + 1, 141):
    loss = nn.functional.cross_entropy(model(torch.full((16, 24), step)), torch.zeros(16, dtype=torch.long))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0 and group.rank == 0:
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "half")
        (folder / "half").replace(saved)
    finish(step, group.rank)
""",
}
FINISH = (
    f"""
LOST_AT = {LOST_AT}
"""
    + """
import os, signal, sys, time
from pathlib import Path
import numpy as np
folder = Path(sys.argv[1])
def finish(step, rank):
    # Slow enough for what is prepared meanwhile for another try.
    time.sleep(0.06)
    if rank == 0:
        with open(folder / "updates", "a") as file:
            print(os.getpid(), step, time.time(), file=file)
    if rank == 1 and step == LOST_AT and not (folder / "killed").exists():
        (folder / "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
"""
)


class Round:
    """Runs one job in its own folder and keeps the times that it measured."""

    torch_python = sys.executable

    def __init__(self, script: str, what: str, launcher: str, *flags: str, **environ: str) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            library = "torch" if launcher == "torchrun" else "ours"
            if what == "lost":
                script = MEET[library] + FINISH + LOST[library]
            elif script is SCRIPT:
                script = MEET[library] + script
            (folder / "script.py").write_text(script)
            arguments = [str(folder / "script.py"), str(folder), what]
            beside = Path(sys.executable).parent
            command = {
                "mpi": [sys.executable, "-m", "mindnlp_dp", "run", "--backend", "mpi", "--nproc", "2"],
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
            updates = (folder / "updates").read_text().splitlines() if (folder / "updates").exists() else []
            self.updates = [(int(pid), int(step), float(when)) for pid, step, when in map(str.split, updates)]
            self.step = tuple(map(float, step.read_text().split())) if step.exists() else (0.0, 0.0)


def _share_of_a_core(pid: int, folder: Path) -> float:
    while not all((folder / f"first_{rank}").exists() for rank in range(2)):
        time.sleep(0.1)
    launcher, began = psutil.Process(pid), time.perf_counter()
    before = sum(launcher.cpu_times()[:2])
    time.sleep(5)
    return (sum(launcher.cpu_times()[:2]) - before) / (time.perf_counter() - began)


class Table:
    """Collects and prints the rows of results; ends(), starts() and costs() add them."""

    def __init__(self, num_rounds: int) -> None:
        self.num_rounds, self.rows = num_rounds, list[tuple[str, str, float]]()

    def row(self, what: str, of: str, value: float) -> None:
        self.rows.append((what, of, value))
        print(f"{what:<44}{of:<34}{value:>10.4g}", flush=True)

    def median(self, what: str, of: str, measure: Callable[..., float], *flags: str) -> None:
        self.row(what, of, statistics.median(measure(*flags) for _ in range(self.num_rounds)))

    def in_turns(self, what: str, measures: dict[str, Callable[[], float]]) -> None:
        rounds = [[measure() for measure in measures.values()] for _ in range(self.num_rounds)]
        for of, values in zip(measures, zip(*rounds)):
            self.row(what, of, statistics.median(values))


def after_kill(launcher: str, what: str = "crash", *flags: str) -> float:
    done = Round(SCRIPT, what, launcher, *flags)
    return done.ended - done.killed


def hang(launcher: str) -> float:
    return after_kill(launcher, "hang", "--hang-timeout", str(HANG_SECONDS)) - HANG_SECONDS


def first(launcher: str = "mpi", **environ: str) -> float:
    done = Round(SCRIPT, "first", launcher, **environ)
    return done.firsts[0] - done.began


def first_step(launcher: str = "mpi", **environ: str) -> float:
    done = Round(STEP, "step", launcher, **environ)
    return done.firsts[0] - done.began


def restart(launcher: str = "mpi", **environ: str) -> float:
    done = Round(SCRIPT, "restart", launcher, "--max-restarts=1", **environ)
    return done.firsts[1] - done.killed


def lost(launcher: str) -> float:
    done = Round("", "lost", launcher, "--max-restarts=1")
    pid = done.updates[0][0]
    return min(when for other, _, when in done.updates if other != pid) - done.killed


def ends(table: Table, *, with_torch: bool, with_msrun: bool) -> None:
    """Measure the times from a failure to the end of the job."""
    for launcher in ("mpi", "mindspore", "mpirun", *(["torchrun"] if with_torch else [])):
        table.median("crash to the end of the job, s", NAMES[launcher], after_kill, launcher)
    if with_msrun:
        table.row("crash to the end of the job, s", "msrun", after_kill("msrun"))
    for launcher in ("mpi", "mindspore"):
        table.median("hang, after its time-out, to the end, s", NAMES[launcher], hang, launcher)


def starts(table: Table, *, with_torch: bool) -> None:
    """Measure the times from a command or a failure to the first all-reduce or update of the job."""
    table.in_turns(
        "command to first all-reduce, s",
        {NAMES["mpi"]: first, "with MPI's own choice": functools.partial(first, OMPI_MCA_btl="^openib")},
    )
    if with_torch:
        table.median("command to first all-reduce, s", "torchrun", first, "torchrun")
        table.median("killed rank to the next try's all-reduce, s", "torchrun", restart, "torchrun")
    table.median("command to first update, s", NAMES["mpi"], first_step)
    table.median("killed rank to the next try's all-reduce, s", NAMES["mpi"], restart)
    for launcher in ("mpi", "mindspore", *(["torchrun"] if with_torch else [])):
        table.median("killed rank to the next update, s", f"{NAMES[launcher]}, restart", lost, launcher)


def costs(table: Table) -> None:
    """Measure the overhead of the launcher and of progress reports in a job without failures."""
    waiting = Round(SCRIPT, "wait", "mpi").waiting
    assert waiting is not None, "measured in this one"
    table.row("launcher while it waits, of a core", NAMES["mpi"], waiting)
    seconds, reports = Round(STEP, "step", "mpi").step
    each = _report_seconds()
    table.row("reports in an update", "counted", reports)
    table.row("reports in an update, of its time", f"{1e6 * each:.1f} us each", reports * each / seconds)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with_torch = args.torch_python is not None
    if with_torch:
        # The jobs run in other folders, so a relative path would not work.
        Round.torch_python = os.path.abspath(shutil.which(args.torch_python) or args.torch_python)
    print(machine())
    table = Table(args.rounds)
    ends(table, with_torch=with_torch, with_msrun=not args.without_msrun)
    starts(table, with_torch=with_torch)
    costs(table)
    return {"rows": [dict(zip(("what", "of", "value"), row)) for row in table.rows]}


def _report_seconds() -> float:
    from mindnlp_dp.runtime import heartbeat

    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "heartbeats")
        heartbeat.create(path, 1)
        heartbeat.report_to(path, 0)
        return min(timeit.repeat(heartbeat.step, number=10000, repeat=5)) / 10000


if __name__ == "__main__":
    run_benchmark(
        __doc__, measure, {}, torch=True, rounds={"type": int, "default": 5, "help": "of every measurement"},
        without_msrun={"action": "store_true", "help": "leave out the one that takes half a minute"},
    )  # fmt: skip
