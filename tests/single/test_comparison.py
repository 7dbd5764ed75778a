"""Tests the comparison of runs on different numbers of ranks, with runs of two weights and two log lines."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from mindnlp_dp.finetuning.comparison import compare_runs, main

INITIAL = np.array([0.0, 1.0], np.float32)


def run(folder, world_size, change, steps=4, initial=INITIAL):
    log = [{"step": 2, "loss": 1.5, "step_seconds": 0.3}, {"step": 4, "loss": 1.25, "step_seconds": 0.1}]
    report = {
        "world_size": world_size,
        "backend": "mpi",
        "train_samples_per_second": 1.0,
        "eval_loss": 1.0,
        "eval_accuracy": 0.5,
        "replica_digest": "",
        "steps": steps,
        "global_batch_size": 8,
        "machine": "a processor, 2 cores",
        "history": log,
    }
    for name, weights in (("initial_model", initial), ("model", INITIAL + np.array(change, np.float32))):
        (folder / name).mkdir(parents=True)
        save_file({"layer.weight": weights}, folder / name / "model.safetensors")
    (folder / "report.json").write_text(json.dumps(report))
    return folder


def test_weight_differences_are_the_largest_one_and_a_share_of_the_change_by_training(tmp_path, capsys):
    folders = [run(tmp_path / "1", 1, [3, 4]), run(tmp_path / "2", 2, [3, 4.5])]
    main(tmp_path, folders)
    compared = json.loads((tmp_path / "compare.json").read_text())
    assert compared["largest_weight_change"] == 4
    assert [run["world_size"] for run in compared["runs"]] == [1, 2]
    assert [run["largest_weight_difference"] for run in compared["runs"]] == [0, 0.5]
    assert [run["relative_weight_difference"] for run in compared["runs"]] == [0, 0.5 / 5]
    assert [run["seconds_per_update"] for run in compared["runs"]] == [0.1, 0.1]
    assert (tmp_path / "compare.png").read_bytes()[1:4] == b"PNG"
    assert "<svg" in (tmp_path / "compare.svg").read_text()
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["4", "1.2500", "1.2500"] in printed
    assert "largest difference of a weight 0.0e+00 5.0e-01".split() in printed


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"steps": 5}, "2 has steps 5, and .*1 has 4"),
        ({"initial": INITIAL + 1}, "2 and .*1 started from other weights; train both with the same seed"),
    ],
)
def test_runs_that_did_not_train_alike_are_not_compared(tmp_path, other, message):
    folders = [run(tmp_path / "1", 1, [3, 4]), run(tmp_path / "2", 2, [3, 4], **other)]
    with pytest.raises(ValueError, match=message):
        compare_runs(folders)


def test_a_run_without_its_initial_model_is_an_error(tmp_path):
    folder = run(tmp_path / "1", 1, [3, 4])
    (folder / "initial_model" / "model.safetensors").unlink()
    with pytest.raises(SystemExit, match=r"initial_model has no \*\.safetensors; train with --save-initial-model"):
        main(tmp_path, [folder])
