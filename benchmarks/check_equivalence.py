#!/usr/bin/env python3
"""Measure how far N ranks end from one process with the whole batch, for every task and every way to train.

    python benchmarks/check_equivalence.py [--dropout 0.1] [--json FILE]
    .venv-mindnlp-0.5/bin/python benchmarks/check_equivalence.py

Each number is the norm of the difference of the final weights, divided by the norm of the change that one process makes
with all rows of a micro-step in one batch: the largest of 2, 3 and 4 ranks and of 1 and 3 micro-steps an update. The
models are small. Labels are spread unevenly: in each micro-step of a loss over tokens, the first rank has 3 labels and
the last one 97; the last global batch is not full. A combination that is not supported shows its error. The exit code
is 1 if a number is above 1e-5. About twenty minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from common import ROOT, job_of, machine, print_table, run_benchmark, run_job

from mindnlp_dp.runtime.versions import mindnlp_series

# The small models are in the tests' folder.
sys.path.insert(0, str(ROOT / "tests"))
MOST = 1e-5
# The name of a task's row, and the model class.
TASKS = {
    "sequence classification, BERT": "BertForSequenceClassification",
    "sequence classification, RoBERTa": "RobertaForSequenceClassification",
    "regression, BERT": "BertForSequenceClassification",
    "token classification, BERT": "BertForTokenClassification",
    "token classification, RoBERTa": "RobertaForTokenClassification",
    "masked LM, BERT": "BertForMaskedLM",
    "masked LM, RoBERTa": "RobertaForMaskedLM",
    "causal LM, GPT-2": "GPT2LMHeadModel",
    "causal LM, Llama": "LlamaForCausalLM",
    "causal LM, packed rows, Llama": "LlamaForCausalLM",
    "causal LM with router loss, Mixtral": "MixtralForCausalLM",
    "encoder-decoder, T5": "T5ForConditionalGeneration",
    "encoder-decoder, BART": "BartForConditionalGeneration",
    "question answering, BERT": "BertForQuestionAnswering",
    "multiple choice, RoBERTa": "RobertaForMultipleChoice",
    "contrastive, in-batch negatives": "",
    "convolutions with batch normalization": "",
    "rows padded to the longest of a micro-batch, BERT": "BertForSequenceClassification",
    "rows padded to the longest of a micro-batch, GPT-2": "GPT2LMHeadModel",
    "class weights, BERT": "BertForSequenceClassification",
    "preferences (DPO), Llama": "LlamaForCausalLM",
    "resized embeddings, Llama": "LlamaForCausalLM",
    "LoRA, GPT-2": "GPT2LMHeadModel",
    "LoRA, T5": "T5ForConditionalGeneration",
    "LoRA, Mixtral": "MixtralForCausalLM",
}
# By way, the mesh of a number of ranks; the other ways are data parallelism.
MESHES = {
    "tp": {2: "tp=2", 4: "dp=2,tp=2"}, "pp": {2: "pp=2", 4: "dp=2,pp=2"},
    "zero3": {2: "fsdp=2", 3: "fsdp=3", 4: "fsdp=4"}, "fsdp=2,tp=2": {4: "fsdp=2,tp=2"},
    "fsdp=2,sp=2": {4: "fsdp=2,sp=2"},
    "sp=2": {2: "sp=2"}, "dp=2,sp=2": {4: "dp=2,sp=2"}, "sp=4": {4: "sp=4"}, "tp=2,sp=2": {4: "tp=2,sp=2"},
}  # fmt: skip
WAYS = ("Trainer", "custom loop", *MESHES)
ROWS, ACCUMULATIONS, RATE = 9, (1, 3), 0.1


@dataclass
class Task:
    """What is trained.

    Attributes:
        make: builds the model.
        rows: 108 samples of two columns or more.
        collate: pads samples to a batch; None stacks them.
        loss: function of the model and the columns, if the model's own loss is not used.
        loss_weight: function of the columns to the weight of that loss; None for the number of rows.
        ways: the columns of the table.
    """

    make: Callable[[], Any]
    rows: list[dict[str, Any]]
    collate: Any = None
    loss: Optional[Callable[..., Any]] = None
    loss_weight: Optional[Callable[[Any], float]] = None
    ways: Sequence[str] = WAYS

    def loss_of(self, model: Any, columns: Any) -> Any:
        return model(**columns)["loss"] if self.loss is None else self.loss(model, columns)


def task_of(name: str, dropout: float) -> Task:
    from across_ranks import ConvNet, Images, Pairs, pairs
    from small_models import build, find, samples

    import mindnlp_dp as dp

    if name.startswith("conv"):
        images = Images(4 * 27)
        return Task(lambda: dp.convert_sync_batchnorm(ConvNet()), [images[row] for row in range(len(images))])
    if name.startswith("contrastive"):
        return Task(Pairs, pairs(4 * 27))
    model_class = find(TASKS[name])
    if name.startswith("rows padded"):
        rows = ragged(samples(model_class, build(model_class), 4 * 27))
        return Task(lambda: build(model_class, dropout=dropout), rows, dp.PaddingCollator(pad_token_id=0))
    if name.startswith("class weights"):
        return with_class_weights(
            lambda: build(model_class, dropout=dropout), samples(model_class, build(model_class), 108)
        )
    if "packed" in name:
        from mindnlp_dp.language_modeling.rows import Collator

        rows = packed(samples(model_class, build(model_class), 4 * 27))
        return Task(lambda: build(model_class, dropout=dropout), rows, Collator(0, is_packed=True))
    if name.startswith("preferences"):
        return preferences(lambda: build(model_class, dropout=dropout))

    def make() -> Any:
        model = build(model_class, dropout=dropout, **({"num_labels": 1} if name.startswith("regression") else {}))
        if "router" in name:
            model.config.output_router_logits = True
            model.router_aux_loss_coef = 0.5
        if name.startswith("LoRA"):
            from tiny_transformers import with_lora

            return with_lora(model, dropout)
        if "resized" in name:
            from library import set_seed

            set_seed(1)
            model.resize_token_embeddings(80)
        return model

    rows = samples(model_class, make(), 4 * 27)
    if name.startswith("regression"):
        rows = [{**row, "labels": float(row["labels"])} for row in rows]
    return Task(make, rows)


def ragged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the samples cut to 5 tokens or more."""
    import numpy as np

    sizes = np.random.default_rng(1).integers(5, len(rows[0]["input_ids"]) + 1, len(rows))
    return [{name: x[:size] if np.ndim(x) else x for name, x in row.items()} for row, size in zip(rows, sizes)]


