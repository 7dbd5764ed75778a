"""Test that mistakes in the files and flags of scripts/finetune.py give one error message and write no results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from conftest import MPI_FIRST, ROOT, run_job, run_one_after_another
from mindnlp_dp.launch.processes.run_module import command as module_command

FINETUNE = ROOT / "scripts" / "finetune.py"
GOOD = "text,label\n" + "".join(f"this is text {i},{'even' if i % 2 == 0 else 'odd'}\n" for i in range(6))

# name: training file, test file, more flags, message.
MISTAKES = {
    "missing file": (None, GOOD, [], r"train.csv: the file does not exist"),
    "malformed line": (
        GOOD + "one,two,three\n", GOOD, [], "train.csv, line 8: expected 2 fields, as in the header, got 3",
    ),
    "unknown label": (
        GOOD, GOOD + "a,new\n", [], "test.csv, row 7: the label 'new' does not occur in the training split",
    ),
    "empty split": (GOOD, "text,label\n", [], "test.csv: it has no rows below the header"),
    "one label": ("text,label\na,x\nb,x\n", GOOD, [], "all rows have the label 'x'; there is nothing to classify"),
}  # fmt: skip


def command(folder, train, test, *flags):
    """Return the training command with these files; its output goes to ``folder``/out."""
    folder.mkdir(exist_ok=True)
    for name, content in (("train.csv", train), ("test.csv", test)):
        if content is not None:
            (folder / name).write_text(content)
    files = ["--train-file", folder / "train.csv", "--test-file", folder / "test.csv"]
    return [FINETUNE, *files, "--output-dir", folder / "out", *flags]


def assert_one_message(job, message):
    assert job.exit_code == 1
    assert job.output.count("error:") == 1, job.output
    assert f"{message}\n" in job.output
    assert "Traceback" not in job.output


CHECKPOINTS = [
    "--global-batch-size", "4", "--save-steps", "1", "--dropout", "0.1", "--resume", "true", "--num-epochs", "3",
]  # fmt: skip
NO_NAME = [FINETUNE, ROOT / "homework" / "train_data_parallel.py"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mistakes")


@pytest.fixture(scope="module")
def ends(folder):
    """Run all cases that both ranks leave together in one MPI job."""
    (folder / "c.yaml").write_text("epochs: 3\n")
    runs = {"unknown key": [FINETUNE, "--config", folder / "c.yaml"]}
    for script in NO_NAME:
        runs[script.name] = [script, "--model", "tiny", "--output-dir="]
    # A folder has the name of the plot, so the plot cannot be written.
    (folder / "unwritable" / "out" / "training.png").mkdir(parents=True)
    flags = ["--max-steps", "1", "--global-batch-size", "4"]
    runs["unwritable"] = command(folder / "unwritable", GOOD, GOOD, *flags)
    runs["whole"] = command(folder / "whole", GOOD, GOOD, *CHECKPOINTS)
    return run_one_after_another(folder, runs)


@pytest.mark.core
@pytest.mark.parametrize("mistake", MISTAKES)
def test_bad_training_files_give_one_error_message_and_no_output_folder(tmp_path, mistake):
    train, test, flags, message = MISTAKES[mistake]
    assert_one_message(run_job(tmp_path, *command(tmp_path, train, test, *flags)), message)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("own_imports")
def test_check_reads_the_files_and_trains_nothing(tmp_path):
    job = run_job(tmp_path, *command(tmp_path, GOOD, GOOD, "--check"))
    assert job == (0, "the settings and the files are right: 6 training and 6 held-out texts, 2 labels\n")
    assert not (tmp_path / "out").exists()


def test_help_is_printed_by_one_process(tmp_path):
    job = run_job(tmp_path, FINETUNE, "--help")
    assert job.exit_code == 0
    assert job.output.startswith("usage: finetune.py")
    assert job.output.count("usage:") == 1
    assert "warning" not in job.output


@pytest.mark.parametrize("backend", MPI_FIRST)
def test_more_ranks_than_samples_are_refused(tmp_path, backend):
    two = "text,label\nyes,a\nno,b\n"
    job = run_job(tmp_path, *command(tmp_path, two, two, "--global-batch-size", "3"), nproc=3, backend=backend)
    assert job.exit_code == 1
    assert (
        "error: 2 training samples for 3 ranks: every rank needs at least one; start at most 2 processes" in job.output
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.core
def test_an_unknown_config_key_is_refused(ends):
    for rank in ends["unknown key"]:
        assert rank.exit_code == 1
        assert "c.yaml: unknown key 'epochs'" in rank.output


@pytest.mark.parametrize("path", NO_NAME, ids=lambda path: path.name)
def test_an_empty_output_dir_is_refused_and_no_file_is_written(folder, ends, path):
    for rank in ends[path.name]:
        assert_one_message(rank, "error: output_dir must name a folder, got ''")
    written = {"c.yaml", "logs", "runs.json", "runs_0.json", "runs_1.json", "unwritable", "whole"}
    assert set(os.listdir(folder)) == written


@pytest.mark.core
def test_an_unwritable_plot_fails_all_ranks_and_leaves_no_partial_report(folder, ends):
    """Every rank fails with the error, and no report claims success."""
    output = folder / "unwritable" / "out"
    for rank in ends["unwritable"]:
        assert rank.exit_code == 1
        assert "IsADirectoryError" in rank.output
    assert not (output / "report.json").exists()
    assert not [name for name in os.listdir(output) if name.startswith(".")]


def test_finetune_resumes_from_its_checkpoint_and_refuses_damaged_ones(folder, ends, tmp_path):
    """It continues after update 5 with the report of an uninterrupted run; fails if all checkpoints are damaged."""
    whole = folder / "whole" / "out"
    expected = json.loads((whole / "report.json").read_text())
    assert expected["steps"] == 6
    stopped, damaged = tmp_path / "stopped", tmp_path / "damaged"
    runs = {path.name: command(path, GOOD, GOOD, *CHECKPOINTS) for path in (stopped, damaged)}
    shutil.copytree(whole, stopped / "out")
    shutil.rmtree(stopped / "out" / "checkpoint-6")
    os.remove(stopped / "out" / "report.json")
    shutil.copytree(whole, damaged / "out")
    for checkpoint in (damaged / "out").glob("checkpoint-*"):
        (checkpoint / "model.safetensors").write_bytes(b"")

    ranks = run_one_after_another(tmp_path, runs)
    for rank in ranks["stopped"]:
        assert rank.exit_code == 0, rank.output
    report = json.loads((stopped / "out" / "report.json").read_text())
    assert (report["replica_digest"], report["steps"]) == (expected["replica_digest"], 6)
    for rank in ranks["damaged"]:
        assert rank.exit_code == 1
        assert "no complete checkpoint in" in rank.output
        assert "is damaged: model.safetensors has 0 bytes" in rank.output
        assert "Traceback" not in rank.output
    assert ranks["damaged"][0].output.startswith("error: no complete checkpoint in")


def test_an_unsupported_python_is_refused_with_the_supported_versions():
    done = subprocess.run(
        ["bash", "-c", f"source {ROOT}/scripts/environment.sh && ensure_environment mpi"],
        env={**os.environ, "PYTHON": "/bin/false", "VENV": "/tmp/mindnlp-dp-no-such-venv"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == "error: Python 3.9 to 3.12 is needed, and /bin/false is not; set PYTHON=/path/to/one\n"


@pytest.mark.usefixtures("own_imports")
@pytest.mark.parametrize("backend", MPI_FIRST)
def test_modules_in_the_current_folder_are_not_imported(tmp_path, backend):
    """Files there replace neither the standard library nor this package (CWE-427)."""
    here = tmp_path / "here"
    (here / "mindnlp_dp").mkdir(parents=True)
    stranger = "open({!r}, 'w').close()\nraise ImportError('a stranger')\n"
    for name in ("tempfile", "random", "secrets", "select", "queue", "mindnlp_dp/__init__"):
        (here / f"{name}.py").write_text(stranger.format(str(tmp_path / f"imported_{name.partition('/')[0]}")))
    script = tmp_path / "script.py"
    script.write_text(
        "import tempfile\nimport mindnlp_dp as dp\n"
        "print('rank', dp.init_process_group().rank, tempfile.gettempdir(), dp.__file__)\n"
    )
    run = [*module_command("mindnlp_dp.commands.main"), "run", "--nproc", "2", "--backend", backend]
    done = subprocess.run(
        [*run, "--log-dir", str(tmp_path / "logs"), str(script)], cwd=here, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 /" in done.stdout
    assert str(ROOT) in done.stdout
    assert not list(tmp_path.glob("imported_*"))
