"""Define the options of ``mindnlp-dp run``, and build the rendezvous of its hosts from the parsed arguments.

:mod:`mindnlp_dp.commands.main` calls it. Options that mean the same as in torchrun have torchrun's names; torchrun's
other options are ignored or refused with a replacement.
"""

from __future__ import annotations

import argparse
import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Optional

from mindnlp_dp.launch.errors import LaunchError
from mindnlp_dp.launch.log_dir import DEFAULT_MB
from mindnlp_dp.launch.membership import MinMax
from mindnlp_dp.launch.rendezvous.protocol import is_this_host, parse_endpoint, read_token
from mindnlp_dp.launch.rendezvous.server import Rendezvous
from mindnlp_dp.launch.termination import GRACE_PERIOD_SECONDS
from mindnlp_dp.runtime.devices import count_devices, default_device

RESTARTS_OF_ELASTIC_JOBS = 100

# The keys of torchrun's --rdzv-conf that have a meaning here.
_CONF = ("join_timeout", "last_call_timeout", "keep_alive_interval", "keep_alive_max_attempt")


def add_run_options(run: argparse.ArgumentParser) -> None:
    """Add all options of ``run``, and its positional arguments, the ``command``: SCRIPT and ARGS."""
    add = run.add_argument
    add(
        "--nproc", "--nproc-per-node", type=_nproc, required=True, metavar="N",
        help="processes on each host; MIN:MAX for an elastic job; auto: one for each card, or core",
    )  # fmt: skip
    add(
        "--backend", choices=("mpi", "mindspore"),
        help="mpi: mpirun, the faster one on CPU; mindspore: HCCL, NCCL or MCCL by device (default: mindspore when "
        "DEVICE_TARGET is Ascend or GPU, or when it is not set and there are NPUs, else mpi)",
    )  # fmt: skip
    add("--log-dir", type=Path, metavar="DIR", help="folder of the logs, worker_R.log (default: logs/DATE-TIME-PID)")
    add(
        "--max-restarts", type=_non_negative, metavar="N",
        help="restart the job after a failure, at most N times, from its newest checkpoint (default: 0; "
        f"{RESTARTS_OF_ELASTIC_JOBS} for an elastic job)",
    )  # fmt: skip
    add(
        "--hang-timeout", type=non_negative, default=JobOptions.hang_timeout, metavar="SECONDS",
        help="end the job, and say which rank waits for which, when no rank has made progress for SECONDS; 0: "
        "never (default: 1800)",
    )  # fmt: skip
    add("--tee", choices=("0", "all", "none"), default="0", help="ranks whose output is shown (default: 0)")
    add(
        "--log-mb", type=_non_negative, default=JobOptions.log_mb, metavar="MB",
        help="the size at which a rank's log is rotated; the previous log stays as worker_R.log.1; 0: "
        f"never (default: {JobOptions.log_mb})",
    )  # fmt: skip
    add(
        "--grow-after", type=non_negative, default=JobOptions.grow_after, metavar="SECONDS",
        help="an elastic job replaces a lost rank after SECONDS (default: 60)",
    )  # fmt: skip
    add(
        "--grace-period", type=non_negative, default=JobOptions.grace_period, metavar="SECONDS",
        help="at SIGTERM or SIGHUP, wait SECONDS for a checkpoint, which dp.DataParallelTrainer writes at its next "
        "update and dp.FunctionalRun at its next save(), before ranks are ended; 0: end them at once (default: 30)",
    )  # fmt: skip
    add(
        "--scale-batch", action="store_true",
        help="an elastic job that has lost ranks makes smaller global batches, and learns at a smaller rate, where "
        "dp.DataParallelTrainer trains; without it ranks take more micro steps",
    )  # fmt: skip
    add = run.add_argument_group("for several hosts; run the same command on each").add_argument
    add(
        "--nnodes", type=_size, default=MinMax(1, 1), metavar="N",
        help="number of hosts; MIN:MAX for an elastic job (default: 1)",
    )  # fmt: skip
    add(
        "--rdzv-endpoint", metavar="HOST:PORT",
        help="the rendezvous endpoint: an address of the first host, and a port that is free there (default: 29400)",
    )  # fmt: skip
    add(
        "--node-rank", type=_non_negative, metavar="R",
        help="this host's number, 0 for the endpoint's (default: what Kubernetes or Slurm says, else found by the "
        "endpoint's address)",
    )  # fmt: skip
    add("--rdzv-id", default="", metavar="NAME", help="the job's name: hosts of another job are refused")
    add(
        "--rdzv-token-file", type=Path, metavar="FILE",
        help="a file with a secret that all hosts share; else MINDNLP_DP_RDZV_TOKEN, else "
        "~/.config/mindnlp_dp/token",
    )  # fmt: skip
    add(
        "--rdzv-conf", default="", metavar="NAME=SECONDS,...",
        help="join_timeout (600), last_call_timeout (30), keep_alive_interval (2) times keep_alive_max_attempt (5) "
        "until a silent host is lost",
    )  # fmt: skip
    add("--rdzv-backend", choices=("c10d", "static"), help=argparse.SUPPRESS)
    add(
        "--master-addr",
        metavar="HOST",
        help="host of the rendezvous endpoint, as in torchrun; replaces --rdzv-endpoint",
    )
    add("--master-port", type=_non_negative, default=29400, metavar="PORT", help="(default: 29400)")
    run.add_argument("--standalone", action="store_true", help="one host, the default; torchrun's option")
    run.add_argument("-m", "--module", dest="module", action="store_true", help="SCRIPT is a module, as in python -m")
    # SCRIPT and ARGS are one argument: argparse removes a -- from the first of two.
    run.add_argument("command", nargs=argparse.PARSER, metavar="SCRIPT")


