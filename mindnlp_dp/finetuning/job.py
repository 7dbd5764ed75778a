"""This module has the steps that all fine-tuning jobs share: joining the group, sharding, training, writing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mindnlp_dp as dp
from mindnlp_dp.checkpoint.collective_save import workspace_in
from mindnlp_dp.checkpoint.directory import has_checkpoints
from mindnlp_dp.checkpoint.manifest import CheckpointError
from mindnlp_dp.finetuning.progress import print_lines
from mindnlp_dp.finetuning.results import INITIAL_MODEL_FOLDER, write_results
from mindnlp_dp.finetuning.settings import InputError, ParallelConfig, as_input_error, parse_layers
from mindnlp_dp.report.runs import RunReport
from mindnlp_dp.runtime.atomic_write import atomic_write
from mindnlp_dp.runtime.mesh_spec import parse_mesh
from mindnlp_dp.runtime.versions import mindnlp_series


def join(config: ParallelConfig) -> tuple[dp.ProcessGroup, dp.DeviceMesh]:
    """Return the group of all ranks, and the mesh that the settings say."""
    group = dp.init_process_group(
        tune_runtime=config.tune_runtime, kernels=config.kernels, matmul_precision=config.matmul_precision,
        deterministic=config.deterministic if config.deterministic == "auto" else config.deterministic == "true",
    )  # fmt: skip
    with as_input_error():
        return group, dp.init_device_mesh(parse_mesh(config.mesh) or {"dp": group.world_size})


def sharded(
    model: Any, config: ParallelConfig, args: dp.DataParallelArguments, first_batch: Callable[[], Mapping[str, Any]]
) -> Any:
    """Return the model, sharded over the mesh, with recomputation, as the settings say; the batch is for a check."""
    with as_input_error():
        layers_per_stage = parse_layers(config.pipeline_layers)
        if layers_per_stage or not dp.get_device_mesh().is_data_parallel:
            if mindnlp_series() != "0.4":
                raise InputError("a model is sharded over ranks (--mesh) with MindNLP 0.4 only; leave it out")
            model = dp.parallelize(
                model,
                schedule=config.pipeline_schedule,
                layers_per_stage=layers_per_stage,
                check=first_batch() if config.check_plan else None,
                param_dtype=args.param_dtype,
            )
        elif config.zero_stage == "3":
            model = dp.fully_shard(model, param_dtype=args.param_dtype)
        elif args.param_dtype:
            model = dp.parallelize(model, param_dtype=args.param_dtype)
        if args.gradient_checkpointing:
            dp.enable_recompute(model, args.recompute_layers)
    return model


def train(trainer: Any, config: ParallelConfig) -> Any:
    """Run the Trainer's ``train``, from the newest checkpoint if the settings say so and there is one."""
    folder = Path(config.output_dir)
    print_lines(trainer)
    if config.save_initial_model:
        with _model_writer(trainer, config) as write_model:
            trainer.world.run_on_rank0(lambda: _write_initial_model(folder, write_model), "writing the initial model")
    resume = config.resume and trainer.world.run_on_rank0(lambda: has_checkpoints(folder), "looking for checkpoints")
    with as_input_error(CheckpointError):
        output = trainer.train(resume_from_checkpoint=resume)
    if config.metric_to_keep or not _is_evaluated(trainer.state):
        # The results are those of the model that is written: the best one, which is loaded now, or the last.
        trainer.evaluate()
    return output


def _is_evaluated(state: Any) -> bool:
    """Return whether the weights of the last update were evaluated; ``--eval-steps`` may not divide the updates."""
    return any("eval_loss" in row and row["step"] == state.global_step for row in state.log_history)


def write(
    trainer: Any, config: ParallelConfig, report: RunReport, save_tokenizer: Callable[[str], None], title: str
) -> None:
    """Write the model with its tokenizer, the plot and the report, on rank 0. A collective."""
    output_dir = Path(config.output_dir)
    with _model_writer(trainer, config) as write_model:

        def save_model(folder: str) -> None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_model(Path(folder))
            save_tokenizer(folder)

        trainer.world.run_on_rank0(lambda: write_results(output_dir, report, save_model, title), "writing the results")


def _write_initial_model(output_dir: Path, write_model: Callable[[Path], None]) -> None:
    with atomic_write(output_dir / INITIAL_MODEL_FOLDER) as folder:
        folder.mkdir()
        write_model(folder)


@contextmanager
def _model_writer(trainer: Any, config: ParallelConfig) -> Iterator[Callable[[Path], None]]:
    """Yield the function that writes the current model into a folder, on rank 0. A collective."""
    output_dir = Path(config.output_dir)
    with workspace_in(output_dir, trainer.world, trainer.distributed_model.is_sharded) as workspace:
        yield trainer.distributed_model.model_writer(workspace, lambda folder: trainer.save_model(str(folder)))
