"""Fork the ranks of jobs from a process that has imported MindSpore and MindNLP, so that suites of tests are fast.

``python tests/forked_ranks.py FOLDER`` serves until it is ended. Jobs with ``MINDNLP_DP_PYTHON=FOLDER/python`` start
that program in place of Python for each rank. It sends its arguments, environment, folder, cores and streams to the
server, whose forked child does the work; the program stays as a proxy, so that mpirun, or the launcher, sees it start
and end. If the server does not answer, the program starts Python as usual.

This process runs no MindSpore operator: after one, children would wait for threads that they do not have. For the same
reason it imports ``mpi4py``, but not ``mpi4py.MPI``.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

SOCKET, PYTHON = "socket", "python"
PRELOADED = ("mpi4py", "mindnlp_dp", "mindspore", "mindnlp.engine", "mindnlp.transformers", "datasets")
FORKED = b"+"
# Less than the grace period that launchers give to ranks.
GRACE_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1


def of_python(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Python reads only when it starts, such as PYTHONPATH."""
    ignored = ("PYTHONUNBUFFERED",)
    return {name: value for name, value in environ.items() if name.startswith("PYTHON") and name not in ignored}


def ask_server(path: str) -> Optional[int]:
    """Have the server do this process's work; return how its child ended, or None if it does not work."""
    connection = socket.socket(socket.AF_UNIX)
    umask = os.umask(0o077)
    os.umask(umask)
    call = {
        "argv": sys.argv[2:], "environ": dict(os.environ), "folder": os.getcwd(), "umask": umask,
        "cores": sorted(os.sched_getaffinity(0)),
    }  # fmt: skip
    with connection:
        try:
            connection.connect(path)
            connection.settimeout(10)
            socket.send_fds(connection, [b"?"], range(3))
            connection.sendall(json.dumps(call).encode() + b"\n")
            if connection.recv(1) != FORKED:
                return None
        except OSError:
            return None
        connection.settimeout(None)
        answer = b""
        while part := connection.recv(64):
            answer += part
    # Without an answer, the server has ended, and its children with it.
    return int(answer) if answer else -signal.SIGKILL


def proxy() -> None:
    """Act as the rank's Python: end as the server's child ends."""
    # CANN does not support processes that are forked.
    code = ask_server(sys.argv[1]) if os.environ.get("DEVICE_TARGET", "CPU") == "CPU" else None
    if code is None:
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


class Server:
    """Forks a child for each request until it is ended; in a child, :meth:`serve` returns the request."""

    def __init__(self, path: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(path)
        self._listening.listen(64)
        self._selector.register(self._listening, selectors.EVENT_READ)
        # A child's end wakes the selector.
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wakes)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._children: dict[socket.socket, int] = {}
        # Children that were asked to end, and the times at which they are killed.
        self._asked: dict[int, float] = {}

    def serve(self) -> dict[str, Any]:
        while True:
            for key, _ in self._selector.select(0.2 if self._asked else None):
                if key.fileobj is self._listening:
                    call = self._answer(self._listening.accept()[0])
                    if call is not None:
                        return call
                elif key.fileobj == self._woken:
                    os.read(self._woken, 4096)
                else:
                    # The proxy was ended.
                    self._ask(self._children[key.fileobj])
                    self._selector.unregister(key.fileobj)
            self._reap()
            for pid, when in self._asked.items():
                if time.monotonic() > when:
                    signal_group(pid, signal.SIGKILL)

    def _answer(self, connection: socket.socket) -> Optional[dict[str, Any]]:
        """Fork a child for a request; return the request in the child, None in the server."""
        connection.settimeout(5)
        _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_LEN(3 * array.array("i").itemsize))
        streams = array.array("i")
        for _, _, data in ancillary:
            streams.frombytes(data)
        text = b""
        while not text.endswith(b"\n") and (part := connection.recv(1 << 16)):
            text += part
        connection.settimeout(None)
        call = json.loads(text or b"{}")
        is_served = bool(call) and of_python(call["environ"]) == of_python(os.environ)
        server = os.getpid()
        pid = os.fork() if is_served else -1
        if pid:
            for stream in streams:
                os.close(stream)
            if not is_served:
                # Python would start in another way for this request, so its proxy does the work itself.
                connection.close()
                return None
            self._children[connection] = pid
            self._selector.register(connection, selectors.EVENT_READ)
            with contextlib.suppress(OSError):
                connection.sendall(FORKED)
            return None
        # As for ranks that mpirun starts, the processes that a rank starts end with it.
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (self._listening, connection, *self._children):
            other.close()
        self._selector.close()
        os.close(self._woken)
        os.close(self._wakes)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return call

    def _ask(self, pid: int) -> None:
        if pid not in self._asked:
            signal_group(pid, signal.SIGTERM)
            self._asked[pid] = time.monotonic() + GRACE_SECONDS

    def _reap(self) -> None:
        for connection, pid in list(self._children.items()):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            # Signal before waitpid, after which the pid may be reused. What a failed child has started is useless.
            if self._asked.pop(pid, None) is not None or ended.si_status:
                signal_group(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            del self._children[connection]
            if connection in self._selector.get_map():
                self._selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            connection.close()


def signal_group(pid: int, number: int) -> None:
    """Signal a child's process group, or only the child: directly after the fork it may not have a group yet."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            send(pid, number)
            return


def main() -> None:
    """Import the modules, then serve requests; a forked child continues here as the rank."""
    # Python would search the folder of this file first.
    del sys.path[0]
    folder = Path(sys.argv[1])
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    server = Server(str(folder / SOCKET))
    python = folder / f".{PYTHON}"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{__file__}" --proxy "{folder / SOCKET}" "$@"\n')
    python.chmod(0o755)
    # Only now, so that no rank finds it before the server is ready.
    python.replace(folder / PYTHON)
    print("ready", flush=True)
    call = server.serve()
    # Ranks do not read standard input, and mpirun's end of the proxy's would not be closed for this process.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.umask(call["umask"])
    os.chdir(call["folder"])
    os.environ.clear()
    os.environ.update(call["environ"])
    os.sched_setaffinity(0, call["cores"])
    sys.argv = call["argv"]
    if "numpy" in sys.modules:
        # Python's own generator is seeded again in each child anyway.
        sys.modules["numpy"].random.seed(random.getrandbits(32))
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "--proxy":
        del sys.argv[1]
        proxy()
    else:
        main()
