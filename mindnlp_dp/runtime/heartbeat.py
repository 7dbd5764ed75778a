"""This module writes and reads the heartbeats of a host's ranks: a few numbers per rank in a memory-mapped file.

Each rank writes its record when it does something or begins to wait in a collective, and a last time when its script
has ended. The launcher and ``mindnlp-dp status`` read the records while ranks are busy or hang: a rank that hangs
cannot answer, but its last record is still there. The launcher keeps the memory of an attempt, so neither a removed
file nor a full disk keeps a rank's exit code from it.

If no launcher asked for it, nothing is written, and a call costs one comparison. Times are CLOCK_MONOTONIC's, which all
processes of a host share.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional, Union

# changes, pid, id of the main thread, next update, whether the rank has joined the others, number of surviving ranks,
# number of the last checkpoint request that it has met; time of the last report, time when its wait began, loss,
# samples so far; name of the call that it waits in; the metrics of _SPEED.
_FORMAT = struct.Struct("<QQQq?3xIQ4d96s4d")

# The metrics of the last log line that the record holds; NaN if one is unknown.
_SPEED = ("step_seconds", "samples_per_second", "input_tokens_per_second", "mfu")

RECORD_BYTES = 256

# Start time of the process, at the record's end: written once, before the rest, which may be read while it is written.
_BORN = struct.Struct("<Q")

_BORN_BEGIN = RECORD_BYTES - _BORN.size

# How the script ended, before the start time: time, exit code, whether the rank gave up waiting for another rank, and,
# written last, whether it has ended.
_END = struct.Struct("<dB??5x")

_END_BEGIN, _HAS_ENDED = _BORN_BEGIN - _END.size, 10

# After the ranks' records, one of the job: the number of the last checkpoint request, and the system of the ranks.
_REQUEST = struct.Struct("<Q")

_SYSTEM = struct.Struct("<128s")

_SYSTEM_BEGIN = 64 - RECORD_BYTES

# The environment variable with the name of the file in the job's log folder, if that is not "progress".
VARIABLE = "MINDNLP_DP_PROGRESS"


@dataclass(frozen=True)
class Status:
    """How a rank's script ended, as the rank has recorded it; a rank that has ended without one has failed.

    Attributes:
        time: time of the end, by the clock of :func:`time.monotonic`, which users cannot set.
        waited: whether the rank gave up waiting for another rank.
    """

    exit_code: int
    time: float
    waited: bool = False


@dataclass(frozen=True)
class RankHeartbeat:
    """The heartbeat record of one rank, which the launcher reads.

    Attributes:
        changes: number of reports so far; 0 if the rank has not begun.
        pid: id of its process.
        thread: id of its main thread, as :mod:`faulthandler` prints it.
        update: number of the next update.
        has_joined: whether it has joined the others; it reports from then on.
        members: number of surviving ranks, including it, after a loss; 0 before.
        saved: number of the last checkpoint request that it has met.
        changed: time of its last report, by the monotonic clock.
        since: time when it began to wait for others; 0 if it does not wait.
        loss: loss of its last update; NaN before.
        samples: number of samples that all ranks have trained on.
        blocked_in: name of the call that it is blocked in; "" if it does not wait.
        speed: metrics of the last log line, over all ranks (docs/metrics.md).
        born: start time of its process (:func:`state_and_birth_of`), because another process may get its pid later.
        exit_code: exit code of its script; None until it has ended.
    """

    changes: int = 0
    pid: int = 0
    thread: int = 0
    update: int = 0
    has_joined: bool = False
    members: int = 0
    saved: int = 0
    changed: float = 0.0
    since: float = 0.0
    loss: float = float("nan")
    samples: float = 0.0
    blocked_in: str = ""
    speed: Mapping[str, float] = field(default_factory=dict)
    born: int = 0
    exit_code: Optional[int] = None

    @property
    def state(self) -> str:
        """State of its process on this host, as in proc(5); "" if it has ended, or has not begun."""
        state, born = state_and_birth_of(self.pid) if self.pid else ("", 0)
        return state if born == self.born else ""


class HeartbeatWriter:
    """Writes the heartbeats of this process to its record in the file."""

    def __init__(self, path: Path, rank: int) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._begin = rank * RECORD_BYTES
        # Called once, before this rank first waits for others, which is to join them.
        self.before_it_meets: Optional[Callable[[], None]] = None
        # Called after every update.
        self.after_update: Optional[Callable[[], None]] = None
        self._depth = 0
        self._thread = threading.get_ident()
        self._pid = os.getpid()
        _BORN.pack_into(self._memory, self._begin + _BORN_BEGIN, state_and_birth_of(self._pid)[1])
        self._changes, self._update, self._has_met, self._saved = 0, 0, False, 0
        self._members = 0
        self._since, self._loss, self._samples, self._waits_in = 0.0, float("nan"), 0.0, b""
        self._speed = [float("nan")] * len(_SPEED)
        self._write()

    def _write(self) -> None:
        self._changes += 1
        # Packed first, because pack_into writes zeros first, and to a reader they mean that this rank has not begun.
        self._memory[self._begin : self._begin + _FORMAT.size] = _FORMAT.pack(
            self._changes, self._pid, self._thread, self._update, self._has_met,
            self._members, self._saved, time.monotonic(), self._since, self._loss, self._samples, self._waits_in,
            *self._speed,
        )  # fmt: skip

    def record_end(self, exit_code: int, *, waited: bool) -> None:
        """Record how the script ended; ``waited``: whether this rank gave up waiting for another rank."""
        end = _END.pack(time.monotonic(), exit_code, waited, False)
        begin = self._begin + _END_BEGIN
        self._memory[begin : begin + _END.size] = end
        self._memory[begin + _HAS_ENDED] = True

    def mark_joined(self) -> None:
        self._has_met = True
        self._write()

    def set_world_size(self, number: int) -> None:
        self._members = number
        self._write()

    def step(self) -> None:
        """Report that something was done."""
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

    def report_speed(self, metrics: Mapping[str, float]) -> None:
        self._speed = [metrics.get(name, float("nan")) for name in _SPEED]
        self._write()

    def begin_to_wait(self, what: str) -> None:
        """Report the outermost of nested waits, in the main thread only: other threads keep no rank waiting."""
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


_writer: Optional[HeartbeatWriter] = None


def report_to(path: Path, rank: int) -> HeartbeatWriter:
    """Report this process's progress to the file ``path`` from now on, and return its writer."""
    global _writer
    _writer = HeartbeatWriter(path, rank)
    return _writer


