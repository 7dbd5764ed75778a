"""Labelled texts: from files, or from CLDR.

Goes in: a CSV or TSV file, or nothing. Comes out: texts with their labels, in an
order that depends on the data alone.
"""

from __future__ import annotations

import csv
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

TEXT_COLUMNS = ("text", "text_a", "sentence")
LABEL_COLUMNS = ("label", "category", "intent")

# Many alphabets, and close relatives within one (Danish and Norwegian, Russian, Ukrainian and Bulgarian).
LANGUAGES = ("ar bg cs da de el en es fa fi fr he hi hu it ja ko nb nl pl pt ro ru sv th tr uk vi zh").split()
HELD_OUT_PERCENT = 10


class InputError(ValueError):
    """A user's file, flag or data is wrong; the message says where, and what to do."""


@dataclass(frozen=True)
class Examples:
    """Texts and their labels, of equal number."""

    texts: list[str]
    labels: list[str]

    def __len__(self) -> int:
        return len(self.texts)


def read_examples(path: str) -> Examples:
    """Read a CSV or TSV file (by its ending) with a header that names a text and a label column.

    Raises:
        InputError: there is no such file, it is not UTF-8, no column fits, a line has another
            number of fields or an empty one, or there are no rows; with the line's number.
    """
    delimiters = {".csv": ",", ".tsv": "\t"}
    suffix = Path(path).suffix.lower()
    if suffix not in delimiters:
        raise InputError(f"{path}: expected a file that ends in .csv or .tsv")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            return _parse(file, path, delimiters[suffix])
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder, expected a file") from None
    except PermissionError:
        raise InputError(f"{path} cannot be read: permission denied") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}; convert it with iconv -t UTF-8") from None


def _parse(file: TextIO, path: str, delimiter: str) -> Examples:
    rows = _rows(csv.reader(file, delimiter=delimiter, strict=True), path)
    _, header = next(rows, (0, []))
    text_column = _find_column(header, TEXT_COLUMNS, "text", path)
    label_column = _find_column(header, LABEL_COLUMNS, "label", path)
    examples = Examples([], [])
    for line, row in rows:
        if len(row) != len(header):
            raise InputError(f"{path}, line {line}: {len(row)} fields, but the header has {len(header)}")
        for name, column in (("text", text_column), ("label", label_column)):
            if not row[column].strip():
                raise InputError(f"{path}, line {line}: the {name} is empty")
        examples.texts.append(row[text_column])
        examples.labels.append(row[label_column].strip())
    if not examples.texts:
        raise InputError(f"{path}: there are no rows below the header")
    return examples


def _rows(reader: Iterator[list[str]], path: str) -> Iterator[tuple[int, list[str]]]:
    """Non-empty rows with the number of the line on which each begins."""
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


def _find_column(header: Sequence[str], names: Sequence[str], what: str, path: str) -> int:
    lowered = [name.strip().lower() for name in header]
    for name in names:
        if name in lowered:
            return lowered.index(name)
    found = ", ".join(header) or "nothing"
    raise InputError(f"{path}, line 1: no {what} column; expected one named {' or '.join(names)}, found {found}")


def label_ids(labels: Sequence[str], names: Sequence[str], what: str) -> list[int]:
    """Numbers for ``labels``, by their place in ``names``; InputError for one that is not there."""
    number = {name: i for i, name in enumerate(names)}
    for row, label in enumerate(labels, 1):
        if label not in number:
            raise InputError(f"{what}, row {row}: the label {label!r} does not occur in the training split")
    return [number[label] for label in labels]


def cldr_phrases() -> tuple[Examples, Examples]:
    """Short phrases and their language: a training and a held-out split that need no download.

    The phrases are CLDR's names of territories, languages, scripts, currencies and cities in 29
    languages, as Babel carries them (https://cldr.unicode.org). One that occurs in several
    languages is left out. A hash of the phrase decides on its split.
    """
    try:
        from babel import Locale
    except ImportError:
        raise InputError(
            'the quickstart\'s data comes with Babel; pip install "mindnlp-dp[quickstart]", or pass --train-file '
            "and --test-file"
        ) from None
    languages_of: defaultdict[str, set[str]] = defaultdict(set)
    for language in LANGUAGES:
        for phrase in _names(Locale(language)):
            languages_of[phrase].add(language)
    splits = {True: Examples([], []), False: Examples([], [])}
    for phrase in sorted(languages_of):
        if len(languages_of[phrase]) == 1:
            split = splits[_hash(phrase) % 100 < HELD_OUT_PERCENT]
            split.texts.append(phrase)
            split.labels.extend(languages_of[phrase])
    return splits[False], splits[True]


def _names(locale: object) -> Iterator[str]:
    for kind in ("territories", "languages", "scripts", "currencies"):
        yield from getattr(locale, kind).values()
    for zone in locale.time_zones.values():  # type: ignore[attr-defined]
        if "city" in zone:
            yield zone["city"]


def _hash(phrase: str) -> int:
    return int.from_bytes(hashlib.blake2b(phrase.encode(), digest_size=8).digest(), "big")
