r"""Fine-tune RoBERTa on the questions of bank customers (BANKING77, 77 intents) in one process, with MindNLP's Trainer.

    python homework/train_single.py
    python homework/train_single.py --train-file train.csv --test-file test.csv --model tiny

Without data files it downloads PolyAI/banking77 from the hub; without --model it starts from roberta-base. --model tiny
trains a small RoBERTa from scratch and, with data files, needs no network. --help lists all settings. `mindnlp-dp
report` makes a page from the files in --output-dir.
"""

import sys
from pathlib import Path

from mindspore.dataset import NumpySlicesDataset

# Import it before mindnlp: it makes MindNLP run on this MindSpore.
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


def main(description=__doc__, defaults=DEFAULTS, from_scratch=FROM_SCRATCH):
    config = parse_config(TaskConfig, description=description, defaults=defaults, from_scratch=from_scratch)
    task = prepare_task(config)
    set_seed(config.seed)
    model = build_model(config, task)
    batch_size = config.global_batch_size
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
