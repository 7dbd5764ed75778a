"""What mpirun calls to start its daemon on another host, as it would call ssh.

``python run_module.py mindnlp_dp.launch.remote_shell FILE HOST COMMAND...``

Goes in: a host of the job and a line for its shell. Comes out: the same line at that host's launcher, by way of the
endpoint: no ssh, no password. (The daemon that is started so, and the ranks, connect to ports of mpirun's own.) The
endpoint and the token are in a file: what is in mpirun's environment would be in that of all ranks, and mpirun takes
this command apart at colons.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from .agent import call
from .head import Rendezvous
from .messages import parse_endpoint
from .run_module import command as module_command

_SECONDS = 30.0


def main() -> int:
    file, *arguments = sys.argv[1:]
    while arguments and arguments[0].startswith("-"):
        arguments.pop(0)
    endpoint, token = Path(file).read_text(encoding="utf-8").splitlines()
    host, port = parse_endpoint(endpoint)
    connection = call(Rendezvous(host, port, token.encode()), _SECONDS)
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
    """By which mpirun calls it; the token goes into a file of a folder that only this user can read."""
    file = folder / "rendezvous"
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
        out.write(f"{endpoint}\n{token.decode()}\n")
    return [*module_command(sys.executable, "mindnlp_dp.launch.remote_shell"), str(file)]
