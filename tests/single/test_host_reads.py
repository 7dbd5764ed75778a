"""Tests that this package's patches read nothing from a device while a model runs on MindSpore's kernels."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MODELS = ["BERT", "RoBERTa", "GPT-2", "GPT-Neo", "Llama", "Qwen2", "OPT"]


@pytest.fixture(scope="module")
def counts(pytestconfig, tmp_path_factory):
    """Return the counts of the benchmark, which runs in a process of its own, because kernels are off there."""
    path = tmp_path_factory.mktemp("reads") / "reads.json"
    script = pytestconfig.rootpath / "benchmarks" / "bench_host_reads.py"
    job = subprocess.run([sys.executable, script, "--json", path], capture_output=True, text=True)
    assert job.returncode == 0, job.stderr
    return json.loads(path.read_text())


@pytest.mark.core
@pytest.mark.parametrize("model", MODELS)
def test_no_patch_reads_from_the_device_in_a_forward_and_backward_pass(counts, model):
    """Check that the only host reads are MindNLP's own; with patches that read, GPT-2 made two per layer."""
    assert counts["models"][model]["mindnlp_dp"] == 0
    assert counts["models"][model]["other"] == 0
    assert sum(counts["models"][model].values()) == {"BERT": 1, "RoBERTa": 1, "OPT": 2}.get(model, 0)


def test_an_update_makes_one_host_read_for_any_number_of_micro_batches(counts):
    assert counts["updates"] == {"1": 1, "4": 1}
