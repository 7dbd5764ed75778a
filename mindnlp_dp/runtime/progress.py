"""How far each rank of a host is, for whoever watches the job: a few numbers a rank in a file in memory.

Goes in: what a rank does (an update begins, a collective is waited in). Comes out: a record of each rank, which the
launcher and ``mindnlp-dp status`` read while the rank is busy, or hangs: a rank that hangs cannot answer, but what it
wrote last stands there.

Where no launcher asked for it, nothing is written, and a call costs a comparison. Times are CLOCK_MONOTONIC's, which
all processes of a host share.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

# changes, pid, id of the main thread, updates done, whether the rank has met the others, how many are left, how many
# requests for checkpoints it has met; when something changed last, since when it waits, loss, samples so far; what it
# waits in.
_FORMAT = struct.Struct("<QQQq?3xIQ4d96s")
RECORD_BYTES = 256
# When its process began, at the record's end: written once, before the rest, which may be read while it is written.
_BORN = struct.Struct("<Q")
_BORN_BEGIN = RECORD_BYTES - _BORN.size
# Behind the ranks' records, one of the job's: the number of the last checkpoint that was asked for; where they are.
_REQUEST = struct.Struct("<Q")
_SYSTEM = struct.Struct("<128s")
_SYSTEM_BEGIN = 64 - RECORD_BYTES
# The name of the file in the job's log folder, where it is not "progress".
VARIABLE = "MINDNLP_DP_PROGRESS"


@dataclass(frozen=True)
class Progress:
    """Of a rank.

    Attributes:
        changes: how many times something was reported; 0: the rank has not begun.
        pid: of its process.
        thread: of its main thread, as :mod:`faulthandler` names it.
        update: the update that is next.
        has_met: whether it has joined the others, so that it reports from then on.
        members: how many ranks there were, it among them, when some had been lost; 0 before.
        saved: the number of the last request for a checkpoint when one was written.
        changed: when it reported last, by the monotonic clock.
        since: when it began to wait for others; 0 where it does not.
        loss: of its last update; NaN before.
        samples: that all ranks have trained on.
        waits_in: what it waits in; "" where it does not.
        born: when its process began (:func:`state_and_birth_of`): its number may be another process's later.
    """

    changes: int = 0
    pid: int = 0
    thread: int = 0
    update: int = 0
    has_met: bool = False
    members: int = 0
    saved: int = 0
    changed: float = 0.0
    since: float = 0.0
    loss: float = float("nan")
    samples: float = 0.0
    waits_in: str = ""
    born: int = 0

    @property
    def state(self) -> str:
        """Of its process, on this host, as proc(5) has it; "" where it has ended, or has not begun."""
        state, born = state_and_birth_of(self.pid) if self.pid else ("", 0)
        return state if born == self.born else ""


class Reporter:
    """Of this process, into its record of the file."""

    def __init__(self, path: Path, rank: int) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._begin = rank * RECORD_BYTES
        # Called once, when this rank first waits for others: to meet them.
        self.before_it_meets: Optional[Callable[[], None]] = None
        # Called behind every update.
        self.after_update: Optional[Callable[[], None]] = None
        self._depth = 0
        self._thread = threading.get_ident()
        self._pid = os.getpid()
        _BORN.pack_into(self._memory, self._begin + _BORN_BEGIN, state_and_birth_of(self._pid)[1])
        self._changes, self._update, self._has_met, self._saved = 0, 0, False, 0
        self._members = 0
        self._since, self._loss, self._samples, self._waits_in = 0.0, float("nan"), 0.0, b""
        self._write()

    def _write(self) -> None:
        self._changes += 1
        # Packed first: pack_into begins with zeros, and who reads them takes this rank for one that has not begun.
        self._memory[self._begin : self._begin + _FORMAT.size] = _FORMAT.pack(
            self._changes, self._pid, self._thread, self._update, self._has_met,
            self._members, self._saved, time.monotonic(), self._since, self._loss, self._samples, self._waits_in,
        )  # fmt: skip

    def meet(self) -> None:
        self._has_met = True
        self._write()

    def note_members(self, number: int) -> None:
        self._members = number
        self._write()

    def step(self) -> None:
        """Something was done."""
        self._write()

    @property
    def request(self) -> int:
        return int(_REQUEST.unpack_from(self._memory, len(self._memory) - RECORD_BYTES)[0])

    @property
    def wants_checkpoint(self) -> bool:
        return self.request > self._saved

    def has_saved(self, request: int) -> None:
        self._saved = request
        self._write()

    def finish_update(self, update: int, loss: Optional[float], samples: float) -> None:
        self._update = update
        self._loss = self._loss if loss is None else loss
        self._samples += samples
        self._write()
        if self.after_update is not None:
            self.after_update()

    def begin_to_wait(self, what: str) -> None:
        """Of calls within calls, the outermost counts; other threads' do not, for they keep nobody waiting."""
        if threading.get_ident() != self._thread:
            return
        if self.before_it_meets is not None:
            self.before_it_meets()
            self.before_it_meets = None
        self._depth += 1
        if self._depth == 1:
            self._waits_in, self._since = what.encode()[:96], time.monotonic()
            self._write()

    def end_wait(self) -> None:
        if threading.get_ident() != self._thread:
            return
        self._depth -= 1
        if self._depth == 0:
            self._waits_in, self._since = b"", 0.0
            self._write()


