r"""Fine-tune RoBERTa data parallel on the questions of bank customers: train_single.py in several processes.

    mindnlp-dp run --nproc 2 homework/train_data_parallel.py
    msrun --worker_num=2 --local_worker_num=2 --master_port=8118 --log_dir=logs/banking77 --join=True \
        homework/train_data_parallel.py --train-file train.csv --test-file test.csv --model tiny

Only the lines marked "data parallel" are new. The batch size is that of the global batch: each process takes its part
of it, so both scripts train the same model. scripts/homework_2npu.sh, homework_2gpu.sh and homework_2cpu.sh start it
on two NPUs, two GPUs or two cores.
"""

import sys
from pathlib import Path

from mindspore.dataset import NumpySlicesDataset

# Import it before mindnlp: it makes MindNLP run on this MindSpore.
import mindnlp_dp as dp  # data parallel
from mindnlp_dp.data.sampler import batch_size_per_rank  # data parallel
from mindnlp_dp.finetuning.settings import InputError, as_input_error, parse_config
from mindnlp_dp.text_classification.classification_config import TaskConfig
from mindnlp_dp.text_classification.classification_recorder import RunRecorder
from mindnlp_dp.text_classification.classification_results import make_report, summary, write_results
from mindnlp_dp.text_classification.classification_task import build_model, prepare_task, save_tokenizer

from mindnlp.engine import Trainer, TrainingArguments  # isort: skip
from mindnlp.engine.utils import set_seed  # isort: skip

DEFAULTS = {
    "dataset": "PolyAI/banking77", "model": "roberta-base", "output_dir": "outputs/banking77_single",
    "max_length": 32, "num_epochs": 5, "global_batch_size": 64, "learning_rate": 5e-5,
}  # fmt: skip
FROM_SCRATCH = {"num_epochs": 15, "learning_rate": 2e-3}
DEFAULTS["output_dir"] = "outputs/banking77_data_parallel"  # data parallel


class Trainer(dp.DataParallelTrainerMixin, Trainer):  # data parallel
    """MindNLP's Trainer, data parallel."""  # data parallel


def main(description=__doc__, defaults=DEFAULTS, from_scratch=FROM_SCRATCH):
    config = parse_config(TaskConfig, description=description, defaults=defaults, from_scratch=from_scratch)
    group = dp.init_process_group()  # data parallel
    task = prepare_task(config)
    set_seed(config.seed)
    model = build_model(config, task)
    batch_size = config.global_batch_size
    batch_size = batch_size_per_rank(batch_size, group.world_size)  # data parallel
    args = TrainingArguments(
        output_dir=config.output_dir,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=config.eval_batch_size,
        num_train_epochs=config.num_epochs,
        max_steps=config.max_steps,
        learning_rate=config.learning_rate,
        warmup_ratio=config.warmup_ratio,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        logging_steps=config.logging_steps,
        evaluation_strategy="epoch",
        save_strategy="no",
        seed=config.seed,
        disable_tqdm=True,
    )
    recorder = RunRecorder(task.label_names, len(task.train["labels"]))
    trainer = Trainer(
        model,
        args,
        train_dataset=NumpySlicesDataset(task.train, shuffle=True),
        eval_dataset=NumpySlicesDataset(task.test, shuffle=False),
        compute_metrics=recorder.metrics,
        callbacks=[recorder],
    )
    output = trainer.train()
    report = make_report(trainer, output, recorder, config, task)
    if trainer.is_world_process_zero():

        def save_model(folder):
            trainer.save_model(folder)
            save_tokenizer(config, task, folder)

        write_results(Path(config.output_dir), report, save_model)
        print(f"\n{summary(report, Path(config.output_dir))}")


def run(**options):
    """Run main(), and exit with a one-line message if a setting or the data is wrong."""
    try:
        with as_input_error():
            main(**options)
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    run()
