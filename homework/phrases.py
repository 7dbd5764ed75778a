"""This module makes the data of the loop_*.py scripts: letter-pair counts of CLDR phrases, with their language."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from typing import Any

import mindspore
import numpy as np

from mindnlp_dp.text_classification.cldr import LANGUAGES, cldr_phrases

NUM_FEATURES, NUM_LABELS = 1024, len(LANGUAGES)
# Enough to learn something in a few seconds.
NUM_TRAIN, NUM_TEST = 6_000, 1_500


def _features(texts: list[str]) -> np.ndarray:
    """Return counts of hashed letter pairs, shape ``(len(texts), NUM_FEATURES)``; each row has norm 1."""
    counts = np.zeros((len(texts), NUM_FEATURES), np.float32)
    for row, text in zip(counts, texts):
        padded = f" {text.lower()} "
        for one, other in zip(padded, padded[1:]):
            row[zlib.crc32((one + other).encode()) % NUM_FEATURES] += 1
    return counts / np.linalg.norm(counts, axis=1, keepdims=True)


def _arrays(split: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    examples = cldr_phrases()[split]
    chosen = np.random.default_rng(0).permutation(len(examples.texts))[:number]
    labels = np.array([LANGUAGES.index(examples.labels[index]) for index in chosen], np.int32)
    return _features([examples.texts[index] for index in chosen]), labels


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank and the world size from the variables of mpirun or msrun; 0 and 1 without a launcher."""
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("MS_NODE_ID", "0"))
    return int(rank), int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("MS_WORKER_NUM", "1")))


def batches_of_this_rank(epoch: int, batch_size: int) -> Iterator[tuple[Any, Any]]:
    """Yield this rank's part of every global batch: every N-th sample of an order that the epoch seeds."""
    rank, world_size = rank_and_world_size()
    features, labels = _arrays(0, NUM_TRAIN)
    order = np.random.default_rng(epoch).permutation(len(labels))
    for begin in range(0, len(order), batch_size * world_size):
        mine = order[begin : begin + batch_size * world_size][rank::world_size]
        yield mindspore.Tensor(features[mine]), mindspore.Tensor(labels[mine])


class Phrases:
    """The training or held-out split as a map-style data set; loop_resumable.py reads it through a loader."""

    def __init__(self, held_out: bool = False) -> None:
        self._features, self._labels = _arrays(int(held_out), NUM_TEST if held_out else NUM_TRAIN)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"features": self._features[index], "labels": self._labels[index]}


def accuracy(network: Any) -> float:
    """Return the accuracy on the held-out phrases; every rank evaluates all of them."""
    features, labels = _arrays(1, NUM_TEST)
    return float((network(mindspore.Tensor(features)).asnumpy().argmax(axis=1) == labels).mean())
