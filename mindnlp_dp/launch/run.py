"""``mindnlp-dp run``: decide which part this host has in a job, and run the job.

:mod:`mindnlp_dp.commands.main` calls :func:`run_job`, which returns the exit code of the first rank that failed, or 0.
A single host, or the host of the endpoint, leads the job (launch_job.py); every other host follows its
orders (:mod:`mindnlp_dp.launch.rendezvous.client`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Optional, Union

from mindnlp_dp.launch.errors import LaunchError, LeaderLostError
from mindnlp_dp.launch.event_loop import EventLoop
from mindnlp_dp.launch.launch_job import Job
from mindnlp_dp.launch.log_dir import LogDir
from mindnlp_dp.launch.membership import Membership, MinMax
from mindnlp_dp.launch.monitor.background_output import BackgroundOutput, stop_waiting_for_readers
from mindnlp_dp.launch.options import JobOptions
from mindnlp_dp.launch.processes.local_host import LocalHost
from mindnlp_dp.launch.processes.run_module import PYTHON_VARIABLE
from mindnlp_dp.launch.rendezvous.client import HostAgent
from mindnlp_dp.launch.rendezvous.protocol import is_this_host
from mindnlp_dp.launch.rendezvous.remote_shell import command as remote_shell
from mindnlp_dp.launch.rendezvous.server import Rendezvous, RendezvousServer
from mindnlp_dp.launch.termination import Interrupted, Termination
from mindnlp_dp.runtime.devices import (
    DEVICES,
    check_visible_devices,
    count_devices,
    default_device,
    too_many_workers,
)
from mindnlp_dp.runtime.launch_env import node_rank_of
from mindnlp_dp.runtime.versions import __version__


def run_job(
    nproc: Union[int, MinMax],
    command: Sequence[str],
    *,
    backend: Optional[str] = None,
    log_dir: Optional[Path] = None,
    options: Optional[JobOptions] = None,
    nnodes: Optional[MinMax] = None,
    rendezvous: Optional[Rendezvous] = None,
    node_rank: Optional[int] = None,
) -> int:
    """Run ``python COMMAND`` in ``nproc`` processes on each of ``nnodes`` hosts (default: 1); return the exit code.

    Raises:
        LaunchError: the script or ``mpirun`` does not exist, there are fewer devices than processes, or the rendezvous
            of the hosts fails.
    """
    nproc = nproc if isinstance(nproc, MinMax) else MinMax(nproc, nproc)
    options = options or JobOptions()
    if command[0] != "-m" and not os.path.isfile(command[0]):
        raise LaunchError(f"the script {command[0]} does not exist")
    environ = dict(os.environ)
    python = environ.get(PYTHON_VARIABLE)
    if python and shutil.which(python) is None:
        raise LaunchError(f"{PYTHON_VARIABLE} names {python}, which is not a program")
    backend, device = _backend_and_device(backend, environ)
    # The launcher and its ranks read the device here only, so that they agree.
    environ["DEVICE_TARGET"] = device
    if options.scale_batch and not (nproc.is_elastic or (nnodes is not None and nnodes.is_elastic)):
        raise LaunchError("--scale-batch is for an elastic job, --nproc MIN:MAX or --nnodes MIN:MAX")
    if wrong := too_many_workers(nproc.most, environ):
        raise LaunchError(wrong)
    termination, loop = Termination(options.grace_period), EventLoop()
    with termination.handled(), BackgroundOutput():
        try:
            if rendezvous is not None and not _leads(rendezvous, node_rank):
                rank = node_rank if node_rank is not None else node_rank_of(environ)
                return HostAgent(
                    rendezvous, environ, nproc.most, loop,
                    version=__version__, node_rank=rank, termination=termination,
                ).run()  # fmt: skip
            folder, server, shell = LogDir(log_dir), None, None
            if rendezvous is not None:
                server = RendezvousServer(rendezvous, __version__, loop, device=device, one_a_host=backend == "mpi")
                shell = partial(remote_shell, server.own_endpoint, rendezvous.token)
            local = LocalHost(environ, nproc.most, loop, remote_shell=shell)
            membership = Membership(
                local, server, loop, nnodes=nnodes or MinMax(1, 1), nproc=nproc, grow_after=options.grow_after
            )
            job = Job(command, backend, membership, loop, log_dir=folder, options=options, termination=termination)
            return _lead(job, local, server, termination)
        except KeyboardInterrupt as interrupt:
            stop_waiting_for_readers()
            print("interrupted: all ranks were ended", file=sys.stderr)
            return _code_of(interrupt)


def _backend_and_device(backend: Optional[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the backend and the device of this host's ranks; print a choice between cards and cores that is not typed.

    Raises:
        LaunchError: the variables of the device have values that the ranks would read in another way.
    """
    is_typed = bool(environ.get("DEVICE_TARGET"))
    device = "CPU" if backend == "mpi" and not is_typed else default_device(environ)
    if device not in DEVICES:
        raise LaunchError(f"DEVICE_TARGET is {device}, expected {', '.join(DEVICES[:-1])} or {DEVICES[-1]}")
    if (is_typed or backend != "mpi") and (wrong := check_visible_devices(environ)):
        raise LaunchError(wrong)
    if backend != "mindspore" and not is_typed and count_devices("Ascend", environ):
        print(
            f"this host has {device} cards, and its ranks use them; DEVICE_TARGET=CPU trains on the CPU"
            if backend is None
            else "this host has Ascend cards, and --backend mpi trains on its CPU; --backend mindspore uses them"
        )
    if device == "CPU" and backend == "mindspore" and not is_typed and count_devices("GPU", environ):
        print("this host has GPUs, and its ranks use the CPU; DEVICE_TARGET=GPU is for a MindSpore built for them")
    return backend or ("mpi" if device == "CPU" else "mindspore"), device


