"""This module writes and reads the heartbeats of a host's ranks: a few numbers per rank in a memory-mapped file.

Each rank writes its record when it does something or begins to wait in a collective, and when its script has ended. The
launcher reads the records while ranks are busy or hang: a rank that hangs cannot answer, but its last record is still
there. The file is in the launcher's own folder in memory (:class:`~mindnlp_dp.runtime.scratch_dir.ScratchDir`).

The functions of this module belong to one :class:`HeartbeatWriter`, which writes to memory of this process only until
:func:`report_to` is called. Times are CLOCK_MONOTONIC's, which all processes of a host share.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional, Union

# The fields of RankHeartbeat up to blocked_in, and the metrics of _SPEED, which are NaN if unknown.
_FORMAT = struct.Struct("<QQQQqQ?7x3d96s4d")
_SPEED = ("step_seconds", "samples_per_second", "input_tokens_per_second", "mfu")
# At the record's end: time of the script's end, exit code, whether the rank gave up waiting for another rank, and,
# written last, how far its end has come: 0 while the script runs, 1 when its main thread has ended, 2 with all threads.
_END, RECORD_BYTES = struct.Struct("<dB??5x"), 256
_END_BEGIN, _STAGE = RECORD_BYTES - _END.size, 10
# After the ranks' records, one of the job: the number of the last checkpoint request.
_REQUEST = struct.Struct("<Q")


@dataclass(frozen=True)
class RankHeartbeat:
    """The record of one rank, as the launcher reads it; times are in seconds of the monotonic clock."""

    changes: int = 0  # number of reports so far; 0 if the rank has not begun
    pid: int = 0
    born: int = 0  # start time of the process (state_and_birth_of): another process may get its pid later
    thread: int = 0  # id of its main thread, as faulthandler prints it
    update: int = 0  # number of the next update
    saved: int = 0  # number of the last checkpoint request that it has met
    has_joined: bool = False  # whether it has joined the others; it reports from then on
    changed: float = 0.0  # time of its last report
    since: float = 0.0  # time when it began to wait for others; 0 if it does not wait
    loss: float = float("nan")  # of its last update; NaN before
    blocked_in: str = ""  # name of the call that it waits in; "" if it does not wait
    speed: Mapping[str, float] = field(default_factory=dict)  # the last log line's (docs/metrics.md)
    exit_code: Optional[int] = None  # of its script; None until the main thread has ended
    ended: float = 0.0  # time of that end
    waited: bool = False  # whether it failed because it gave up waiting for another rank
    threads_ended: bool = False  # whether the script's other threads have ended, too

    @property
    def state(self) -> str:
        """State of its process on this host, as in proc(5); "" if it has ended, or has not begun."""
        state, born = state_and_birth_of(self.pid) if self.pid else ("", 0)
        return state if born == self.born else ""


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
    """Create a file for ``num_ranks`` ranks, none of which has begun, and return its memory."""
    with open(path, "x+b") as file:
        file.truncate((num_ranks + 1) * RECORD_BYTES)
        return mmap.mmap(file.fileno(), 0)


def read(memory: mmap.mmap) -> list[RankHeartbeat]:
    """Return the records of all ranks."""
    found = []
    for begin in range(0, len(memory) - RECORD_BYTES, RECORD_BYTES):
        # The end's stage was written last, so it is read first.
        stage = memory[begin + _END_BEGIN + _STAGE]
        ended, exit_code, waited, _ = _END.unpack_from(memory, begin + _END_BEGIN)
        values = _FORMAT.unpack_from(memory, begin)
        *numbers, name = values[: -len(_SPEED)]
        # A record that was never written has zeros.
        known = {metric: value for metric, value in zip(_SPEED, values[-len(_SPEED) :]) if value > 0}
        end = [exit_code, ended, waited, stage > 1] if stage else []
        fields = [*numbers, name.rstrip(b"\0").decode(errors="replace"), known, *end]
        found.append(RankHeartbeat(*fields))
    return found


def ask_for_checkpoint(memory: mmap.mmap, number: int) -> None:
    """Request a checkpoint for the ``number``-th time, counted from 1."""
    _REQUEST.pack_into(memory, len(memory) - RECORD_BYTES, number)


class HeartbeatWriter:
    """Writes the heartbeats of this process to its record; ``after_update`` is called after every update."""

    def __init__(self) -> None:
        self._memory: Union[mmap.mmap, bytearray] = bytearray(2 * RECORD_BYTES)
        self._begin = self._born = 0
        self.after_update: Callable[[], None] = lambda: None
        self._thread, self._pid = threading.get_ident(), os.getpid()
        self._changes, self._update, self._has_joined, self._saved = 0, 0, False, 0
        self._since, self._loss, self._waits_in = 0.0, float("nan"), b""
        self._speed = [float("nan")] * len(_SPEED)

    def report_to(self, path: Path, rank: int) -> mmap.mmap:
        """Report this process's progress to a file from now on, and return the memory of all ranks."""
        with open(path, "r+b") as file:
            self._memory = memory = mmap.mmap(file.fileno(), 0)
        self._begin, self._thread, self._pid = rank * RECORD_BYTES, threading.get_ident(), os.getpid()
        self._born = state_and_birth_of(self._pid)[1]
        self.step()
        return memory

    def step(self) -> None:
        """Report that this rank has done something."""
        self._changes += 1
        # Packed first, because pack_into writes zeros first, and to a reader they mean that this rank has not begun.
        self._memory[self._begin : self._begin + _FORMAT.size] = _FORMAT.pack(
            self._changes, self._pid, self._born, self._thread, self._update, self._saved, self._has_joined,
            time.monotonic(), self._since, self._loss, self._waits_in, *self._speed,
        )  # fmt: skip

    def mark_joined(self) -> None:
        """Report that this rank has joined the others."""
        self._has_joined = True
        self.step()

    def checkpoint_request(self) -> int:
        """Return the number of the last checkpoint request; 0 if there was none.

        A caller that writes a checkpoint reads this number before, and passes it to :meth:`has_saved` afterwards.
        """
        return int(_REQUEST.unpack_from(self._memory, len(self._memory) - RECORD_BYTES)[0])

    def wants_checkpoint(self) -> bool:
        """Return whether the launcher has asked this rank for a checkpoint since it last wrote one."""
        return self.checkpoint_request() > self._saved

    def has_saved(self, request: int) -> None:
        """Report that a checkpoint was written, all of it after that request."""
        self._saved = request
        self.step()

    def finish_update(self, update: int, losses: Sequence[tuple[float, float]]) -> None:
        """Report that update ``update - 1`` is done: this rank's losses with their weights."""
        self._update = update
        weight = sum(weight for _, weight in losses)
        self._loss = sum(loss * weight for loss, weight in losses) / weight if weight else self._loss
        self.step()
        self.after_update()

    def report_speed(self, metrics: Mapping[str, float]) -> None:
        """Report the metrics of a log line, by their names in docs/metrics.md."""
        self._speed = [metrics.get(name, float("nan")) for name in _SPEED]
        self.step()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Report, within the block, that this rank may wait for others in ``what``.

        Only the outermost of nested waits counts, in the main thread: other threads keep no rank waiting.
        """
        counts = threading.get_ident() == self._thread and not self._waits_in
        if counts:
            self._waits_in, self._since = what.encode()[:96], time.monotonic()
            self.step()
        try:
            yield
        finally:
            if counts:
                self._waits_in, self._since = b"", 0.0
                self.step()

    def record_end(self, exit_code: int, *, waited: bool) -> None:
        """Record that the main thread has ended; ``waited``: whether this rank gave up waiting for another rank."""
        begin = self._begin + _END_BEGIN
        self._memory[begin : begin + _END.size] = _END.pack(time.monotonic(), exit_code, waited, False)
        self._memory[begin + _STAGE] = 1

    def record_end_of_threads(self) -> None:
        """Record that all other threads of the script have ended, too."""
        self._memory[self._begin + _END_BEGIN + _STAGE] = 2


writer = HeartbeatWriter()
report_to, step, mark_joined, waiting = writer.report_to, writer.step, writer.mark_joined, writer.waiting
checkpoint_request, wants_checkpoint, has_saved = writer.checkpoint_request, writer.wants_checkpoint, writer.has_saved
finish_update, report_speed = writer.finish_update, writer.report_speed
