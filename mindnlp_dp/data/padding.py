"""This module pads samples of tokens to one length; Trainers and loaders take the collator as ``data_collator``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.data.batches import Columns, check_same_columns, default_collate

_IGNORED = -100


class PaddingCollator:
    """Makes a batch of samples whose rows of tokens have different lengths, by padding them to the longest.

    ``input_ids`` and ``decoder_input_ids`` are padded with the padding token, masks and ``token_type_ids`` with 0, and
    ``labels`` with -100, which losses ignore. A missing ``attention_mask`` is added. Other columns are stacked, and
    ``label`` is renamed to ``labels``. Values are lists, NumPy arrays or MindSpore tensors.

    Example::

        trainer = dp.DataParallelTrainer(model, args, train_dataset=rows, data_collator=dp.PaddingCollator(tokenizer))

    Args:
        tokenizer: its ``pad_token_id`` and ``padding_side`` are used, unless the arguments below replace them.
        pad_token_id: by default the tokenizer's; 0 without a tokenizer.
        pad_to_multiple_of: the length is a multiple of this number.
        side: "right" or "left"; by default the tokenizer's; "right" without a tokenizer.

    Raises:
        ValueError: the tokenizer has no padding token, ``side`` or ``pad_to_multiple_of`` is unknown, samples have
            different columns, or rows of a column that is not padded have different shapes.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        pad_token_id: Optional[int] = None,
        pad_to_multiple_of: Optional[int] = None,
        side: Optional[str] = None,
    ) -> None:
        if pad_token_id is None:
            pad_token_id = 0 if tokenizer is None else tokenizer.pad_token_id
        if pad_token_id is None:
            raise ValueError(
                "the tokenizer has no padding token; set tokenizer.pad_token, for example to tokenizer.eos_token, or "
                "pass pad_token_id"
            )
        side = side or getattr(tokenizer, "padding_side", "right")
        if side not in ("right", "left"):
            raise ValueError(f'side is "right" or "left", got {side!r}')
        if pad_to_multiple_of is not None and pad_to_multiple_of < 1:
            raise ValueError(f"pad_to_multiple_of is at least 1, got {pad_to_multiple_of}")
        self.side, self.multiple = side, pad_to_multiple_of or 1
        self.padding = {
            "input_ids": pad_token_id, "attention_mask": 0, "token_type_ids": 0, "labels": _IGNORED,
            "decoder_input_ids": pad_token_id, "decoder_attention_mask": 0,
        }  # fmt: skip

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> Columns:
        """Return the batch, as arrays with one row per sample."""
        rows = [{name: self._as_array(name, value) for name, value in sample.items()} for sample in samples]
        check_same_columns(rows)
        for row in rows:
            if "input_ids" in row and "attention_mask" not in row:
                row["attention_mask"] = np.ones(row["input_ids"].shape, np.int64)
        columns = [name for name in self.padding if self._is_of_tokens(name, rows)]
        for name in columns:
            longest = max(len(row[name]) for row in rows)
            length = -(-longest // self.multiple) * self.multiple
            for row in rows:
                row[name] = self._padded(row[name], length, self.padding[name])
        return default_collate(rows)

    @staticmethod
    def _is_of_tokens(name: str, rows: list[dict[str, np.ndarray]]) -> bool:
        """Tell whether a column has rows of tokens; labels may be one number per sample, or one per class."""
        if not all(name in row and row[name].ndim == 1 for row in rows):
            return False
        lengths = [len(row[name]) for row in rows]
        is_as_long = lengths == [len(row.get("input_ids", ())) for row in rows]
        return name != "labels" or len(set(lengths)) > 1 or is_as_long

    def _as_array(self, name: str, value: Any) -> np.ndarray:
        array = np.asarray(value.asnumpy() if hasattr(value, "asnumpy") else value)
        # Small integers and bool cannot hold the padding.
        return array.astype(np.int64) if name in self.padding and array.dtype.kind in "iub" else array

    def _padded(self, values: np.ndarray, length: int, padding: int) -> np.ndarray:
        missing = length - len(values)
        # An empty list has no integer type.
        values = values if len(values) else values.astype(np.int64)
        return np.pad(values, (0, missing) if self.side == "right" else (missing, 0), constant_values=padding)
