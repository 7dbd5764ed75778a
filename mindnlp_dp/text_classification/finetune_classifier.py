"""Train a RoBERTa or BERT text classifier on any number of processes.

    mindnlp-dp run --nproc 2 scripts/finetune.py --config configs/quickstart_cpu.yaml
    msrun --worker_num=2 --local_worker_num=2 scripts/finetune.py --train-file train.csv --test-file test.csv

Without data files it trains on short phrases in 29 languages and predicts the language; this data needs no download.
--dataset names a data set of a hub or a folder, --model a pretrained model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import mindnlp_dp as dp
from mindnlp_dp.data.sampler import check_every_rank_has_a_sample
from mindnlp_dp.finetuning.early_checks import check_files
from mindnlp_dp.finetuning.recipe_arguments import callbacks, training_arguments
from mindnlp_dp.finetuning.settings import InputError, as_input_error, parse_config
from mindnlp_dp.report.runs import RunReport
from mindnlp_dp.text_classification.classification_config import FinetuneConfig
from mindnlp_dp.text_classification.classification_results import make_report, summary
from mindnlp_dp.text_classification.classification_task import (
    TextClassificationTask,
    as_dataset,
    build_model,
    prepare_task,
    read_splits,
    save_tokenizer,
)
from mindnlp_dp.text_classification.planned import check_model, compare_with_plan, follow_plan


def main() -> None:
    """Train as the command line says, and print a summary; errors in the input end with one sentence."""
    try:
        config = follow_plan(parse_config(FinetuneConfig, description=__doc__))
        splits = check_files(config, config.model, lambda: read_splits(config))
        # Imported here because it imports MindSpore, which takes seconds: errors in files and flags come before.
        from mindnlp_dp.finetuning import job

        group, mesh = job.join(config)
        args = training_arguments(config, mesh, label_smoothing_factor=config.label_smoothing)
        task = group.run_on_rank0(lambda: prepare_task(config, splits), "preparing the data")
        with as_input_error():
            check_every_rank_has_a_sample(len(task.train["labels"]), mesh.dp_group.world_size)
        report = train(config, args, task, group)
    except InputError as error:
        # Every rank that gets this error writes it to its own log.
        sys.exit(f"error: {error}")
    if group.is_main:
        print(f"\n{summary(report, Path(config.output_dir))}")


def train(
    config: FinetuneConfig, args: dp.DataParallelArguments, task: TextClassificationTask, group: dp.ProcessGroup
) -> RunReport:
    """Train, evaluate, write the model and the results, and return the report of the run."""
    from mindnlp_dp.finetuning import job
    from mindnlp_dp.text_classification.classification_recorder import RunRecorder
    from mindnlp_dp.text_classification.classification_trainer import balanced_weights, make_trainer, trimmed
    from mindnlp_dp.text_classification.predictions import write_predictions
    from mindnlp_dp.training.trainer.mindnlp_trainer import set_seed

    set_seed(config.seed)
    # One process of each host downloads a pretrained model; the others read it from the cache.
    with args.main_process_first():
        model = build_model(config, task)
        with as_input_error():
            check_model(model, config)
    model_config = model.config
    model = job.sharded(model, config, args, lambda: {name: column[:8] for name, column in task.train.items()})
    recorder = RunRecorder(task.label_names, len(task.train["labels"]))
    trainer = make_trainer(
        balanced_weights(task.train["labels"], len(task.label_names)) if config.class_weights else None,
        model,
        args,
        train_dataset=as_dataset(task.train),
        data_collator=trimmed if config.dynamic_padding else None,
        eval_dataset=as_dataset(task.test),
        compute_metrics=recorder.metrics,
        callbacks=[recorder, *callbacks(config)],
    )
    if group.is_main and task.num_truncated:
        print(f"texts truncated to max_length ({config.max_length} tokens): {task.num_truncated}")
    output = job.train(trainer, config)
    report = make_report(trainer, output, recorder, config, task)
    compare_with_plan(report, config)
    if task.unlabelled is not None:
        logits = trainer.predict(as_dataset(task.unlabelled)).predictions
        group.run_on_rank0(
            lambda: write_predictions(Path(config.output_dir), task.unlabelled_texts, logits, task.label_names),
            "writing the predictions",
        )

    def save_beside(folder: str) -> None:
        save_tokenizer(config, task, folder)
        if not Path(folder, "config.json").exists():
            # PEFT writes none with adapters, and it has the labels.
            model_config.save_pretrained(folder)

    job.write(trainer, config, report, save_beside, f"{report['num_labels']} labels")
    return report


if __name__ == "__main__":
    main()
