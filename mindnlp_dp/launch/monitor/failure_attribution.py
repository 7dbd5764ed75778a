"""Find which rank ended a job, and how: from ranks' records, their processes' exit codes, and what mpirun printed.

:mod:`mindnlp_dp.launch.monitor.attempt_monitor` calls it. A rank's own record counts most. A rank that gave up waiting
for another is not to blame: the other rank is.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

from mindnlp_dp.launch.membership import Host
from mindnlp_dp.launch.monitor.snapshot import JobSnapshot, first_lost
from mindnlp_dp.launch.processes.attempt import Attempt
from mindnlp_dp.launch.processes.exit_status import head, read_text, tail
from mindnlp_dp.runtime.heartbeat import RankHeartbeat

# The exit codes of processes that are ended because another one failed.
_BY_OTHERS = (-signal.SIGTERM, -signal.SIGABRT, 128 + signal.SIGTERM, 14)

# How many logs are shown if it is not known which rank failed.
_MOST_LOGS = 4


@dataclass(frozen=True)
class Failure:
    """The rank that ended the job, the job's exit code (128 + N after signal N, as in a shell), and what happened.

    ``message`` explains what the rank's log cannot.
    """

    rank: Optional[int]
    exit_code: int
    what: str
    message: str = ""


def find_failure(snapshot: JobSnapshot, hosts: Sequence[Host], attempt: Attempt) -> Optional[Failure]:
    """Return how an attempt failed; None if it succeeded."""
    log_dir = Path(attempt.log_dir)
    threads = snapshot.with_threads if snapshot.are_processes_over else []
    if snapshot.has_succeeded and not threads and not snapshot.silent:
        # A host that is lost now does not matter.
        return None
    lost = first_lost(hosts)
    if lost is not None and all(rank.waited for rank in snapshot.failed.values()):
        rank = replace(attempt, index=hosts.index(lost)).ranks.start
        return Failure(rank, 1, "was lost with its host", f"host {lost.name} is lost: {lost.lost}")
    failure = find_failed_rank(snapshot) or _find_failed_mpirun(snapshot, log_dir)
    if threads and (failure is None or failure.rank is None):
        code = failure.exit_code if failure is not None else 1
        failure = Failure(threads[0], code, "was ended by another thread after the end of its main thread,")
    if failure is not None and failure.what == _killed(signal.SIGKILL):
        why = "often for lack of memory"
        if snapshot.oom_kills:
            why = f"and the kernel has killed {snapshot.oom_kills} processes of this host meanwhile, for lack of memory"
        failure = replace(failure, what=f"{failure.what}, {why},")
    missing = [rank for rank in range(len(snapshot.ranks)) if rank not in snapshot.ends]
    # Exit codes do not outweigh that: mpirun exits with 0 after it has lost a host, and Python reads 0 for each process
    # where SIGCHLD is ignored.
    if failure is None and missing:
        return Failure(missing[0], 1, "exited without reporting a status")
    if failure is not None and failure.rank is None and not failure.what and snapshot.has_begun:
        what = f"mpirun ended with exit code {failure.exit_code}, and ranks {missing} have not recorded their end,"
        return replace(failure, what=what, message=_logs(log_dir, missing[:_MOST_LOGS]))
    return failure


def _logs(log_dir: Path, ranks: Sequence[int]) -> str:
    """Return the beginning of mpirun's output, where MPI says why it aborts, and the ends of these ranks' logs."""
    logs = [f"worker_{rank}.log ends:\n{tail(log_dir / f'worker_{rank}.log')}" for rank in ranks]
    return "\n".join([f"launcher.log begins:\n{head(log_dir / 'launcher.log')}", *logs])


def find_failed_rank(snapshot: JobSnapshot) -> Optional[Failure]:
    """Return which rank failed first, and how, judged by its record or its own process; None if none failed."""
    if failed := snapshot.failed:
        rank = min(failed, key=lambda r: (failed[r].waited, failed[r].ended))
        return _find_missing(rank, snapshot) if failed[rank].waited else _recorded(rank, failed[rank])
    if snapshot.silent:
        return _find_silent(snapshot.silent)
    return None


def _find_failed_mpirun(snapshot: JobSnapshot, log_dir: Path) -> Optional[Failure]:
    """Return what mpirun's exit code and output say, where ranks are its children; None if that is nothing."""
    code = next((p.returncode for p in snapshot.exited if p.rank is None and p.returncode), 0)
    if code < 0:
        return Failure(None, 128 - code, f"mpirun {_killed(-code)}")
    if not snapshot.exited or (snapshot.has_succeeded and not snapshot.with_threads):
        return None
    return _read_mpirun(log_dir, code) or (Failure(None, code, "") if code else None)


