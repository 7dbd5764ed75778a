"""This module holds the rows of a data set of tokens, packs several texts into a row, and makes batches of rows.

Packed texts do not see each other: attention has a block-diagonal mask, and positions begin again with each text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import numpy as np

from mindnlp_dp.data.loss_weight import IGNORED

# Model types of MindNLP 0.4.1 that take a mask of (batch, 1, length, length), which packing needs.
PACKABLE = ("llama", "qwen2", "mistral", "gemma", "phi", "mixtral", "qwen2_moe")


# A token, and whether it has a label and begins a text, in 32 bits.
_HAS_LABEL, _BEGINS = np.int32(1 << 30), np.int32(1 << 29)
LARGEST_TOKEN = (1 << 29) - 1
_TOKENS_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class TokenRows:
    """Rows of tokens of different lengths, end to end; a data set for the Trainer.

    Attributes:
        codes: (N,) int32, often a memory map: all tokens, with a bit for those that have a label, which is the token
            itself, and one for the first token of a text.
        bounds: (rows + 1,) where each row begins and the last one ends.
        reference: (rows, 2) for pairs of answers, their log probabilities before training.
    """

    codes: np.ndarray
    bounds: np.ndarray
    reference: Optional[np.ndarray] = None

    @classmethod
    def of(cls, encoded: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]]) -> TokenRows:
        """Make rows of one or several (tokens, labels) each."""
        return cls.of_codes([[codes_of(ids, labels) for ids, labels in row] for row in encoded])

    @classmethod
    def of_codes(cls, encoded: Sequence[Sequence[np.ndarray]]) -> TokenRows:
        """Make rows of one or several texts each, which :func:`codes_of` returns."""
        lengths = [sum(map(len, row)) for row in encoded]
        flat = [codes for row in encoded for codes in row]
        return cls(np.concatenate(flat or [np.zeros(0, np.int32)]), np.cumsum([0, *lengths], dtype=np.int64))

    @property
    def num_labels(self) -> int:
        return sum(int(np.count_nonzero(codes & _HAS_LABEL)) for codes in self._blocks())

    @property
    def largest_token(self) -> int:
        return max((int((codes & LARGEST_TOKEN).max()) for codes in self._blocks()), default=0)

    def _blocks(self) -> Iterator[np.ndarray]:
        # Temporary arrays of all tokens would need more memory than the tokens.
        return (self.codes[at : at + _TOKENS_AT_A_TIME] for at in range(0, len(self.codes), _TOKENS_AT_A_TIME))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        codes = np.asarray(self.codes[self.bounds[index] : self.bounds[index + 1]])
        ids = (codes & LARGEST_TOKEN).astype(np.int64)
        labels = np.where(codes & _HAS_LABEL, ids, IGNORED)
        row = {"input_ids": ids, "labels": labels, "texts": np.cumsum(codes & _BEGINS != 0) - 1}
        return row if self.reference is None else {**row, "reference": self.reference[index]}

    def in_memory(self) -> TokenRows:
        """Return a copy that is not in a file."""
        return replace(self, codes=np.array(self.codes))

    def __reduce__(self) -> tuple[Any, ...]:
        # A process of the same host opens the file, instead of having a copy of the tokens.
        codes: Any = self.codes
        if isinstance(codes, np.memmap):
            codes = str(codes.filename), codes.offset, codes.shape
        return _restored, (codes, self.bounds, self.reference)

    def __deepcopy__(self, memo: Any) -> TokenRows:
        # MindNLP's Trainer copies its data sets. These rows are only read.
        return self


def _restored(codes: Any, bounds: np.ndarray, reference: Optional[np.ndarray]) -> TokenRows:
    if isinstance(codes, tuple):
        path, offset, shape = codes
        codes = np.memmap(path, np.int32, "r", offset, shape)
    return TokenRows(codes, bounds, reference)


def codes_of(ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return a text's tokens and labels as int32 codes of :class:`TokenRows`."""
    codes = ids.astype(np.int32) | np.where(labels != IGNORED, _HAS_LABEL, np.int32(0))
    codes[:1] |= _BEGINS
    return codes


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Put texts of these lengths into rows: best-fit decreasing, in O(texts * max_length); return each row's texts.

    >>> pack([3, 2, 5, 4], 7)
    [[2, 1], [3, 0]]
    """
    rows: list[list[int]] = []
    # The rows with so much space left.
    with_space: list[list[int]] = [[] for _ in range(max_length + 1)]
    for text in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[text]
        space = next((space for space in range(length, max_length + 1) if with_space[space]), None)
        if space is None:
            rows.append([text])
            with_space[max_length - length].append(len(rows) - 1)
        else:
            row = with_space[space].pop(0)
            rows[row].append(text)
            with_space[space - length].append(row)
    return rows


@dataclass(frozen=True)
class Collator:
    """Makes a batch of rows, padded on the right to the longest of them.

    Attributes:
        pad: the token that fills rows up.
        is_packed: whether rows hold several texts; then the mask has the shape (batch, 1, length, length), with 0 where
            a token sees another and the least float32 elsewhere, and there are ``position_ids``.
    """

    pad: int
    is_packed: bool

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
        length = max(len(row["input_ids"]) for row in rows)

        def padded(name: str, value: int) -> np.ndarray:
            return np.stack([_filled(row[name], length, value) for row in rows])

        batch = {"input_ids": padded("input_ids", self.pad), "labels": padded("labels", IGNORED)}
        # Padding counts as a separate text, which no other text sees.
        texts = padded("texts", -1)
        if not self.is_packed:
            return {**batch, "attention_mask": (texts >= 0).astype(np.int64)}
        is_same = texts[:, :, None] == texts[:, None, :]
        sees = is_same & np.tri(length, dtype=bool)
        mask = np.where(sees, np.float32(0), np.finfo(np.float32).min)[:, None]
        begins = np.concatenate([np.ones((len(rows), 1), bool), texts[:, 1:] != texts[:, :-1]], axis=1)
        places = np.arange(length)
        positions = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
        return {**batch, "attention_mask": mask, "position_ids": positions}


@dataclass(frozen=True)
class PairCollator:
    """Makes a batch of rows that hold two texts each: the prompt with the chosen answer, and with the rejected one."""

    pad: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
        length = max(int(np.bincount(row["texts"]).max()) for row in rows)
        batch = {}
        for number, name in enumerate(("chosen", "rejected")):
            texts = [np.asarray(row["texts"]) == number for row in rows]
            for column, key, value in (("ids", "input_ids", self.pad), ("labels", "labels", IGNORED)):
                parts = [np.asarray(row[key])[text] for row, text in zip(rows, texts)]
                batch[f"{name}_{column}"] = np.stack([_filled(part, length, value) for part in parts])
            batch[f"{name}_mask"] = np.stack([_filled(np.ones(text.sum()), length, 0) for text in texts])
        none = np.zeros(2, np.float32)
        return {**batch, "reference": np.stack([row.get("reference", none) for row in rows])}


def _filled(values: Any, length: int, value: int) -> np.ndarray:
    return np.concatenate([np.asarray(values, np.int64), np.full(length - len(values), value, np.int64)])
