"""Test jobs whose models are sharded over ranks: failures, refused settings, and the examples."""

from __future__ import annotations

import json
import re
import time

import pytest

from conftest import ROOT, core

EXAMPLES = ROOT / "examples" / "parallel"
PIPELINE = """
import os, sys
import mindnlp_dp as dp
group = dp.init_process_group()
from mindnlp.core import optim
from tiny_transformers import batch, build, rows
mesh = dp.init_device_mesh({axes})
model = dp.parallelize(build("gpt2"), mesh)
calls = [0]

def forward(**inputs):
    calls[0] += 1
    if group.rank == 1 and calls[0] == 6:
        {what}
    return model(**inputs)[0]

parameters = list(model.parameters())
step = dp.make_train_step(forward, optim.SGD(parameters, lr=0.1), parameters, accumulation_steps=4)
for _ in range(3):
    step([rows(batch("gpt2", 8), first, first + 2) for first in (0, 2, 4, 6)])
print("never reached")
"""
WAYS = {"dies": "os._exit(3)", "raises": "raise OSError('no such device')"}
SAID = {
    "dies": ("rank 1 of 2 exited with code 3",),
    "raises": ("rank 1 of 2 failed with exit code 1",),
}


@pytest.mark.parametrize(
    ("way", "axes"),
    [pytest.param("dies", '{"pp": 2}', marks=core), ("raises", '{"pp": 2}'), ("dies", '{"tp": 2}')],
)
def test_a_rank_that_fails_during_an_update_ends_a_tp_or_pp_job(launch, way, axes):
    began = time.monotonic()
    job = launch(PIPELINE.replace("{what}", WAYS[way]).replace("{axes}", axes))
    assert job.exit_code != 0
    # The other stage may end first, because a message is missing; the launcher must not blame it.
    assert all(said in job.output for said in SAID[way])
    assert way != "raises" or "OSError: no such device" in job.output
    assert "never reached" not in job.output
    # A job starts in ten seconds; the other rank must not wait for the dead one until a time-out.
    assert time.monotonic() - began < 100


@pytest.mark.parametrize(
    ("nproc", "script", "picture", "said"),
    [
        (2, "two_operators.py", ["tensor"], "device 2 (tp=1):  10.0 of 10 GB"),
        (2, "two_operators.py", ["pipeline"], "device 2 (pp=1):  10.0 of 10 GB of weights: operators.1"),
        pytest.param(
            4,
            "two_operators.py",
            ["hybrid"],
            "device 4 (dp=1, pp=1):  10.0 of 10 GB of weights: operators.1",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4,
            "transformers_by_device.py",
            ["gpt"],
            "micro-batches in flight, by stage: [4, 3, 2, 1]",
            marks=pytest.mark.slow,
        ),
        (2, "transformers_by_device.py", ["t5"], "device 2 (pp=1)"),
        (4, "experts_by_device.py", [], "times the mean"),
    ],
)
def test_examples_of_model_parallelism_run_and_print_their_summary(launch, nproc, script, picture, said):
    job = launch(EXAMPLES / script, *picture, nproc=nproc)
    assert job.exit_code == 0, job.output
    assert said in job.output
    ((first, last),) = re.findall(r"^loss: ([\d.]+), after 5 updates ([\d.]+)$", job.output, re.MULTILINE)
    assert float(last) < float(first)


def test_finetune_has_the_same_eval_loss_with_tp_and_pp(launch, tmp_path):
    settings = ["--max-steps", "3", "--hidden-size", "16", "--intermediate-size", "32", "--vocab-size", "300",
                "--logging-steps", "1", "--eval-batch-size", "512"]  # fmt: skip
    script = ROOT / "scripts" / "finetune.py"
    losses = {}
    for mesh in ("tp=2", "pp=2"):
        trace = ["--trace", str(tmp_path / "trace.json")]
        job = launch(script, "--mesh", mesh, "--output-dir", str(tmp_path / mesh), *trace, *settings)
        assert job.exit_code == 0, job.output
        assert "replicas in sync  yes" in job.output
        report = json.loads((tmp_path / mesh / "report.json").read_text())
        losses[mesh] = report["eval_loss"]
        assert ("pipeline" in report) == (mesh == "pp=2")
        assert (tmp_path / mesh / "model" / "model.safetensors").exists()
    assert losses["tp=2"] == pytest.approx(losses["pp=2"], abs=1e-4)


TINY = {
    "model_type": "roberta", "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 32, "max_position_embeddings": 26, "num_labels": 29,
}  # fmt: skip


def a_cluster(num_devices):
    return {
        "devices_per_host": num_devices, "memory_gib": 1, "tflops": 0.1, "efficiency": 1.0,
        "memory_bandwidth_gbs": 10, "inside": {"latency_us": 30, "bandwidth_gbs": 1}, "precision": "float32",
    }  # fmt: skip


