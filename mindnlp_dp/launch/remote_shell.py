"""What mpirun calls to start its daemon on another host, as it would call ssh.

``python -m mindnlp_dp.launch.remote_shell HOST COMMAND...``

Goes in: a host of the job and a line for its shell. Comes out: the same line at that host's launcher, by way of the
endpoint; no ssh, no password, no second network port.
"""

from __future__ import annotations

import os
import sys
import time

from .agent import call
from .head import Rendezvous
from .messages import parse_endpoint, read_token

ENDPOINT_VARIABLE = "MINDNLP_DP_RDZV_ENDPOINT"
_SECONDS = 30.0


def main() -> int:
    arguments = sys.argv[1:]
    while arguments and arguments[0].startswith("-"):
        arguments.pop(0)
    host, port = parse_endpoint(os.environ[ENDPOINT_VARIABLE])
    connection = call(Rendezvous(host, port, read_token(os.environ)), _SECONDS)
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


if __name__ == "__main__":
    sys.exit(main())
