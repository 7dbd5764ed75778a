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
from mindnlp_dp.checkpoint.directory import has_checkpoints
from mindnlp_dp.checkpoint.manifest import CheckpointError
from mindnlp_dp.data.sampler import check_every_rank_has_a_sample
from mindnlp_dp.finetuning.arguments import build_optimizer, training_arguments
from mindnlp_dp.finetuning.settings import InputError, as_input_error, parse_config
from mindnlp_dp.report.runs import RunReport
from mindnlp_dp.runtime.versions import mindnlp_series
from mindnlp_dp.schedules.mesh_spec import parse_mesh
from mindnlp_dp.text_classification.config import FinetuneConfig
from mindnlp_dp.text_classification.planned import check_model, compare_with_plan, follow_plan, parse_layers
from mindnlp_dp.text_classification.results import make_report, summary, write_results
from mindnlp_dp.text_classification.task import (
    TextClassificationTask,
    as_dataset,
    build_model,
    prepare_task,
    save_tokenizer,
)


def main() -> None:
    """Train as the command line says, and print a summary; errors in the input end with one sentence."""
    try:
        config = follow_plan(parse_config(FinetuneConfig, description=__doc__))
        group = dp.init_process_group(
            tune_runtime=config.tune_runtime, kernels=config.kernels, matmul_precision=config.matmul_precision
        )
        with as_input_error():
            mesh = dp.init_device_mesh(parse_mesh(config.mesh) or {"dp": group.world_size})
        args = training_arguments(config, mesh)
        task = group.run_on_rank0(lambda: prepare_task(config), "preparing the data")
        with as_input_error():
            check_every_rank_has_a_sample(len(task.train["labels"]), mesh.dp_group.world_size)
        report = train(config, args, task, group)
    except InputError as error:
        # Every rank gets this error and writes it to its own log.
        sys.exit(f"error: {error}")
    if group.is_main:
        print(f"\n{summary(report, Path(config.output_dir))}")


def train(
    config: FinetuneConfig, args: dp.DataParallelArguments, task: TextClassificationTask, group: dp.ProcessGroup
) -> RunReport:
    """Train, evaluate, write the model and the results, and return the report of the run."""
    from mindnlp_dp.text_classification.recorder import RunRecorder
    from mindnlp_dp.training.trainer.mindnlp_trainer import set_seed

    set_seed(config.seed)
    # One process of each host downloads a pretrained model; the others read it from the cache.
    with args.main_process_first():
        model = build_model(config, task)
        with as_input_error():
            check_model(model, config)
    with as_input_error():
        layers_per_stage = parse_layers(config.pipeline_layers)
    if layers_per_stage or not dp.get_device_mesh().is_data_parallel:
        if mindnlp_series() != "0.4":
            raise InputError("a model is sharded over ranks (--mesh) with MindNLP 0.4 only; leave it out")
        with as_input_error():
            model = dp.parallelize(
                model,
                schedule=config.pipeline_schedule,
                layers_per_stage=layers_per_stage,
                check={name: column[:8] for name, column in task.train.items()} if config.check_plan else None,
            )
    if args.gradient_checkpointing:
        with as_input_error():
            dp.enable_recompute(model, args.recompute_layers)
    recorder = RunRecorder(task.label_names, len(task.train["labels"]))
    trainer = dp.DataParallelTrainer(
        model,
        args,
        train_dataset=as_dataset(task.train),
        eval_dataset=as_dataset(task.test),
        optimizers=(build_optimizer(config, model), None),
        compute_metrics=recorder.metrics,
        callbacks=[recorder],
    )
    if group.is_main and task.num_truncated:
        print(f"{task.num_truncated} texts are longer than max_length ({config.max_length} tokens) and were cut")
    resume = config.resume and group.run_on_rank0(
        lambda: has_checkpoints(Path(config.output_dir)), "looking for checkpoints"
    )
    with as_input_error(CheckpointError):
        output = trainer.train(resume_from_checkpoint=resume)
    report = make_report(trainer, output, recorder, config, task)
    compare_with_plan(report, config)

    output_dir = Path(config.output_dir)
    write_model = trainer.whole.model_writer(output_dir, lambda folder: trainer.save_model(str(folder)))

    def save_model(folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_model(Path(folder))
        save_tokenizer(config, task, folder)

    group.run_on_rank0(lambda: write_results(output_dir, report, save_model), "writing the results")
    return report
