"""Tests complete plans and their parts: models, clusters, memory, layers, boundaries; and the command."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shlex
import subprocess
import sys

import numpy as np
import pytest

from mindnlp_dp.commands.main import main
from mindnlp_dp.finetuning.settings import InputError, parse_config
from mindnlp_dp.planner import InfeasibleError, load_cluster, load_model, memory_of, plan, predict, simulate_pipeline
from mindnlp_dp.planner.cost_model.memory_cost import parameter_memory, strategies_of
from mindnlp_dp.planner.cost_model.resharding_costs import Boundaries
from mindnlp_dp.planner.cost_model.stage_costs import StageCosts, StageParallelism
from mindnlp_dp.planner.estimate_memory import estimate
from mindnlp_dp.planner.profiles.cluster_profile import all_gather, all_to_all
from mindnlp_dp.planner.profiles.model_profiles import model_names
from mindnlp_dp.planner.profiles.operator_graph import cluster_layers, crossing
from mindnlp_dp.report.plan_table import _in_code, as_dict, launch_command, text_of
from mindnlp_dp.text_classification.classification_config import FinetuneConfig
from mindnlp_dp.text_classification.planned import follow_plan, read_plan

CLUSTER = {
    "devices_per_host": 4, "memory_gib": 16, "tflops": 10, "efficiency": 0.5, "memory_bandwidth_gbs": 500,
    "inside": {"latency_us": 10, "bandwidth_gbs": 20}, "precision": "float32", "call_us": 5,
}  # fmt: skip
TINY = {
    "model_type": "roberta", "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": 34, "num_labels": 3,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 128, "sequence": 32,
}  # fmt: skip
GIB = 2**30


# Models.

PARAMETERS = {  # published values, in millions
    "bert-base": 109.5, "roberta-large": 355.4, "gpt2": 124.4, "gpt2-xl": 1557.6, "t5-base": 222.9,
    "mixtral-8x7b": 46702.8, "gpt3-175b": 174600, "llama-2-7b": 6738.4, "llama-3-8b": 8030.3, "tinyllama-1.1b": 1100.0,
    "qwen2-0.5b": 494.0, "qwen2-7b": 7615.6, "mistral-7b": 7241.7, "gemma-2b": 2506.2, "phi-2": 2779.7,
    "opt-125m": 125.2, "opt-6.7b": 6658.5,
}  # fmt: skip


@pytest.mark.parametrize("name", model_names())
def test_shipped_models_have_their_published_sizes(name):
    model = load_model(name)
    if name in PARAMETERS:
        assert model.parameters / 1e6 == pytest.approx(PARAMETERS[name], rel=1e-3)
    assert len(model.blocks) == len(model.split_points) + 2


@pytest.mark.core
def test_flops_match_the_published_formula():
    model = load_model("gpt3-175b")
    s, h, layers, words = 2048, 12288, 96, 50257
    # Without recomputation: three quarters of 96 B s h^2 L (1 + s / 6h), plus the output layer.
    assert model.flops == pytest.approx(72 * s * h**2 * layers * (1 + s / (6 * h)) + 6 * s * h * words, rel=1e-12)


def test_parameters_match_those_of_real_models(tmp_path):
    from mindnlp.transformers import (
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        MixtralConfig,
        MixtralForCausalLM,
        RobertaConfig,
        RobertaForSequenceClassification,
        T5Config,
        T5ForConditionalGeneration,
    )  # fmt: skip

    small = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    models = [
        RobertaForSequenceClassification(RobertaConfig(**small, intermediate_size=48, num_labels=5)),
        BertForMaskedLM(BertConfig(**small, intermediate_size=48)),
        GPT2LMHeadModel(GPT2Config(vocab_size=90, n_embd=32, n_layer=2, n_head=4, n_positions=16)),
        T5ForConditionalGeneration(T5Config(vocab_size=90, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)),
        MixtralForCausalLM(MixtralConfig(**small, intermediate_size=48, num_key_value_heads=2, num_local_experts=4)),
    ]
    for number, model in enumerate(models):
        folder = tmp_path / str(number)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(str(folder))
        ours = load_model(folder)
        real = sum(p.size for p in {id(p): p for p in model.parameters()}.values())
        assert ours.parameters == pytest.approx(real, rel=0.03), type(model).__name__


@pytest.mark.parametrize("kind", ["llama", "llama, tied", "qwen2", "mistral", "gemma", "phi", "opt"])
def test_parameters_of_decoders_equal_those_of_real_models(tmp_path, kind):
    from tiny_transformers import build

    model = build(kind)
    model.config.save_pretrained(str(tmp_path))
    real = sum(p.size for p in {id(p): p for p in model.parameters()}.values())
    assert load_model(tmp_path).parameters == real


def test_lora_plans_count_gradients_only_for_adapters():
    whole, lora = load_model("llama-2-7b", sequence=512), load_model("llama-2-7b", sequence=512, lora_rank=8)
    # The number that PEFT prints for this model and all seven kinds of layers.
    assert lora.trained == 19_988_480
    assert lora.parameters == whole.parameters + lora.trained
    for zero_stage in (0, 1, 2):
        full, adapters = (memory_of(model, dp=4, zero_stage=zero_stage) for model in (whole, lora))
        assert adapters.weights == pytest.approx(4 * lora.parameters)
        assert adapters.optimizer == pytest.approx(8 * lora.trained / (4 if zero_stage else 1))
        assert adapters.gradients == pytest.approx((5 if zero_stage == 2 else 8) * lora.trained)
        assert full.total > 2.5 * adapters.weights
    cluster = load_cluster("ascend-910b-8")
    full, adapters = (plan(model, cluster, 64)[0] for model in (whole, lora))
    assert adapters.seconds < full.seconds
    for mesh in ({"dp": 8}, {"pp": 2, "dp": 4}, {"dp": 4, "tp": 2}):
        assert predict(lora, cluster, 64, mesh, 4).seconds < predict(whole, cluster, 64, mesh, 4).seconds
    with pytest.raises(ValueError, match="rank of LoRA's adapters must be at least 1, got 0"):
        load_model("gpt2", lora_rank=0)


def test_a_model_described_by_operators_is_planned(tmp_path):
    file = tmp_path / "mlp.yaml"
    file.write_text(
        "name: mlp\noperators:\n"
        "  - {name: up, kind: matmul, rows: 8, width_in: 64, width_out: 256}\n"
        "  - {name: act, kind: elementwise, inputs: [up], rows: 8, width_in: 256, width_out: 256}\n"
        "  - {name: down, kind: matmul, inputs: [act], rows: 8, width_in: 256, width_out: 64}\n"
        "  - {name: loss, kind: loss, inputs: [down], rows: 8, width_in: 64, width_out: 1}\n"
    )
    model = load_model(file)
    assert model.parameters == 2 * 64 * 256
    assert model.flops == 3 * 2 * 2 * 8 * 64 * 256
    plans = plan(model, load_cluster(CLUSTER), 16)
    assert launch_command(plans[0], plans) is None
    assert "takes your own plan" in text_of(plans)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "bloom"}, "model key model_type must be one of bert"),
        ({**TINY, "hidden_size": 0}, "model key hidden_size must be a whole number of at least 1, got 0"),
        ({**TINY, "hidden_size": "64"}, "model key hidden_size"),
        ({**TINY, "hidden_size": 66}, "num_attention_heads is 4, which does not divide hidden_size, 66"),
        ({**TINY, "sequence": 500}, "model key sequence is 500"),
        ({**TINY, "sequence": True}, "model key sequence must be a whole number"),
        ({**TINY, "sequence": 33}, "model key sequence is 33, and the model has 32 positions"),
        ({**TINY, "architectures": "RobertaForMaskedLM"}, "model key architectures must be a list"),
        ({**TINY, "vocab_size": 10**400}, "model key vocab_size must be below"),
        ({**TINY, "hidden_dropout_prob": "x"}, "model key hidden_dropout_prob must be a share"),
        ({"model_type": ["bert"]}, "model key model_type must be one of"),
        ({"model_type": "gpt2", "n_inner": -3}, "model key n_inner must be a whole number"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok is 9, and there are 8"),
        ({"model_type": "mixtral", "num_key_value_heads": 5}, "num_key_value_heads is 5, which does not divide"),
        ({"operators": [{"name": "a", "kind": "matmul", "inputs": None}]}, "operators\\[0\\].inputs must be a list"),
        ({"operators": [{"name": "a", "kind": "matmul", "only": "column"}]}, "operators\\[0\\].only must be a list"),
        ({"operators": [{"name": "a", "kind": "elementwise"}]}, "there is nothing to plan"),
        ({"operators": []}, "model key operators must be a list"),
        ({"operators": [{"name": "a", "kind": "conv"}]}, "model key operators\\[0\\].*kind must be one of"),
        ({"operators": [{"name": "a", "kind": "matmul", "rows": -1}]}, "operators\\[0\\].rows must be a number"),
        ({"operators": [{"name": "a", "kind": "matmul", "inputs": ["b"]}]}, "input 'b' is not an operator before it"),
    ],
)
def test_invalid_models_are_refused_with_their_key(keys, message):
    with pytest.raises(ValueError, match=message):
        load_model(keys)


# Clusters.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_gib": None}, "cluster key memory_gib is missing"),
        ({"memory_gib": -1}, "cluster key memory_gib must be a number above 0, got -1"),
        ({"efficiency": 1.5}, "cluster key efficiency must be a number above 0 and at most 1"),
        ({"hosts": 1.5}, "cluster key hosts must be a whole number"),
        ({"hosts": 2}, "cluster key between must have the keys latency_us and bandwidth_gbs"),
        ({"inside": {"latency_us": 1}}, "cluster key inside must have the keys"),
        ({"inside": {"latency_us": -1, "bandwidth_gbs": 1}}, "cluster key inside.latency_us"),
        ({"precision": "int8"}, "cluster key precision"),
        ({"speed": 3}, "cluster key 'speed' is unknown"),
        ({"tflops": float("nan")}, "cluster key tflops"),
        ({"tflops": True}, "cluster key tflops"),
        ({"tflops": 10**400}, "cluster key tflops"),
        ({"preset": ["a"]}, "cluster key preset must be one of"),
    ],
)
def test_invalid_clusters_are_refused_with_their_key(change, message):
    with pytest.raises(ValueError, match=message):
        load_cluster({**CLUSTER, **change})


def test_a_cluster_file_overrides_a_preset(tmp_path):
    file = tmp_path / "ours.yaml"
    file.write_text("preset: v100-16gb-8\nhosts: 4\nmemory_gib: 32\n")
    cluster = load_cluster(file)
    assert (cluster.num_devices, cluster.memory) == (32, 32 * GIB)
    assert cluster.flops == load_cluster("v100-16gb-8").flops
    assert cluster.resized(64).num_hosts == 8
    assert cluster.resized(4).devices_per_host == 4
    with pytest.raises(ValueError, match="12 devices do not fill the hosts"):
        cluster.resized(12)


def test_groups_that_span_hosts_share_their_links():
    cluster = load_cluster({**CLUSTER, "hosts": 4, "between": {"latency_us": 30, "bandwidth_gbs": 5}})
    assert cluster.link(4, 1) == cluster.inside
    assert cluster.link(16, 1) == cluster.between
    # Each of 4 groups that span all hosts has a quarter of a host's link.
    assert cluster.link(4, 4).beta == pytest.approx(4 * cluster.between.beta)


# Memory.


def test_zero_memory_is_that_of_float32_parameters_and_gradients():
    """Also with param_dtype, which keeps them: docs/zero.md has the table."""
    gigabytes = [parameter_memory(7.5e9, dp=64, zero_stage=stage).total / 1e9 for stage in range(4)]
    assert gigabytes == pytest.approx([150, 90.9, 61.4, 2.34], rel=0.01)
    model = load_model(TINY)
    mixed, full = (memory_of(model, dp=4, zero_stage=1, precision=each) for each in ("mixed", "float32"))
    assert (mixed.weights, mixed.gradients, mixed.optimizer) == (full.weights, full.gradients, full.optimizer)
    assert mixed.activations < full.activations


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_activations_of_a_layer_match_the_published_formula(tp):
    model = load_model("bert-large")
    first = next(i for i, o in enumerate(model.graph.operators) if o.name == "layer.3.qkv")
    s, h, a, b = 512, 1024, 16, 2
    found = memory_of(model, (first, first + 9), tp=tp, micro_batch=b).activations
    assert found == pytest.approx(s * b * h * (10 + 24 / tp + 5 * a * s / (h * tp)), rel=1e-12)


@pytest.mark.core
@pytest.mark.parametrize("sp", [2, 4])
def test_sequence_parallelism_divides_the_activations_of_layers(sp):
    model = load_model("bert-large")
    first = next(i for i, o in enumerate(model.graph.operators) if o.name == "layer.3.qkv")
    one, split = (memory_of(model, (first, first + 9), sp=n, zero_stage=1) for n in (1, sp))
    assert split.activations == one.activations / sp
    # Weights and gradients are replicated; ZeRO shards the optimizer's states over the same ranks.
    assert (split.weights, split.gradients, split.optimizer) == (one.weights, one.gradients, one.optimizer / sp)
    # The embedding is not split, and the logits are.
    assert memory_of(model, (0, first // 3), sp=sp).activations > one.activations / sp
    gpt2, last = load_model("gpt2"), len(load_model("gpt2").graph.operators) - 1
    one, split = (memory_of(gpt2, (last - 1, last), sp=n) for n in (1, sp))
    assert split.activations == one.activations / sp
    classifier = load_model(TINY)
    last = len(classifier.graph.operators) - 1
    one, split = (memory_of(classifier, (last - 3, last), sp=n) for n in (1, 2))
    assert split.activations == one.activations > 0


def test_sequence_parallelism_with_uneven_lengths_counts_the_longest_shard():
    model = load_model("gpt2", sequence=1023)
    last = len(model.graph.operators) - 1
    one, split = (memory_of(model, (last, last), sp=n) for n in (1, 2))
    assert split.activations == pytest.approx(one.activations * 512 / 1023, rel=1e-12)


def test_the_memory_of_a_plan_is_that_of_its_heaviest_stage():
    model = load_model(TINY)
    cluster = load_cluster(CLUSTER)
    found = predict(model, cluster, 16, {"pp": 4}, 4, blocks=[1, 2, 2, 1])
    totals = [stage.memory.total for stage in found.stages]
    assert found.heaviest.memory.total == max(totals) > np.mean(totals)
    # The second stage has twice the layers of the first, and more micro-batches in flight than the third.
    assert totals.index(max(totals)) == 1
    assert found.margin == pytest.approx(1 - max(totals) / cluster.memory)
    assert found.timeline.in_flight == [4, 3, 2, 1]


def test_recomputation_keeps_the_inputs_of_layers():
    model, cluster = load_model("bert-base"), load_cluster(CLUSTER)
    kept, again = (predict(model, cluster, 32, {"pp": 4}, 2, recompute=recompute) for recompute in (False, True))
    # The second stage has three layers, and three micro-batches of two samples in flight.
    before, after = kept.stages[1], again.stages[1]
    inputs = cluster.bytes_per_value * 2 * model.sequence * 768
    assert after.memory.activations == pytest.approx(3 * 3 * inputs + before.memory.activations / 9)
    assert after.backward == pytest.approx(before.backward + before.forward)
    assert (after.forward, after.memory.weights) == (before.forward, before.memory.weights)
    # The embedding and the head are not recomputed.
    for number in (0, 3):
        before, after = kept.stages[number], again.stages[number]
        assert before.backward < after.backward < before.backward + before.forward


def test_recomputation_of_an_encoder_decoder_keeps_the_encoder_output_once():
    model = load_model("t5-base", sequence=128)
    kept, again = (memory_of(model, precision="float32", recompute=recompute) for recompute in (False, True))
    hidden = 4 * 128 * 768
    # The inputs of 24 layers, the encoder's output, the head, and one layer.
    assert 25 * hidden < again.activations < 0.25 * kept.activations


def test_recomputation_is_planned_if_a_model_fits_only_with_it():
    model = load_model("bert-large")
    cluster = load_cluster({**CLUSTER, "memory_gib": 8, "devices_per_host": 1})
    best = plan(model, cluster, 16)[0]
    assert (best.recompute, best.schedule) == (True, "")
    roomy = plan(model, load_cluster({**CLUSTER, "memory_gib": 64, "devices_per_host": 1}), 16)[0]
    assert not roomy.recompute
    assert roomy.seconds < best.seconds < 1.4 * roomy.seconds
    assert "--gradient-checkpointing true" in launch_command(best, plan(model, cluster, 16))


@pytest.mark.parametrize(
    "mesh",
    [
        {"dp": 2}, {"tp": 4}, {"sp": 4}, {"dp": 2, "sp": 2}, {"sp": 2, "tp": 2}, {"pp": 2, "dp": 2},
        {"pp": 2, "dp": (2, 1), "tp": (1, 2)},
    ],
)  # fmt: skip
@pytest.mark.parametrize("recompute", [False, True])
def test_estimate_and_plan_predict_the_same_memory(mesh, recompute):
    model = load_model(TINY)
    found = estimate(model, 16, mesh, micro_batch=2, zero_stage=1, recompute=recompute)
    cluster = load_cluster({**CLUSTER, "devices_per_host": math.prod(mesh.values()) if "pp" not in mesh else 4})
    rows = 1 if mesh == {"pp": 2, "dp": (2, 1), "tp": (1, 2)} else mesh.get("dp", 1)
    size = 2 * max(mesh["dp"]) if rows == 1 and "dp" in mesh else 2
    same = predict(model, cluster, 16, mesh, size, recompute=recompute, zero_stage=1)
    assert found.total == pytest.approx(same.heaviest.memory.total)


def test_the_estimate_command_writes_memory_per_mesh_and_refuses_invalid_options(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    given = ["estimate", "--model", str(tmp_path), "--batch", "8", "--devices", "2"]
    assert main([*given, "--json", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["mesh"], row["zero_stage"]) for row in rows] == [
        ("dp=2", 0), ("dp=2", 1), ("dp=2", 2), ("dp=2", 3), ("tp=2", 0), ("pp=2", 0), ("sp=2", 0), ("sp=2", 1),
        ("sp=2", 2),
    ]  # fmt: skip
    first = rows[0]
    assert first["kept"]["total"] == sum(value for name, value in first["kept"].items() if name != "total")
    assert first["recomputed"]["activations"] < first["kept"]["activations"]
    assert first["recomputed"]["weights"] == rows[2]["kept"]["weights"] == 4 * load_model(TINY).parameters
    assert rows[1]["kept"]["optimizer"] == first["kept"]["optimizer"] / 2
    # Half of the weights, and in full those of one layer, and of the embeddings and the head.
    weights, kept = first["kept"]["weights"], rows[3]["kept"]
    assert weights / 2 < kept["weights"] < weights * 1.5
    layer = 4 * (4 * 64**2 + 4 * 64 + 2 * 64 * 128 + 128 + 64 + 4 * 64)
    in_full = 4 * load_model(TINY).parameters - 5 * layer
    assert kept["gradients"] == weights + in_full
    # The gradients of the backward pass, and half of those that are exchanged.
    assert rows[2]["kept"]["gradients"] == weights * 1.5
    assert kept["weights"] == weights / 2 + in_full
    assert kept["optimizer"] == rows[2]["kept"]["optimizer"]
    out = capsys.readouterr().out
    assert out.count("dp=2") == 4
    for change, message in (
        (["--mesh", "dp=3"], "dp=3: 3 does not divide the batch of 8"),
        (["--mesh", "tp=3"], "tp=3: 3 does not divide num_attention_heads"),
        (["--mesh", "cp=2"], "a mesh has axes dp, pp, ep, fsdp, sp, tp"),
        (["--mesh", "sp=8"], "sp=8: sp=8 does not divide num_attention_heads, 4"),
        (["--micro-batch-size", "5"], "a micro-batch of 5 samples exceeds the 4 samples of a device"),
        (["--model", "nothing"], "model 'nothing' is neither a file nor one of"),
        (["--model", str(tmp_path.parent)], "is a folder without a config.json"),
        (["--mesh", ""], "--mesh is empty; one device is dp=1"),
    ):
        assert main([*given, *change]) == 2
        assert message in capsys.readouterr().err


def test_muon_takes_one_moment_of_the_matrices_in_layers_and_more_time():
    model = load_model(TINY)
    matrices = sum(o.parameters for o in model.graph.operators if o.kind == "matmul" and o.layer is not None)
    models = [model, load_model(TINY, optimizer="muon")]
    kept = [estimate(each, 16, {"dp": 2}, zero_stage=1).optimizer for each in models]
    assert 0 < 4 * matrices / 2 == pytest.approx(kept[0] - kept[1])
    cluster = load_cluster({**CLUSTER, "devices_per_host": 2})
    of_adamw, of_muon = (plan(each, cluster, 16, mixed_stages=False) for each in models)
    assert any("tp=2" in str(found) for found in of_adamw)
    assert not any("tp=" in str(found) for found in of_muon)
    seconds = [next(p.parts["optimizer"] for p in plans if str(p) == "dp=2") for plans in (of_adamw, of_muon)]
    assert seconds[1] > seconds[0]
    with pytest.raises(ValueError, match="optimizer must be adamw or muon, got 'sgd'"):
        load_model(TINY, optimizer="sgd")


def test_the_integer_program_finds_the_tensor_parallel_shards_of_megatron():
    roles = strategies_of(load_model("gpt2"), "tp", 2)
    block = {name[4:]: role for name, role in roles.items() if name.startswith("h.5.")}
    assert block == {
        "ln_1": "none", "qkv": "column", "attention": "feature", "projection": "row", "attention.add": "none",
        "ln_2": "none", "up": "column", "gelu": "feature", "down": "row", "add": "none",
    }  # fmt: skip
    assert (roles["embeddings.words"], roles["head"], roles["loss"]) == ("vocabulary", "column", "feature")


# Layers and boundaries.


def test_operators_are_clustered_by_the_min_max_rule():
    rng = np.random.default_rng(0)
    for _ in range(100):
        n = int(rng.integers(2, 9))
        k = int(rng.integers(1, n + 1))
        work, across = rng.random(n) + 0.1, rng.random(n + 1)
        firsts = cluster_layers(work, across, k)
        assert len(firsts) == k

        def rated(cuts, work=work, across=across, n=n, k=k):
            sums = [work[a:b].sum() for a, b in itertools.pairwise([0, *cuts, n])]
            return max(sums), max((across[c] for c in cuts), default=0.0), sum(x * x for x in sums)

        everything = [rated(cuts) for cuts in itertools.combinations(range(1, n), k - 1)]
        limit = max(1.5 * work.sum() / k, min(largest for largest, _, _ in everything)) * (1 + 1e-12)
        largest, crossed, _ = rated(firsts[1:])
        assert largest <= limit
        assert crossed == min(c for most, c, _ in everything if most <= limit)


def test_a_transformer_is_split_between_its_layers():
    model = load_model("gpt2")
    firsts = cluster_layers(
        [o.flops for o in model.graph.operators], crossing(model.graph), 6, split_points=model.split_points
    )
    names = [model.graph.operators[first].name for first in firsts]
    # The last layer contains the output layer and only one block.
    assert names == ["embeddings.words", *(f"h.{block}.ln_1" for block in (2, 4, 6, 8, 11))]


def test_stage_boundaries_cost_their_best_resharding_schedule():
    cluster = load_cluster({**CLUSTER, "hosts": 4, "between": {"latency_us": 30, "bandwidth_gbs": 1}})
    beta = cluster.between.beta

    def between(source, destination, first_device=0):
        boundary = Boundaries(cluster).between(source, destination, first_device)
        assert boundary.time(0) == boundary.seconds > 0
        return boundary.seconds_per_byte

    # All data between two single hosts uses one link, however the tensor is sharded.
    assert between((1, 4), (1, 4)) == pytest.approx(beta)
    assert between((4, 1), (2, 2)) == pytest.approx(beta)
    # Between two hosts and two hosts, each link carries one half at the same time.
    assert between((8, 1), (8, 1)) == pytest.approx(beta / 2)
    assert between((2, 4), (8, 1)) == pytest.approx(beta / 2)
    # Within a host, each device has its own link.
    assert between((2, 1), (2, 1)) == pytest.approx(cluster.inside.beta / 2)
    # The next devices in order are on the next host.
    assert between((2, 1), (2, 1), 2) == pytest.approx(beta)


def test_stage_costs_add_up_and_grow_with_the_number_of_samples():
    model, cluster = load_model(TINY), load_cluster(CLUSTER)
    firsts = [0, *model.split_points]
    costs = StageCosts(model, cluster, StageParallelism(2, 2), firsts)
    whole = costs.times(0, 5, 4)
    parts = [costs.times(a, b, 4) for a, b in ((0, 1), (2, 2), (3, 5))]
    assert float(whole.total) == pytest.approx(sum(float(p.total) for p in parts))
    assert float(costs.times(0, 5, 8).total) < 2 * float(whole.total)
    assert float(costs.times(0, 5, 8).forward_collectives) > float(whole.forward_collectives)


@pytest.mark.parametrize(("kv_heads", "sp", "tp", "copies"), [(4, 2, 1, 1), (2, 4, 1, 2), (1, 2, 1, 2), (2, 2, 2, 2)])
def test_sequence_parallelism_costs_four_all_to_alls_per_pass_of_a_layer(kv_heads, sp, tp, copies):
    model, cluster = load_model({**LLAMA, "num_key_value_heads": kv_heads}), load_cluster(CLUSTER)
    firsts = [0, *model.split_points]

    def of_second_layer(sharing, size):
        times = StageCosts(model, cluster, sharing, firsts).times(1, 1, size)
        return np.array([times.forward_collectives, times.backward_collectives])

    found = of_second_layer(StageParallelism(1, tp, 1, sp), 3)
    # Tensor parallelism all-reduces this rank's tokens.
    found -= of_second_layer(StageParallelism(1, tp), 3) / sp
    alphas = 0 if tp == 1 else cluster.inside.alpha * 2 * (1 - 1 / sp)
    values = 3 * 4 * 32 * 64 / tp
    keys = values * kv_heads * copies / 4
    wanted = sum(all_to_all(sp, b, cluster.inside) for b in (values, keys, keys, values))
    assert found == pytest.approx([wanted + alphas] * 2, rel=1e-9)
    # The last of four layers is followed by an all-gather of the hidden states.
    last = StageCosts(model, cluster, StageParallelism(1, 1, 1, 2), firsts).times(3, 3, 1).forward_collectives
    third = StageCosts(model, cluster, StageParallelism(1, 1, 1, 2), firsts).times(2, 2, 1).forward_collectives
    assert last - third == pytest.approx(all_gather(2, 4 * 32 * 64, cluster.inside))


def test_sequence_parallelism_exchanges_gradients_like_data_parallelism():
    model, cluster = load_model(LLAMA), load_cluster(CLUSTER)
    updates = [
        StageCosts(model, cluster, sharing, [0]).update(0, 0, 1)
        for sharing in (StageParallelism(4), StageParallelism(2, sp=2), StageParallelism(sp=4))
    ]
    assert updates[0] == updates[1] == updates[2]
    assert updates[0][0] > 0


# Plans.


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_plans_are_sorted_fit_in_memory_and_use_all_devices(devices):
    model = load_model(TINY)
    cluster = load_cluster({**CLUSTER, "devices_per_host": devices})
    plans = plan(model, cluster, 24)
    assert [p.seconds for p in plans] == sorted(p.seconds for p in plans)
    assert len({str(p) for p in plans}) == len(plans)
    for found in plans:
        assert found.num_devices == devices
        by_stage = [size for size in found.mesh.values() if isinstance(size, tuple)]
        assert (math.prod(found.mesh.values()) == devices) if not by_stage else (str(found).count("|") >= 1)
        assert found.seconds == pytest.approx(sum(found.parts.values()))
        assert found.speedup <= found.amdahl * (1 + 1e-9) <= devices * (1 + 1e-6)
        assert all(stage.memory.total <= 0.9 * cluster.memory for stage in found.stages)
        assert found.micro_batch * found.num_micro_batches * found.stages[0].sharing.num_data == 24
        blocks = [stage.blocks for stage in found.stages]
        assert blocks[0][0] == 0
        assert blocks[-1][1] == 6
        assert all(a[1] == b[0] for a, b in itertools.pairwise(blocks))
        again = predict(
            model, cluster, 24, found.mesh, found.micro_batch_size, schedule=found.schedule or "1f1b",
            recompute=found.recompute, zero_stage=found.zero_stage, blocks=[b - a for a, b in blocks],
        )  # fmt: skip
        assert again.seconds == pytest.approx(found.seconds, rel=1e-9)
        assert (again.mesh, again.micro_batch) == (found.mesh, found.micro_batch)


def test_uneven_pipeline_stages_are_planned_on_three_devices():
    """Plan two layers on three devices, which no stages of equal size can fill."""
    model = load_model({**TINY, "num_hidden_layers": 2, "num_attention_heads": 4})
    plans = plan(model, load_cluster({**CLUSTER, "devices_per_host": 3}), 128)
    assert {"pp=2,dp=2|1", "pp=2,dp=1|2"} & set(map(str, plans))
    assert all(found.num_devices == 3 for found in plans)


def test_more_memory_never_gives_a_slower_plan():
    model = load_model("gpt2")
    best, meshes = math.inf, set()
    for gib in (2, 3, 4, 6, 16):
        try:
            plans = plan(model, load_cluster({**CLUSTER, "memory_gib": gib}), 8)
        except InfeasibleError:
            assert best == math.inf
            continue
        assert plans[0].seconds <= best * (1 + 1e-9)
        best = plans[0].seconds
        now = {str(p) for p in plans if p.mesh}
        assert meshes <= now
        meshes = now
    assert len(meshes) > 4


def test_plans_of_every_pipeline_schedule_fit_in_memory():
    model = load_model("gpt2")
    for schedule in ("gpipe", "1f1b", "eager-1f1b"):
        cluster = load_cluster({**CLUSTER, "memory_gib": 3})
        plans = plan(model, cluster, 16, schedules=[schedule])
        assert any(p.schedule == schedule for p in plans)
        assert all(p.heaviest.memory.total <= 0.9 * cluster.memory for p in plans)


def test_a_large_batch_is_planned_without_simulating_all_micro_batches():
    model = load_model(TINY)
    cluster = load_cluster({**CLUSTER, "devices_per_host": 2})
    small, large = (plan(model, cluster, batch) for batch in (2048, 2048 * 64))
    pipelines = [next(p for p in plans if p.mesh == {"pp": 2}) for plans in (small, large)]
    assert len(pipelines[1].timeline.events) < 10_000
    # Micro-batches that are not simulated take as long as simulated ones.
    found = pipelines[1]
    forward, backward = [s.forward for s in found.stages], [s.backward for s in found.stages]
    assert found.seconds > found.num_micro_batches * max(f + b for f, b in zip(forward, backward))
    assert found.seconds < 1.01 * found.num_micro_batches * max(f + b for f, b in zip(forward, backward)) + 1


def test_groups_on_one_host_use_the_inside_link_and_others_the_between_link():
    cluster = load_cluster({**CLUSTER, "devices_per_host": 3, "hosts": 2,
                            "between": {"latency_us": 30, "bandwidth_gbs": 1}})  # fmt: skip
    # Some groups of two span both hosts; groups of three fit on one host.
    assert cluster.link(2, 1).alpha == cluster.between.alpha
    assert cluster.link(3, 1) == cluster.inside
    assert cluster.link(1, 3) == cluster.inside


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 0}, "tp must be at least 1"),
        ({"micro_batch": -1}, "micro_batch must be at least 1"),
        ({"stage": (3, 1)}, "stage must be operators"),
        ({"stage": (0, 999)}, "stage must be operators"),
        ({"tp": 2, "ep": 2}, "expert parallelism is supported only with data parallelism"),
        ({"precision": "int8"}, "precision must be one of mixed, float32"),
        ({"zero_stage": 4}, "zero_stage must be"),
    ],
)
def test_invalid_options_of_memory_of_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        memory_of(load_model(TINY), **options)


def test_a_plan_with_stage_3_prices_gathers_and_shards_the_weights(tmp_path):
    """Per micro-batch two gathers of each layer, one of the other weights, and a reduce-scatter, in float32."""
    model, cluster = load_model(TINY), load_cluster(CLUSTER)
    whole, sharded = (plan(model, cluster, 32, zero_stage=stage)[0] for stage in (2, 3))
    assert (whole.mesh, sharded.mesh) == ({"dp": 4}, {"fsdp": 4})
    costs = StageCosts(model, cluster, StageParallelism(dp=4), [0])
    size, alpha, beta = 4 * model.parameters, cluster.inside.alpha, cluster.inside.beta
    per_layer = 4 * 64**2 + 4 * 64 + 2 * 64 * 128 + 128 + 64 + 4 * 64
    once, of_layers = 7 * alpha + 3 / 4 * beta * size, 6 * alpha + 3 / 4 * beta * 4 * 6 * per_layer
    assert costs.gathers(0, 0, 3) == pytest.approx((once, of_layers + once))
    assert costs.gathers(0, 0, 2) == (0.0, 0.0)
    assert costs.update(0, 0, 3)[0] == 0.0
    assert costs.update(0, 0, 3)[1] == pytest.approx(costs.update(0, 0, 2)[1])
    assert sharded.parts["gradients"] == 0.0
    assert sharded.parts["collectives"] == pytest.approx(sharded.num_micro_batches * (2 * once + of_layers))
    # A quarter of the weights, and in full what is in no layer, and one layer.
    memory = memory_of(model, dp=4, zero_stage=3, precision="float32")
    assert sharded.heaviest.memory.weights == pytest.approx(memory.weights)
    assert size / 4 < memory.weights < size
    assert estimate(model, 32, {"fsdp": 4}).weights == pytest.approx(memory.weights)
    again = predict(model, cluster, 32, sharded.mesh, sharded.micro_batch_size, recompute=sharded.recompute)
    assert again.seconds == pytest.approx(sharded.seconds)
    with pytest.raises(ValueError, match="fsdp is priced without dp and pp"):
        estimate(model, 32, {"dp": 2, "fsdp": 2})
    plans = plan(model, cluster, 32, zero_stage=3)
    assert {"zero_stage=3 with pp is not supported"} == {r.why for r in plans.rejected if r.what.startswith("pp=")}
    assert {tuple(sorted(found.mesh)) for found in plans} >= {("fsdp",), ("fsdp", "tp"), ("fsdp", "sp")}
    # Where no data-parallel ranks have the same weights, there is nothing to shard over them.
    assert {found.zero_stage for found in plans if "fsdp" not in found.mesh} <= {0, 1}
    assert estimate(model, 32, {"fsdp": 1, "tp": 2}) == estimate(model, 32, {"tp": 2})
    with pytest.raises(ValueError, match="zero_stage=3 with pp is not supported"):
        predict(model, cluster, 32, {"dp": 2, "pp": 2}, 4, zero_stage=3)
    muon = plan(load_model(TINY, optimizer="muon"), cluster, 32, zero_stage=3)
    assert all("fsdp" not in found.mesh for found in muon)
    assert any("Muon needs full matrices, and with zero_stage=3" in r.why for r in muon.rejected)
    # Frozen weights are gathered, and have no gradients.
    frozen = estimate(load_model(TINY, lora_rank=2), 32, {"fsdp": 4})
    assert frozen.gradients < frozen.weights / 10
    flags = shlex.split(launch_command(plan(load_model("roberta-base"), cluster, 32, zero_stage=3)[0], plans) or "")
    assert "fsdp=4" in flags


def test_no_mesh_with_even_stages_is_faster_than_the_best_plan():
    model, cluster = load_model("gpt2"), load_cluster(CLUSTER)
    best = plan(model, cluster, 32)[0].seconds
    for pp, tp, sp in itertools.product((1, 2, 4), repeat=3):
        if pp * tp * sp > 4 or (pp > 1 and sp > 1):
            continue
        dp = 4 // pp // tp // sp
        for micro_batch, schedule in itertools.product((1, 2, 4, 8), ("gpipe", "1f1b", "eager-1f1b")):
            if 32 % (dp * micro_batch):
                continue
            mesh = {"pp": pp, "dp": dp, "sp": sp, "tp": tp}
            grid = predict(model, cluster, 32, mesh, micro_batch, schedule=schedule, zero_stage=int(dp * sp > 1))
            assert best <= grid.seconds * (1 + 1e-9) or grid.margin < 0.1


def test_long_rows_that_do_not_fit_are_planned_with_sequence_parallelism():
    keys = {**TINY, "max_position_embeddings": 8194, "sequence": 8192}
    cluster = load_cluster({**CLUSTER, "memory_gib": 2})
    plans = plan(load_model(keys), cluster, 4)
    assert plans[0].mesh.get("sp", 1) > 1
    assert "needs at least" in next(r for r in plans.rejected if r.what == "dp=4").why
    assert f"--mesh {plans[0]} " in launch_command(plans[0], plans)
    assert f"best     {plans[0]}: " in text_of(plans)
    # Of all meshes without tensor parallelism, the best one is the one that the simulation says.
    seconds = {}
    for dp, micro_batch, recompute in itertools.product((1, 2, 4), (1, 2, 4), (False, True)):
        if 4 % (dp * micro_batch) == 0:
            mesh = {"dp": dp, "sp": 4 // dp}
            found = predict(load_model(keys), cluster, 4, mesh, micro_batch, recompute=recompute, zero_stage=1)
            if found.margin >= 0.1:
                seconds[dp, micro_batch, recompute] = found.seconds
    assert plans[0].seconds == pytest.approx(min(seconds.values()))


def test_sequence_parallelism_is_planned_only_if_it_divides_the_heads():
    def meshes(model, **changes):
        plans = plan(model, load_cluster({**CLUSTER, **changes}), 48)
        assert all(p.mesh.get("sp", 1) == 1 or "pp" not in p.mesh for p in plans)
        return {p.mesh.get("sp", 1) for p in plans}, {r.what: r.why for r in plans.rejected}

    sizes, rejected = meshes(load_model({**LLAMA, "num_key_value_heads": 2}), devices_per_host=8)
    assert sizes == {1, 2, 4}
    assert rejected["sp=8"] == "sp=8 does not divide num_attention_heads, 4"
    keys = {**LLAMA, "num_attention_heads": 12, "hidden_size": 96, "num_key_value_heads": 4}
    sizes, rejected = meshes(load_model(keys), devices_per_host=6)
    assert sizes == {1, 2}
    assert rejected["dp=2,sp=3"] == "sp=3 does not divide num_key_value_heads, 4"
    sizes, rejected = meshes(load_model({**LLAMA, "sequence": 3}))
    assert (sizes, rejected["sp=4"]) == ({1, 2}, "sp=4 needs rows of at least 4 tokens, and they have 3")
    sizes, rejected = meshes(load_model("t5-base", sequence=64))
    assert (sizes, rejected["sp=4"]) == ({1}, "sp needs a model with one list of transformer layers")
    operators = [{"name": "a", "kind": "matmul", "rows": 8, "width_in": 64, "width_out": 64}]
    sizes, rejected = meshes(load_model({"operators": operators}))
    assert sizes == {1}
    assert not any("sp" in what for what in rejected)


def test_plans_that_do_not_fit_in_memory_are_rejected_with_the_reason():
    model = load_model("gpt2-xl")
    small = load_cluster({**CLUSTER, "devices_per_host": 8, "memory_gib": 12})
    plans = plan(model, small, 16)
    assert all(p.margin >= 0.1 - 1e-9 for p in plans)
    dp = next(r for r in plans.rejected if r.what == "dp=8")
    assert "needs at least" in dp.why
    assert dp.needs > small.memory
    heads = next(r for r in plans.rejected if r.what == "tp=8")
    assert heads.why == "8 does not divide n_head, 25"
    with pytest.raises(InfeasibleError, match="closest is"):
        plan(model, dataclasses.replace(small, memory=GIB), 16)


def test_expert_parallelism_is_planned_with_dp_and_sp_but_not_tp_or_pp():
    keys = {
        "model_type": "mixtral", "vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "sequence": 16,
    }  # fmt: skip
    plans = plan(load_model(keys), load_cluster(CLUSTER), 16)
    spread = [p for p in plans if p.mesh and p.mesh.get("ep", 1) > 1]
    assert {p.mesh["ep"] for p in spread} == {2, 4}
    assert all(set(p.mesh) <= {"dp", "ep", "sp"} for p in spread)
    assert any("sp" in p.mesh for p in spread)


def test_an_encoder_decoder_has_at_most_two_pipeline_stages():
    plans = plan(load_model("t5-base"), load_cluster({**CLUSTER, "memory_gib": 64}), 16)
    assert all(len(p.stages) <= 2 for p in plans)
    assert any(r.what == "pp=4" for r in plans.rejected)
    assert all(launch_command(p, plans) is None for p in plans)
    assert "in your script: dp.parallelize(model, dp.init_device_mesh(" in text_of(plans)
    with pytest.raises(ValueError, match="pp=4: t5-base has 2 layers that can be stages"):
        predict(load_model("t5-base"), load_cluster(CLUSTER), 16, {"pp": 4}, 4)


@pytest.mark.parametrize(
    ("mesh", "micro_batch", "options", "message"),
    [
        ({"dp": 3}, 1, {}, "does not have the 4 devices"),
        ({"dp": 4}, 3, {}, "do not divide 16 samples"),
        ({"pp": 2, "dp": 2}, 1, {"blocks": [1, 1]}, "does not split 6 layers"),
        ({"dp": 4}, 0, {}, "micro_batch must be at least 1"),
        ({"cp": 4}, 1, {}, "a mesh has axes dp, pp, ep, fsdp, sp, tp"),
        ({"pp": 2, "sp": 2}, 1, {}, "pp=2,sp=2: sp with pp is not supported"),
        ({"ep": 4}, 1, {}, "ep=4: 4 does not divide 0 experts"),
        ({"pp": 2, "dp": (2, 1, 1)}, 1, {}, "or of as many stages"),
        ({"pp": 2, "dp": (2, 1)}, 1, {}, "does not have the 4 devices"),
        ({"pp": 2, "dp": (2, 1), "tp": (1, 2)}, 1, {}, "1 samples of a micro-batch cannot be split evenly among 2"),
    ],
)
def test_invalid_meshes_of_predict_are_refused(mesh, micro_batch, options, message):
    with pytest.raises(ValueError, match=message):
        predict(load_model(TINY), load_cluster(CLUSTER), 16, mesh, micro_batch, **options)


def test_the_makespan_of_a_plan_is_that_of_the_pipeline_simulator():
    found = predict(load_model(TINY), load_cluster(CLUSTER), 16, {"pp": 2, "dp": 2}, 1)
    forward, backward = [s.forward for s in found.stages], [s.backward for s in found.stages]
    without = simulate_pipeline(forward, backward, 8, "1f1b").makespan
    assert found.timeline.makespan == pytest.approx(without + found.parts["transfers"])


# The command.


def run(capsys, *arguments):
    code = main(["plan", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.fixture
def files(tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(TINY))
    (tmp_path / "cluster.yaml").write_text(json.dumps(CLUSTER))
    return ["--model", tmp_path / "model.json", "--cluster", tmp_path / "cluster.yaml", "--batch", 16]


@pytest.mark.parametrize(
    ("model", "rank", "rate"),
    [("bert-base", None, 5e-5), ("bert-base", 8, 3e-4), (TINY, None, 2e-3), (TINY, 8, None)],
)
def test_launch_commands_of_plans_are_accepted_by_the_recipe(model, rank, rate):
    plans = plan(load_model(model, lora_rank=rank), load_cluster(CLUSTER), 16)
    command = launch_command(plans[0], plans)
    if rate is None:
        assert command is None
        return
    flags = shlex.split(command.partition("scripts/finetune.py ")[2])
    config = parse_config(FinetuneConfig, flags)
    assert (config.lora_rank, config.global_batch_size, config.learning_rate) == (rank or 0, 16, rate)


def test_the_plan_command_prints_writes_json_and_plots(capsys, tmp_path, files):
    code, out, _ = run(capsys, *files, "--json", tmp_path / "plan.json", "--plot", tmp_path / "plan.png")
    assert code == 0
    assert "launch   mindnlp-dp run --nproc 4 scripts/finetune.py --train-file FILE --test-fraction 0.1 --vocab" in out
    written = json.loads((tmp_path / "plan.json").read_text())
    best = written["plans"][0]
    assert best["seconds"] == min(p["seconds"] for p in written["plans"])
    assert sum(best["parts"].values()) == pytest.approx(best["seconds"])
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
    assert read_plan(tmp_path / "plan.json")["batch"] == 16
    assert as_dict(plan(load_model(TINY), load_cluster(CLUSTER), 16))["plans"][0]["mesh"] == best["mesh"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "nothing"], "model 'nothing' is neither a file nor one of"),
        (["--cluster", "nothing"], "cluster 'nothing' is neither a file nor one of"),
        (["--fill", "0"], "fill must be a share"),
        (["--devices", "6"], "6 devices do not fill the hosts"),
        (["--measure", "x.yaml"], "give --cluster, or --measure"),
    ],
)
def test_invalid_options_of_the_plan_command_are_refused_in_one_line(capsys, files, change, message):
    code, _, err = run(capsys, *files, *change)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_the_plan_command_does_not_import_mindspore(files):
    script = (
        "import sys; sys.modules['mindspore'] = None; from mindnlp_dp.commands.main import main; "
        f"code = main({['plan', *map(str, files)]!r}); assert 'mpi4py' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Fits to measured machines.


def test_calibration_recovers_the_rates_of_synthetic_times():
    from mindnlp_dp.commands.calibrate.fit import fit_cluster, model_keys, step_terms
    from mindnlp_dp.commands.calibrate.rates_job import SHAPES

    rates = np.array([5e-12, 2e-10, 1e-8, 1e-9, 1e-4, 3e-10, 1.5e-9])
    steps = []
    for name, shape in SHAPES.items():
        terms = step_terms(model_keys(shape), rows=shape[5])
        for times in (1, 3):
            seconds = float(terms[:-1] @ rates[:-1]) * times + terms[-1] * rates[-1]
            steps.append({"name": name, "micro_batches": times, "seconds": seconds})
    links = [{"bytes": size, "seconds": 2e-5 + size * 1e-10} for size in (1e3, 1e5, 1e7)]
    keys = fit_cluster({"world_size": 2, "steps": steps, "all_reduces": links}, memory=4 * GIB)
    cluster = load_cluster(keys)
    found = [
        1 / cluster.flops, 4 / cluster.memory_bandwidth, 1 / cluster.score_rate, 1 / cluster.draw_rate, cluster.call,
        1 / cluster.gradient_rate, 1 / cluster.update_rate,
    ]  # fmt: skip
    assert found == pytest.approx(rates.tolist(), rel=0.01)
    assert (cluster.inside.alpha, cluster.inside.beta) == pytest.approx((2e-5, 1e-10), rel=0.01)
    assert cluster.memory == pytest.approx(4 * GIB)


def test_the_preset_this_machine_is_measured():
    cluster = load_cluster("this-machine")
    assert cluster.num_devices >= 1
    assert 1e9 < cluster.flops < 1e14
    assert 1e8 < cluster.memory_bandwidth < 1e13
    assert plan(load_model(TINY), cluster.resized(1), 8)[0].seconds > 0


def test_plans_in_half_precision_say_so_in_their_commands():
    plans = plan(load_model("roberta-base"), load_cluster("ascend-910b-8"), 256)
    half = next(each for each in plans if {axis for axis, size in each.mesh.items() if size != 1} == {"dp"})
    assert "--param-dtype bfloat16" in launch_command(half, plans)
    assert "values of 2 bytes, parameters of float32" in text_of(plans)
    sharded = next(each for each in plans if each.mesh.get("tp", 1) != 1)
    assert "--param-dtype" not in launch_command(sharded, plans)


def test_plans_for_devices_have_what_their_libraries_have():
    model = load_model({**TINY, "model_type": "roberta"}, sequence=16)
    for device in ("Ascend", "GPU", "CPU"):
        plans = plan(model, load_cluster({**CLUSTER, "device": device}), 32)
        axes = {axis for found in plans for axis in found.mesh}
        assert ("sp" in axes) == (device != "GPU")
        assert any("no all-to-all, which sp needs" in each.why for each in plans.rejected) == (device == "GPU")
    with pytest.raises(ValueError, match="cluster key device must be Ascend, GPU or CPU, got 'TPU'"):
        load_cluster({**CLUSTER, "device": "TPU"})


def test_messages_in_order_take_time_in_every_pass_of_a_pipeline():
    times = {}
    for device in ("Ascend", "CPU"):
        slow = {**CLUSTER, "device": device, "inside": {"latency_us": 500, "bandwidth_gbs": 0.1}}
        found = predict(load_model(TINY), load_cluster(slow), 32, {"pp": 4}, 2, schedule="eager-1f1b")
        times[device] = found.seconds
    assert times["Ascend"] > 1.02 * times["CPU"]


def test_a_pipeline_of_an_encoder_decoder_is_printed_without_layers_per_stage():
    plans = plan(load_model("t5-base"), load_cluster({**CLUSTER, "device": "Ascend"}), 32)
    [split] = [each for each in plans if sorted(each.mesh.items()) == [("dp", 2), ("pp", 2)]]
    assert "schedule=" in _in_code(split, plans)
    assert "layers_per_stage" not in _in_code(split, plans)


def test_a_folder_with_weights_is_planned_as_the_classifier_that_is_launched(tmp_path):
    folder = tmp_path / "roberta"
    folder.mkdir()
    config = {**TINY, "model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder).parameters == load_model(config).parameters
    (folder / "model.safetensors").write_bytes(b"")
    assert load_model(folder).parameters == load_model({**config, "architectures": []}).parameters


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-length", "16"], "max_length is 16, and the plan is for"),
        (["--optimizer", "muon"], "optimizer is muon, and the plan is for adamw"),
        (["--lora-rank", "4", "--model", "FOLDER"], "lora_rank is 4, and the plan is for training all weights"),
    ],
)
def test_a_plan_for_another_run_is_refused(tmp_path, files, capsys, flags, message):
    assert run(capsys, *files, "--json", tmp_path / "plan.json")[0] == 0
    length = load_model(TINY).sequence
    given = ["--plan", str(tmp_path / "plan.json"), "--global-batch-size", "16", "--max-length", str(length), *flags]
    with pytest.raises(InputError, match=message):
        follow_plan(parse_config(FinetuneConfig, given))