def writer() -> Optional[HeartbeatWriter]:
    """Return this process's writer; None if no launcher asked for one."""
    return _writer


def mark_joined() -> None:
    """Report that this rank has joined the others."""
    if _writer is not None:
        _writer.mark_joined()


def set_world_size(number: int) -> None:
    """Report that this rank continues in a group of ``number`` ranks, because others were lost."""
    if _writer is not None:
        _writer.set_world_size(number)


def step() -> None:
    """Report that this rank has done something."""
    if _writer is not None:
        _writer.step()


def checkpoint_request() -> int:
    """Return the number of the last checkpoint request; 0 if there was none.

    A caller that writes a checkpoint reads this number before, and passes it to :func:`has_saved` afterwards.
    """
    return 0 if _writer is None else _writer.request


def wants_checkpoint() -> bool:
    """Return whether the launcher has asked this rank for a checkpoint since it last wrote one."""
    return _writer is not None and _writer.wants_checkpoint


def has_saved(request: int) -> None:
    """Report that a checkpoint was written, all of it after that request."""
    if _writer is not None:
        _writer.has_saved(request)


def finish_update(update: int, losses: Sequence[tuple[float, float]], samples: float) -> None:
    """Report that update ``update - 1`` is done: this rank's losses with their weights, and all ranks' samples."""
    if _writer is not None:
        weight = sum(weight for _, weight in losses)
        loss = sum(loss * weight for loss, weight in losses) / weight if weight else None
        _writer.finish_update(update, loss, samples)