def _leads(rendezvous: Rendezvous, node_rank: Optional[int]) -> bool:
    """Return whether this host leads the job: its node rank is 0 or, without one, the endpoint's address is its own."""
    number = node_rank if node_rank is not None else node_rank_of(os.environ)
    return is_this_host(rendezvous.host) if number is None else number == 0


def _lead(job: Job, local: LocalHost, server: Optional[RendezvousServer], termination: Termination) -> int:
    """Lead a job from this host, and tell the other hosts its exit code."""
    code = 1
    try:
        code = job.run()
        # A rank's own exit code must not look like that of a host that has lost the first one.
        code = 1 if code == LeaderLostError.exit_code else code
        return code
    except KeyboardInterrupt as interrupt:
        code = _code_of(interrupt)
        raise
    except LaunchError as error:
        code = error.exit_code
        raise
    finally:
        job.note_end(code)
        if code:
            # What waits for the job, such as Slurm or Kubernetes, must not wait for a reader of its output.
            stop_waiting_for_readers()
        try:
            if server is not None:
                server.close(code)
        finally:
            with termination.ignored():
                local.end()


def _code_of(interrupt: KeyboardInterrupt) -> int:
    """Return the exit code that a shell would report: 128 plus the number of the signal."""
    return 128 + (interrupt.number if isinstance(interrupt, Interrupted) else signal.SIGINT)


def run_measurement(command: Sequence[str], world_size: int) -> Any:
    """Run ``python COMMAND --write FILE`` on ``world_size`` ranks under MPI; return the JSON that rank 0 wrote to FILE.

    Raises:
        LaunchError: the job could not be started.
        RuntimeError: the job failed; it has printed the reason.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "measured.json")
        options = JobOptions(tee="none")
        command = [*command, "--write", str(file)]
        if run_job(world_size, command, backend="mpi", log_dir=Path(folder, "logs"), options=options) != 0:
            raise RuntimeError(f"the job with {world_size} ranks failed; see its message above")
        return json.loads(file.read_text())
