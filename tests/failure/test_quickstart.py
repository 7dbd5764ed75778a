"""Test that scripts/quickstart.sh --compare trains the same model on one, two and four ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, TIMEOUT_SECONDS
from mindnlp_dp.runtime.versions import mindnlp_series

SMALL = (
    "--hidden-size 32 --num-layers 1 --intermediate-size 64 --vocab-size 300 --max-train-samples 400 "
    "--global-batch-size 32 --max-steps 4 --logging-steps 1"
).split()


@pytest.fixture
def environ(tmp_path):
    """Return the variables with which the scripts take this environment for one that they have installed."""
    folder = tmp_path / "venv"
    folder.mkdir()
    for entry in Path(sys.prefix).iterdir():
        (folder / entry.name).symlink_to(entry)
    environ = {**os.environ, "VENV": str(folder), "MINDNLP": mindnlp_series()}
    script = f'source {ROOT}/scripts/environment.sh; _what_is_installed "$VENV/bin/python"'
    stamp = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, check=True).stdout
    for name in (".installed", ".installed-mpi-quickstart-report"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(stamp)
    return environ


@pytest.mark.core
def test_compare_trains_the_same_model_on_one_two_and_four_ranks(tmp_path, environ):
    command = ["bash", ROOT / "scripts/quickstart.sh", "--compare", *SMALL, "--output-dir", tmp_path / "compare"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=TIMEOUT_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    compared = json.loads((tmp_path / "compare/compare.json").read_text())
    assert [run["world_size"] for run in compared["runs"]] == [1, 2, 4]
    one, *others = compared["runs"]
    assert one["steps"] == [1, 2, 3, 4]
    for run in others:
        # The log has four decimals.
        assert run["losses"] == pytest.approx(one["losses"], abs=1.5e-4)
        assert run["relative_weight_difference"] < 1e-5
    assert "largest difference of a weight     0.0e+00" in done.stdout
    assert {"compare.json", "compare.png", "compare.svg", "1", "2", "4"} == {
        file.name for file in (tmp_path / "compare").iterdir()
    }
