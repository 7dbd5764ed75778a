"""Download the course's emotion data, Baidu's archive of dialogues with three emotions, into data/emotion.

    python homework/download_emotion.py [FOLDER]

An archive that is already in the folder, for example copied by hand, is used; an incomplete one is rejected.
"""

from __future__ import annotations

import hashlib
import http.client
import sys
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

from mindnlp_dp.runtime.atomic_write import atomic_write

URL = "https://baidu-nlp.bj.bcebos.com/emotion_detection-dataset-1.0.0.tar.gz"
# The hash that PaddleNLP publishes for this data.
MD5 = "512d256add5f9ebae2c101b74ab053e9"
FILES = ("train.tsv", "dev.tsv", "test.tsv")
TIMEOUT = 30


class DownloadError(Exception):
    """Raised if the data cannot be downloaded; the message says why and what the user can do instead."""


def fetch(folder: Path, url: str = URL, md5: str = MD5) -> None:
    """Write the three files to ``folder``; each file is complete or does not exist."""
    archive = folder / url.rpartition("/")[2]
    if not archive.exists():
        _download(url, archive)
    found = hashlib.md5(archive.read_bytes()).hexdigest()
    if found != md5:
        raise DownloadError(
            f"{archive} ({archive.stat().st_size} bytes) is not the archive that was published: its MD5 is {found}, "
            f"expected {md5}; remove it, and try again"
        )
    with tarfile.open(archive) as opened:
        for name in FILES:
            member = opened.extractfile(f"data/{name}")
            assert member is not None, f"the archive with this hash holds data/{name}"
            with atomic_write(folder / name) as temporary:
                temporary.write_bytes(member.read())


def _download(url: str, archive: Path) -> None:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            content = answer.read()
    except http.client.IncompleteRead as error:
        got, lacking = len(error.partial), error.expected
        raise DownloadError(f"{url} was interrupted after {got} bytes, {lacking} are missing; try again") from None
    except (urllib.error.URLError, OSError) as error:
        raise DownloadError(
            f"{url} cannot be reached ({getattr(error, 'reason', error)}); download it on a machine with a "
            f"network, copy it to {archive}, and run this command again"
        ) from None
    with atomic_write(archive) as temporary:
        temporary.write_bytes(content)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "data/emotion")
    try:
        fetch(folder)
    except DownloadError as error:
        sys.exit(f"error: {error}")
    for name in FILES:
        with (folder / name).open(encoding="utf-8") as file:
            print(f"{folder / name}: {sum(1 for _ in file) - 1} samples")


if __name__ == "__main__":
    main()
