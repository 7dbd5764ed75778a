"""Train as an elastic job without dropout, so that any number of ranks trains the same model up to rounding.

    mindnlp-dp run --nproc MIN:MAX tests/failure/elastic.py FOLDER [--updates N] [--seconds S] [--save-steps N]
        [--async-save] [--resume] [--fault HOW@STEP:RANK ...]

The job makes ``--updates`` updates of four samples per rank; an epoch has 48 samples. Each fault (HOW: ``kill``,
``raise``, ``exit``, ``stop`` or ``hang``) happens once, in the first attempt that reaches it. At the end rank 0 writes
the weights to FOLDER/weights.npz, and their digest and the number of ranks of every update to FOLDER/result.json. Every
update takes ``--seconds`` longer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import numpy as np

import mindnlp_dp as dp
from mindnlp_dp.checkpoint.directory import has_checkpoints


def fail(how: str) -> None:
    if how == "raise":
        raise RuntimeError("a fault")
    if how == "exit":
        os._exit(3)
    if how == "hang":
        while True:
            time.sleep(0.1)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--save-steps", type=int, default=5)
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--fault", action="append", default=[])
    options = parser.parse_args()
    group = dp.init_process_group()

    from library import TrainerCallback, settings_here

    from models import Rows, tiny_roberta

    def happens_now(step: int) -> str:
        for fault in options.fault:
            how, _, where = fault.partition("@")
            if where == f"{step}:{group.rank}":
                try:
                    (options.folder / f"had_{fault}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                return how
        return ""

    class Watched(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if how := happens_now(state.global_step):
                fail(how)

        def on_step_end(self, args, state, control, **kwargs):
            time.sleep(options.seconds)
            if group.is_main:
                with open(options.folder / "sizes", "a") as file:
                    file.write(f"{state.global_step} {group.world_size}\n")

    model = tiny_roberta(seed=1, num_layers=2, dropout=0.0)
    settings = {
        "per_device_train_batch_size": 4, "max_steps": options.updates, "learning_rate": 1e-2, "logging_steps": 5,
        "save_strategy": "steps", "save_steps": options.save_steps, "save_total_limit": 2, "disable_tqdm": True,
        "async_save": options.async_save,
    }  # fmt: skip
    args = dp.DataParallelArguments(str(options.folder), **settings_here(**settings))
    trainer = dp.DataParallelTrainer(model, args, train_dataset=Rows(48), callbacks=[Watched()])
    resume = options.resume and group.run_on_rank0(lambda: has_checkpoints(options.folder), "looking for checkpoints")
    output = trainer.train(resume_from_checkpoint=resume)
    assert output.global_step == trainer.state.max_steps
    if group.is_main:
        weights = {name: parameter.asnumpy() for name, parameter in trainer.model.named_parameters()}
        np.savez(options.folder / "weights.npz", **weights)
        sizes = dict(map(int, line.split()) for line in (options.folder / "sizes").read_text().splitlines())
        result = {"digest": trainer.replica_digest, "sizes": [sizes[step + 1] for step in range(output.global_step)]}
        (options.folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
