"""Test that recomputing activations changes no bit of the weights, with any parallelism and zero_stage."""

from __future__ import annotations

import numpy as np
import pytest
from sharded_models import IS_MPI, crashed, needs_mpi, one_mesh_at_a_time, pieces_of, trained_by_trainer
from tiny_transformers import build, train, whole_weights

import mindnlp_dp as dp
from mindnlp_dp.runtime.mesh_spec import parse_mesh
from mindnlp_dp.runtime.recompute import has_recomputed_layers
from models import Rows, tiny_roberta, weights
from models import train as train_by_trainer

# This autouse fixture applies to every test here.
__all__ = ["one_mesh_at_a_time"]

WORLD_SIZE = dp.get_process_group().world_size
# Of two ranks, MindSpore's CPU library has collectives only.
MESHES = {2: ["tp=2", "pp=2", "ep=2"] if IS_MPI else ["tp=2"], 4: ["dp=2,pp=2", "pp=2,tp=2"] if IS_MPI else []}
CORE = [("gpt2", "pp=2"), ("mixtral", "ep=2"), ("llama", "dp=2"), ("bert", "tp=2")]


def cases():
    kinds = {"tp": ("bert", "t5", "mixtral"), "pp": ("gpt2", "roberta", "t5"), "ep": ("mixtral",), "dp": ("llama",)}
    meshes = [f"dp={WORLD_SIZE}", *MESHES.get(WORLD_SIZE, [])]
    pairs = [(kind, mesh) for mesh in meshes for kind in kinds[mesh.rpartition("=")[0].rpartition(",")[2]]]
    return [pytest.param(*pair, marks=pytest.mark.core if pair in CORE else ()) for pair in pairs]


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


@pytest.mark.parametrize(("kind", "mesh"), cases())  # some are marked as core
def test_recompute_does_not_change_a_bit_of_the_weights(group, kind, mesh):
    mesh = dp.init_device_mesh(parse_mesh(mesh))

    def trained(recompute=False, at_sharding=False):
        model = build(kind, dropout=0.1)
        if not mesh.is_data_parallel:
            model = dp.parallelize(model, mesh, recompute=at_sharding)
        if recompute:
            dp.enable_recompute(model)
        train(model, kind, pieces_of(mesh, 2), num_updates=3)
        # A stage may have no second layer.
        assert any(group.all_gather_object(has_recomputed_layers(model))) == bool(recompute or at_sharding)
        return whole_weights(model)

    expected = trained()
    assert_equal(trained(recompute=True), expected)
    if not mesh.is_data_parallel:
        assert_equal(trained(at_sharding=2), expected)


@pytest.mark.parametrize("zero_stage", [0, 1, pytest.param(2, marks=pytest.mark.core)])
def test_recompute_does_not_change_a_bit_with_zero_and_overlap(group, tmp_path, zero_stage):
    settings = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "zero_stage": zero_stage, "overlap": True,
        "bucket_cap_mb": 0.002, "seed": 9,
    }  # fmt: skip

    def trained(**more):
        model = tiny_roberta(seed=1, num_layers=2, dropout=0.1)
        return weights(train_by_trainer(model, Rows(12 * group.world_size + 1), tmp_path, **settings, **more).model)

    assert_equal(trained(gradient_checkpointing=True), trained())


@pytest.mark.parametrize("mesh", {2: ["dp=2", "tp=2", "pp=2"]}.get(WORLD_SIZE, []))
def test_a_resumed_run_with_recompute_has_the_weights_of_an_uninterrupted_one(group, shared_tmp_path, mesh):
    if mesh == "pp=2" and not IS_MPI:
        pytest.skip("MindSpore's CPU library has no messages between two ranks")
    plain = trained_by_trainer(group, mesh, shared_tmp_path / "plain", dropout=0.1)
    saving = {"save_strategy": "steps", "save_steps": 1, "dropout": 0.1, "gradient_checkpointing": True}
    crashed(group, mesh, shared_tmp_path / "again", **saving)
    resumed = trained_by_trainer(group, mesh, shared_tmp_path / "again", resume=True, **saving)
    assert resumed.state.global_step == plain.state.global_step
    assert_equal(whole_weights(resumed.model), whole_weights(plain.model))


@needs_mpi
def test_enable_recompute_selects_the_layers_of_its_own_pipeline_stage(group):
    if group.world_size != 2:
        pytest.skip("needs two stages")
    mesh = dp.init_device_mesh({"pp": 2})
    model = dp.parallelize(build("gpt2"), mesh)
    layers = ["h.0", "h.3.attn"]
    assert dp.enable_recompute(model, layers) == [f"transformer.{layers[group.rank]}"]
    for name, message in (("h.4", "is named 'h.4'"), ("transformer", "layers of several stages of the pipeline")):
        with pytest.raises(ValueError, match=message):
            dp.enable_recompute(model, name)