def report_speed(metrics: Mapping[str, float]) -> None:
    """Report the metrics of a log line, by their names in docs/metrics.md."""
    if _writer is not None:
        _writer.report_speed(metrics)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Report, within the block, that this rank may wait for others in ``what``."""
    if _writer is None:
        yield
        return
    _writer.begin_to_wait(what)
    try:
        yield
    finally:
        _writer.end_wait()


def state_and_birth_of(pid: int) -> tuple[str, int]:
    """Return a process's state as in proc(5), such as "T" (stopped), and its start time in clock ticks after boot.

    The result is ("", 0) if the process does not exist, or has ended and only waits for its parent to notice.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return ("", 0) if fields[0] in ("Z", "X") else (fields[0], int(fields[19]))
    except (OSError, IndexError):
        return "", 0


def create(path: Path, num_ranks: int) -> mmap.mmap:
    """Create a file for ``num_ranks`` ranks of this system, none of which has begun, and return its memory.

    The memory stays that of these ranks if the file is removed or replaced.
    """
    data = bytearray((num_ranks + 1) * RECORD_BYTES)
    _SYSTEM.pack_into(data, len(data) + _SYSTEM_BEGIN, _this_system())
    # A rank of an earlier attempt, on a host that was cut off, may still write to the old file.
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "w+b") as file:
        file.write(data)
        file.flush()
        memory = mmap.mmap(file.fileno(), 0)
    temporary.replace(path)
    return memory


def is_of_this_system(path: Path) -> bool:
    """Return whether the ranks of a file have the same process ids and clock as this process."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    is_whole = len(data) >= 2 * RECORD_BYTES
    return is_whole and _SYSTEM.unpack_from(data, len(data) + _SYSTEM_BEGIN)[0].rstrip(b"\0") == _this_system()


def _this_system() -> bytes:
    """Return a name that differs on each host, and in each container that has its own process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}".encode()
    except OSError:
        # A sandbox may hide these files.
        return os.uname().nodename.encode()


def ask_for_checkpoint(memory: mmap.mmap, number: int) -> None:
    """Request a checkpoint for the ``number``-th time, counted from 1."""
    _REQUEST.pack_into(memory, len(memory) - RECORD_BYTES, number)


def read(path: Path) -> list[RankHeartbeat]:
    """Return the records of all ranks; an empty list if the file does not exist."""
    try:
        return parse(path.read_bytes())
    except OSError:
        return []


def parse(data: bytes) -> list[RankHeartbeat]:
    """Return the records of all ranks in the contents of a file."""
    found = []
    for begin in range(0, len(data) - 2 * RECORD_BYTES + 1, RECORD_BYTES):
        values = _FORMAT.unpack_from(data, begin)
        (*numbers, name), speed = values[: -len(_SPEED)], values[-len(_SPEED) :]
        (born,) = _BORN.unpack_from(data, begin + _BORN_BEGIN)
        # A record that was never written has zeros.
        known = {metric: value for metric, value in zip(_SPEED, speed) if value > 0}
        ended = _status(data, begin)
        exit_code = None if ended is None else ended.exit_code
        fields = [*numbers, name.rstrip(b"\0").decode(errors="replace"), known, born, exit_code]
        found.append(RankHeartbeat(*fields))
    return found


def read_statuses(memory: mmap.mmap, ranks: Iterable[int]) -> dict[int, Status]:
    """Return the statuses of those of these ranks that have recorded one."""
    found = {rank: _status(memory, rank * RECORD_BYTES) for rank in ranks}
    return {rank: status for rank, status in found.items() if status is not None}


def _status(data: Union[bytes, mmap.mmap], begin: int) -> Optional[Status]:
    # Whether the rank has ended is written last and read first.
    if not data[begin + _END_BEGIN + _HAS_ENDED]:
        return None
    ended, exit_code, waited, _ = _END.unpack_from(data, begin + _END_BEGIN)
    return Status(exit_code, ended, waited)
