"""Test elastic jobs that continue in the same processes when a rank is lost (``mindnlp-dp run --in-place``)."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_elastic import ELASTIC, results

from conftest import ROOT, run_job

UPDATES = 20
IN_PLACE = ("--grow-after", 600, "--in-place")


# No rank is left of the first attempt, and none of the second, which has one rank.
ONLY = """
import os
from pathlib import Path
import mindnlp_dp as dp
group = dp.init_process_group()
group.barrier()
count = int(os.environ["MINDNLP_DP_RESTART_COUNT"])
if count < 2:
    os.kill(os.getpid(), 9)
assert group.world_size == 1, group
Path("done").touch()
"""


# Rank 0 is killed while its thread writes the best checkpoint, which the first evaluation has chosen.
BEST = """
import os, signal, sys, threading
from pathlib import Path
import mindnlp_dp as dp
from mindnlp_dp.checkpoint import collective_save
folder, group = sys.argv[1], dp.init_process_group()
from library import TrainerCallback, settings_here
from models import Rows, tiny_roberta
if group.world_size == 2:
    collective_save.publish_checkpoint = lambda *arguments: threading.Event().wait()
class Die(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3 and group.world_size == 2:
            group.barrier()
            if group.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            collective_save.publish_checkpoint = publish
from mindnlp_dp.checkpoint.writer import publish_checkpoint as publish
args = dp.DataParallelArguments(folder, **settings_here(
    per_device_train_batch_size=2, max_steps=8, evaluation_strategy="steps", eval_steps=2, save_strategy="steps",
    save_steps=2, disable_tqdm=True, zero_stage=0, async_save=True, load_best_model_at_end=True,
    metric_for_best_model="score", greater_is_better=True,
))
trainer = dp.DataParallelTrainer(
    tiny_roberta(), args, train_dataset=Rows(40), eval_dataset=Rows(8), callbacks=[Die()],
    compute_metrics=lambda _: {"score": {2: 9, 4: 3, 6: 5, 8: 2}[trainer.state.global_step]},
)
trainer.train()
print("the best is", Path(trainer.state.best_model_checkpoint).name, flush=True)
"""


def failures(folder):
    return [json.loads(line) for line in (folder / "logs/failures.jsonl").read_text().splitlines()]


def steps(folder):
    """Return the numbers of the updates in the order in which they were made."""
    return [int(line.split()[0]) for line in (folder / "sizes").read_text().splitlines()]


def elastic(folder, *flags, size="1:3", how=IN_PLACE):
    return run_job(folder, *how, ELASTIC, folder, "--updates", UPDATES, "--seconds", 0.05, *flags, nproc=size)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Train with three ranks and no fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    exit_code, output = elastic(folder, size=3, how=())
    assert exit_code == 0, output
    return results(folder)


def assert_same_model(folder, undisturbed):
    for name, weight in undisturbed[1].items():
        # AdamW amplifies rounding differences with every update.
        np.testing.assert_allclose(results(folder)[1][name], weight, rtol=0, atol=2e-3, err_msg=name)


@pytest.mark.core
def test_the_others_go_on_and_no_update_is_made_twice(tmp_path, undisturbed):
    """One rank is killed, then rank 0 raises an exception, and the next rank becomes rank 0."""
    exit_code, output = elastic(tmp_path, "--fault", "kill@7:2", "--fault", "raise@12:0", "--save-steps", 1000)
    assert exit_code == 0, output
    assert results(tmp_path)[0]["sizes"] == [3] * 7 + [2] * 5 + [1] * 8
    assert steps(tmp_path) == list(range(1, UPDATES + 1))
    assert_same_model(tmp_path, undisturbed)
    assert [(f["rank"], f["in_place"], f["restart"]) for f in failures(tmp_path)] == [(2, True, 1), (0, True, 2)]
    assert not (tmp_path / "logs/try_1").exists()
    assert "the job continues in place with 2 of 3 ranks" in output
    # The log of the new rank 0 is shown from then on.
    assert "RuntimeError: a fault" in output
    assert output.count("'train_loss'") == 1


def test_batches_become_smaller_in_the_midst_of_an_epoch(tmp_path):
    """The loss comes after three of four updates; two ranks read the rest of the epoch in two smaller updates."""
    how = (*IN_PLACE, "--scale-batch")
    exit_code, output = elastic(tmp_path, "--fault", "kill@7:2", "--save-steps", 1000, how=how)
    assert exit_code == 0, output
    assert results(tmp_path)[0]["sizes"] == [3] * 7 + [2] * (2 + 3 * 6)
    assert steps(tmp_path) == list(range(1, 28))
    log = (tmp_path / "logs/latest/worker_0.log").read_text()
    assert "training with global batches of 8 samples, and 0.667 times the learning rate" in log


def test_what_is_divided_is_taken_up_from_the_newest_checkpoint(tmp_path, undisturbed):
    exit_code, output = elastic(tmp_path, "--zero-stage", 1, "--fault", "kill@12:1")
    assert exit_code == 0, output
    assert "1 of 3 ranks lost; the others continue in place, from the newest checkpoint" in output
    assert not (tmp_path / "logs/try_1").exists()
    assert steps(tmp_path) == [*range(1, 13), *range(11, UPDATES + 1)]
    assert_same_model(tmp_path, undisturbed)


def test_a_best_checkpoint_that_was_being_written_is_forgotten(tmp_path):
    (tmp_path / "best.py").write_text(BEST)
    exit_code, output = run_job(tmp_path, *IN_PLACE, tmp_path / "best.py", tmp_path / "out", nproc="1:2")
    assert exit_code == 0, output
    assert "checkpoint-2, the best checkpoint so far, was lost with a rank" in output
    assert "the best is checkpoint-6" in output


@pytest.mark.slow
def test_without_a_checkpoint_the_job_begins_anew(tmp_path, undisturbed):
    exit_code, output = elastic(tmp_path, "--zero-stage", 1, "--fault", "kill@7:2", "--save-steps", 1000)
    assert exit_code == 0, output
    assert "no checkpoint exists to continue from" in (tmp_path / "logs/try_1/worker_0.log").read_text()
    assert failures(tmp_path)[0]["rank"] == 2
    assert steps(tmp_path) == [*range(1, 8), *range(1, UPDATES + 1)]
    assert_same_model(tmp_path, undisturbed)


@pytest.mark.slow
def test_one_that_mpi_does_not_tell_of_costs_a_restart(tmp_path, undisturbed):
    exit_code, output = elastic(tmp_path, "--fault", "exit@7:1")
    assert exit_code == 0, output
    assert [(f["rank"], f.get("in_place")) for f in failures(tmp_path)] == [(1, None)]
    assert (tmp_path / "logs/try_1").exists()
    assert_same_model(tmp_path, undisturbed)


def test_below_the_smallest_size_it_is_started_again(tmp_path, undisturbed):
    exit_code, output = elastic(tmp_path, "--fault", "kill@7:0", "--fault", "kill@12:0", size="2:3")
    assert exit_code == 0, output
    assert [(f["rank"], f.get("in_place")) for f in failures(tmp_path)] == [(0, True), (1, None)]
    assert min(results(tmp_path)[0]["sizes"]) == 2
    assert (
        "1 rank is left of this job, which is to have 2 at least" in (tmp_path / "logs/try_1/worker_2.log").read_text()
    )
    assert_same_model(tmp_path, undisturbed)


def test_the_only_rank_of_a_try_is_lost(tmp_path):
    """In this case mpirun exits with 0."""
    exit_code, output = run_job(tmp_path, *IN_PLACE, ONLY, nproc="1:2")
    assert exit_code == 0, output
    assert [(f["rank"], f.get("in_place")) for f in failures(tmp_path)] == [(0, None)] * 2
    assert (tmp_path / "done").exists()


def test_it_grows_again(tmp_path, undisturbed):
    how = ("--grow-after", 1, "--in-place")
    exit_code, output = elastic(tmp_path, "--fault", "kill@5:0", "--seconds", 0.3, how=how)
    assert exit_code == 0, output
    sizes = results(tmp_path)[0]["sizes"]
    assert sizes[0] == 3
    assert min(sizes) == 2
    assert sizes[-1] == 3
    # The loss repeats no update. Growing may repeat updates that were made while the launcher polled, and skips none.
    found = steps(tmp_path)
    grown = next((at for at in range(1, len(found)) if found[at] != found[at - 1] + 1), len(found))
    assert found[:grown] == list(range(1, grown + 1))
    again = found[grown:]
    assert not again or 5 < again[0] <= grown
    assert again == list(range(UPDATES + 1 - len(again), UPDATES + 1))
    assert [failure["in_place"] for failure in failures(tmp_path)] == [True]
    assert_same_model(tmp_path, undisturbed)


@pytest.mark.slow
def test_restarts_are_counted_and_limited(tmp_path):
    # The faults are far enough apart for the launcher to see two separate losses.
    faults = ("--fault", "raise@5:2", "--fault", "raise@12:1", "--seconds", 0.2)
    exit_code, output = elastic(tmp_path, *faults, how=(*IN_PLACE, "--max-restarts", 1))
    assert exit_code == 1
    assert "it was restarted 1 times, as --max-restarts says" in output
    assert [f["restart"] for f in failures(tmp_path)] == [1, None]


@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_that_are_an_update_apart_continue_with_the_later_one(tmp_path, late):
    script = ROOT / "tests/failure/late_in_place.py"
    exit_code, output = run_job(tmp_path, *IN_PLACE, script, tmp_path, late, nproc="1:3")
    assert exit_code == 0, output
    assert "the others continue in place, in update 5" in output
    first, second = json.loads((tmp_path / "result.json").read_text())
    assert first == second
    assert first["step"] == 8
    assert first["logged"] == [1, 2, 3, 4, 5, 6, 7, 8]
    made = {r: [tuple(map(int, line.split())) for line in (tmp_path / f"steps_{r}").read_text().splitlines()]
            for r in (0, 1)}  # fmt: skip
    full = [(step, 3) for step in (1, 2, 3, 4)] + [(step, 2) for step in (6, 7, 8)]
    # Only the other rank made update 5: it noticed the loss after that update.
    assert made[late] == full
    assert made[1 - late] == [*full[:4], (5, 2), *full[4:]]


# Rank 0 is lost in an evaluation that makes the callback stop training, between two updates or at an epoch's end.
STOPPED = """
import json, os, signal, sys
from pathlib import Path
import mindnlp_dp as dp
group = dp.init_process_group()
first = group.rank == 0
from mindnlp.engine import TrainerCallback
from mindnlp.engine.utils import set_seed
from mindnlp.transformers import RobertaForSequenceClassification
from models import Rows, tiny_config

class Stop(TrainerCallback):
    ends = 0
    def on_evaluate(self, args, state, control, **kwargs):
        control.should_training_stop = True
    def on_epoch_end(self, args, state, control, **kwargs):
        self.ends += 1

class Trainer(dp.DataParallelTrainer):
    def prediction_step(self, *args, **kwargs):
        if first:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().prediction_step(*args, **kwargs)

set_seed(1)
when = sys.argv[1]
args = dp.DataParallelArguments(
    "out", per_device_train_batch_size=4, num_train_epochs=5, evaluation_strategy=when, eval_steps=2, logging_steps=1,
    save_strategy="no", disable_tqdm=True,
)
stop = Stop()
model = RobertaForSequenceClassification(tiny_config(num_layers=1, dropout=0.0))
trainer = Trainer(model, args, train_dataset=Rows(48), eval_dataset=Rows(9, seed=1), callbacks=[stop])
output = trainer.train()
if group.is_main:
    history = [[name for name in ("loss", "eval_loss") if name in entry] for entry in trainer.state.log_history]
    Path("result.json").write_text(json.dumps([output.global_step, sum(history, []), stop.ends, group.world_size]))
"""


@pytest.mark.parametrize(
    ("when", "steps", "ends"), [("steps", 2, 1), pytest.param("epoch", 4, 1, marks=pytest.mark.slow)]
)
def test_a_stop_that_an_interrupted_evaluation_leads_to(tmp_path, when, steps, ends):
    exit_code, output = run_job(tmp_path, *IN_PLACE, STOPPED, when, nproc="1:3")
    assert exit_code == 0, output
    found, entries, ended, world_size = json.loads((tmp_path / "result.json").read_text())
    assert (found, entries, ended, world_size) == (steps, ["loss"] * steps + ["eval_loss"], ends, 2)


@pytest.mark.core
@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (2, ()), ("1:2", ("--backend", "mindspore")),
        ("1:2", ("--nnodes", 2, "--rdzv-endpoint", "127.0.0.1:29499")),
    ],
)  # fmt: skip
def test_it_is_refused_where_it_cannot_be(tmp_path, size, flags, monkeypatch):
    monkeypatch.setenv("MINDNLP_DP_RDZV_TOKEN", "0" * 64)
    exit_code, output = run_job(tmp_path, *flags, "--in-place", "raise SystemExit(9)\n", nproc=size)
    assert exit_code == 2
    assert "--in-place is for an elastic job, --nproc MIN:MAX, of one host under MPI" in output
