#!/usr/bin/env python3
"""Train sentence embeddings by in-batch negatives on several ranks: the model that one process with the batch trains.

    mindnlp-dp run --nproc 2 scripts/sentence_embeddings.py --train-file train.csv --test-file test.csv

A batch has pairs of texts with the same label. Each text is to be nearer to its partner than to the partners of all
other texts in the batch (van den Oord et al., Representation Learning with Contrastive Predictive Coding, 2018), on
whichever rank they are: ``dp.all_gather_with_grad`` brings them together. The encoder has the sizes of all-MiniLM-L6
and random weights; ``--model FOLDER`` starts from a pretrained BERT, such as all-MiniLM-L6-v2. Prints how many test
texts are nearest to one of 2,000 training texts that has their label, before and after training, and writes the encoder
with its tokenizer to ``model/`` of the output folder.
"""

from __future__ import annotations

import argparse
from typing import Any

import mindnlp_dp as dp  # isort: skip

import numpy as np

from mindnlp_dp.finetuning.pretrained import load_pretrained
from mindnlp_dp.finetuning.settings import FROM_SCRATCH, InputError
from mindnlp_dp.text_classification.classification_config import TaskConfig
from mindnlp_dp.text_classification.classification_task import prepare_task, save_tokenizer

SCALE = 20.0


class Pairs:
    """A data set of pairs: each text of a label, and another one of it."""

    def __init__(self, columns: dict[str, np.ndarray], seed: int) -> None:
        random, labels = np.random.default_rng(seed), columns["labels"]
        self.columns, self.partners = columns, np.empty(len(labels), np.int64)
        for label in np.unique(labels):
            of_label = np.flatnonzero(labels == label)
            order = random.permutation(of_label)
            self.partners[order] = np.roll(order, 1)

    def __len__(self) -> int:
        return len(self.partners)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        names, partner = ("input_ids", "attention_mask"), self.partners[index]
        pair = {name: np.stack([self.columns[name][index], self.columns[name][partner]]) for name in names}
        return {**pair, "labels": self.columns["labels"][index]}


def embed(model: Any, input_ids: Any, attention_mask: Any) -> Any:
    """Return the mean of each text's last hidden states, of length 1: (texts, width)."""
    hidden = model(input_ids, attention_mask=attention_mask).last_hidden_state
    mask = attention_mask.astype(hidden.dtype).expand_dims(-1)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return mean / ((mean * mean).sum(-1, keepdims=True) + 1e-12).sqrt()


class ContrastiveTrainer(dp.DataParallelTrainer):
    """Trains a model of embeddings: the loss of a pair compares its first text with the second texts of all ranks."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False) -> Any:
        from mindnlp.core.nn import functional
        from mindspore import Tensor

        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        embeddings = embed(model, ids.reshape(-1, ids.shape[-1]), mask.reshape(-1, ids.shape[-1]))
        pairs = dp.all_gather_with_grad(embeddings.reshape(len(ids), 2, -1))
        scores = SCALE * (pairs[:, 0] @ pairs[:, 1].T)
        loss = functional.cross_entropy(scores, Tensor(np.arange(len(pairs))))
        return (loss, {"scores": scores}) if return_outputs else loss


def all_embeddings(model: Any, columns: dict[str, np.ndarray], size: int = 256) -> np.ndarray:
    from mindspore import Tensor

    model.set_train(False)
    batches = [slice(begin, begin + size) for begin in range(0, len(columns["labels"]), size)]
    names = ("input_ids", "attention_mask")
    return np.concatenate(
        [embed(model, *(Tensor(columns[name][rows]) for name in names)).asnumpy() for rows in batches]
    )


def accuracy(model: Any, train: dict[str, np.ndarray], test: dict[str, np.ndarray], most: int = 2000) -> float:
    """Return the share of test texts whose nearest training text, of ``most`` ones, has their label."""
    some = np.random.default_rng(0).permutation(len(train["labels"]))[:most]
    train = {name: column[some] for name, column in train.items()}
    some = np.random.default_rng(1).permutation(len(test["labels"]))[:most]
    test = {name: column[some] for name, column in test.items()}
    nearest = (all_embeddings(model, test) @ all_embeddings(model, train).T).argmax(1)
    return float(np.mean(train["labels"][nearest] == test["labels"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-file", default="", help="texts with labels; by default, phrases of many languages")
    parser.add_argument("--test-file", default="")
    parser.add_argument("--model", default=FROM_SCRATCH, help="a folder with a pretrained BERT")
    parser.add_argument("--trust-pickle", action="store_true", help="load its weights if they are not safetensors")
    parser.add_argument("--batch-size", type=int, default=128, help="pairs in an update, over all ranks")
    parser.add_argument("--max-length", type=int, default=32)
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output-dir", default="outputs/sentence_embeddings")
    args = parser.parse_args()

    files = {"train_file": args.train_file, "test_file": args.test_file}
    config = TaskConfig(**files, model=args.model, max_length=args.max_length, trust_pickle=args.trust_pickle)
    try:
        config.validate()
        group = dp.init_process_group()
        from mindnlp.engine import set_seed
        from mindnlp.transformers import BertConfig, BertModel

        task = group.run_on_rank0(lambda: prepare_task(config), "reading the data")
    except InputError as error:
        parser.error(str(error))
    set_seed(args.seed)
    if args.model == FROM_SCRATCH:
        sizes = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
        model = BertModel(
            BertConfig(vocab_size=config.vocab_size, num_hidden_layers=args.num_layers, pad_token_id=1, **sizes)
        )
    else:
        model = load_pretrained(BertModel, args.model, "model", trust_pickle=args.trust_pickle)
    before = accuracy(model, task.train, task.test)
    settings = dp.DataParallelArguments(
        args.output_dir, per_device_train_batch_size=args.batch_size, global_batch_size=args.batch_size,
        max_steps=args.max_steps, learning_rate=args.learning_rate, warmup_ratio=0.1, save_strategy="no",
        logging_steps=20, remove_unused_columns=False, seed=args.seed,
    )  # fmt: skip
    trainer = ContrastiveTrainer(model, settings, train_dataset=Pairs(task.train, args.seed))
    loss = trainer.train().training_loss
    if group.is_main:
        after = accuracy(model, task.train, task.test)
        updates = trainer.state.global_step
        print(f"mean loss {loss:.6f} in {updates} updates")
        print(f"nearest text of the same label: {before:.4f} before, {after:.4f} after")
        folder = f"{args.output_dir}/model"
        trainer.save_model(folder)
        save_tokenizer(config, task, folder)
        print(f"written to {folder}")
    print(f"rank {group.rank}: weights {dp.assert_replicas_in_sync(model)}")


if __name__ == "__main__":
    main()
