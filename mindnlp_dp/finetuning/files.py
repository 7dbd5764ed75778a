"""This module reads the rows of CSV, TSV, JSON and Parquet files, each with its line; the recipes call it.

An error names the file and the line, and says what to do.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from mindnlp_dp.finetuning.settings import InputError

# The line where a row begins (in Parquet its number), and its columns.
Row = tuple[int, dict[str, Any]]

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
# Files whose name says text: how they begin, what they are, and what to do.
NOT_TEXT = {
    b"PAR1": "a Parquet file; name it .parquet",
    b"PK\x03\x04": "a zip archive, such as an Excel workbook; unpack it, or save the workbook as CSV in UTF-8",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook; save it as CSV in UTF-8",
    b"\x1f\x8b": "compressed by gzip; unpack it",
    b"BZh": "compressed by bzip2; unpack it",
    b"\xfd7zXZ": "compressed by xz; unpack it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; unpack it",
}
LONGEST_SHOWN = 60
# Encodings of mainframes, which fit almost any bytes.
EBCDIC = ["cp037", "cp1026", "cp1140", "cp273", "cp424", "cp500", "cp875"]
TSV_LINE_BREAKS = (
    "; quotes are text in TSV, so that no field can hold a line break: if one does, save the file as CSV or JSON lines"
)


def read_rows(path: str) -> Iterator[Row]:
    """Yield the rows of a file: .csv or .tsv with a header, .jsonl or .json with objects or a list, or .parquet.

    Text is UTF-8, or UTF-16 with its mark at the beginning.

    Raises:
        InputError: the file is missing or in another encoding, or a line is malformed; the message has its number.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}")
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
        if suffix == ".parquet":
            yield from _parquet(path)
            return
        for begin, what in NOT_TEXT.items():
            if head.startswith(begin):
                raise InputError(f"{path} is {what}")
        is_marked = head[:2] in (b"\xff\xfe", b"\xfe\xff")
        if not is_marked and head.count(0) > len(head) // 4:
            raise _other_encoding(path, head)
        encoding = "utf-16" if is_marked else "utf-8-sig"
        with _fields_of_any_length(), open(path, newline="", encoding=encoding) as text:
            yield from (_json if suffix in (".jsonl", ".json") else _delimited)(text, path)
    except FileNotFoundError:
        raise InputError(f"{path}: the file does not exist") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder, expected a file") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise _other_encoding(path, Path(path).read_bytes()) from None


def weighted_files(names: str) -> list[tuple[str, float]]:
    """Return the files of a setting, and how often each is read per epoch.

    >>> weighted_files("a.jsonl"), weighted_files("a.jsonl:0.5, b.jsonl")
    ([('a.jsonl', 1.0)], [('a.jsonl', 0.5), ('b.jsonl', 1.0)])
    """
    if names and Path(names).exists():
        return [(names, 1.0)]
    found = []
    for part in filter(None, map(str.strip, names.split(","))):
        path, _, weight = part.rpartition(":")
        try:
            found.append((path, float(weight)) if path else (part, 1.0))
        except ValueError:
            found.append((part, 1.0))
        if not 0 < found[-1][1] <= 100:
            raise InputError(f"{part}: the weight of a file is above 0 and at most 100, as in a.jsonl:0.5,b.jsonl:2")
    return found


