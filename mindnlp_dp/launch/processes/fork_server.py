"""Import MindSpore and MindNLP once, and fork ranks from that process: a rank then starts in a second, without imports.

``python -m mindnlp_dp.launch.processes.fork_server SOCKET [LOG_DIR]``

:class:`ForkServer` starts the server for a launcher. Through a UNIX socket the server gets the arguments, environment,
folder, cores and standard streams of a worker that was started as usual (:mod:`mindnlp_dp.launch.processes.worker`), or
of the scheduler of MindSpore's cluster. A forked child does the work. The original process stays as its proxy, so that
mpirun, or its other parent, sees it start and end; the server tells it how the child ended.

This process runs no MindSpore operator: after one, children would wait for threads that they do not have. For the same
reason it imports ``mpi4py``, but not ``mpi4py.MPI``. Only this user can open its socket.
"""

from __future__ import annotations

import argparse
import array
import importlib
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.launch.processes.environment import CLUSTER_VARIABLES, clean_environment
from mindnlp_dp.launch.processes.fork_client import (
    ENVIRON_CHANGES,
    FORKED,
    NUM_STREAMS,
    PRELOADED,
    VARIABLE,
    WorkerCall,
    changes_of,
    python_env_vars,
)
from mindnlp_dp.launch.processes.run_module import command as module_command
from mindnlp_dp.launch.processes.spawn import set_parent_death_signal
from mindnlp_dp.runtime.scratch_dir import ScratchDir

_MODULE = "mindnlp_dp.launch.processes.fork_server"

# Less than the grace period that launchers give to ranks.
_GRACE_SECONDS = 2.0

_LOOK_SECONDS = 0.2


