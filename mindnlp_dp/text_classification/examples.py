"""This module takes the texts and labels from rows of a file, in the file's order."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindnlp_dp.finetuning.files import read_rows, shown
from mindnlp_dp.finetuning.settings import InputError

USUAL_NAMES = {"text": ("text", "text_a", "sentence"), "label": ("label", "category", "intent")}
# A space without width, and a mark of the byte order.
INVISIBLE = "\u200b\ufeff"


@dataclass(frozen=True)
class Examples:
    """Texts and their labels, in two lists of equal length."""

    texts: list[str]
    labels: list[str]

    def __len__(self) -> int:
        return len(self.texts)

    def at(self, numbers: Iterable[int]) -> Examples:
        """Return the examples with these numbers."""
        numbers = list(numbers)
        return Examples([self.texts[at] for at in numbers], [self.labels[at] for at in numbers])


@dataclass(frozen=True)
class Columns:
    """The names of the text and the label column; an empty name means that the usual names are tried."""

    text: str = ""
    label: str = ""


USUAL_COLUMNS = Columns()


def read_examples(path: str, columns: Columns = USUAL_COLUMNS) -> Examples:
    """Return the texts and labels of a file.

    Raises:
        InputError: the file cannot be read, no column fits, or it has no rows; or a text or a label is empty, or is
            neither a text nor a number, and the message has the line.
    """
    return collect(read_rows(path), columns, path)


def collect(rows: Iterable[tuple[int, Mapping[str, Any]]], columns: Columns, what: str) -> Examples:
    """Return the texts and labels of ``(line, row)`` pairs; all rows are mappings with the same keys."""
    return Examples(*_values(rows, {"text": columns.text, "label": columns.label}, what))


def texts_of(rows: Iterable[tuple[int, Mapping[str, Any]]], columns: Columns, what: str) -> list[str]:
    """Return the texts alone of ``(line, row)`` pairs."""
    return _values(rows, {"text": columns.text}, what)[0]


def _values(rows: Iterable[tuple[int, Mapping[str, Any]]], given: Mapping[str, str], what: str) -> list[list[str]]:
    """Return the values of each kind, whose column is found in the first row."""
    found: dict[str, list[str]] = {kind: [] for kind in given}
    names: dict[str, str] = {}
    for line, row in rows:
        names = names or {kind: _find_column(list(row), name, kind, what) for kind, name in given.items()}
        for kind, name in names.items():
            found[kind].append(_value(row.get(name), kind, f"{what}, line {line}"))
    if not names:
        raise InputError(f"{what}: it has no rows below the header")
    return list(found.values())


def _value(value: Any, kind: str, where: str) -> str:
    """Return a text or a label, in which equal numbers and equal characters have one form."""
    if isinstance(value, float):
        is_integer = kind == "label" and value.is_integer()
        value = None if math.isnan(value) else int(value) if is_integer else value
    if value is not None and not isinstance(value, (str, int, float)):
        raise InputError(f"{where}: the {kind} must be one text or number, got {shown(value)}")
    text = "" if value is None else str(value)
    if kind == "label":
        text = unicodedata.normalize("NFC", text).strip().strip(INVISIBLE).strip()
    if not text.strip():
        raise InputError(f"{where}: the {kind} is empty")
    return text


def _find_column(header: Sequence[str], given: str, kind: str, what: str) -> str:
    usual = USUAL_NAMES[kind]
    for name in [given] if given else usual:
        found = [each for each in header if each.strip().lower() == name.lower()]
        if given in found:
            return given
        if len(found) > 1:
            raise InputError(f"{what}: the {kind} may be in {' or '.join(found)}; name it with --{kind}-column")
        if found:
            if not given and name == "text_a" and any(each.strip().lower() == "text_b" for each in header):
                raise InputError(
                    f"{what}: it has pairs, text_a and text_b, and the recipe classifies one text; join them in one "
                    f"column, or name one of them with --{kind}-column"
                )
            return found[0]
    expected = f"there is none named {given}" if given else f"expected one named {' or '.join(usual)}"
    raise InputError(f"{what}: no {kind} column; {expected}, found {', '.join(header)}; name it with --{kind}-column")


def label_ids(labels: Sequence[str], names: Sequence[str], what: str) -> list[int]:
    """Return the index of each label in ``names``; raise InputError for a label that is not in it."""
    number = {name: i for i, name in enumerate(names)}
    for row, label in enumerate(labels, 1):
        if label not in number:
            raise InputError(f"{what}, row {row}: the label {label!r} does not occur in the training split")
    return [number[label] for label in labels]