def packed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the samples as rows of two or three texts, of other lengths in each."""
    import numpy as np

    rng, length = np.random.default_rng(1), len(rows[0]["input_ids"])
    ends = [np.sort(rng.choice(np.arange(1, length), 2)) for _ in rows]
    texts = [np.searchsorted(end, np.arange(length), side="right") for end in ends]
    kept = ("input_ids", "labels")
    return [{**{name: row[name] for name in kept}, "texts": text} for row, text in zip(rows, texts)]


def with_class_weights(make: Callable[[], Any], rows: list[dict[str, Any]]) -> Task:
    import mindspore
    import numpy as np
    from library import nn

    import mindnlp_dp as dp

    weights = np.array([1, 10, 0.1], np.float32)

    def loss(model: Any, columns: Any) -> Any:
        columns = dict(columns)
        labels = columns.pop("labels")
        return nn.functional.cross_entropy(model(**columns)["logits"], labels, weight=mindspore.Tensor(weights))

    return Task(
        make, rows, loss=loss, loss_weight=lambda columns: dp.count_labels(columns, weight=weights), ways=WAYS[:3]
    )


def preferences(make: Callable[[], Any]) -> Task:
    sys.path.insert(0, str(ROOT / "examples"))
    from preference import pair, preference_loss

    reference = make()
    reference.eval()
    for parameter in reference.parameters():
        parameter.requires_grad = False

    def loss(model: Any, columns: Any) -> Any:
        return preference_loss(model, reference, columns)[0]

    return Task(make, [pair(number) for number in range(4 * 27)], loss=loss, ways=WAYS[:2])


def spread(rows: list[dict[str, Any]], num_ranks: int, num_micro_steps: int) -> list[dict[str, Any]]:
    """Return samples of which the first rank has 3 labels in each micro-step, and the last one 97, and 5 more rows."""
    import numpy as np

    num_full = num_ranks * ROWS * num_micro_steps
    rows = [rows[number % len(rows)] for number in range(num_full + 5)]
    lengths = {np.shape(row.get("labels", 0)) for row in rows}
    if len(lengths) > 1 or lengths == {()}:
        return rows
    result = []
    for number, row in enumerate(rows[:num_full]):
        rank, place = divmod(number % (num_ranks * ROWS), ROWS)
        labels = np.array(row["labels"])
        words = np.where(labels == -100, 7 % (labels.max() + 1), labels)
        if rank == 0:
            labels = np.full_like(words, -100)
            labels[1] = words[1] if place < 3 else -100
        elif rank == num_ranks - 1:
            # 97 of the 99 labels that are not in the first column, which a causal language model does not use.
            labels = np.where(np.arange(len(words)) < (1 if place else 3), -100, words)
        result.append({**row, "labels": labels})
    return result + rows[num_full:]


def by_trainer(task: Task, model: Any, rows: Any, batch: tuple[int, int], folder: Path) -> Any:
    """Train on micro-batches of ``batch[0]`` samples, ``batch[1]`` of them in an update."""
    size, accumulation = batch
    import mindnlp_dp as dp
    from models import train

    class OwnLoss(dp.DataParallelTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            return task.loss_of(model, inputs)

    class OwnLossAndWeight(OwnLoss):
        def loss_weight(self, inputs: Any) -> float:
            assert task.loss_weight is not None
            return task.loss_weight(inputs)

    trainer_class = None if task.loss is None else OwnLoss if task.loss_weight is None else OwnLossAndWeight
    return train(
        model, rows, folder, trainer_class, per_device_train_batch_size=size, optim="sgd", learning_rate=RATE,
        gradient_accumulation_steps=accumulation, max_grad_norm=1.0, dataset_shuffle=False, logging_strategy="no",
        data_collator=task.collate, remove_unused_columns=task.loss is None and "texts" not in rows[0],
    ).model  # fmt: skip


def by_custom_loop(task: Task, model: Any, rows: Any, batch: tuple[int, int], folder: Path) -> Any:
    size, accumulation = batch
    from library import optim

    import mindnlp_dp as dp

    parameters = [p for p in model.parameters() if p.requires_grad]
    step = dp.make_train_step(
        lambda **columns: task.loss_of(model, columns), optim.SGD(parameters, lr=RATE), parameters, model=model,
        accumulation_steps=accumulation, max_grad_norm=1.0, zero_stage=0,
        loss_weight_of=task.loss_weight or ((lambda batch: len(batch.indices)) if task.loss else None),
    )  # fmt: skip
    model.train()
    for micro_batches in dp.make_loader(rows, size, accumulation, shuffle=False, collate=task.collate).updates():
        step(micro_batches if accumulation > 1 else micro_batches[0])
    return model


def compare(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return, for each task and way, the largest difference of this job's numbers of micro-steps, or an error."""
    import mindnlp_dp as dp

    group = dp.init_process_group()
    found: dict[str, dict[str, Any]] = {}
    for name in args.tasks or TASKS:
        try:
            task = task_of(name, args.dropout)
        except (StopIteration, ImportError):
            continue
        for way in args.ways:
            mesh = MESHES[way].get(group.world_size) if way in MESHES else None
            if way not in task.ways or (way in MESHES and mesh is None):
                continue
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    result: Any = max(difference(task, way, mesh, steps, Path(folder)) for steps in ACCUMULATIONS)
                except ValueError as error:
                    result = str(error).partition("\n")[0]
            found.setdefault(name, {})[way] = result
    return found


