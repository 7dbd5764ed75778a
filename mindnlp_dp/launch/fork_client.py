"""A process whose work is done by a fork server's child (:mod:`mindnlp_dp.launch.fork_server`), for which it stands in.

``python run_module.py mindnlp_dp.launch.fork_client MODULE`` has MODULE's ``run()`` done so, or does it itself.

Goes in: what this process was called with. Comes out: how the child ended, in the same way.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

# Names the server's socket.
VARIABLE = "MINDNLP_DP_FORK_SERVER"
NUM_STREAMS = 3
# Those that are installed are imported by the server.
PRELOADED = ("mpi4py", "mindspore", "mindnlp.engine", "mindnlp.transformers", "datasets")
# What it says when it has forked.
FORKED = b"+"
_PATIENCE_SECONDS = 10.0
# Process, user and group, as the kernel says who is at the other end of a socket.
_CREDENTIALS = struct.Struct("3i")
# In the log folder: what rank 0's script had changed in its environment when ranks met. Where imports would not have
# changed the same, a server that has imported before is none for this script.
ENVIRON_CHANGES = "environ_changes.json"


@dataclass(frozen=True)
class WorkerCall:
    """What a worker was called with, and the module whose ``run()`` is its work."""

    module: str
    argv: list[str]
    environ: dict[str, str]
    folder: str
    cores: list[int]
    umask: int
    streams: tuple[int, ...] = ()

    @classmethod
    def of_this_process(cls, module: str) -> WorkerCall:
        umask = os.umask(0o077)
        os.umask(umask)
        return cls(module, sys.argv, dict(os.environ), os.getcwd(), sorted(os.sched_getaffinity(0)), umask)

    def take_over(self) -> None:
        """Make this process look as the one that was called."""
        for number, stream in enumerate(self.streams):
            os.dup2(stream, number)
            os.close(stream)
        # Ranks read nothing, and what mpirun gives to the stand-in is not closed for this process.
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.umask(self.umask)
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environ)
        os.environ.pop(VARIABLE, None)
        os.sched_setaffinity(0, self.cores)
        sys.argv = self.argv


def stand_in(environ: Mapping[str, str], module: str) -> Optional[int]:
    """Have a fork server do this process's work, and return how its child ended, as ``os.waitstatus_to_exitcode``.

    None where there is no server, or it is not ready: who was called does the work itself.
    """
    path = environ.get(VARIABLE)
    if not path or _hides_a_module():
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        return None
    if _user_of(connection) != os.geteuid():
        # Somebody else's, who would be given this process's environment.
        connection.close()
        return None
    call = vars(WorkerCall.of_this_process(module)) | {"streams": ()}
    with connection:
        connection.settimeout(_PATIENCE_SECONDS)
        try:
            socket.send_fds(connection, [b"?"], range(NUM_STREAMS))
            connection.sendall(json.dumps(call).encode() + b"\n")
            if connection.recv(1) != FORKED:
                return None
        except OSError:
            # It is there, and does nothing.
            return None
        connection.settimeout(None)
        answer = b""
        while part := connection.recv(64):
            answer += part
    # A server that is gone has taken its children with it.
    return int(answer) if answer else -signal.SIGKILL


def _user_of(connection: socket.socket) -> int:
    """The number of the user whose process listens at the other end."""
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def _hides_a_module() -> bool:
    """Whether a module beside the script has the name of one that the server has imported from elsewhere."""
    # worker LOG_DIR NPROC -- COMMAND...
    command = sys.argv[4:] or ["-m"]
    folder = os.getcwd() if command[0] == "-m" else os.path.dirname(os.path.abspath(command[0]))
    names = {name.partition(".")[0] for name in PRELOADED}
    return any(os.path.exists(os.path.join(folder, name + end)) for name in names for end in ("", ".py"))


def changes_of(before: Mapping[str, str]) -> set[str]:
    """The variables that this process has set, changed or removed in its environment since."""
    now = dict(os.environ)
    return {name for name in {*before, *now} if before.get(name) != now.get(name)}


def what_python_read(environ: Mapping[str, str]) -> dict[str, str]:
    """What it reads when it begins, as PYTHONPATH: behind that nobody can change it."""
    return {name: value for name, value in environ.items() if name.startswith("PYTHON")}


def leave_as(code: int) -> None:
    """End this process as another one ended: with its exit code, or by its signal."""
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def main() -> None:
    """For work that is not the script's."""
    module = sys.argv[1]
    ended = stand_in(os.environ, module)
    if ended is None:
        importlib.import_module(module).run()
    else:
        leave_as(ended)


if __name__ == "__main__":
    main()