class CommandParser(argparse.ArgumentParser):
    """Parses a subcommand. Without abbreviations, an unknown option is an error that names the closest one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        if self.allow_abbrev:
            return super().parse_known_args(args, namespace)
        # argparse would take the value of an unknown option for SCRIPT, and then miss the real options.
        words, number = list(args), 0
        while number < len(words) and words[number].startswith("-") and words[number] not in ("-", "--"):
            name, equals, value = words[number].partition("=")
            if name.startswith("--"):
                # torchrun takes both spellings, too.
                name = name.replace("_", "-")
                words[number] = name + equals + value
            else:
                name, equals = name[:2], name[2:]
            if name in _IGNORED:
                del words[number : number + (1 if equals else 2)]
                continue
            action = self._option_string_actions.get(name)
            if action is None:
                self._refuse(name)
            number += 1 if action.nargs == 0 or equals else 2
        return super().parse_known_args(words, namespace)

    def _refuse(self, name: str) -> NoReturn:
        if name in _OF_TORCHRUN:
            self.error(f"{name} is an option of torchrun that is not supported here: {_OF_TORCHRUN[name]}")
        close = difflib.get_close_matches(name, self._option_string_actions, 1)
        self.error(f"unrecognized option {name}" + (f"; did you mean {close[0]}?" if close else ""))


def rendezvous_of(args: argparse.Namespace) -> Optional[Rendezvous]:
    """Return the rendezvous that the arguments describe; None for a job of one host, even if an endpoint was given.

    Raises:
        LaunchError: the arguments contradict each other, or no token was found.
    """
    endpoint = args.rdzv_endpoint
    if endpoint is None and args.master_addr is not None:
        endpoint = f"{args.master_addr}:{args.master_port}"
    if args.nnodes.most == 1:
        _check_this_is_the_host(args.node_rank or 0, endpoint)
        return None
    if args.standalone:
        raise LaunchError(f"--standalone is for one host, and --nnodes is {args.nnodes}")
    if endpoint is None:
        raise LaunchError(f"--nnodes {args.nnodes} needs --rdzv-endpoint HOST:PORT, an address of the first host")
    try:
        host, port = parse_endpoint(endpoint)
        token = read_token(os.environ, args.rdzv_token_file)
        conf = _conf(args.rdzv_conf)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    lost_after = conf.pop("keep_alive_interval", 2.0) * conf.pop("keep_alive_max_attempt", 5.0)
    return Rendezvous(host, port, token, args.rdzv_id, lost_after=lost_after, **conf)


def _check_this_is_the_host(node_rank: int, endpoint: Optional[str]) -> None:
    """Check that this is the host of a job of one host, so that no second host trains a separate model."""
    host = "" if endpoint is None else (endpoint.rpartition(":")[0] or endpoint).strip("[]")
    if node_rank or (host and not is_this_host(host)):
        which = f"--node-rank {node_rank}" if node_rank else f"the endpoint {endpoint}, of another host"
        raise LaunchError(f"{which}, and --nnodes is 1: this host would be a separate job; --nnodes 2, on both")


def _conf(text: str) -> dict[str, float]:
    conf = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if name not in _CONF or not 0 < seconds < float("inf"):
            raise ValueError(f"--rdzv-conf takes {', '.join(_CONF)} and numbers above 0, got {part!r}")
        conf[name] = seconds
    return conf


def _size(text: str) -> MinMax:
    try:
        return MinMax.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _nproc(text: str) -> MinMax:
    """Parse ``N``, ``MIN:MAX``, ``auto`` or a device, for which the cards or the usable CPU cores are counted."""
    own = default_device(os.environ)
    device = {"auto": own, "cpu": "CPU", "gpu": "GPU", "npu": "Ascend"}.get(text)
    if device is None:
        return _size(text)
    if device != own:
        raise argparse.ArgumentTypeError(f"{text}: ranks would use {own}; set DEVICE_TARGET={device}")
    if device not in ("CPU", "GPU", "Ascend"):
        raise argparse.ArgumentTypeError(f"{text}: DEVICE_TARGET is {device}, expected CPU, Ascend or GPU")
    number = len(os.sched_getaffinity(0)) if device == "CPU" else count_devices(device, os.environ)
    if not number:
        raise argparse.ArgumentTypeError(f"{text}: this host has no {device} cards to use")
    return MinMax(number, number)


def _non_negative(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text}")
    return int(text)


def non_negative(text: str) -> float:
    """Parse a number of at least 0, for :mod:`argparse`."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text}")
    return number


