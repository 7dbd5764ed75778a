"""Train with dropout, evaluation and checkpoints, and cause one fault, once, at a chosen moment.

    mindnlp-dp run --nproc 2 --max-restarts 2 tests/failure/faulty.py FOLDER [--fault HOW --moment WHEN --rank R]

HOW is one of FAULTS, WHEN one of MOMENTS. At the end rank 0 writes the digest of the weights to FOLDER/result.json;
FOLDER/fault has the time of the fault, FOLDER/updates the time of every update. Checkpoints go to FOLDER/checkpoints;
"disk" fills this folder, so it has to be a small, separate disk; the job's next attempt frees it again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import time
from pathlib import Path

MOMENTS = ("start", "broadcast", "backward", "collective", "checkpoint", "evaluation", "end")
FAULTS = ("raise", "exit", "kill", "stop", "hang", "disk")
NUM_STEPS = 12
# After the checkpoint of update 3.
STEP = 5
FILLER = "filler"


def fill(path: Path) -> None:
    """Fill the disk of this file to the last byte."""
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--moment", choices=MOMENTS)
    parser.add_argument("--rank", type=int, default=1)
    options = parser.parse_args()
    checkpoints = options.folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("MS_NODE_ID", "0")))

    def now_is(moment: str) -> None:
        if moment != options.moment or rank != options.rank:
            return
        try:
            with open(options.folder / "fault", "x") as file:
                file.write(repr(time.time()))
        except FileExistsError:
            return
        if options.fault == "disk":
            fill(checkpoints / FILLER)
            return
        if options.fault == "raise":
            raise RuntimeError("a fault")
        if options.fault == "exit":
            os._exit(3)
        while options.fault == "hang":
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL if options.fault == "kill" else signal.SIGSTOP)

    if rank == options.rank:
        # The next attempt frees the disk, as a user would do.
        (checkpoints / FILLER).unlink(missing_ok=True)
    now_is("start")
    import mindnlp_dp as dp

    group = dp.init_process_group()
    from mindnlp.engine import TrainerCallback
    from mindnlp.engine.utils import set_seed
    from mindnlp.transformers import RobertaForSequenceClassification

    from models import Rows, tiny_config

    class Watched(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == STEP:
                sync = trainer.training_loop.synchronizer
                reduce = sync.reduce

                def reduce_late(**options):
                    # The other ranks are in the collective by now.
                    time.sleep(0.2)
                    now_is("collective")
                    return reduce(**options)

                sync.reduce = reduce_late
            elif state.global_step == STEP + 1:
                vars(trainer.training_loop.synchronizer).pop("reduce", None)

        def on_step_end(self, args, state, control, **kwargs):
            if group.is_main:
                with open(options.folder / "updates", "a") as file:
                    file.write(f"{state.global_step} {time.time()}\n")

    class Trainer(dp.DataParallelTrainer):
        def training_step(self, model, inputs):
            loss = super().training_step(model, inputs)
            if self.state.global_step == STEP:
                now_is("backward")
            return loss

        def prediction_step(self, *args, **kwargs):
            now_is("evaluation")
            return super().prediction_step(*args, **kwargs)

        def save_model(self, *args, **kwargs):
            super().save_model(*args, **kwargs)
            if self.state.global_step > STEP:
                now_is("checkpoint")

    set_seed(1)
    model = RobertaForSequenceClassification(tiny_config(num_layers=2, dropout=0.1))
    args = dp.DataParallelArguments(
        str(checkpoints), per_device_train_batch_size=4, max_steps=NUM_STEPS, learning_rate=1e-2, logging_steps=3,
        save_strategy="steps", save_steps=3, evaluation_strategy="steps", eval_steps=4, disable_tqdm=True,
    )  # fmt: skip
    now_is("broadcast")
    trainer = Trainer(model, args, train_dataset=Rows(48), eval_dataset=Rows(9, seed=1), callbacks=[Watched()])
    trainer.train()
    now_is("end")
    if group.is_main:
        (options.folder / "result.json").write_text(json.dumps({"digest": trainer.replica_digest}))


if __name__ == "__main__":
    main()