def shown(value: Any) -> str:
    """Return a value as JSON of at most one short line, for messages."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _other_encoding(path: str, content: bytes) -> InputError:
    """Return the error for a file that is not UTF-8, with the command that converts it."""
    from charset_normalizer import from_bytes

    line = 1
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
    found = [match.encoding for match in from_bytes(content[:100_000], cp_exclusion=EBCDIC)]
    if not found:
        return InputError(f"{path}, line {line}: not UTF-8, nor another known encoding; save the file as UTF-8")
    # Several encodings fit a short text. GB 18030, which includes GBK, is the most frequent of them.
    encoding = "gb18030" if "gb18030" in found else found[0]
    reads = (content.decode(encoding, "replace").splitlines() or [""])[line - 1 :][:1]
    # iconv writes UTF-16LE.
    name = encoding.upper().replace("_16_", "-16").replace("_32_", "-32").replace("_", "-")
    target = Path(path).with_suffix(f".utf8{Path(path).suffix}")
    return InputError(
        f"{path}, line {line}: not UTF-8; as {name} it reads {shown(''.join(reads).strip())}. If that is right, "
        f"convert it: iconv -f {name} -t UTF-8 {shlex.quote(path)} > {shlex.quote(str(target))}"
    )


@contextlib.contextmanager
def _fields_of_any_length() -> Iterator[None]:
    # The csv module's limit is 131,072 characters and applies to the whole process, so it is restored.
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _delimited(file: TextIO, path: str) -> Iterator[Row]:
    # In TSV, tabs separate fields even inside quotes; quotes around a complete field are removed.
    by_tabs = Path(path).suffix.lower() == ".tsv"
    # Spreadsheets write semicolons in countries whose decimal point is a comma.
    delimiter = max(",;\t|", key=lambda mark: _fits(file, mark))
    file.seek(0)
    first = file.readline()
    file.seek(0)
    # Such a first line tells Excel the separator, and is not a row.
    if told := re.match(r'"?sep=([,;\t|])"?\s*$', first):
        delimiter = told[1]
    if first.lstrip().startswith(('{"', "[{", "[\n")):
        raise InputError(f"{path}, line 1: this is JSON; name the file .jsonl or .json")
    if by_tabs and "\t" not in first and delimiter in first:
        raise InputError(f"{path}, line 1: there is no tab, but {delimiter!r}; name the file .csv")
    lines = (
        csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        if by_tabs
        else csv.reader(file, delimiter=delimiter, strict=True)
    )
    rows = itertools.islice(_csv_rows(lines, path), 1 if told else 0, None)
    line, header = next(rows, (1, []))
    if not header:
        raise InputError(f"{path}, line 1: the header is missing")
    header = [_unquoted(name.strip()) for name in header]
    for name in header:
        if name and header.count(name) > 1:
            raise InputError(f"{path}, line {line}: two columns have the name {name!r}; rename or remove one")
    for line, row in rows:
        if len(row) != len(header):
            reason = TSV_LINE_BREAKS if by_tabs and len(row) < len(header) else ""
            wrong = f"expected {len(header)} fields, as in the header, got {len(row)}{reason}"
            raise InputError(f"{path}, line {line}: {wrong}")
        yield line, dict(zip(header, map(_unquoted, row) if by_tabs else row))


def _fits(file: TextIO, delimiter: str) -> tuple[bool, int]:
    """Return whether header and first row have the same number of fields, more than one, and the header's number."""
    file.seek(0)
    counts = []
    with contextlib.suppress(csv.Error):
        for row in itertools.islice(filter(None, csv.reader(file, delimiter=delimiter, strict=True)), 2):
            counts.append(len(row))
    return len(set(counts)) == 1 and counts[0] > 1, sum(counts[:1])


def _unquoted(field: str) -> str:
    is_quoted = len(field) >= 2 and field[0] == field[-1] == '"'
    return field[1:-1].replace('""', '"') if is_quoted else field


def _csv_rows(reader: Iterator[list[str]], path: str) -> Iterator[tuple[int, list[str]]]:
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


def _json(file: TextIO, path: str) -> Iterator[Row]:
    """Yield the objects of a file of one object per line, or of a file that is a list of objects."""
    start = file.read(1)
    while start.isspace():
        start = file.read(1)
    file.seek(0)
    if start == "[":
        yield from _json_list(file.read(), path)
        return
    for line, given in enumerate(file, 1):
        if text := given.strip():
            where = f"{path}, line {line}"
            row, end = _decoded(text, 0, where)
            if text[end:]:
                raise InputError(f"{where}: {shown(text[end:])} after the object; expected one JSON object per line")
            yield line, row


def _json_list(text: str, path: str) -> Iterator[Row]:
    at, counted, line, separator = text.index("["), 0, 1, "["
    while text[at : at + 1] == separator:
        at = _after_spaces(text, at + 1)
        line, counted = line + text.count("\n", counted, at), at
        if text[at : at + 1] == "]":
            if separator == ",":
                raise InputError(f"{path}, line {line}: a comma before the ] at the end; remove it")
            break
        row, at = _decoded(text, at, f"{path}, line {line}")
        yield line, row
        at, separator = _after_spaces(text, at), ","
    if text[at:].strip() != "]":
        line += text.count("\n", counted, at)
        raise InputError(f"{path}, line {line}: expected a comma, and another object of the list, or ] at the end")


def _after_spaces(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def _decoded(text: str, at: int, where: str) -> tuple[dict[str, Any], int]:
    """Return the object at a position, and the position after it."""
    try:
        row, end = _DECODER.raw_decode(text, at)
        if "\\u" in text[at:end]:
            # JSON may have halves of a character, which no tokenizer takes.
            json.dumps(row, ensure_ascii=False).encode()
    except RecursionError:
        raise InputError(f"{where}: the JSON has too many levels") from None
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("unicode_escape").decode()
        raise InputError(f"{where}: {half} is half of a character; remove it") from None
    except ValueError as error:
        reason = getattr(error, "msg", str(error))
        raise InputError(f"{where}: {reason}; expected one JSON object per line, or a list of objects") from None
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected a JSON object, got {shown(row)}")
    return row, end


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repeated_keys)


def _of_its_own_keys(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose tools and calls of tools have no nulls: Parquet gives each one the keys of all others."""
    for key in ("messages", "conversations"):
        for message in row.get(key) or ():
            if isinstance(message, dict) and message.get("tool_calls"):
                message["tool_calls"] = _without_nulls(message["tool_calls"])
    return {**row, "tools": _without_nulls(row["tools"])} if "tools" in row else row


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _parquet(path: str) -> Iterator[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        batches = ParquetFile(path).iter_batches()
        yield from enumerate((_of_its_own_keys(row) for batch in batches for row in batch.to_pylist()), 1)
    except (ArrowException, OSError) as error:
        raise InputError(f"{path} is not a Parquet file: {str(error).partition(chr(10))[0]}") from None
