"""This module reads the stacks of ranks that hang, for the message about the hang."""

from __future__ import annotations

import os
import re
import signal
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path

from mindnlp_dp.launch.processes.exit_status import read_text
from mindnlp_dp.runtime.heartbeat import RankHeartbeat

# The limit for all ranks of a host together: their stacks go to the first host in one message (rendezvous/protocol.py).
_MOST_STACKS_BYTES = 1 << 20

# The signal at which ranks write their stacks: not SIGUSR1, which scripts use (Slurm sends it before the time limit).
SIGNAL = signal.SIGRTMAX - 1

_STACK_SECONDS = 1.0

_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


def stacks_of(ranks: Mapping[int, RankHeartbeat], log_dir: Path) -> dict[int, str]:
    """Return what :mod:`faulthandler`, set up by the workers for a signal, writes for the ranks that answer."""
    asked = {}
    for number, rank in ranks.items():
        if rank.state and _handles(rank.pid, SIGNAL):
            try:
                os.kill(rank.pid, SIGNAL)
                asked[number] = log_dir / f"worker_{number}.stacks"
            except OSError:
                pass
    most = _MOST_STACKS_BYTES // max(1, len(asked))
    deadline, texts = time.monotonic() + _STACK_SECONDS, dict[int, str]()
    while time.monotonic() < deadline:
        before, texts = texts, {number: read_text(path) for number, path in asked.items()}
        if all(texts.values()) and texts == before:
            break
        time.sleep(0.05)
    return {number: text[:most] for number, text in texts.items()}


def _handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, which would end it at its start or at Python's very end."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", read_text(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def describe_exit(rank: RankHeartbeat, stacks: str) -> str:
    """Describe where the process of a rank is whose script has ended: in some thread of the user's, or in a library."""
    frames = [*_main_thread(stacks, rank.thread), *(match.groupdict() for match in _FRAME.finditer(stacks))]
    frame = _own_frame(frames)
    return f"it is in {frame}" if frame else "Python has exited, and libraries such as MPI clean up"


def describe_location(rank: RankHeartbeat, stacks: str, is_stopped: bool) -> str:
    """Describe where a rank is that waits for no other rank, as far as it answers."""
    if not rank.pid:
        return "it has not started"
    if is_stopped:
        return f"its process, {rank.pid}, is stopped (SIGSTOP)"
    frame = _own_frame(_main_thread(stacks, rank.thread))
    return f"it is in {frame}, in update {rank.update}" if frame else f"it is in update {rank.update}"


def _main_thread(stacks: str, thread: int) -> list[Mapping[str, str]]:
    """Return the frames of one thread from a rank's stacks, innermost first."""
    for part in stacks.split("\n\n"):
        if f"0x{thread:016x}" in part.partition("\n")[0]:
            return [match.groupdict() for match in _FRAME.finditer(part)]
    return []


def _own_frame(frames: list[Mapping[str, str]]) -> str:
    """Return the innermost frame of the user's code, else the innermost of all; "" without frames."""
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    # This file is in mindnlp_dp/launch/processes/.
    ours = str(Path(__file__).resolve().parents[2])
    own = [f for f in frames if not f["file"].startswith((*libraries, ours, "<"))] or frames
    return f"{own[0]['file']}:{own[0]['line']}, in {own[0]['function']}()" if own else ""