def difference(task: Task, way: str, mesh: Optional[str], accumulation: int, folder: Path) -> float:
    from token_losses import distance

    import mindnlp_dp as dp
    from models import alone, weights

    group = dp.get_process_group()
    train: Any = by_custom_loop if way == "custom loop" else by_trainer
    build, read = task.make, weights
    num_ranks = group.world_size
    if mesh is not None:
        from sharded_models import whole_weights

        from mindnlp_dp.runtime.mesh_spec import parse_mesh

        dp.init_device_mesh(parse_mesh(mesh))
        num_ranks = dp.get_device_mesh().dp_group.world_size
        build, read = lambda: dp.parallelize(task.make()), whole_weights
    # Two full updates, and one that is not full.
    rows = spread(task.rows, num_ranks, 2 * accumulation)
    try:
        mine = read(train(task, build(), rows, (ROWS, accumulation), folder / str(group.rank)))
        with alone():
            if mesh is not None:
                dp.init_device_mesh({"dp": 1})
            one = train(task, task.make(), rows, (ROWS * num_ranks, accumulation), folder / f"alone-{group.rank}")
            # Of a sharded model with adapters, only what trains is read.
            expected, begin = ({name: x for name, x in weights(m).items() if name in mine} for m in (one, task.make()))
            return distance(mine, expected, begin)
    finally:
        if mesh is not None:
            dp.init_device_mesh({"dp": group.world_size})


