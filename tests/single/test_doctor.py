"""Test what `mindnlp-dp doctor` reports of versions, variables, ports and devices."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from mindnlp_dp.commands.doctor import findings as doctor
from mindnlp_dp.runtime.devices import check_visible_devices, count_devices, too_many_workers
from mindnlp_dp.runtime.versions import BEST_MINDSPORE, MINDNLP, OTHER_MINDNLP

ASKED = [Requirement("mindspore>=2.5.0,<2.9.0"), Requirement("numpy<2"), Requirement('mpi4py>=4; extra == "mpi"')]
FITTING = {"mindspore": "2.8.0", "numpy": "1.26.4", "mpi4py": "4.1.2"}


def problems_of(findings):
    return {finding.what: finding.advice for finding in findings if finding.advice}


def test_supported_versions_are_reported_without_problems():
    findings = list(doctor.check_installed(ASKED, FITTING))
    assert [finding.what for finding in findings] == ["mindspore 2.8.0", "numpy 1.26.4", "mpi4py 4.1.2"]
    assert not problems_of(findings)


@pytest.mark.core
@pytest.mark.parametrize(
    ("installed", "what", "advice"),
    [
        ({"numpy": "2.1.0"}, "numpy 2.1.0 is not supported, expected <2", 'pip install "numpy<2"'),
        (
            {"mindspore": "2.10.0"},
            "mindspore 2.10.0 is not supported, expected <2.9.0,>=2.5.0",
            f'pip install "mindspore=={BEST_MINDSPORE}"',
        ),
        ({"mindspore": None}, "mindspore is not installed", f'pip install "mindspore=={BEST_MINDSPORE}"'),
        ({"mpi4py": None}, "mpi4py is not installed (only the mpi backend needs it)", 'pip install "mpi4py>=4"'),
    ],
)  # fmt: skip
def test_missing_or_unsupported_versions_are_reported_with_a_pip_command(installed, what, advice):
    have = {name: version for name, version in {**FITTING, **installed}.items() if version is not None}
    assert problems_of(doctor.check_installed(ASKED, have)) == {what: advice}


def test_versions_newer_than_the_tested_ones_are_reported():
    asked = [Requirement("mindspore>=2.7.0"), Requirement("mindnlp==0.4.1")]
    findings = list(doctor.check_installed(asked, {"mindspore": "2.12.0", "mindnlp": "0.4.1"}))
    assert not problems_of(findings)
    assert "MindSpore 2.12.0 is newer than the tested versions" in findings[-1].what
    assert len(list(doctor.check_installed(asked, {"mindspore": "2.10.0", "mindnlp": "0.4.1"}))) == 2


def test_the_doctor_runs_checks_in_the_parent_folder_of_the_package():
    """In the package's folder, its modules would hide others of the same name."""
    assert (doctor._ROOT / "mindnlp_dp" / "__init__.py").exists()


def test_a_package_that_is_not_installed_is_reported():
    assert problems_of(doctor.check_installed([], {})) == {
        "mindnlp-dp itself is not installed": "pip install -e . in its folder"
    }


def test_stale_environment_variables_of_an_earlier_job_are_reported(monkeypatch):
    stale = {"MS_ROLE": "MS_WORKER", "MS_SCHED_PORT": "8118", "HOME": "/root"}
    found = problems_of(doctor.check_environment(stale))
    assert found["an earlier job left MS_ROLE, MS_SCHED_PORT in this shell"] == "unset MS_ROLE MS_SCHED_PORT"


def test_a_missing_mpirun_is_reported_and_mpi_is_not_tried(monkeypatch):
    monkeypatch.setattr(doctor, "find_mpirun", lambda: None)
    assert problems_of(doctor.check_environment({}))["mpirun was not found"] == 'pip install "mindnlp-dp[mpi]"'
    monkeypatch.setattr(doctor, "_try_backend", lambda backend, *_: doctor.Finding(f"{backend} works"))
    tried = [finding.what for finding in doctor.check_backends({}, can_import=True)]
    assert tried == ["mpi: not tested, because mpirun is missing", "mindspore works"]


def test_a_port_in_use_is_reported(monkeypatch):
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setattr(doctor, "MSRUN_PORT", server.getsockname()[1])
        found = problems_of(doctor.check_environment({}))
    assert any(what.endswith("is in use") and "MASTER_PORT=" in advice for what, advice in found.items())


