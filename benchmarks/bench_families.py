#!/usr/bin/env python3
"""Train the quickstart's task with RoBERTa and other model families of the same size, on two ranks.

    python benchmarks/bench_families.py --json outputs/bench_families.json       (about fifteen minutes on two cores)

All runs have the quickstart's settings, data, order and seed; only the model differs. A model with uninitialized
weights or a zero head would be far less accurate than RoBERTa.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import ROOT, job_of, machine, print_table, run_benchmark, run_job

FAMILIES = ("roberta", "xlm_roberta", "distilbert", "ernie", "opt")


def build(family: str, config: Any, vocab_size: int, num_labels: int) -> Any:
    """Return a classifier of a family, of the same size as the quickstart's RoBERTa."""
    import mindnlp.transformers as library

    from mindnlp_dp.text_classification.tokenize_texts import BOS, EOS, PAD

    shared = {
        "vocab_size": vocab_size, "num_labels": num_labels, "bos_token_id": BOS, "pad_token_id": PAD,
        "eos_token_id": EOS, "max_position_embeddings": config.max_length + PAD + 1,
    }  # fmt: skip
    of_bert = {
        "hidden_size": config.hidden_size, "num_hidden_layers": config.num_layers, "hidden_act": "relu",
        "num_attention_heads": config.num_heads, "intermediate_size": config.intermediate_size,
        "hidden_dropout_prob": config.dropout, "attention_probs_dropout_prob": config.dropout,
    }  # fmt: skip
    if family == "distilbert":
        return library.DistilBertForSequenceClassification(library.DistilBertConfig(
            dim=config.hidden_size, n_layers=config.num_layers, n_heads=config.num_heads, activation="relu",
            hidden_dim=config.intermediate_size, dropout=config.dropout, attention_dropout=config.dropout,
            seq_classif_dropout=config.dropout, **shared,
        ))  # fmt: skip
    if family == "opt":
        return library.OPTForSequenceClassification(library.OPTConfig(
            hidden_size=config.hidden_size, num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
            ffn_dim=config.intermediate_size, word_embed_proj_dim=config.hidden_size, dropout=config.dropout,
            attention_dropout=config.dropout, **shared,
        ))  # fmt: skip
    model, configuration = {
        "roberta": (library.RobertaForSequenceClassification, library.RobertaConfig),
        "xlm_roberta": (library.XLMRobertaForSequenceClassification, library.XLMRobertaConfig),
        "ernie": (library.ErnieForSequenceClassification, library.ErnieConfig),
    }[family]
    return model(configuration(**shared, **of_bert))


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train and evaluate one family."""
    import mindnlp_dp as dp

    group = dp.init_process_group()
    from tokenizers import Tokenizer

    from mindnlp_dp.finetuning.settings import read_config_file
    from mindnlp_dp.text_classification.classification_config import FinetuneConfig
    from mindnlp_dp.text_classification.classification_task import as_dataset, prepare_task
    from mindnlp_dp.training.evaluate import accuracy
    from mindnlp_dp.training.trainer.mindnlp_trainer import set_seed

    config = FinetuneConfig(**read_config_file(str(args.config), FinetuneConfig))
    task = group.run_on_rank0(lambda: prepare_task(config), "preparing the data")
    set_seed(config.seed)
    model = build(args.family, config, Tokenizer.from_str(task.tokenizer_json).get_vocab_size(), len(task.label_names))
    arguments = dp.DataParallelArguments(
        str(args.write.parent), per_device_train_batch_size=config.global_batch_size // group.world_size,
        per_device_eval_batch_size=config.eval_batch_size, num_train_epochs=config.num_epochs,
        learning_rate=config.learning_rate, warmup_ratio=config.warmup_ratio, weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm, seed=config.seed, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip

    def metrics(prediction: Any) -> dict[str, float]:
        return {"accuracy": accuracy(prediction.predictions, prediction.label_ids)}

    trainer = dp.DataParallelTrainer(
        model,
        arguments,
        train_dataset=as_dataset(task.train),
        eval_dataset=as_dataset(task.test),
        compute_metrics=metrics,
    )
    trainer.train()
    result = trainer.evaluate()
    size = sum(int(parameter.size) for parameter in model.parameters())
    numbers = {"accuracy": result["eval_accuracy"], "loss": result["eval_loss"], "parameters": size}
    return {**numbers, "digest": trainer.replica_digest}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    flags = ["--config", args.config, "--family"]
    runs = {family: run_job(job_of(__file__, "train", 2, *flags, family)) for family in args.families}
    print(machine())
    rows = [
        [family, f"{run['parameters']:,}", f"{run['accuracy']:.3f}", f"{run['loss']:.3f}", run["digest"]]
        for family, run in runs.items()
    ]
    print_table(["family", "parameters", "accuracy", "loss", "digest"], rows)
    return {"config": args.config.name, "runs": runs}


if __name__ == "__main__":
    run_benchmark(
        __doc__, measure, {"train": train}, family={},
        config={"type": Path, "default": ROOT / "configs/quickstart_cpu.yaml", "help": "of the quickstart"},
        families={"nargs": "+", "choices": FAMILIES, "default": list(FAMILIES), "help": "which to train"},
    )  # fmt: skip
