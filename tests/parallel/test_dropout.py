"""Test that dropout draws each sample's mask from its position in the global batch.

Any number of ranks and micro-steps, and any mesh, then trains what one process with the full batch trains.
"""

from __future__ import annotations

import numpy as np
import pytest
from library import is_0_5, optim
from small_models import batch, build, find, samples
from token_losses import distance, settings, together_and_alone, whole_batch

import mindnlp_dp as dp
from mindnlp_dp.data.batches import Batch
from mindnlp_dp.kernels import dispatch
from mindnlp_dp.parallel.device_mesh import get_device_mesh
from mindnlp_dp.schedules.mesh_spec import parse_mesh
from models import alone, train, weights

if not is_0_5:
    # The first name is an autouse fixture for every test here.
    from cut_models import one_mesh_at_a_time, whole_weights  # noqa: F401

MOST = 1e-5
RATE = 0.1


@pytest.mark.core
@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("name", ["RobertaForSequenceClassification", "GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_any_number_of_ranks_and_micro_steps_trains_the_same_model(group, tmp_path, name, accumulation_steps):
    far, *_ = together_and_alone(group, tmp_path, name, accumulation_steps, p=RATE)
    assert far < MOST


@pytest.mark.parametrize("name", ["RobertaForMultipleChoice", "BartForConditionalGeneration"])
def test_rows_that_are_several_to_a_sample(group, tmp_path, name):
    far, *_ = together_and_alone(group, tmp_path, name, 2, p=RATE)
    assert far < MOST


@pytest.mark.skipif(is_0_5, reason="the small models of MindNLP 0.4")
@pytest.mark.parametrize("name", ["FSMTForConditionalGeneration", "DebertaV2ForSequenceClassification"])
def test_models_with_other_layouts(group, tmp_path, name):
    """FSMT computes with the length first; DeBERTa drops shared tables."""
    far, *_ = together_and_alone(group, tmp_path, name, 2, p=RATE)
    assert far < MOST


@pytest.mark.core
def test_per_rank_masks_train_another_model(group, tmp_path):
    far, *_ = together_and_alone(group, tmp_path, "RobertaForSequenceClassification", 2, p=RATE, dropout="per-rank")
    assert far > 100 * MOST


@pytest.mark.core
def test_a_run_is_resumed_with_another_number_of_ranks(group, shared_tmp_path):
    """Four updates with all ranks, the rest in one process, and the other way round."""
    model_class = find("GPT2LMHeadModel")
    before = weights(build(model_class))
    rows = samples(model_class, build(model_class), 10 * group.world_size * 2)
    saving = {
        "save_steps": 4, "save_strategy": "steps", "num_train_epochs": 1, "lr_scheduler_type": "constant",
    }  # fmt: skip
    together, one = settings(group, 2, **saving), whole_batch(group, 2, **saving)
    folder = shared_tmp_path / f"alone-{group.rank}"
    with alone():
        expected = train(build(model_class, dropout=RATE), rows, folder, **one)
    train(build(model_class, dropout=RATE), rows, shared_tmp_path, **together, max_steps=4)
    with alone():
        checkpoint = str(shared_tmp_path / "checkpoint-4")
        resumed = train(build(model_class, dropout=RATE), rows, folder / "2", **one, resume=checkpoint)
    others = train(
        build(model_class, dropout=RATE), rows, shared_tmp_path / "3", **together, resume=str(folder / "checkpoint-4")
    )
    assert resumed.state.global_step == others.state.global_step == expected.state.global_step > 4
    for model in (resumed.model, others.model):
        assert distance(weights(model), weights(expected.model), before) < MOST


MESHES = {
    2: [("tp=2", "BertForMaskedLM"), ("tp=2", "T5ForConditionalGeneration"), ("tp=2", "GPT2LMHeadModel"),
        ("tp=2", "RobertaForMultipleChoice"),
        ("pp=2", "GPT2LMHeadModel"), ("pp=2", "BertForSequenceClassification")],
    3: [("pp=3", "BertForSequenceClassification")],
    4: [("dp=2,pp=2", "GPT2LMHeadModel"), ("dp=2,tp=2", "T5ForConditionalGeneration"),
        ("pp=2,dp=2|1,tp=1|2", "BertForMaskedLM")],
}  # fmt: skip


@pytest.mark.core
@pytest.mark.skipif(is_0_5, reason="models are sharded with MindNLP 0.4 only")
@pytest.mark.skipif(dp.get_process_group().backend != "mpi", reason="MindSpore's CPU library has no messages")
@pytest.mark.parametrize(("mesh", "name"), MESHES.get(dp.get_process_group().world_size, []))
def test_models_that_are_sharded(group, tmp_path, mesh, name):
    model_class = find(name)
    rows = samples(model_class, build(model_class), 48)
    dp.init_device_mesh(parse_mesh(mesh))
    model = dp.parallelize(build(model_class, dropout=RATE))
    more = settings(group, 4, num_train_epochs=1)
    more["per_device_train_batch_size"] = 4 // get_device_mesh().dp_group.world_size
    mine = train(model, rows, tmp_path, **more)
    with alone():
        dp.init_device_mesh({"dp": 1})
        more.update(per_device_train_batch_size=16, gradient_accumulation_steps=1)
        one = train(build(model_class, dropout=RATE), rows, tmp_path / "1", **more)
    assert mine.state.global_step == one.state.global_step == 3
    assert distance(whole_weights(mine.model), weights(one.model), weights(build(model_class))) < MOST


def custom_loop(columns, size, group, *, knows_positions, **options):
    model = build(find("GPT2LMHeadModel"), dropout=RATE)
    parameters = model.trainable_params() if hasattr(model, "trainable_params") else list(model.parameters())
    step = dp.make_train_step(
        lambda **inputs: model(**inputs).loss, optim.SGD(parameters, lr=0.1), parameters, model=model, group=group,
        zero_stage=0, **options,
    )  # fmt: skip
    model.train()
    for begin in range(0, 12, size):
        mine = np.arange(begin, begin + size)[group.rank :: group.world_size]
        rows = {name: column[mine] for name, column in columns.items()}
        step(Batch(rows, mine, mine - begin) if knows_positions else rows)
    return weights(model)


@pytest.mark.core
def test_a_custom_loop(group, capfd):
    """Rows in any order train the same model if they say where they belong; else the log says once what is done."""
    model_class = find("GPT2LMHeadModel")
    before = weights(build(model_class))
    columns = batch(model_class, build(model_class), 12)
    mine = custom_loop(columns, 6, group, knows_positions=True)
    assert "dropout" not in capfd.readouterr().out
    unknown = custom_loop(columns, 6, group, knows_positions=False)
    said = capfd.readouterr().out
    with alone() as one:
        expected = custom_loop(columns, 6, one, knows_positions=True)
    assert distance(mine, expected, before) < MOST
    assert distance(unknown, expected, before) > 100 * MOST
    assert said.count("draws masks of its own in each micro-step, because the batches do not say where") == 1


def test_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match="dropout must be 'global' or 'per-rank', got 'local'"):
        dp.DataParallelArguments(str(tmp_path), dropout="local")


@pytest.mark.skipif(is_0_5, reason="with MindNLP 0.5 our kernel draws the masks in any case")
def test_mindspores_kernels_draw_per_rank_and_it_is_said(group, tmp_path, capfd):
    model_class = find("GPT2LMHeadModel")
    rows = samples(model_class, build(model_class), 8)
    dispatch.choose("mindspore", 1)
    try:
        train(build(model_class, dropout=RATE), rows, tmp_path, **settings(group, 1))
        said = capfd.readouterr().out
        train(build(model_class), rows, tmp_path, **settings(group, 1))
    finally:
        dispatch.choose("auto", 1)
    assert said.count("in each micro-step, because MindSpore's kernels draw them") == 1
    assert "masks" not in capfd.readouterr().out