_reporter: Optional[Reporter] = None


def report_to(path: Path, rank: int) -> Reporter:
    """From now on, this process says there how far it is."""
    global _reporter
    _reporter = Reporter(path, rank)
    return _reporter


def reporter() -> Optional[Reporter]:
    """This process's; None where nobody asked for it."""
    return _reporter


def meet() -> None:
    """This rank has joined the others."""
    if _reporter is not None:
        _reporter.meet()


def note_members(number: int) -> None:
    """This rank goes on with so many, of which it is one, for others were lost."""
    if _reporter is not None:
        _reporter.note_members(number)


def step() -> None:
    """This rank has done something."""
    if _reporter is not None:
        _reporter.step()


def checkpoint_request() -> int:
    """The number of the last request for a checkpoint; 0: there was none.

    Who writes one asks for it before, and says behind it, by :func:`has_saved`, that it has been met.
    """
    return 0 if _reporter is None else _reporter.request


def wants_checkpoint() -> bool:
    """Whether the launcher has asked this rank for a checkpoint since it last wrote one."""
    return _reporter is not None and _reporter.wants_checkpoint


def has_saved(request: int) -> None:
    """A checkpoint was written, all of it behind that request."""
    if _reporter is not None:
        _reporter.has_saved(request)


def finish_update(update: int, losses: Sequence[tuple[float, float]], samples: float) -> None:
    """The update before number ``update`` is done, with this rank's losses and their weights, and all's samples."""
    if _reporter is not None:
        weight = sum(weight for _, weight in losses)
        loss = sum(loss * weight for loss, weight in losses) / weight if weight else None
        _reporter.finish_update(update, loss, samples)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Within it, this rank may wait for others."""
    if _reporter is None:
        yield
        return
    _reporter.begin_to_wait(what)
    try:
        yield
    finally:
        _reporter.end_wait()


def state_and_birth_of(pid: int) -> tuple[str, int]:
    """A process's state as proc(5) has it, such as "T", stopped, and when it began, in clock ticks behind the system.

    ("", 0) where there is none, or it has ended and only waits for its parent to notice.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return ("", 0) if fields[0] in ("Z", "X") else (fields[0], int(fields[19]))
    except (OSError, IndexError):
        return "", 0


def create(path: Path, num_ranks: int) -> None:
    """A file for so many ranks of this system, none of which has begun."""
    data = bytearray((num_ranks + 1) * RECORD_BYTES)
    _SYSTEM.pack_into(data, len(data) + _SYSTEM_BEGIN, _this_system())
    # A rank of an earlier try, on a host that was cut off, may still write to the old one.
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def is_of_this_system(path: Path) -> bool:
    """Whether the ranks of a file have their process ids and their clock where this process has its own."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    is_whole = len(data) >= 2 * RECORD_BYTES
    return is_whole and _SYSTEM.unpack_from(data, len(data) + _SYSTEM_BEGIN)[0].rstrip(b"\0") == _this_system()


def _this_system() -> bytes:
    """Another one on each host, and in each container that has process ids of its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}".encode()
    except OSError:
        # A sandbox that hides them.
        return os.uname().nodename.encode()


def ask_for_checkpoint(path: Path, number: int) -> None:
    """The ``number``-th time, from 1 on."""
    with open(path, "r+b") as file:
        file.seek(-RECORD_BYTES, os.SEEK_END)
        file.write(_REQUEST.pack(number))


def read(path: Path) -> list[Progress]:
    """Of all ranks; empty where there is no such file."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    found = []
    for begin in range(0, len(data) - 2 * RECORD_BYTES + 1, RECORD_BYTES):
        *numbers, name = _FORMAT.unpack_from(data, begin)
        (born,) = _BORN.unpack_from(data, begin + _BORN_BEGIN)
        fields = [*numbers, name.rstrip(b"\0").decode(errors="replace"), born]
        found.append(Progress(*fields))
    return found
