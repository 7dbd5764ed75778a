"""Train with three ranks, and lose one when another has finished an update that the third has not.

    mindnlp-dp run --nproc 2:3 --in-place tests/failure/late_in_place.py FOLDER BEHIND

When the gradients of update 5 have been exchanged, rank 2 is killed. Rank BEHIND notices this before it has made its
update, the other rank afterwards. At the end, rank 0 of the two remaining ranks writes to FOLDER/result.json, for both
of them: digest, first moment of the optimizer, step, logged steps, and sums of the weights.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import mindnlp_dp as dp

LOST = 2
STEP = 4


def main() -> None:
    folder, late = Path(sys.argv[1]), int(sys.argv[2])
    group = dp.init_process_group()
    rank = group.rank

    from mindnlp.engine import TrainerCallback
    from mindnlp.engine.utils import set_seed
    from mindnlp.transformers import RobertaForSequenceClassification
    from mpi4py import MPI

    from models import Rows, tiny_config

    class Watched(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step != STEP or group.world_size != 3:
                return
            updater = trainer.training_loop.train_step.updater
            update = updater.update

            def update_or_not(gradients):
                group.barrier()
                if rank == LOST:
                    # The other ranks have left the barrier by then.
                    time.sleep(0.3)
                    os.kill(os.getpid(), signal.SIGKILL)
                if rank == late:
                    updater.is_updating = False
                    # The other rank has made its update by then.
                    time.sleep(0.8)
                    raise MPI.Exception(MPI.ERR_PROC_FAILED)
                update(gradients)

            updater.update = update_or_not

        def on_step_end(self, args, state, control, **kwargs):
            with open(folder / f"steps_{rank}", "a") as file:
                file.write(f"{state.global_step} {group.world_size}\n")

    set_seed(1)
    model = RobertaForSequenceClassification(tiny_config(num_layers=1, dropout=0.0))
    args = dp.DataParallelArguments(
        str(folder / "out"), per_device_train_batch_size=4, max_steps=8, learning_rate=1e-2, save_strategy="no",
        disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    trainer = dp.DataParallelTrainer(model, args, train_dataset=Rows(48), callbacks=[Watched()])
    trainer.train()
    first = trainer.optimizer.param_groups[0]["params"][0]
    mine = {
        "digest": trainer.replica_digest,
        "moment": float(abs(trainer.optimizer.state[first]["exp_avg"].asnumpy()).sum()),
        "step": int(trainer.optimizer.state[first]["step"]),
        "logged": [entry["step"] for entry in trainer.state.log_history if "loss" in entry],
        "weights": [float(parameter.asnumpy().sum()) for parameter in trainer.model.parameters()],
    }
    everyone = group.all_gather_object(mine)
    if group.is_main:
        (folder / "result.json").write_text(json.dumps(everyone))


if __name__ == "__main__":
    main()
