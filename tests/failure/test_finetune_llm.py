"""Test that scripts/finetune_llm.py trains the same model on every mesh, and that LoRA adapters train on that model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import chat_models
import pytest

from mindnlp_dp.runtime.versions import mindnlp_series

pytestmark = pytest.mark.skipif(mindnlp_series() == "0.5", reason="the recipe is for MindNLP 0.4")

ROOT = Path(__file__).resolve().parents[2]
SIZES = (
    "--hidden-size 32 --num-layers 2 --intermediate-size 64 --vocab-size 300 --max-length 96 --global-batch-size 16 "
    "--max-steps 5 --logging-steps 1 --max-new-tokens 4"
).split()


def run(folder, num_ranks, script, *flags):
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "mindnlp_dp", "run", "--nproc", str(num_ranks), "--log-dir", str(folder / "logs")]
    done = subprocess.run(
        [*command, str(ROOT / script), *flags], capture_output=True, text=True, timeout=300, cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def report_of(folder, num_ranks, *flags):
    folders = ["--output-dir", str(folder / "out"), "--cache-dir", str(folder / "cache")]
    run(folder, num_ranks, "scripts/finetune_llm.py", *folders, *SIZES, *flags)
    report = json.loads((folder / "out/report.json").read_text())
    assert report["replicas_in_sync"]
    losses = [row["loss"] for row in report["history"] if "loss" in row]
    return [*losses, report["eval_loss"]], report


@pytest.fixture(scope="module", params=["", "--packing", "--lora-rank 4", "--optimizer muon --micro-batch-size 4"])
def alone(request, tmp_path_factory):
    """Return the flags of a job, and its losses in one process; adapters are for the model of another job."""
    flags = request.param.split()
    if "--lora-rank" in flags:
        report_of(tmp_path_factory.mktemp("base"), 1)
        flags += ["--model", str(tmp_path_factory.getbasetemp() / "base0/out/model")]
    return flags, report_of(tmp_path_factory.mktemp("alone"), 1, *flags)[0]


MESHES = ["", "--zero-stage 0 --group-by-length", "--mesh tp=2 --check-plan", "--mesh pp=2 --gradient-checkpointing"]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_finetune_llm_losses_on_every_mesh_equal_one_process(tmp_path, alone, mesh):
    flags, expected = alone
    if "muon" in flags and "tp=2" in mesh:
        pytest.skip("Muon needs full matrices")
    if "--group-by-length" in mesh:
        expected = report_of(tmp_path / "alone", 1, *flags, "--group-by-length")[0]
    losses, report = report_of(tmp_path, 2, *flags, *mesh.split())
    assert losses == pytest.approx(expected, rel=2e-5)
    assert ("samples" in report) == ("pp" not in mesh)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "mistral base"])
def test_new_control_tokens_train_on_meshes_as_in_one_process(tmp_path, kind):
    """The models have no <|im_start|>: their embeddings are resized, to a number that two does not divide."""
    chat_models.save_untrained(kind, tmp_path / "base")
    flags = [*chat_models.write_chats(tmp_path), "--model", str(tmp_path / "base"), "--template", "chatml"]
    flags += ["--max-length", "64", "--learning-rate", "5e-3"]
    expected, _ = report_of(tmp_path / "one", 1, *flags)
    assert json.loads((tmp_path / "one/out/model/config.json").read_text())["vocab_size"] % 2
    for mesh in ("tp=2", "pp=2"):
        losses, _ = report_of(tmp_path / mesh, 2, *flags, "--mesh", mesh)
        assert losses == pytest.approx(expected, rel=2e-5)


@pytest.mark.core
def test_lora_adapters_train_on_a_model_of_finetune_llm(tmp_path):
    losses, report = report_of(tmp_path, 2, "--packing")
    assert losses[-2] < losses[0]
    assert len(report["samples"]) == 4
    text = run(tmp_path, 2, "homework/lora_docstrings.py", str(tmp_path / "out/model"), str(tmp_path / "lora"), "1")
    words = text.partition("perplexity: ")[2].split()
    before, after = float(words[0]), float(words[2])
    assert after < before
    assert (tmp_path / "lora/adapter/adapter_config.json").is_file()
