"""This module keeps the rows of a split in one file of a host, which its processes map instead of copying."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np

from mindnlp_dp.language_modeling.conversations import Conversation
from mindnlp_dp.language_modeling.rows import TokenRows

# Rows, and the numbers of truncated texts and of those without labels.
Split = tuple[TokenRows, int, int]

# Changes when the same texts and settings give other rows, or the file has another form.
_VERSION = 1
_HEADER_BYTES = 512


def key_of(conversations: Sequence[Conversation], settings: Sequence[Any]) -> str:
    """Return a hash of the texts, and of the settings, of which the rows are made."""
    found = hashlib.blake2b(repr((_VERSION, *settings)).encode(), digest_size=16)
    for each in conversations:
        rejected = None if each.rejected is None else list(each.rejected)
        text = repr((list(each), each.tools, rejected, each.is_document))
        found.update(text.encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def cached(folder: str, key: str, make: Callable[[], Split]) -> Split:
    """Return the split from its file, which is made if it is missing or broken.

    Rows stay in memory if the file cannot be written, or without a folder.
    """
    if not folder:
        return make()
    path = Path(folder).expanduser() / f"{key}.rows"
    found = _read(path, key)
    if found is None:
        found = make()
        with contextlib.suppress(OSError):
            _write(path, key, found)
            found = _read(path, key) or found
    return found


def _write(path: Path, key: str, split: Split) -> None:
    rows, *counts = split
    checksum = zlib.crc32(rows.codes.data, zlib.crc32(rows.bounds.data))
    header = json.dumps([key, len(rows.bounds), len(rows.codes), checksum, *counts])
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".rows-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(header.encode().ljust(_HEADER_BYTES))
            rows.bounds.tofile(file)
            rows.codes.tofile(file)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _read(path: Path, key: str) -> Optional[Split]:
    try:
        with path.open("rb") as file:
            found, num_bounds, num_codes, checksum, *counts = json.loads(file.read(_HEADER_BYTES))
            bounds = np.fromfile(file, np.int64, num_bounds)
            codes = np.memmap(path, np.int32, "r", _HEADER_BYTES + 8 * num_bounds, (num_codes,))
        is_complete = zlib.crc32(codes.data, zlib.crc32(bounds.data)) == checksum
        truncated, without_labels = counts
    except (OSError, ValueError, TypeError):
        return None
    return (TokenRows(codes, bounds), truncated, without_labels) if is_complete and found == key else None
