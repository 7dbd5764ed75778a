"""Train with dropout, gradient accumulation, evaluations and checkpoints; stop where told, and resume.

    mindnlp-dp run --nproc 2 tests/failure/interruptible.py FOLDER [--stop-at STEP [--at-line N]] [--on-rank R]
        [--hidden-size N] [--zero-stage S] [--async-save] [--sharded-checkpoints] [--once]

With ``--at-line`` rank R dies within update STEP, before the N-th Python line of the code that updates and exchanges.
Every rank writes its process id to FOLDER/pid_R when training begins; at the end rank 0 writes the digest of the
weights and the losses to FOLDER/result.json. With ``--once`` the rank dies in the job's first attempt only, and the
launcher resumes the job.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

import mindnlp_dp as dp
from mindnlp_dp.checkpoint.directory import has_checkpoints

NUM_STEPS = 21
# Lines of files in these folders count as lines of an update.
UPDATING = ("/mindnlp_dp/optim/", "/mindnlp_dp/data_parallel/", "/mindnlp_dp/communication/")


class KillAtLine:
    """Trace function (``sys.settrace``) that sends SIGKILL before the ``number``-th line of an update."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame, event, arg):
        return self.count if any(name in frame.f_code.co_filename for name in UPDATING) else None

    def count(self, frame, event, arg):
        self.left -= event == "line"
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stop-at", type=int, default=0)
    parser.add_argument("--at-line", type=int, default=0)
    parser.add_argument("--on-rank", type=int, default=0)
    parser.add_argument("--hidden-size", type=int, default=16)
    parser.add_argument("--zero-stage", type=int, default=0)
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--sharded-checkpoints", action="store_true")
    parser.add_argument("--once", action="store_true")
    options = parser.parse_args()
    group = dp.init_process_group()

    from mindnlp.engine import TrainerCallback
    from mindnlp.engine.utils import set_seed
    from mindnlp.transformers import RobertaForSequenceClassification

    from models import Rows, tiny_config

    class Watched(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            (options.folder / f"pid_{group.rank}").write_text(str(os.getpid()))

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == options.stop_at - 1 and group.rank == options.on_rank and options.at_line:
                sys.settrace(KillAtLine(options.at_line))

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == options.stop_at and group.rank == options.on_rank:
                os.kill(os.getpid(), signal.SIGKILL)

    if options.once and options.folder.joinpath(f"pid_{options.on_rank}").exists():
        options.stop_at = 0
    config = tiny_config(num_layers=2, dropout=0.2)
    config.hidden_size, config.intermediate_size = options.hidden_size, 2 * options.hidden_size
    # Every attempt starts with different weights: those of the checkpoint must replace them.
    set_seed(1 if not options.folder.joinpath("pid_0").exists() else os.getpid())
    args = dp.DataParallelArguments(
        str(options.folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=3,
        learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=4, logging_steps=2, evaluation_strategy="steps",
        eval_steps=5, save_strategy="steps", save_steps=1 if options.hidden_size > 16 else 3, save_total_limit=2,
        disable_tqdm=True, zero_stage=options.zero_stage, async_save=options.async_save,
        sharded_checkpoints=options.sharded_checkpoints,
    )  # fmt: skip
    trainer = dp.DataParallelTrainer(
        RobertaForSequenceClassification(config), args, train_dataset=Rows(51), eval_dataset=Rows(9, seed=1),
        callbacks=[Watched()],
    )  # fmt: skip

    resume = not options.once and group.run_on_rank0(lambda: has_checkpoints(options.folder), "looking for checkpoints")
    output = trainer.train(resume_from_checkpoint=True if resume else None)
    assert output.global_step == NUM_STEPS
    if group.is_main:
        losses = [row.get("loss", row.get("eval_loss")) for row in trainer.state.log_history[:-1]]
        result = {"digest": trainer.replica_digest, "losses": losses, "training_loss": output.training_loss}
        (options.folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