def measure(args: argparse.Namespace) -> dict[str, Any]:
    ways = args.ways or (WAYS if mindnlp_series() == "0.4" else WAYS[:2])
    flags = ("--dropout", args.dropout, "--ways", *ways, *(["--tasks", *args.tasks] if args.tasks else []))
    cells: dict[str, dict[str, list[Any]]] = {}
    for ranks in args.ranks:
        for name, results in run_job(job_of(__file__, "compare", ranks, *flags)).items():
            for way, result in results.items():
                cells.setdefault(name, {}).setdefault(way, []).append(result)
    print(f"{machine()}; MindNLP {mindnlp_series()}; dropout {args.dropout}; {', '.join(map(str, args.ranks))} ranks")
    table = {name: {way: largest(row[way]) if row.get(way) else "-" for way in ways} for name, row in cells.items()}
    errors = sorted({cell for row in table.values() for cell in row.values() if isinstance(cell, str) and cell != "-"})
    shown = {error: f"({number})" for number, error in enumerate(errors, 1)}
    print_table(
        ["task", *ways],
        [[name, *(shown.get(cell, cell) if isinstance(cell, str) else f"{cell:.1e}" for cell in row.values())]
         for name, row in table.items()],
    )  # fmt: skip
    for error, number in shown.items():
        print(f"{number} refused: {error}")
    numbers = [cell for row in table.values() for cell in row.values() if isinstance(cell, float)]
    print(f"the largest of {len(numbers)}: {max(numbers):.1e}")
    if max(numbers) > MOST:
        sys.exit(f"above {MOST}")
    return {"dropout": args.dropout, "table": table}


def largest(results: list[Any]) -> Any:
    return next((result for result in results if isinstance(result, str)), None) or max(results)


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        measure,
        {"compare": compare},
        ranks={"type": int, "nargs": "+", "default": [2, 3, 4], "help": "numbers of ranks"},
        dropout={"type": float, "default": 0.0, "help": "probability of dropout in the models"},
        tasks={"nargs": "+", "choices": TASKS, "help": "rows of the table; by default all"},
        ways={"nargs": "+", "choices": WAYS, "help": "columns; by default all that the installed MindNLP has"},
    )