@pytest.mark.slow
def test_finetune_follows_a_plan_and_refuses_settings_that_differ_from_it(launch, tmp_path):
    from mindnlp_dp.commands.main import main

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 3}
    cluster = a_cluster(2)
    files = {name: tmp_path / f"{name}.json" for name in ("model", "cluster", "plan")}
    files["model"].write_text(json.dumps(TINY))
    files["cluster"].write_text(json.dumps(cluster))
    flags = [part for name, path in files.items() for part in ("--json" if name == "plan" else f"--{name}", str(path))]
    assert main(["plan", *flags, "--batch", "16", "--sequence", "24"]) == 0
    written = json.loads(files["plan"].read_text())
    # Keep only the plans with two pipeline stages.
    written["plans"] = [found for found in written["plans"] if (found["mesh"] or {}).get("pp") == 2]
    files["plan"].write_text(json.dumps(written))
    settings = [part for name, size in sizes.items() for part in (f"--{name.replace('_', '-')}", str(size))]
    settings += ["--vocab-size", "300", "--max-steps", "3", "--eval-batch-size", "512", "--plan", str(files["plan"])]
    script = ROOT / "scripts" / "finetune.py"
    job = launch(script, *settings, "--global-batch-size", "16", "--output-dir", str(tmp_path / "run"))
    assert job.exit_code == 0, job.output
    assert "predicted" in job.output
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    best = written["plans"][0]
    assert report["plan"]["predicted"] == best["seconds"]
    assert report["plan"]["measured"] > 0
    assert report["config"]["mesh"] == "pp=2"
    assert [int(n) for n in report["config"]["pipeline_layers"].split(",")] == [
        stage["layers"][1] - stage["layers"][0] for stage in best["stages"]
    ]
    # Another model or another batch is refused.
    other = ["--output-dir", str(tmp_path / "x")]
    job = launch(script, *settings, "--hidden-size", "32", "--global-batch-size", "16", *other)
    assert job.exit_code == 1
    assert "the plan is for a model of" in job.output
    job = launch(script, *settings, "--global-batch-size", "32", *other)
    assert job.exit_code == 1
    assert "global_batch_size is 32, and the plan is for 16 samples" in job.output
    # Contradictory settings are refused, and so is a file that is not a plan.
    settings += ["--global-batch-size", "16"]
    job = launch(script, *settings, "--mesh", "tp=2", "--output-dir", str(tmp_path / "other"))
    assert job.exit_code == 1
    assert "mesh is tp=2, and the plan's is pp=2; leave one of them out" in job.output
    files["plan"].write_text("{}")
    job = launch(script, *settings, "--output-dir", str(tmp_path / "other"))
    assert job.exit_code == 1
    assert "is not what mindnlp-dp plan --json writes" in job.output


def test_finetune_follows_a_plan_with_stages_of_different_sizes(launch, tmp_path):
    from mindnlp_dp.planner import load_cluster, load_model, predict
    from mindnlp_dp.planner.plan import Plans
    from mindnlp_dp.report.plan_table import as_dict, text_of

    model, cluster = load_model(TINY, sequence=24), load_cluster(a_cluster(3))
    found = predict(model, cluster, 16, {"pp": 2, "dp": (2, 1)}, 4, blocks=[2, 1])
    assert (found.micro_batch, found.micro_batch_size) == (2, 4)
    plans = Plans([found], [], model=model, cluster=cluster, batch=16, num_priced=1)
    assert "--mesh 'pp=2,dp=2|1' --global-batch-size 16 --micro-batch-size 4" in text_of(plans)
    (tmp_path / "plan.json").write_text(json.dumps(as_dict(plans)))
    settings = {
        "hidden-size": 16, "intermediate-size": 32, "num-layers": 3, "vocab-size": 300, "max-steps": 3,
        "eval-batch-size": 512, "global-batch-size": 16,
    }  # fmt: skip
    flags = [str(part) for name, size in settings.items() for part in (f"--{name}", size)]
    script, losses = ROOT / "scripts" / "finetune.py", {}
    for name, nproc, more in [("alone", 1, []), ("stages", 3, ["--plan", str(tmp_path / "plan.json")])]:
        job = launch(script, *flags, *more, "--output-dir", str(tmp_path / name), nproc=nproc)
        assert job.exit_code == 0, job.output
        report = json.loads((tmp_path / name / "report.json").read_text())
        losses[name] = report["eval_loss"]
    assert report["config"]["mesh"] == "pp=2,dp=2|1"
    assert report["plan"]["predicted"] == found.seconds
    assert losses["stages"] == pytest.approx(losses["alone"], abs=1e-4)


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ("tp=3", "tp=3 does not match the 2 ranks of this job"),
        ("tp2", "a mesh is written as dp=2,tp=2, or by stage as pp=2,dp=2|1,tp=1|2; got 'tp2'"),
        ("dp=1|1", "dp=1|1 has 2 stages, and pp=1"),
        ("cp=2", "a mesh has axes dp, pp, ep, fsdp, sp, tp, got 'cp'"),
        ("ep=2", "does not say how to shard experts"),
    ],
)
def test_invalid_meshes_are_refused_in_one_line(launch, mesh, said, tmp_path):
    job = launch(ROOT / "scripts" / "finetune.py", "--mesh", mesh, "--max-steps", "1", "--output-dir", str(tmp_path))
    assert job.exit_code == 1
    assert said in job.output
    assert "Traceback" not in job.output