class _Server:
    """Forks a child for each request until it is ended; in a child, :meth:`serve` returns the request."""

    def __init__(self, path: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listening = socket.socket(socket.AF_UNIX)
        _forget_socket_of_the_dead(path)
        umask = os.umask(0o077)
        try:
            self._listening.bind(path)
        finally:
            os.umask(umask)
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
        # On SIGTERM the children are ended first: they would be killed with the server, without a chance to clean up.
        self._is_asked = False
        signal.signal(signal.SIGTERM, self._end_with_all)

    def _end_with_all(self, number: int, frame: object) -> None:
        self._is_asked = True

    def serve(self) -> WorkerCall:
        while True:
            if self._is_asked:
                for pid in self._children.values():
                    self._ask(pid)
                if not self._children:
                    raise SystemExit(128 + signal.SIGTERM)
            for key, _ in self._selector.select(_LOOK_SECONDS if self._asked else None):
                if key.fileobj is self._listening:
                    call = self._answer(self._listening.accept()[0])
                    if call is not None:
                        return call
                elif key.fileobj == self._woken:
                    os.read(self._woken, 4096)
                else:
                    self._end_child_of(key.fileobj)
            self._reap()
            for pid, when in self._asked.items():
                if time.monotonic() > when:
                    _signal_group(pid, signal.SIGKILL)

    def _answer(self, connection: socket.socket) -> Optional[WorkerCall]:
        """Fork a child for a request; return the request in the child, None in the server."""
        # The caller sends its request without delay, and other callers wait meanwhile.
        connection.settimeout(1)
        try:
            call = _receive(connection)
        except (OSError, ValueError, TypeError):
            connection.close()
            return None
        if python_env_vars(call.environ) != python_env_vars(os.environ):
            # Python would start in another way for this request, so its proxy does the work itself.
            _decline(call, connection)
            return None
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            print(f"no rank can be forked, so each rank starts as usual: {error}", flush=True)
            _decline(call, connection)
            return None
        if pid:
            for stream in call.streams:
                os.close(stream)
            self._children[connection] = pid
            self._selector.register(connection, selectors.EVENT_READ)
            try:
                connection.sendall(FORKED)
            except OSError:
                # The proxy has timed out, and does the work itself.
                _signal_group(pid, signal.SIGKILL)
            return None
        # As for ranks that mpirun starts, the processes that a rank starts end with it.
        os.setpgid(0, 0)
        set_parent_death_signal(server, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Also as under mpirun: a launcher in the background of a shell script ignores SIGINT, its ranks do not.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for other in (self._listening, connection, *self._children):
            other.close()
        self._selector.close()
        os.close(self._woken)
        os.close(self._wakes)
        return call

    def _end_child_of(self, connection: Any) -> None:
        """End the child whose proxy has closed its connection, because the proxy itself was ended."""
        pid = self._children.get(connection)
        if pid is not None:
            self._ask(pid)
        self._selector.unregister(connection)

    def _ask(self, pid: int) -> None:
        if pid not in self._asked:
            _signal_group(pid, signal.SIGTERM)
            self._asked[pid] = time.monotonic() + _GRACE_SECONDS

    def _reap(self) -> None:
        for connection, pid in list(self._children.items()):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            # Signal before waitpid, after which the pid may be reused. What a failed child has started is useless.
            if self._asked.pop(pid, None) is not None or ended.si_status:
                _signal_group(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            del self._children[connection]
            if connection in self._selector.get_map():
                self._selector.unregister(connection)
            try:
                connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            except OSError:
                pass
            connection.close()


def _decline(call: WorkerCall, connection: socket.socket) -> None:
    for stream in call.streams:
        os.close(stream)
    connection.close()


def _forget_socket_of_the_dead(path: str) -> None:
    """Remove the socket of an earlier server that has ended, if there is one at this path."""
    if not Path(path).is_socket():
        # A file refuses connections like the socket of a server that has ended, but is not ours to remove.
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError:
            # The caller's bind() reports any problem.
            pass


def _signal_group(pid: int, number: int) -> None:
    """Signal a child's process group, or only the child: directly after the fork it may not have a group yet."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def _receive(connection: socket.socket) -> WorkerCall:
    _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_LEN(NUM_STREAMS * array.array("i").itemsize))
    streams = array.array("i")
    for _, _, data in ancillary:
        streams.frombytes(data)
    try:
        text = b""
        while not text.endswith(b"\n"):
            part = connection.recv(1 << 16)
            if not part:
                raise ValueError("half a call")
            text += part
        connection.settimeout(None)
        return WorkerCall(**{**json.loads(text), "streams": tuple(streams)})
    except (OSError, ValueError, TypeError):
        for stream in streams:
            os.close(stream)
        raise


class ForkServer:
    """A launcher's fork server, started while the job's first attempt runs, for the attempts that follow."""

    def __init__(self, environ: Mapping[str, str], log_dir: Path) -> None:
        # If this launcher is killed, the next one removes the folder.
        self._scratch = ScratchDir("job")
        self._socket = str(self._scratch.path / "fork_server")
        launcher = os.getpid()
        with open(log_dir / "fork_server.log", "wb") as log:
            self._popen = subprocess.Popen(
                [*module_command(sys.executable, _MODULE), self._socket, str(log_dir)],
                env=clean_environment(environ),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=lambda: set_parent_death_signal(launcher),  # noqa: PLW1509 -- the launcher has no threads
            )  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        """Return the variable by which workers find the server."""
        return {VARIABLE: self._socket}

    def end(self) -> None:
        self._popen.kill()
        try:
            self._popen.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            # The server is blocked in a disk that does not answer, and ends when the disk does.
            pass
        self._scratch.remove()


def _others_changes(log_dir: Path, of_imports: set[str]) -> list[str]:
    """Return the environment variables that the job's script has changed and imports do not change."""
    try:
        of_script = json.loads((log_dir / ENVIRON_CHANGES).read_text())
    except (OSError, ValueError):
        return []
    # MindSpore sets the cluster's variables when a rank of MPI imports it, and moves its folder to the front of
    # LD_LIBRARY_PATH, where mpirun has put MPI's; a process reads that variable only when it starts.
    return sorted(set(of_script) - of_imports - {*CLUSTER_VARIABLES, "LD_LIBRARY_PATH"})


def main() -> None:
    """Import the modules, then serve requests; a forked child continues here as the worker."""
    parser = argparse.ArgumentParser(
        f"python -m {_MODULE}",
        description="Import MindSpore and MindNLP, then become the ranks of jobs that have MINDNLP_DP_FORK_SERVER set.",
    )
    parser.add_argument("socket", metavar="SOCKET", help="a path at which nothing is, for MINDNLP_DP_FORK_SERVER")
    parser.add_argument("log_dir", metavar="LOG_DIR", nargs="?", type=Path, help="of the only job that it is for")
    asked, wanted = parser.parse_args(), clean_environment(os.environ)
    if wanted != dict(os.environ):
        # Restart with the environment of ranks that start directly: Python has already read its variables.
        os.execve(sys.executable, [*module_command(sys.executable, _MODULE), *sys.argv[1:]], wanted)
    before = dict(os.environ)
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except ImportError:
            print(f"{name} cannot be imported here; children import it themselves")
    if asked.log_dir is not None and (other := _others_changes(asked.log_dir, changes_of(before))):
        print(f"the script sets {', '.join(other)} before it imports: its ranks import as usual")
        return
    # The socket is created only now, so that no worker finds it before the server is ready.
    try:
        server = _Server(asked.socket)
    except OSError as error:
        sys.exit(f"no socket can be made at {asked.socket}: {error}")
    print(f"ready after {time.process_time():.1f} s of CPU", flush=True)
    call = server.serve()
    call.take_over()
    if "numpy" in sys.modules:
        # Python's own generator is seeded again in each child anyway.
        sys.modules["numpy"].random.seed(random.getrandbits(32))
    importlib.import_module(call.module).run()


if __name__ == "__main__":
    # python -m searches the current folder first, but its modules are the user's and must not be imported here.
    if sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    main()
