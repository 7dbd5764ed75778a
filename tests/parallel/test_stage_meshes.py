"""Test pipelines with a different mesh for each stage: on four ranks they train like one process."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
from mindnlp.core import optim
from sharded_models import (
    BACK,
    MIXED,
    UNEVEN,
    Sentences,
    assert_close,
    assert_resumes_like_uninterrupted,
    needs_mpi,
    one_mesh_at_a_time,
    trained_by_trainer,
)  # fmt: skip
from tiny_transformers import batch, build, rows, train, whole_weights

import mindnlp_dp as dp
from mindnlp_dp.runtime.mesh_spec import parse_mesh
from models import alone

# This autouse fixture applies to every test here.
__all__ = ["one_mesh_at_a_time"]
pytestmark = [
    needs_mpi,
    pytest.mark.skipif(dp.get_process_group().world_size != 4, reason="stages of two ranks"),
]


def test_a_mesh_with_sizes_by_stage_has_the_right_groups(group):
    mesh = dp.init_device_mesh(parse_mesh(MIXED))
    assert str(mesh) == "pp=2, dp=2|1, tp=1|2"
    assert mesh.stages == [(2, 1), (1, 2)]
    assert (mesh.dp_group.world_size, mesh.model_parallel_group.world_size) == (1, 4)
    expected = [(2, 2, 1), (2, 2, 1), (1, 1, 2), (1, 1, 2)][group.rank]
    assert (
        mesh.grad_sync_group.world_size,
        mesh.group("dp_in_stage").world_size,
        mesh.group("tp").world_size,
    ) == expected
    assert [mesh.row(stage) for stage in (0, 1)] == [[0, 1], [2, 3]]
    labels = [f"pp={pp}, dp_in_stage={part}, tp={tp}" for pp, part, tp in ((0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1))]
    assert labels[group.rank] in repr(mesh)
    assert len(set(group.all_gather_object(mesh.seed_rank))) == 3
    # Equal sizes in all stages make an ordinary mesh, whose dp axis splits the rows for all stages.
    mesh = dp.init_device_mesh({"dp": (2, 2), "pp": 2, "tp": (1, 1)})
    assert (mesh.dp_group.world_size, mesh.stages_differ) == (2, False)
    assert dp.init_device_mesh({"pp": 2, "dp": (3, 1)}).group("dp_in_stage").world_size == (3 if group.rank < 3 else 1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"pp": 2, "dp": (2, 1)},
            r"pp=2 x dp=2\|1 does not match the 4 ranks of this job; .* by stage, and stages add up",
        ),
        ({"pp": 3, "dp": (2, 1, 1), "tp": (1, 2)}, r"tp=1\|2 has 2 stages, and pp=3"),
        ({"dp": (2, 2)}, r"dp=2\|2 has 2 stages, and pp=1"),
        ({"pp": 2, "ep": (2, 1)}, "the sizes of dp and tp may differ by stage, that of ep may not"),
        ({"pp": 2, "dp": (2, 0)}, r"sizes by stage are whole numbers of at least 1, got dp=2\|0"),
        ({"pp": 2, "dp": (2, "x")}, "sizes by stage are whole numbers"),
        ({"pp": 2, "dp": (2, 1), "tp": -1}, "leave no axis to be inferred; tp is -1"),
        ({"pp": -1, "dp": (2, 1), "tp": (1, 2)}, "has 2 stages, and pp=-1"),
    ],
)
def test_invalid_meshes_with_sizes_by_stage_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        dp.init_device_mesh(sizes)


@pytest.mark.core
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("mesh", [MIXED, BACK, UNEVEN])
def test_stages_with_different_meshes_train_like_one_process_with_any_zero_stage(mesh, zero_stage):
    mesh = dp.init_device_mesh(parse_mesh(mesh))
    model = dp.parallelize(build("masked"), mesh, layers_per_stage=[1, 3])
    train(model, "masked", lambda columns: [rows(columns, 0, 5), rows(columns, 5, 8)], zero_stage=zero_stage)
    assert_close(model, "masked", 5e-6)
    model.parallel.assert_in_sync()


@pytest.mark.parametrize("mesh", [MIXED, BACK, UNEVEN])
def test_rows_with_different_and_zero_loss_weights_train_like_one_process(mesh):
    """Rows weigh by their labeled tokens; a shard of a micro-batch may have none, and its mean is 0 / 0."""
    columns = batch("gpt2", 8)
    columns["labels"][1, 3:] = -100
    columns["labels"][4:6] = -100

    def trained(pieces):
        model = pieces.model
        model.set_train(True)
        parameters = list(model.parameters())
        step = dp.make_train_step(
            lambda **inputs: model(**inputs)[0], optim.SGD(parameters, lr=0.1), parameters, accumulation_steps=2,
            loss_weight_of=lambda inputs: float((np.asarray(inputs["labels"])[:, 1:] != -100).sum()),
            group=pieces.group,
        )  # fmt: skip
        for _ in range(2):
            step([rows(columns, 0, 4), rows(columns, 4, 8)])
        return whole_weights(model)

    class Alone:
        pass

    with alone() as single:
        one = Alone()
        one.model, one.group = build("gpt2"), single
        expected = trained(one)
    mesh = dp.init_device_mesh(parse_mesh(mesh))
    ours = Alone()
    ours.model, ours.group = dp.parallelize(build("gpt2"), mesh), None
    for name, weight in trained(ours).items():
        np.testing.assert_allclose(weight, expected[name], rtol=0, atol=2e-6, err_msg=name)


WEIGHTS = {
    "one": lambda inputs: 1.0,
    "hundredths": lambda inputs: len(inputs["labels"]) / 100,
    "squares": lambda inputs: len(inputs["labels"]) ** 2,
    "beyond two": lambda inputs: max(0, len(inputs["labels"]) - 2),
}


@pytest.mark.parametrize("loss_weight_of", WEIGHTS.values(), ids=WEIGHTS)
def test_loss_weights_that_do_not_add_up_by_rows_apply_to_micro_batches(loss_weight_of):
    """Such weights apply to micro-batches, not to rows; the weights of all their shards may be 0."""
    columns = batch("bert", 8)

    def trained(model, group):
        model.set_train(True)
        parameters = list(model.parameters())
        step = dp.make_train_step(
            lambda **inputs: model(**inputs)[0], optim.SGD(parameters, lr=0.1), parameters, accumulation_steps=2,
            loss_weight_of=loss_weight_of, group=group,
        )  # fmt: skip
        for _ in range(2):
            step([rows(columns, 0, 3), rows(columns, 3, 8)])
        return whole_weights(model)

    with alone() as single:
        expected = trained(build("bert"), single)
    for sizes in (MIXED, BACK, UNEVEN):
        mesh = dp.init_device_mesh(parse_mesh(sizes))
        for name, weight in trained(dp.parallelize(build("bert"), mesh), None).items():
            np.testing.assert_allclose(weight, expected[name], rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("mesh", [MIXED, BACK])
def test_a_model_that_changes_the_number_of_rows_is_refused(mesh):
    mesh = dp.init_device_mesh(parse_mesh(mesh))
    model = dp.parallelize(build("gpt2"), mesh)
    parameters = list(model.parameters())
    step = dp.make_train_step(
        lambda **inputs: model(**{name: np_rows(x) for name, x in inputs.items()})[0],
        optim.SGD(parameters, lr=0.1), parameters,
    )  # fmt: skip
    expected = {
        True: rf"has {4 // mesh.sizes['dp_in_stage']} of the 4 rows of a micro-batch, and the model has made",
        False: r"rank 0 \(.*\) could not send its message; its own error says why",
    }[mesh.is_first_stage]
    with pytest.raises(ValueError, match=expected):
        step(rows(batch("gpt2", 8), 0, 4))


def np_rows(x):
    """Return the first half of the rows."""
    return x[: max(1, x.shape[0] // 2)]


def test_a_nan_loss_in_one_shard_skips_the_micro_batch_on_every_rank(group):
    """The full micro-batch is left out on every rank."""
    mesh = dp.init_device_mesh(parse_mesh(BACK))
    columns = batch("bert", 8)
    parts = [rows(columns, first, first + 2) for first in range(0, 8, 2)]

    def trained(micro_steps, is_bad):
        model = dp.parallelize(build("bert"), mesh)
        optimizer = optim.SGD(list(model.parameters()), lr=0.1)
        calls = [0]

        def forward(**inputs):
            calls[0] += 1
            loss = model(**inputs)[0]
            return loss * float("nan") if is_bad and calls[0] % 4 == 0 and mesh.index("dp_in_stage") == 1 else loss

        step = dp.make_train_step(forward, optimizer, list(model.parameters()), accumulation_steps=len(micro_steps))
        model.set_train(True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                step(micro_steps)
        model.parallel.assert_in_sync()
        return whole_weights(model)

    poisoned, expected = trained(parts, True), trained(parts[:3], False)
    for name, weight in expected.items():
        np.testing.assert_array_equal(poisoned[name], weight, err_msg=name)


def test_dropout_masks_differ_between_ranks_that_split_a_micro_batch(group):
    mesh = dp.init_device_mesh(parse_mesh(MIXED))
    model = dp.parallelize(build("bert", dropout=0.3), mesh)
    seen = []
    for name, module in model.named_modules():
        if name.endswith("output.dropout"):
            module.register_forward_hook(lambda module, args, output: seen.append((output.asnumpy() == 0)[:2]))
    train(model, "bert", lambda columns: [rows(columns, 0, 4)], num_updates=1)
    masks = group.all_gather_object(seen[1])
    # The ranks of the second stage have the same rows, and this output is replicated.
    for one, other in itertools.combinations(range(4), 2):
        assert (masks[one] == masks[other]).all() == ((one, other) == (2, 3))


def test_settings_unsupported_by_one_stage_are_refused_on_all_ranks(group):
    mesh = dp.init_device_mesh({"pp": 2, "dp": (1, 1), "tp": (1, 3)})
    with pytest.raises(ValueError, match=r"which tp=3 does not divide"):
        dp.parallelize(build("bert"), mesh)
    mesh = dp.init_device_mesh(parse_mesh(MIXED))
    model = dp.parallelize(build("bert"), mesh)
    optimizer = dp.optim.LAMB(list(model.parameters()), lr=0.1)
    with pytest.raises(ValueError, match="LAMB needs the norm of each whole parameter"):
        dp.make_train_step(lambda **inputs: model(**inputs)[0], optimizer, list(model.parameters()))


@pytest.mark.core
def test_a_trainer_run_is_resumed_on_another_mesh(group, shared_tmp_path):
    whole = trained_by_trainer(group, "dp=2,tp=2", shared_tmp_path / "whole")
    meshes = [MIXED, "pp=2,tp=2", UNEVEN, "dp=2,tp=2", MIXED]
    for number, (first, second) in enumerate(zip(meshes, meshes[1:])):
        settings = {"sharded_checkpoints": number % 2 == 0, "async_save": number % 3 > 0}
        assert_resumes_like_uninterrupted(group, first, second, shared_tmp_path / str(number), whole, **settings)


def test_a_loss_weight_function_that_fails_on_one_rank_is_an_error_on_all_ranks(group):
    mesh = dp.init_device_mesh(parse_mesh(MIXED))
    model = dp.parallelize(build("gpt2"), mesh)
    parameters = list(model.parameters())

    def loss_weight_of(inputs):
        if len(inputs["labels"]) < 4 and mesh.index("dp_in_stage") == 1:
            raise KeyError("a mistake of the user's")
        return len(inputs["labels"])

    step = dp.make_train_step(
        lambda **inputs: model(**inputs)[0], optim.SGD(parameters, lr=0.1), parameters, loss_weight_of=loss_weight_of
    )
    fails = mesh.index("dp_in_stage") == 1
    expected = "a mistake of the user's" if fails else r"could not send its message|has failed; its own error"
    with pytest.raises(KeyError if fails else ValueError, match=expected):
        step(rows(batch("gpt2", 8), 0, 4))
    assert group.all_gather_object(fails) == [False, True, False, False]


def test_a_run_resumed_on_the_same_mesh_equals_an_uninterrupted_one(group, shared_tmp_path):
    """The model has tied weights, dropout, and optimizer state that stages share."""

    def run(folder, stop_after=None):
        mesh = dp.init_device_mesh(parse_mesh(UNEVEN))
        model = dp.parallelize(build("masked", dropout=0.1), mesh)
        model.set_train(True)
        parameters = list(model.parameters())
        step = dp.make_train_step(
            lambda **inputs: model(**inputs)[0], optim.AdamW(parameters, lr=5e-4), parameters, accumulation_steps=2,
        )  # fmt: skip
        run = dp.FunctionalRun(folder, model, step, dp.make_loader(Sentences("masked"), 4, 2, shuffle=True, seed=1))
        run.resume()
        for micro_batches in run.updates(num_epochs=3):
            step(micro_batches)
            if step.num_updates == 2:
                run.save()
            if step.num_updates == stop_after:
                break
        model.set_train(False)
        evaluation = dp.evaluate(
            lambda **inputs: model(**inputs)[:2], dp.make_loader(Sentences("masked"), 2), model=model, has_loss=True
        )
        return model.parallel.assert_in_sync(), evaluation, step.mean_loss()

    expected, evaluated, loss = run(shared_tmp_path / "whole")
    run(shared_tmp_path / "again", stop_after=3)
    found, again, same = run(shared_tmp_path / "again")
    assert found == expected
    # The mean loss also covers the updates before the resume.
    assert same == pytest.approx(loss, rel=1e-6)
    assert evaluated.outputs.shape == (13, 10, 51)
    np.testing.assert_array_equal(again.outputs, evaluated.outputs)