_ELSEWHERE = "every rank's output goes to worker_R.log in --log-dir; --tee 0, all or none says whose is shown"

# Options of torchrun that would change nothing here, for users who type torchrun's command from memory.
_IGNORED = ("--monitor-interval", "--start-method", "--role")

# Its options that are refused, and what to do instead.
_OF_TORCHRUN = {
    "--no-python": "ranks are Python processes; start another program from a script with subprocess",
    "--run-path": "this is always the case; leave it out",
    "--redirects": _ELSEWHERE,
    "-r": _ELSEWHERE,
    "-t": _ELSEWHERE,
    "--local-ranks-filter": _ELSEWHERE,
    "--logs-specs": _ELSEWHERE,
    "--local-addr": "hosts are identified by their address; --rdzv-endpoint names the rendezvous",
    "--event-log-handler": "failures are written to failures.jsonl in --log-dir",
}


@dataclass(frozen=True)
class JobOptions:
    """Options that say how a job is monitored and restarted; used by :class:`~mindnlp_dp.launch.launch_job.Job`.

    Attributes:
        hang_timeout: seconds without progress of any rank after which the job is ended; 0: never.
        max_restarts: maximum number of restarts after failures.
        tee: ranks whose output is shown: "0", "all" or "none".
        grow_after: seconds after which an elastic job fills the place of a lost rank again.
        grace_period: seconds that the job gets to write a checkpoint when it is asked to end (SIGTERM, SIGHUP).
        log_mb: size in MiB at which a rank's log is rotated; 0: never.
        scale_batch: whether the global batch of an elastic job is proportional to the number of its ranks.
    """

    hang_timeout: float = 1800.0
    max_restarts: int = 0
    tee: str = "0"
    grow_after: float = 60.0
    grace_period: float = GRACE_PERIOD_SECONDS
    log_mb: int = DEFAULT_MB
    scale_batch: bool = False
