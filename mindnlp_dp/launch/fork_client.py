"""A worker whose work is done by a fork server's child (:mod:`mindnlp_dp.launch.fork_server`), for which it stands in.

Goes in: what this worker was called with. Comes out: how the child ended, in the same way.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

# Names the server's socket.
VARIABLE = "MINDNLP_DP_FORK_SERVER"
NUM_STREAMS = 3


@dataclass(frozen=True)
class WorkerCall:
    """What a worker was called with."""

    argv: list[str]
    environ: dict[str, str]
    folder: str
    cores: list[int]
    streams: tuple[int, ...] = ()

    @classmethod
    def of_this_process(cls) -> WorkerCall:
        return cls(sys.argv, dict(os.environ), os.getcwd(), sorted(os.sched_getaffinity(0)))

    def take_over(self) -> None:
        """Make this process look as the one that was called."""
        for number, stream in enumerate(self.streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environ)
        os.environ.pop(VARIABLE, None)
        os.sched_setaffinity(0, self.cores)
        sys.argv = self.argv


def stand_in(environ: Mapping[str, str]) -> Optional[int]:
    """Have a fork server do this worker's work, and return how its child ended, as ``os.waitstatus_to_exitcode``.

    None where there is no server, or it is not ready: the worker does its work itself.
    """
    path = environ.get(VARIABLE)
    if not path:
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        return None
    call = vars(WorkerCall.of_this_process()) | {"streams": ()}
    with connection:
        socket.send_fds(connection, [b"?"], range(NUM_STREAMS))
        connection.sendall(json.dumps(call).encode() + b"\n")
        answer = b""
        while part := connection.recv(64):
            answer += part
    # A server that is gone has taken its children with it.
    return int(answer) if answer else -signal.SIGKILL


def leave_as(code: int) -> None:
    """End this process as another one ended: with its exit code, or by its signal."""
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
