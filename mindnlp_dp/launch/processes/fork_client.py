"""Let a child of the fork server (fork_server.py) do this process's work, and act as its proxy.

Started by run_module.py with the name of a module, it runs the module's ``run()`` this way, or in this process.

The child gets this process's arguments, environment and streams, and this process then ends in the same way as the
child. :mod:`mindnlp_dp.launch.processes.worker` uses this, too.
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

from mindnlp_dp.runtime.devices import default_device

# The variable with the path of the server's socket.
VARIABLE = "MINDNLP_DP_FORK_SERVER"

NUM_STREAMS = 3

# The modules that the server imports, if they are installed.
PRELOADED = ("mpi4py", "mindspore", "mindnlp.engine", "mindnlp.transformers", "datasets")

# The server's answer when it has forked.
FORKED = b"+"

_PATIENCE_SECONDS = 10.0

# The process, user and group at the other end of a socket, as the kernel gives them.
_CREDENTIALS = struct.Struct("3i")

# A file in the log folder: the environment variables that rank 0's script had changed when ranks joined. If they are
# more than imports change, a server that has already imported cannot serve this script.
ENVIRON_CHANGES = "environ_changes.json"


@dataclass(frozen=True)
class WorkerCall:
    """A request to the fork server: how a worker was called, and the module whose ``run()`` is its work."""

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
        """Make this process look like the one that was called."""
        for number, stream in enumerate(self.streams):
            os.dup2(stream, number)
            os.close(stream)
        # Ranks do not read standard input, and mpirun's end of the proxy's would not be closed for this process.
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


def run_in_fork_server(environ: Mapping[str, str], module: str) -> Optional[int]:
    """Have a fork server do this process's work; return how its child ended, as ``os.waitstatus_to_exitcode`` does.

    Return None if no server exists or it is not ready: the caller then does the work itself. CANN does not support
    processes that are forked, so ranks that use a device do their own work, too.
    """
    path = environ.get(VARIABLE)
    if not path or default_device(environ) != "CPU" or _hides_a_module():
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        return None
    if _user_of(connection) != os.geteuid():
        # Another user's server must not get this process's environment.
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
            # The server exists, but does not answer.
            return None
        connection.settimeout(None)
        answer = b""
        while part := connection.recv(64):
            answer += part
    # Without an answer, the server has ended, and its children with it.
    return int(answer) if answer else -signal.SIGKILL


def _user_of(connection: socket.socket) -> int:
    """Return the id of the user whose process listens at the other end."""
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def _hides_a_module() -> bool:
    """Return whether a module next to the script has the name of one that the server has imported from elsewhere."""
    # sys.argv is: worker LOG_DIR NPROC COMMAND...
    command = sys.argv[3:] or ["-m"]
    folder = os.getcwd() if command[0] == "-m" else os.path.dirname(os.path.abspath(command[0]))
    names = {name.partition(".")[0] for name in PRELOADED}
    return any(os.path.exists(os.path.join(folder, name + end)) for name in names for end in ("", ".py"))


def changes_of(before: Mapping[str, str]) -> set[str]:
    """Return the names of the environment variables that this process has set, changed or removed since ``before``."""
    now = dict(os.environ)
    return {name for name in {*before, *now} if before.get(name) != now.get(name)}


def python_env_vars(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Python reads only when it starts, such as PYTHONPATH; later changes have no effect."""
    return {name: value for name, value in environ.items() if name.startswith("PYTHON")}


def exit_like(code: int) -> None:
    """End this process like another one: with the same exit code, or by the same signal."""
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def main() -> None:
    """Run a module that is not the user's script, such as MindSpore's scheduler."""
    module = sys.argv[1]
    ended = run_in_fork_server(os.environ, module)
    if ended is None:
        importlib.import_module(module).run()
    else:
        exit_like(ended)


if __name__ == "__main__":
    main()
