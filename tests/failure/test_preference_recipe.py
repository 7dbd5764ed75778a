"""Test that scripts/finetune_llm.py learns preferences (DPO, ORPO) with the losses of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SIZES = (
    "--hidden-size 32 --num-layers 2 --intermediate-size 64 --vocab-size 300 --max-length 96 --global-batch-size 8 "
    "--max-steps 6 --logging-steps 1 --max-new-tokens 4 --num-samples 1"
).split()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    rows = [
        {"prompt": f"{a} plus {b}?", "chosen": f" {a + b} is it", "rejected": " no idea" + " really" * (a % 3)}
        for a in range(7)
        for b in range(5)
    ]
    for name, part in (("train", rows), ("test", rows[:11])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    return ["--train-file", str(folder / "train.jsonl"), "--test-file", str(folder / "test.jsonl")]


def report_of(folder, num_ranks, *flags):
    """Run the recipe in ``folder``; return all its losses and rewards, and the report."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "mindnlp_dp", "run", "--nproc", str(num_ranks), "--log-dir", str(folder / "logs")]
    script = [str(ROOT / "scripts/finetune_llm.py"), "--output-dir", "out", "--cache-dir", "cache"]
    done = subprocess.run([*command, *script, *SIZES, *flags], capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "out/report.json").read_text())
    names = ("loss", "eval_loss", "eval_rewards/margins", "eval_rewards/accuracies")
    return [row[name] for row in report["history"] for name in names if name in row], report


@pytest.mark.parametrize("objective", ["dpo", "orpo"])
def test_dpo_and_orpo_losses_of_two_ranks_equal_one_process(tmp_path, files, objective):
    flags = ["--objective", objective, *files]
    alone, _ = report_of(tmp_path / "alone", 1, *flags, "--micro-batch-size", "2")
    both, report = report_of(tmp_path / "both", 2, *flags, "--zero-stage", "2")
    assert both == pytest.approx(alone, rel=1e-5, abs=1e-5)
    assert report["replicas_in_sync"]
    assert report["samples"]


def test_dpo_uses_the_base_model_as_reference_for_continued_lora_adapters(tmp_path, files):
    """At the start, new adapters change nothing, so that DPO's loss is log 2; continued ones do."""
    report_of(tmp_path / "base", 1, "--objective", "simpo", *files)
    flags = ["--objective", "dpo", *files, "--learning-rate", "0.01"]
    first, _ = report_of(tmp_path / "new", 1, *flags, "--model", str(tmp_path / "base/out/model"), "--lora-rank", "4")
    assert first[0] == pytest.approx(0.693147, abs=1e-4)
    second, _ = report_of(tmp_path / "more", 1, *flags, "--model", str(tmp_path / "new/out/model"))
    assert second[0] < 0.68


def test_a_resumed_dpo_run_keeps_its_reference_model_and_losses(tmp_path, files):
    flags = ["--objective", "dpo", *files, "--lr-scheduler", "constant_with_warmup"]
    whole, _ = report_of(tmp_path / "whole", 1, *flags)
    report_of(tmp_path / "parts", 1, *flags, "--save-steps", "3", "--max-steps", "3")
    resumed, _ = report_of(tmp_path / "parts", 1, *flags, "--save-steps", "3", "--resume")
    assert resumed[-4:] == pytest.approx(whole[-4:], rel=1e-5, abs=1e-5)