def _find_missing(waiting: int, snapshot: JobSnapshot) -> Failure:
    """Return the rank for which ``waiting`` and others gave up waiting: it is gone, has ended, or is still busy."""
    ends = snapshot.ends
    code = ends[waiting].exit_code or 1
    if snapshot.silent:
        return _find_silent(snapshot.silent)
    if left := {rank: end for rank, end in ends.items() if not end.waited}:
        rank = min(left, key=lambda r: left[r].ended)
        before = ends[waiting].ended - left[rank].ended
        return Failure(rank, code, f"reached its end, and rank {waiting} waited {before:.0f} s longer for it,")
    busy = next((rank for rank in range(len(snapshot.ranks)) if rank not in ends), None)
    if busy is None:
        return _recorded(waiting, ends[waiting])
    return Failure(busy, code, f"was still busy elsewhere when rank {waiting} stopped waiting for it,")


def _recorded(rank: int, end: RankHeartbeat) -> Failure:
    # A code above 128 is the script's own too: a rank that a signal has killed records nothing.
    return Failure(rank, end.exit_code or 1, f"failed with exit code {end.exit_code}")


def _find_silent(silent: dict[int, int]) -> Failure:
    """Return the rank that left first, of those that ended without a record; a library then kills the others."""
    rank = min(silent, key=lambda rank: (silent[rank] != 0, silent[rank] in _BY_OTHERS))
    code = silent[rank]
    return Failure(rank, 128 - code, _killed(-code)) if code < 0 else Failure(rank, code or 1, _left(code))


def _read_mpirun(log_dir: Path, code: int) -> Optional[Failure]:
    """Return the rank that mpirun names in its output as the one that ended; its ranks are not our children.

    Args:
        code: exit code of mpirun, which is the one that a rank, or MPI itself, has passed to MPI_Abort.
    """
    said = read_text(log_dir / "launcher.log")
    if killed := re.search(r"process rank (\d+) with PID \d+.*?exited on\s+signal (\d+)", said, re.DOTALL):
        return Failure(int(killed[1]), 128 + int(killed[2]), _killed(int(killed[2])))
    if peer := re.search(r"peer process has unexpectedly disconnected.*?Peer host:\s+(\S+)", said, re.DOTALL):
        # The rank that aborts is not to blame: it has lost a rank of another host.
        return Failure(None, code or 1, f"a rank on {peer[1]} exited without reporting a status", _logs(log_dir, []))
    if aborted := re.search(r"process rank (\d+) with PID \d+ on node \S+ calling\s+\"abort\"", said):
        what = f"aborted the MPI job with exit code {code}"
        return Failure(int(aborted[1]), code or 1, what, _logs(log_dir, [int(aborted[1])]))
    if left := re.search(r"Process name: \[[^\]]*,(\d+)\]\s+Exit code:\s+(\d+)", said):
        return Failure(int(left[1]), int(left[2]), _left(int(left[2])))
    if left := re.search(r"process rank (\d+) with PID \d+[^,]*?exiting\s+improperly", said):
        return Failure(int(left[1]), 1, _left(0))
    return None


def _killed(number: int) -> str:
    return f"was killed by signal {int(number)}"


def _left(code: int) -> str:
    return f"exited with code {code} before the end of the script (os._exit),"


def report_failure(failure: Failure, attempt: Attempt, seconds: float, *, where: str = "", log_tail: str = "") -> None:
    """Print which rank ended the job, when and where, and why: the message, or the end of the rank's log."""
    log_dir = attempt.log_dir
    if failure.rank is None and not failure.what:
        print(f"the job failed before its ranks started; {log_dir}/launcher.log says:", file=sys.stderr)
        print(tail(Path(log_dir, "launcher.log")), file=sys.stderr)
        return
    who = "" if failure.rank is None else f"rank {failure.rank} of {attempt.num_ranks}{where} "
    print(f"{who}{failure.what} after {seconds:.1f} s; all logs: {log_dir}", file=sys.stderr)
    if failure.message:
        print(failure.message, file=sys.stderr)
    elif log_tail:
        print(f"worker_{failure.rank}.log ends:\n{log_tail}", file=sys.stderr)