def test_an_unsupported_python_version_is_reported():
    assert "make an environment with Python 3.9 to 3.12" in problems_of(doctor.check_machine((3, 13), {})).values()


def test_the_doctor_works_with_a_broken_mindspore_and_mindnlp(tmp_path):
    for name in ("mindspore", "mindnlp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('this {name} is broken')\n")
    code = (
        "import os, sys; from mindnlp_dp.commands.doctor import findings as doctor;"
        f"sys.path.insert(0, {str(tmp_path)!r}); print([f.what for f in doctor.check_imports(os.environ)]);"
        "print([f.what for f in doctor.check_backends(os.environ, can_import=False)]);"
        "assert 'mindspore' not in sys.modules"
    )
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    assert "MindSpore cannot be imported: ImportError: this mindspore is broken" in done.stdout
    assert "mpi: not tested, because the imports above failed" in done.stdout


def test_more_workers_than_visible_devices_are_reported():
    assert count_devices("GPU", {"CUDA_VISIBLE_DEVICES": "0,1"}) == 2
    assert count_devices("Ascend", {"ASCEND_RT_VISIBLE_DEVICES": ""}) == 0
    assert too_many_workers(9, {}) is None
    assert too_many_workers(9, {"DEVICE_TARGET": "CPU"}) is None
    two = {"DEVICE_TARGET": "GPU", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert too_many_workers(2, two) is None
    assert too_many_workers(3, two) == "3 workers, but this host has 2 GPU devices to use; start at most 2"
    assert too_many_workers(3, {"ASCEND_RT_VISIBLE_DEVICES": "4,5"}).startswith("3 workers, but this host has 2 Ascend")
    none = {"DEVICE_TARGET": "Ascend", "ASCEND_RT_VISIBLE_DEVICES": ""}
    assert too_many_workers(2, none) == "2 workers, but this host has 0 Ascend devices to use; try DEVICE_TARGET=CPU"


@pytest.mark.parametrize(
    ("listed", "count", "meant"),
    [
        ("0,1,5", 3, None), ("", 0, None), ("7", 1, None), ("0,10", 2, None), ("-1", 0, None), ("1,-1,3", 1, None),
        ("1, 2,3", 1, "1,2,3"), (" 0,1", 0, "0,1"), ("0,1,", 2, "0,1"), ("0;1", 1, "0,1"), ("0-1", 1, "0,1"),
        ("1,0", 2, "0,1"), ("0,0,1", 3, "0,1"), ("0-3", 1, "0,1,2,3"),
    ],
)  # fmt: skip
def test_visible_npus_are_counted_as_cann_counts_them(listed, count, meant):
    environ = {"ASCEND_RT_VISIBLE_DEVICES": listed}
    assert count_devices("Ascend", environ) == count
    said = check_visible_devices(environ)
    assert said is None if meant is None else said.endswith(f"; write, for example, ASCEND_RT_VISIBLE_DEVICES={meant}")
    assert check_visible_devices({**environ, "DEVICE_TARGET": "CPU"}) is None
    assert check_visible_devices({**environ, "DEVICE_TARGET": "Ascend"}) == said


@pytest.mark.parametrize("listed", ["all", "NONE", "-2", "4,-10", "npu0"])
def test_an_npu_list_without_numbers_is_reported_with_an_example(listed):
    said = check_visible_devices({"ASCEND_RT_VISIBLE_DEVICES": listed})
    assert said.endswith("or list their numbers, for example ASCEND_RT_VISIBLE_DEVICES=0,1,2,3")


def test_visible_gpus_are_counted_as_cuda_counts_them():
    counts = {"0, 1": 2, "GPU-8932f937,GPU-d72c": 2, "0,-1,1": 1, "-1": 0, "": 0}
    assert {listed: count_devices("GPU", {"CUDA_VISIBLE_DEVICES": listed}) for listed in counts} == counts


def test_each_mindnlp_series_has_its_own_requirements():
    names = {"0.4": MINDNLP, "0.5": OTHER_MINDNLP}
    for series, specifier in names.items():
        asked = {requirement.name: requirement for requirement in doctor.requirements(series)}
        assert asked["mindnlp"].specifier == SpecifierSet(specifier)
        assert "numpy" in asked
