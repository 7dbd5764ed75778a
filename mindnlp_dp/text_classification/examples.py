"""This module reads labelled texts from CSV, TSV and JSON lines files, in the file's order; task.py calls it."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Optional, TextIO

from mindnlp_dp.finetuning.settings import InputError

TEXT_COLUMNS = ("text", "text_a", "sentence")
LABEL_COLUMNS = ("label", "category", "intent")
TSV_LINE_BREAKS = (
    "; quotes are text in TSV, so that no field can hold a line break: if one does, save the file as CSV or JSON lines"
)


@dataclass(frozen=True)
class Examples:
    """Texts and their labels, in two lists of equal length."""

    texts: list[str]
    labels: list[str]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Columns:
    """The names of the text and the label column; an empty name means that the usual names are tried."""

    text: str = ""
    label: str = ""


USUAL_COLUMNS = Columns()


def read_examples(path: str, columns: Columns = USUAL_COLUMNS) -> Examples:
    """Read a file by its suffix: .csv or .tsv with a header, or .jsonl or .json with one object per line.

    Raises:
        InputError: the file is missing or not UTF-8, no column fits, or it has no rows; or a line is malformed, has
            another number of fields or an empty one, and the message has the line number.
    """
    readers = {".csv": _delimited(","), ".tsv": _delimited("\t"), ".jsonl": _json_lines, ".json": _json_lines}
    reader = readers.get(Path(path).suffix.lower())
    if reader is None:
        raise InputError(f"{path}: expected a file that ends in {', '.join(readers)}")
    try:
        with _fields_of_any_length(), open(path, newline="", encoding="utf-8-sig") as file:
            return collect(reader(file, path), columns, path)
    except FileNotFoundError:
        raise InputError(f"{path}: the file does not exist") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder, expected a file") from None
    except PermissionError:
        raise InputError(f"{path} cannot be read: permission denied") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}; convert it with iconv -t UTF-8") from None


def collect(rows: Iterable[tuple[int, Mapping[str, Any]]], columns: Columns, what: str) -> Examples:
    """Return the texts and labels of ``(line, row)`` pairs; all rows are mappings with the same keys."""
    examples = Examples([], [])
    names: Optional[tuple[str, str]] = None
    for line, row in rows:
        if names is None:
            names = (
                _find_column(list(row), columns.text, TEXT_COLUMNS, "text", what),
                _find_column(list(row), columns.label, LABEL_COLUMNS, "label", what),
            )
        for name, kind, values in zip(names, ("text", "label"), (examples.texts, examples.labels)):
            value = row.get(name)
            if value is None or not str(value).strip():
                raise InputError(f"{what}, line {line}: the {kind} is empty")
            values.append(str(value) if kind == "text" else str(value).strip())
    if not examples.texts:
        raise InputError(f"{what}: it has no rows below the header")
    return examples


@contextmanager
def _fields_of_any_length() -> Iterator[None]:
    # The csv module's limit is 131,072 characters and applies to the whole process, so it is restored.
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _delimited(delimiter: str) -> Callable[[TextIO, str], Iterator[tuple[int, Mapping[str, Any]]]]:
    def read(file: TextIO, path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
        # In TSV, tabs separate fields even inside quotes; quotes around a complete field are removed.
        by_tabs = delimiter == "\t"
        lines = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if by_tabs else csv.reader(file, strict=True)
        rows = _rows(lines, path)
        line, header = next(rows, (1, []))
        if not header:
            raise InputError(f"{path}, line 1: the header is missing")
        header = [_unquoted(name.strip()) for name in header]
        for line, row in rows:
            if len(row) != len(header):
                reason = TSV_LINE_BREAKS if by_tabs and len(row) < len(header) else ""
                raise InputError(f"{path}, line {line}: {len(row)} fields, but the header has {len(header)}{reason}")
            yield line, dict(zip(header, map(_unquoted, row) if by_tabs else row))

    return read


def _unquoted(field: str) -> str:
    is_quoted = len(field) >= 2 and field[0] == field[-1] == '"'
    return field[1:-1].replace('""', '"') if is_quoted else field


def _json_lines(file: TextIO, path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {line}: {error.msg}; expected one JSON object a line") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {line}: expected a JSON object, got {text.strip()[:40]}")
        yield line, row


def _rows(reader: Iterator[list[str]], path: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the non-empty rows with the number of the line on which each begins."""
    while True:
        line = reader.line_num + 1  # type: ignore[attr-defined]
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise InputError(f"{path}, line {line}: {error}") from None
        if row:
            yield line, row


def _find_column(header: Sequence[str], given: str, usual: Sequence[str], kind: str, what: str) -> str:
    by_name = {name.strip().lower(): name for name in header}
    for name in [given] if given else usual:
        if name.lower() in by_name:
            return by_name[name.lower()]
    expected = f"there is none named {given}" if given else f"expected one named {' or '.join(usual)}"
    raise InputError(f"{what}: no {kind} column; {expected}, found {', '.join(header)}; name it with --{kind}-column")


def label_ids(labels: Sequence[str], names: Sequence[str], what: str) -> list[int]:
    """Return the index of each label in ``names``; raise InputError for a label that is not in it."""
    number = {name: i for i, name in enumerate(names)}
    for row, label in enumerate(labels, 1):
        if label not in number:
            raise InputError(f"{what}, row {row}: the label {label!r} does not occur in the training split")
    return [number[label] for label in labels]
