"""Test the homework's complete scripts as a student runs them, on small data."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindnlp_dp.launch.processes.environment import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
WORDS = {"0": "bad sad angry", "1": "it is so", "2": "good glad happy"}


def environment(**more):
    """Return variables with which the scripts use the environment of these tests, and install nothing."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **more}


@pytest.fixture
def flags(tmp_path):
    """Write data files in the course's format (three classes, 120 texts); return the flags that use them."""
    rng = np.random.default_rng(0)
    for name, number in (("train", 90), ("test", 30)):
        labels = [str(label) for label in rng.integers(0, 3, number)]
        rows = [f"{label}\t{' '.join(rng.permutation(WORDS[label].split()))}" for label in labels]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["label\ttext_a", *rows]) + "\n")
    return [
        "--train-file", str(tmp_path / "train.tsv"), "--test-file", str(tmp_path / "test.tsv"), "--model", "tiny",
        "--output-dir", str(tmp_path / "out"), "--num-epochs", "4", "--hidden-size", "32", "--num-heads", "2",
        "--intermediate-size", "64", "--num-layers", "1", "--global-batch-size", "8", "--learning-rate", "5e-3",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    """Make a copy of this environment (symbolic links), with a stamp that says that everything is installed.

    The stamp of the real environment may be out of date; ensure_environment would then call pip during the tests.
    """
    folder = tmp_path_factory.mktemp("environment") / "venv"
    folder.mkdir()
    for path in Path(sys.prefix).iterdir():
        if not path.name.startswith(".installed-"):
            (folder / path.name).symlink_to(path)
    stamp = subprocess.run(
        ["bash", "-c", "source scripts/environment.sh && _what_is_installed"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    (folder / ".installed-report").write_text(stamp.stdout)
    return str(folder)


def run(command, **variables):
    return subprocess.run(
        command, cwd=ROOT, env=environment(**variables), capture_output=True, text=True, timeout=300
    )  # fmt: skip


def words_of(page):
    """Return the text of an HTML page on one line."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", page.read_text(encoding="utf-8"))))


def test_homework_scripts_learn_the_task_with_one_and_two_processes(flags, tmp_path):
    single = run([sys.executable, "homework/train_single.py", *flags])
    assert single.returncode == 0, single.stderr
    report = json.loads((tmp_path / "out/report.json").read_text())
    reports = [report]
    assert (report["world_size"], report["eval_accuracy"], report["replicas_in_sync"]) == (1, 1.0, True)
    assert (tmp_path / "out/training.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "out").rename(tmp_path / "one")

    parallel = [sys.executable, "-m", "mindnlp_dp", "run", "--nproc", "2", "--log-dir", str(tmp_path / "logs")]
    two = run([*parallel, "homework/train_data_parallel.py", *flags])
    assert two.returncode == 0, two.stdout + two.stderr
    report = json.loads((tmp_path / "out/report.json").read_text())
    reports.append(report)
    assert (report["world_size"], report["eval_accuracy"], report["replicas_in_sync"]) == (2, 1.0, True)
    assert report["command"].startswith(
        "mindnlp-dp run --nproc 2 --backend mpi homework/train_data_parallel.py --train"
    )
    assert report["global_batch_size"] == 8

    page = run([sys.executable, "-m", "mindnlp_dp", "report", str(tmp_path / "one"), str(tmp_path / "out")])
    assert page.returncode == 0, page.stderr
    words = words_of(tmp_path / "one/report.html")
    for expected in (
        "Training report: 3 classes, 90 training samples", "one (one process); out (2 processes, mpi)",
        "accuracy 1.0000", "on 30 held-out samples", "replicas agree", "accuracy 1.0000 1.0000",
        f"digest of the weights {reports[0]['replica_digest']} {reports[1]['replica_digest']} , on every process",
    ):  # fmt: skip
        assert expected in words, expected


@pytest.mark.slow
def test_the_homework_2cpu_script_writes_an_html_report(flags, tmp_path, venv):
    done = run(
        ["bash", "scripts/homework_2cpu.sh", *flags],
        VENV=venv, VIRTUAL_ENV=venv, MASTER_PORT=str(free_port()), LOG_DIR=str(tmp_path / "logs"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"written to {tmp_path}/out/report.html")
    words, report = words_of(tmp_path / "out/report.html"), json.loads((tmp_path / "out/report.json").read_text())
    for expected in ("out (2 processes, mccl)", "replicas agree", f"{report['replica_digest']} , on every process"):
        assert expected in words, expected


@pytest.mark.slow
def test_a_failed_homework_run_does_not_show_an_earlier_report(flags, tmp_path, venv):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/report.json").write_text("{}")
    done = run(
        ["bash", "scripts/homework_2cpu.sh", *flags, "--global-batch-size", "7"],
        VENV=venv, VIRTUAL_ENV=venv, MASTER_PORT=str(free_port()), LOG_DIR=str(tmp_path / "logs"),
    )  # fmt: skip
    assert done.returncode == 2
    assert "global_batch_size (7) must be divisible" in done.stderr
    assert "report.json does not exist" in done.stderr


@pytest.mark.slow
def test_the_homework_emotion_script_learns_the_task_with_two_processes(flags, tmp_path):
    done = run(
        ["bash", "scripts/homework_emotion.sh", *flags],
        DEVICE="CPU", VIRTUAL_ENV=str(Path(sys.prefix)), MASTER_PORT=str(free_port()), LOG_DIR=str(tmp_path / "logs"),
    )  # fmt: skip
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert (report["world_size"], report["backend"], report["eval_accuracy"]) == (2, "mccl", 1.0), done.stdout


@pytest.mark.parametrize(("script", "device"), [("homework_2npu.sh", "Ascend"), ("homework_2gpu.sh", "GPU")])
def test_homework_scripts_for_two_devices_are_refused_without_devices(script, device):
    done = run(["bash", f"scripts/{script}"])
    assert done.returncode == 2
    assert f"2 workers, but this host has 0 {device} devices to use" in done.stderr


def test_missing_emotion_data_is_refused_with_the_download_command(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "homework/bert_emotion.py")], cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "error: there is no data/emotion; python homework/download_emotion.py fetches it"
    )
