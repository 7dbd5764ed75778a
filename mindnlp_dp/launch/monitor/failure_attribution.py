"""Find which rank ended a job, and how: from ranks' statuses, their processes' exit codes, and what mpirun printed.

:mod:`mindnlp_dp.launch.monitor.attempt_monitor` calls it. A rank's own status counts most. A rank that gave up waiting
for another is not to blame: the other rank is.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

from mindnlp_dp.launch.monitor.snapshot import JobSnapshot, first_lost
from mindnlp_dp.launch.processes.attempt import Attempt
from mindnlp_dp.launch.processes.exit_status import ExitedProcess, head, tail
from mindnlp_dp.launch.rendezvous.membership import Host
from mindnlp_dp.runtime.heartbeat import Status

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


def find_failure(
    snapshot: JobSnapshot, hosts: Sequence[Host], attempt: Attempt, log_dir: Path, ranks: Sequence[int]
) -> Optional[Failure]:
    """Return how an attempt failed, judged by ``ranks``, which are those that are not lost; None if it succeeded."""
    statuses = {rank: status for rank, status in snapshot.statuses.items() if rank in ranks}
    if all(rank in statuses and not statuses[rank].exit_code for rank in ranks):
        # All ranks succeeded, so a host that is lost now does not matter.
        return None
    lost = first_lost(hosts)
    if lost is not None and not any(status.exit_code and not status.waited for status in statuses.values()):
        rank = replace(attempt, index=hosts.index(lost)).ranks.start
        return Failure(rank, 1, "was lost with its host", f"host {lost.name} is lost: {lost.lost}")
    failure = find_failed_process(snapshot.ended, statuses, log_dir, ranks)
    if failure is not None and failure.what == _killed(signal.SIGKILL):
        why = "because there was not enough memory" if snapshot.oom_kills else "often for lack of memory"
        failure = replace(failure, what=f"{failure.what}, {why},")
    missing = [rank for rank in ranks if rank not in statuses]
    # Exit codes do not outweigh that: mpirun exits with 0 after it has lost a host, and Python reads 0 for each process
    # where SIGCHLD is ignored.
    if failure is None and missing:
        return Failure(missing[0], 1, "ended without a word")
    if failure is not None and failure.rank is None and not failure.what and snapshot.has_begun:
        what = f"mpirun ended with exit code {failure.exit_code}, and ranks {missing} have not recorded their end,"
        return replace(failure, what=what, message=_logs(log_dir, missing[:_MOST_LOGS]))
    return failure


def _logs(log_dir: Path, ranks: Sequence[int]) -> str:
    """Return the beginning of mpirun's output, where MPI says why it aborts, and the ends of these ranks' logs."""
    logs = [f"worker_{rank}.log ends:\n{tail(log_dir / f'worker_{rank}.log')}" for rank in ranks]
    return "\n".join([f"launcher.log begins:\n{head(log_dir / 'launcher.log')}", *logs])


def find_failed_process(
    ended: Sequence[ExitedProcess], statuses: Mapping[int, Status], log_dir: Path, ranks: Sequence[int]
) -> Optional[Failure]:
    """Return which of these ranks failed first, and how, judged by its status or its process; None if none failed."""
    gone = {process.rank: process.returncode for process in ended if process.rank is not None}
    silent = {rank: code for rank, code in gone.items() if rank not in statuses}
    failed = {rank: status for rank, status in statuses.items() if status.exit_code != 0}
    if failed:
        rank = min(failed, key=lambda r: (failed[r].waited, failed[r].time))
        if failed[rank].waited:
            return _find_missing(rank, statuses, silent, ranks)
        return Failure(rank, failed[rank].exit_code, describe_status(failed[rank]))
    if len(statuses) == len(ranks) or not ended:
        return None
    if silent:
        return _find_silent(silent)
    code = next((process.returncode for process in ended if process.returncode), 0)
    if code < 0:
        return Failure(None, 128 - code, f"mpirun {_killed(-code)}")
    return _read_mpirun(log_dir, code) or (Failure(None, code, "") if code else None)


def _find_missing(
    waiting: int, statuses: Mapping[int, Status], silent: dict[int, int], ranks: Sequence[int]
) -> Failure:
    """Return the rank for which ``waiting`` and others gave up waiting: it is gone, has ended, or is still busy."""
    code = statuses[waiting].exit_code
    if silent:
        return _find_silent(silent)
    left = {rank: status for rank, status in statuses.items() if not status.waited}
    if left:
        rank = min(left, key=lambda r: left[r].time)
        before = statuses[waiting].time - left[rank].time
        return Failure(rank, code, f"reached its end, and rank {waiting} waited {before:.0f} s longer for it,")
    rank = next((rank for rank in ranks if rank not in statuses), waiting)
    if rank == waiting:
        return Failure(waiting, code, describe_status(statuses[waiting]))
    return Failure(rank, code, f"was still busy elsewhere when rank {waiting} stopped waiting for it,")


def _find_silent(silent: dict[int, int]) -> Failure:
    """Return the rank that left first, of those that ended without a status; a library then kills the others."""
    rank = min(silent, key=lambda rank: (silent[rank] != 0, silent[rank] in _BY_OTHERS))
    code = silent[rank]
    return Failure(rank, 128 - code, _killed(-code)) if code < 0 else Failure(rank, code or 1, _left(code))


def _read_mpirun(log_dir: Path, code: int) -> Optional[Failure]:
    """Return the rank that mpirun names in its output as the one that ended; its ranks are not our children.

    Args:
        code: exit code of mpirun, which is the one that a rank, or MPI itself, has passed to MPI_Abort.
    """
    try:
        said = (log_dir / "launcher.log").read_text(errors="replace")
    except OSError:
        # The file was removed.
        return None
    if killed := re.search(r"process rank (\d+) with PID \d+.*?exited on\s+signal (\d+)", said, re.DOTALL):
        return Failure(int(killed[1]), 128 + int(killed[2]), _killed(int(killed[2])))
    if peer := re.search(r"peer process has unexpectedly disconnected.*?Peer host:\s+(\S+)", said, re.DOTALL):
        # The rank that aborts is not to blame: it has lost a rank of another host.
        return Failure(None, code or 1, f"a rank on {peer[1]} ended without a word", _logs(log_dir, []))
    if aborted := re.search(r"process rank (\d+) with PID \d+ on node \S+ calling\s+\"abort\"", said):
        what = f"aborted the MPI job with exit code {code}"
        return Failure(int(aborted[1]), code or 1, what, _logs(log_dir, [int(aborted[1])]))
    if left := re.search(r"Process name: \[[^\]]*,(\d+)\]\s+Exit code:\s+(\d+)", said):
        return Failure(int(left[1]), int(left[2]), _left(int(left[2])))
    if left := re.search(r"process rank (\d+) with PID \d+[^,]*?exiting\s+improperly", said):
        return Failure(int(left[1]), 1, _left(0))
    return None


def describe_status(status: Status) -> str:
    """Return a clause that says how a rank ended that has recorded its end."""
    # A code above 128 is the script's own too: a rank that a signal has killed records nothing.
    return f"failed with exit code {status.exit_code}"


def _killed(number: int) -> str:
    return f"was killed by signal {int(number)}"


def _left(code: int) -> str:
    return f"left with exit code {code}, past the end of the script (os._exit),"


def report_failure(
    failure: Failure,
    log_dir: Path,
    nproc: int,
    seconds: float,
    *,
    where: str = "",
    log_tail: str = "",
    shown: str = "0",
    main: Optional[Status] = None,
) -> None:
    """Print which rank ended the job, when, and the end of its log, unless rank 0's output, which is shown, says why.

    Args:
        where: host of that rank, if the job has several.
        log_tail: end of that rank's log.
        shown: ranks whose output is shown as it is written, as given by ``--tee``.
        main: status of rank 0 when its output was last shown; its later output is not shown.
    """
    if failure.rank is None and failure.what:
        print(f"{failure.what} after {seconds:.1f} s; all logs: {log_dir}", file=sys.stderr)
        if failure.message:
            print(failure.message, file=sys.stderr)
        return
    if failure.rank is None:
        print(f"the job failed before its ranks started; {log_dir}/launcher.log says:", file=sys.stderr)
        print(tail(log_dir / "launcher.log"), file=sys.stderr)
        return
    who = f"rank {failure.rank} of {nproc}" + (f" on {where}" if where else "")
    print(f"{who} {failure.what} after {seconds:.1f} s; all logs: {log_dir}", file=sys.stderr)
    if failure.message:
        print(failure.message, file=sys.stderr)
        return
    said_why = failure.rank == 0 or (main is not None and main.exit_code != 0)
    if not (said_why and shown != "none"):
        print(f"worker_{failure.rank}.log ends:\n{log_tail}", file=sys.stderr)
