r"""Fine-tune a language model on prompts and completions, or chats, on any number of processes.

    mindnlp-dp run --nproc 2 scripts/finetune_llm.py
    mindnlp-dp run --nproc 2 scripts/finetune_llm.py --model FOLDER --lora-rank 8 \
        --train-file train.jsonl --test-file test.jsonl --template chatml

The loss is on completions only. Without files, a small Llama learns paragraphs of Python's manual, which needs no
download.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import numpy as np
from tokenizers import Tokenizer

import mindnlp_dp as dp
from mindnlp_dp.data.sampler import check_every_rank_has_a_sample
from mindnlp_dp.finetuning import results
from mindnlp_dp.finetuning.early_checks import check_files
from mindnlp_dp.finetuning.pretrained import max_tokens_of
from mindnlp_dp.finetuning.recipe_arguments import callbacks, training_arguments
from mindnlp_dp.finetuning.settings import InputError, as_input_error, parse_config
from mindnlp_dp.language_modeling.language_modeling_config import LanguageModelingConfig
from mindnlp_dp.language_modeling.language_modeling_task import (
    ConversationSplits,
    LanguageModelingTask,
    build_model,
    prepare_task,
    read_splits,
    save_tokenizer,
)
from mindnlp_dp.language_modeling.rows import Collator, PairCollator
from mindnlp_dp.report.runs import RunReport


def main() -> None:
    """Train as the command line says, and print a summary; errors in the input end with one sentence."""
    try:
        config = parse_config(LanguageModelingConfig, description=__doc__)
        splits = check_files(config, config.model, lambda: read_splits(config))
        # Imported here because it imports MindSpore, which takes seconds: errors in files and flags come before.
        from mindnlp_dp.finetuning import job

        group, mesh = job.join(config)
        args = training_arguments(
            config,
            mesh,
            prediction_loss_only=config.objective == "sft",
            remove_unused_columns=False,
            # The rewards of both answers are compared, and come with this column.
            label_names=["labels" if config.objective == "sft" else "reference"],
        )
        task = prepared(config, splits, group)
        with as_input_error():
            check_every_rank_has_a_sample(len(task.train), mesh.dp_group.world_size)
        report = train(config, args, task, group)
    except InputError as error:
        # Every rank that gets this error writes it to its own log.
        sys.exit(f"error: {error}")
    if group.is_main:
        print(f"\n{summary(report, Path(config.output_dir))}")


def prepared(
    config: LanguageModelingConfig, splits: Optional[ConversationSplits], group: dp.ProcessGroup
) -> LanguageModelingTask:
    """Let rank 0, which alone needs the files, prepare the data; return it on every rank. A collective."""

    def prepare() -> bytes:
        task = prepare_task(config, splits)
        # The ranks of one host map the same file of rows, which other hosts do not have.
        if group.local_world_size < group.world_size:
            task = replace(task, train=task.train.in_memory(), test=task.test.in_memory())
        return pickle.dumps(task)

    packed = group.run_on_rank0(prepare, "preparing the data")
    task = group.run_on(True, lambda: pickle.loads(packed), "opening the rows of tokens")
    assert task is not None, "every rank opens them"
    return task


def train(
    config: LanguageModelingConfig, args: dp.DataParallelArguments, task: LanguageModelingTask, group: dp.ProcessGroup
) -> RunReport:
    """Train, evaluate, write the model and the results, and return the report of the run."""
    from mindnlp_dp.finetuning import job
    from mindnlp_dp.finetuning.recorder import TimeRecorder
    from mindnlp_dp.training.trainer.mindnlp_trainer import set_seed

    set_seed(config.seed)
    collator = Collator(task.pad, config.packing) if config.objective == "sft" else PairCollator(task.pad)
    trainer_class = dp.DataParallelTrainer
    # One process of each host downloads a pretrained model; the others read it from the cache.
    with args.main_process_first():
        model = build_model(config, task)
    generation_config = model.generation_config
    with as_input_error():
        fuses = config.fused_cross_entropy
        with contextlib.suppress(*([ValueError] if fuses == "auto" else [])):
            if fuses != "false" and config.objective == "sft":
                dp.fuse_cross_entropy(model)
    if isinstance(collator, PairCollator):
        # Imported here because it imports MindSpore.
        from mindnlp_dp.language_modeling import preferences

        if config.objective in preferences.WITH_REFERENCE:
            # The model is not trained yet, also in a run that resumes.
            both = [
                preferences.with_reference(rows, model, collator, config.eval_batch_size)
                for rows in (task.train, task.test)
            ]
            task = replace(task, train=both[0], test=both[1])
        trainer_class = preferences.trainer_of(config.objective, config.beta, config.simpo_gamma)
    model = job.sharded(
        model, config, args, lambda: collator([task.train[number] for number in range(min(8, len(task.train)))])
    )
    recorder = TimeRecorder(len(task.train))
    trainer = trainer_class(
        model,
        args,
        train_dataset=task.train,
        eval_dataset=task.test,
        data_collator=collator,
        callbacks=[recorder, *callbacks(config)],
    )
    if group.is_main:
        if task.num_truncated:
            print(
                f"texts truncated, which are longer than max_length ({config.max_length} tokens): {task.num_truncated}"
            )
        if task.num_without_labels:
            print(f"texts left out, which have no completion left: {task.num_without_labels}")
        if task.ignored_keys:
            print(f"keys of the files' lines that are not used: {', '.join(task.ignored_keys)}")
    output = job.train(trainer, config)
    report = results.make_report(
        trainer, output, recorder, config, train_samples=len(task.train), eval_samples=len(task.test)
    )
    if config.objective == "sft":
        report["perplexity"] = math.exp(min(report["eval_loss"], 80.0))
    try:
        if samples := complete(model, config, task):
            report["samples"] = samples
    except Exception as error:  # noqa: BLE001
        # The weights are not written yet: they must not be lost with a text.
        if group.is_main:
            print(f"the model cannot complete the prompts: {str(error).partition(chr(10))[0]}")

    title = f"{task.train.num_labels:,} labels an epoch"

    def save_beside(folder: str) -> None:
        save_tokenizer(config, task, folder)
        # PEFT writes none with adapters.
        generation_config.save_pretrained(folder)

    job.write(trainer, config, report, save_beside, title)
    return report


def complete(model: Any, config: LanguageModelingConfig, task: LanguageModelingTask) -> list[dict[str, str]]:
    """Let the model complete the prompts, by its most likely tokens; every rank calls it.

    It makes no texts with stages or ``sp``, nor with ``fsdp``, where all weights may not fit on a rank.
    """
    from mindspore import Tensor

    sizes = dp.get_device_mesh().sizes
    if max(sizes["pp"], sizes["sp"], sizes["fsdp"]) > 1:
        return []
    tokenizer = Tokenizer.from_str(task.tokenizer_json)
    positions = max_tokens_of(model.config) or config.max_length + config.max_new_tokens
    num_new = min(config.max_new_tokens, positions - 1)
    model.set_train(False)
    found = []
    for prompt in task.prompts:
        ids = np.array([prompt.ids[-min(config.max_length, positions - num_new) :] or task.ends[-1:] or [0]], np.int64)
        output = model.generate(
            input_ids=Tensor(ids), attention_mask=Tensor(np.ones_like(ids)), max_new_tokens=num_new, do_sample=False,
            pad_token_id=task.pad,
        )  # fmt: skip
        completion = tokenizer.decode(output.asnumpy()[0, ids.shape[1] :].tolist())
        found.append({"prompt": prompt.text, "completion": completion, "expected": prompt.expected})
    return found


def summary(report: RunReport, folder: Path) -> str:
    """Return the report as the lines that are printed at the end of a run."""
    evaluation = "loss {eval_loss:.4f} on {eval_samples} rows"
    if "perplexity" in report:
        evaluation = f"perplexity {{perplexity:.2f}}, {evaluation}"
    found: dict[str, float] = next((row for row in reversed(report["history"]) if "eval_rewards/margins" in row), {})
    evaluation = ", ".join(
        [
            evaluation.format_map(report),
            *(f"{key[5:]} {found[key]:.4f}" for key in found if key.startswith("eval_rewards")),
        ]
    )
    lines = [results.summary(report, folder, evaluation)]
    lines += [f"{sample['prompt']!r} -> {sample['completion']!r}" for sample in report.get("samples", ())]
    return "\n".join(lines)
