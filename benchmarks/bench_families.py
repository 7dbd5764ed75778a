#!/usr/bin/env python3
"""Train the quickstart's task with RoBERTa and other model families of the same size, on two ranks.

    python benchmarks/bench_families.py --json outputs/bench_families.json       (about fifteen minutes on two cores)

All runs have the quickstart's settings, data, order and seed; only the model differs. A model with uninitialized
weights or a zero head would be far less accurate than RoBERTa.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import launched, machine, run_job, write_json

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ("roberta", "xlm_roberta", "distilbert", "ernie", "opt")


def build(family: str, config: Any, vocab_size: int, num_labels: int) -> Any:
    """Return a classifier of a family, of the same size as the quickstart's RoBERTa."""
    import mindnlp.transformers as library

    from mindnlp_dp.text_classification.tokenization import BOS, EOS, PAD

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


def train(family: str, config_file: Path, write: Path) -> None:
    """Train and evaluate one family on every rank of a job; rank 0 writes the result."""
    import mindnlp_dp as dp

    group = dp.init_process_group()
    from tokenizers import Tokenizer

    from mindnlp_dp.text_classification.config import FinetuneConfig, read_config_file
    from mindnlp_dp.text_classification.task import as_dataset, prepare_task
    from mindnlp_dp.training.evaluate import accuracy
    from mindnlp_dp.training.trainer.mindnlp_trainer import set_seed

    config = FinetuneConfig(**read_config_file(str(config_file)))
    task = group.run_on_rank0(lambda: prepare_task(config), "preparing the data")
    set_seed(config.seed)
    model = build(family, config, Tokenizer.from_str(task.tokenizer_json).get_vocab_size(), len(task.label_names))
    args = dp.DataParallelArguments(
        str(write.parent), per_device_train_batch_size=config.global_batch_size // group.world_size,
        per_device_eval_batch_size=config.eval_batch_size, num_train_epochs=config.num_epochs,
        learning_rate=config.learning_rate, warmup_ratio=config.warmup_ratio, weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm, seed=config.seed, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip

    def metrics(prediction: Any) -> dict[str, float]:
        return {"accuracy": accuracy(prediction.predictions, prediction.label_ids)}

    trainer = dp.DataParallelTrainer(
        model, args, train_dataset=as_dataset(task.train), eval_dataset=as_dataset(task.test), compute_metrics=metrics
    )
    trainer.train()
    result = trainer.evaluate()
    if group.is_main:
        size = sum(int(parameter.size) for parameter in model.parameters())
        numbers = {"accuracy": result["eval_accuracy"], "loss": result["eval_loss"], "parameters": size}
        write.write_text(json.dumps({**numbers, "digest": trainer.replica_digest}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/quickstart_cpu.yaml")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--family", help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.family:
        train(args.family, args.config, args.write)
        return
    print(machine())
    print(f"{'family':14}{'parameters':>12}{'accuracy':>10}{'loss':>8}  digest")
    runs = {}
    for family in args.families:
        runs[family] = run = run_job([*launched("mpi"), __file__, "--config", str(args.config), "--family", family])
        print(f"{family:14}{run['parameters']:>12,}{run['accuracy']:>10.3f}{run['loss']:>8.3f}  {run['digest']}")
    write_json(args.json, {"machine": machine(), "config": args.config.name, "runs": runs})


if __name__ == "__main__":
    main()
