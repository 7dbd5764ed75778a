"""The command that mpirun calls, instead of ssh, to start its daemon on another host.

``python run_module.py mindnlp_dp.launch.rendezvous.remote_shell FILE HOST COMMAND...``

It sends a line for a host's shell to that host's launcher, through the endpoint: without ssh, without a password. (The
daemon that is started this way, and the ranks, connect to mpirun's own ports.) The endpoint and the token are in a
file: all ranks would inherit them from mpirun's environment, and mpirun splits this command at colons.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from mindnlp_dp.launch.processes.run_module import command as module_command
from mindnlp_dp.launch.rendezvous.client import connect
from mindnlp_dp.launch.rendezvous.protocol import parse_endpoint
from mindnlp_dp.launch.rendezvous.server import Rendezvous

_SECONDS = 30.0


def main() -> int:
    """Send the command of mpirun's daemon to the launcher on its host, and return its exit code."""
    file, *arguments = sys.argv[1:]
    while arguments and arguments[0].startswith("-"):
        arguments.pop(0)
    endpoint, token = Path(file).read_text(encoding="utf-8").splitlines()
    host, port = parse_endpoint(endpoint)
    connection = connect(Rendezvous(host, port, token.encode()), _SECONDS)
    connection.send({"say": "daemon", "host": arguments[0], "command": " ".join(arguments[1:])})
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        try:
            for answer in connection.receive():
                return int(answer["code"])
        except (EOFError, OSError):
            break
        time.sleep(0.01)
    print("the endpoint does not answer", file=sys.stderr)
    return 1


def command(endpoint: str, token: bytes, folder: Path) -> list[str]:
    """Return the command for mpirun, and write the token to a file in a folder that only this user can read."""
    file = folder / "rendezvous"
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
        out.write(f"{endpoint}\n{token.decode()}\n")
    return [*module_command("mindnlp_dp.launch.rendezvous.remote_shell"), str(file)]
