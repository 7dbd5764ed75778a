"""Test SyncBatchNorm, in-batch negatives and router losses: N ranks train as one process with the rows of all ranks."""

from __future__ import annotations

import contextlib
import copy
import pickle

import mindspore
import numpy as np
import pytest
from across_ranks import ConvNet, Images, Pairs, pairs
from library import is_0_5, nn, optim
from small_models import build, find, samples
from token_losses import distance, settings

import mindnlp_dp as dp
from mindnlp_dp.data.batches import default_collate
from mindnlp_dp.runtime.mesh_spec import parse_mesh
from models import alone, train, weights

if not is_0_5:
    # The first name is an autouse fixture for every test here.
    from sharded_models import one_mesh_at_a_time, whole_weights  # noqa: F401

MOST = 1e-5
# With MindNLP 0.5 no exchange overlaps with the backward pass.
OVERLAPS = [False] if is_0_5 else [False, True]


def buffers(model):
    return {name: x.asnumpy().astype(np.float64) for name, x in model.named_buffers()}


@pytest.mark.core
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("options", [{}, {"affine": False, "momentum": None}])
def test_sync_batchnorm_on_n_ranks_equals_one_process(group, tmp_path, overlap, accumulation_steps, options):
    """Compare weights and running statistics; the last micro-batch has fewer rows, and some ranks have none."""
    num_samples = 4 * group.world_size * accumulation_steps + 2
    more = settings(group, accumulation_steps, overlap=overlap, learning_rate=0.05)
    mine = train(dp.convert_sync_batchnorm(ConvNet(**options)), Images(num_samples), tmp_path, **more)
    assert type(mine.model.norm).__name__ == "SyncBatchNorm2d"
    with alone():
        more["per_device_train_batch_size"] *= group.world_size
        one = train(ConvNet(**options), Images(num_samples), tmp_path / "1", **more)
    assert mine.state.global_step == one.state.global_step
    assert distance(weights(mine.model), weights(one.model), weights(ConvNet(**options))) < MOST
    for name, value in buffers(one.model).items():
        np.testing.assert_allclose(buffers(mine.model)[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    dp.assert_replicas_in_sync(mine.model)


def test_batchnorm_without_conversion_trains_another_model(group, tmp_path):
    if group.world_size == 1:
        pytest.skip("one rank has all rows")
    more = settings(group, 1, learning_rate=0.05)
    mine = train(ConvNet(), Images(16), tmp_path, **more)
    with alone():
        more["per_device_train_batch_size"] *= group.world_size
        one = train(ConvNet(), Images(16), tmp_path / "1", **more)
    assert distance(weights(mine.model), weights(one.model), weights(ConvNet())) > 100 * MOST


class Cells(mindspore.nn.Cell):
    """Layers of ``mindspore.nn``."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(3)
        weight = mindspore.Tensor(rng.normal(0, 0.5, (6, 4)).astype(np.float32))
        self.hidden, self.norm = mindspore.nn.Dense(4, 6, weight, has_bias=False), mindspore.nn.BatchNorm1d(6)
        self.out = mindspore.nn.Dense(6, 1, mindspore.Tensor(np.ones((1, 6), np.float32)), has_bias=False)

    def construct(self, x, y):
        return ((self.out(mindspore.ops.relu(self.norm(self.hidden(x)))) - y) ** 2).mean()


def trained_cells(group, sizes, weight=None):
    """Train on slices of one batch, of ``sizes`` rows for each rank."""
    model = dp.convert_sync_batchnorm(Cells())
    model.set_train()
    optimizer = mindspore.nn.SGD(model.trainable_params(), 0.05)
    step = dp.make_train_step(model, optimizer, optimizer.parameters, group=group, zero_stage=0, loss_weight_of=weight)
    rng = np.random.default_rng(1)
    bounds = np.cumsum([0, *sizes])
    for _ in range(4):
        x, y = (rng.normal(1, 2, (bounds[-1], width)).astype(np.float32) for width in (4, 1))
        mine = slice(bounds[group.rank], bounds[group.rank + 1])
        rows = tuple(mindspore.Tensor(each[mine]) for each in (x, y))
        step(rows if mine.start < mine.stop else None)
    return {p.name: p.asnumpy() for p in model.get_parameters()}


@pytest.mark.core
@pytest.mark.skipif(is_0_5, reason="MindSpore's own layers are used with MindNLP 0.4")
@pytest.mark.parametrize("sizes", [(7, 3, 1, 1), (6, 0, 2, 2), (0, 5, 0, 4)])
def test_sync_batchnorm_of_mindspore_cells_handles_uneven_rows(group, sizes):
    if group.world_size == 1:
        pytest.skip("one rank has all rows")
    sizes = sizes[: group.world_size]
    mine = trained_cells(group, sizes)
    with alone() as one:
        expected = trained_cells(one, [sum(sizes)])
    for name, value in expected.items():
        np.testing.assert_allclose(mine[name], value, rtol=1e-5, atol=2e-6, err_msg=name)


@pytest.mark.core
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_sync_batchnorm_layer_switched_to_training_later_equals_one_process(group, overlap):
    """The layer is in evaluation mode for two updates; in the third, a rank has no rows."""
    if group.world_size == 1:
        pytest.skip("one rank has all rows")
    models = {}
    for ranks in ("together", "alone"):
        with alone() if ranks == "alone" else contextlib.nullcontext(group) as on:
            model = dp.convert_sync_batchnorm(ConvNet())
            parameters = list(model.parameters())
            step = dp.make_train_step(
                lambda **columns: model(**columns)["loss"], optim.SGD(parameters, lr=0.1), parameters, model=model,  # noqa: B023
                group=on, zero_stage=0, overlap=overlap,
            )  # fmt: skip
            model.train()
            images = Images(12)
            for update in range(4):
                model.norm.train(update > 1)
                bounds = np.linspace(0, 4, on.world_size + 1).astype(int) if update != 2 else [0, 4, 4, 4, 4]
                mine = range(*bounds[on.rank : on.rank + 2]) if on.world_size > 1 else range(4)
                rows = [images[update + number] for number in mine]
                step(default_collate(rows) if rows else None)
            models[ranks] = model
    mine, expected = models["together"], models["alone"]
    assert distance(weights(mine), weights(expected), weights(ConvNet())) < MOST
    for name, value in buffers(expected).items():
        np.testing.assert_allclose(buffers(mine)[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.core
@pytest.mark.skipif(is_0_5, reason="MindSpore's own layers are used with MindNLP 0.4")
def test_sync_batchnorm_leaves_a_nan_loss_out_on_all_ranks(group):
    """A target in the second of three micro-steps is NaN, on one rank; one process leaves the micro-step out, too."""
    found = {}
    for ranks in ("together", "alone"):
        with alone() if ranks == "alone" else contextlib.nullcontext(group) as on:
            model = dp.convert_sync_batchnorm(Cells())
            model.set_train()
            optimizer = mindspore.nn.SGD(model.trainable_params(), 0.05)
            options = {"group": on, "zero_stage": 0, "accumulation_steps": 3}
            step = dp.make_train_step(model, optimizer, optimizer.parameters, model=model, **options)
            rng = np.random.default_rng(1)
            for update in range(2):
                x, y = (rng.normal(1, 2, (3, 12, width)).astype(np.float32) for width in (4, 1))
                y[1, -1] = np.nan if update == 0 else y[1, -1]
                mine = slice(12 * on.rank // on.world_size, 12 * (on.rank + 1) // on.world_size)
                step([tuple(mindspore.Tensor(each[number, mine]) for each in (x, y)) for number in range(3)])
            found[ranks] = {p.name: p.asnumpy() for p in model.get_parameters()}
    for name, value in found["alone"].items():
        assert np.isfinite(value).all()
        np.testing.assert_allclose(found["together"][name], value, rtol=1e-5, atol=2e-6, err_msg=name)


def test_sync_batchnorm_refuses_subclasses_with_their_own_forward(group):
    class Scaled(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x) * 3

    class Named(nn.BatchNorm1d):
        pass

    with pytest.raises(ValueError, match="Scaled overrides the forward pass of _BatchNorm"):
        dp.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2), Scaled(2)))
    assert type(dp.convert_sync_batchnorm(Named(2))).__name__ == "SyncNamed"


def test_sync_batchnorm_models_can_be_pickled_and_copied(group):
    # MindNLP's convolutions cannot be pickled.
    model = dp.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(other[1]) is type(model[1])
        for name, value in {**weights(model), **buffers(model)}.items():
            np.testing.assert_array_equal({**weights(other), **buffers(other)}[name], value)


@pytest.mark.skipif(is_0_5, reason="MindSpore's own layers are used with MindNLP 0.4")
def test_sync_batchnorm_refuses_jit_and_second_derivatives(group):
    model = dp.convert_sync_batchnorm(Cells())
    optimizer = mindspore.nn.SGD(model.trainable_params(), 0.05)
    with pytest.raises(ValueError, match="jit=True cannot compile the layers of convert_sync_batchnorm"):
        dp.make_train_step(model, optimizer, optimizer.parameters, model=model, jit=True)
    with pytest.raises(ValueError, match="jit=True cannot compile the layers of convert_sync_batchnorm"):
        dp.make_train_step(lambda x, y: 2 * model(x, y), optimizer, optimizer.parameters, jit=True)
    if group.world_size == 1:
        return

    def penalty(x, y):
        return (mindspore.grad(model)(x, y) ** 2).sum()

    model.set_train()
    step = dp.make_train_step(penalty, optimizer, optimizer.parameters, model=model, zero_stage=0)
    x, y = (mindspore.Tensor(np.random.default_rng(group.rank).normal(size=(3, n)).astype(np.float32)) for n in (4, 1))
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        step((x, y))


@pytest.mark.core
def test_sync_batchnorm_handles_different_numbers_of_micro_batches_per_rank(group):
    """Rank 0 has three micro-batches, the others have two."""
    models = {}
    for ranks in ("together", "alone"):
        with alone() if ranks == "alone" else contextlib.nullcontext(group) as on:
            model = dp.convert_sync_batchnorm(ConvNet())
            parameters = list(model.parameters())
            step = dp.make_train_step(
                lambda **columns: model(**columns)["loss"], optim.SGD(parameters, lr=0.1), parameters, model=model,  # noqa: B023
                group=on, zero_stage=0, accumulation_steps=3,
            )  # fmt: skip
            model.train()
            images, micro_batches = Images(3 * 8), []
            for number in range(3):
                size = 8 // on.world_size if number < 2 or on.world_size == 1 else 8 * (on.rank == 0)
                first = 8 * number + (size * on.rank if number < 2 else 0)
                rows = [images[first + place] for place in range(size)]
                micro_batches += [default_collate(rows)] if rows else []
            step(micro_batches)
            models[ranks] = model
    assert distance(weights(models["together"]), weights(models["alone"]), weights(ConvNet())) < MOST


def test_sync_batchnorm_refuses_models_without_batchnorm_and_converts_once(group):
    with pytest.raises(ValueError, match="Linear has no BatchNorm layer to convert"):
        dp.convert_sync_batchnorm(nn.Linear(2, 2))
    model = dp.convert_sync_batchnorm(ConvNet())
    assert dp.convert_sync_batchnorm(model) is model


# In-batch negatives.


def contrastive(group, over, sizes, **options):
    model = Pairs(over)
    parameters = list(model.parameters())
    step = dp.make_train_step(
        lambda **columns: model(**columns)["loss"], optim.SGD(parameters, lr=0.5), parameters, model=model,
        group=group, zero_stage=0, **options,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    bounds = np.cumsum([0, *sizes])
    mine = slice(bounds[group.rank], bounds[group.rank + 1])
    for _ in range(6):
        a = rng.normal(0, 1, (bounds[-1], 4)).astype(np.float32)
        b = (a + rng.normal(0, 0.5, a.shape)).astype(np.float32)
        rows = {"a": a[mine], "b": b[mine], "first": np.full(len(a[mine]), mine.start, np.int64)}
        step(rows if mine.start < mine.stop else None)
    return weights(model)


@pytest.mark.core
@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (7, 1, 3, 2), (0, 5, 2, 2), (5, 0, 0, 3)])
@pytest.mark.parametrize("over", ["both", "candidates"])
@pytest.mark.parametrize("options", [{}, {"loss_weight_of": lambda rows: 10 * len(rows["a"])}])
def test_in_batch_negatives_of_all_ranks_equal_one_process(group, over, sizes, options):
    """A loss over all rows on every rank, and one of this rank's rows and all candidates, give the same model."""
    sizes = sizes[: group.world_size]
    if not sum(sizes):
        pytest.skip("no rows")
    mine = contrastive(group, over, sizes, **options)
    with alone() as one:
        expected = contrastive(one, over, [sum(sizes)])
    assert distance(mine, expected, weights(Pairs())) < MOST


@pytest.mark.core
def test_all_gather_with_grad_in_a_later_update_needs_batches_of_a_loader(group):
    """Compare all rows from the third update on: batches of our loaders say that all ranks have some."""
    if group.world_size == 1:
        pytest.skip("one rank has all rows")
    for knows in (True, False):
        model, number = Pairs(), [0]
        parameters = list(model.parameters())

        def forward(**columns):
            return model(**columns)["loss"] if number[0] > 1 else model.encode(columns["a"]).sum()  # noqa: B023

        options = {"model": model, "group": group, "zero_stage": 0}
        step = dp.make_train_step(forward, optim.SGD(parameters, lr=0.5), parameters, **options)
        batches = dp.make_loader(pairs(16 * group.world_size), 4, shuffle=False, group=group).updates()
        for update, [batch] in enumerate(batches):
            number[0] = update
            if knows or update < 2:
                step(batch if knows else dict(batch))
                continue
            with pytest.raises(ValueError, match="a rank without rows would not join the collective"):
                step(dict(batch))
            break
        assert number[0] == (3 if knows else 2)


def test_all_gather_with_grad_outside_a_train_step_returns_its_input(group):
    x = mindspore.Tensor(np.ones((group.rank + 1, 2), np.float32))
    assert dp.all_gather_with_grad(x) is x


# Router losses.


def with_router_loss(model):
    model.config.output_router_logits = True
    model.router_aux_loss_coef = 0.5
    return model


@pytest.mark.parametrize(
    ("name", "router_loss", "accumulation_steps"),
    [
        pytest.param("MixtralForCausalLM", "global", 1, marks=pytest.mark.core),
        ("MixtralForCausalLM", "global", 3),
        ("MixtralForCausalLM", "local", 1),
        ("Qwen2MoeForCausalLM", "global", 1),
    ],
)
def test_global_router_loss_equals_one_process_and_local_does_not(
    group, tmp_path, name, router_loss, accumulation_steps
):
    if is_0_5:
        pytest.skip("mixtures of experts are tried with MindNLP 0.4")
    model_class = find(name)
    rows = samples(model_class, build(model_class), 4 * group.world_size * accumulation_steps + 2)
    more = settings(group, accumulation_steps, router_loss=router_loss)
    mine = train(with_router_loss(build(model_class)), rows, tmp_path, **more)
    with alone():
        more["per_device_train_batch_size"] *= group.world_size
        one = train(with_router_loss(build(model_class)), rows, tmp_path / "1", **more)
    far = distance(weights(mine.model), weights(one.model), weights(build(model_class)))
    assert far < MOST if router_loss == "global" or group.world_size == 1 else far > 10 * MOST


@pytest.mark.core
@pytest.mark.skipif(is_0_5, reason="models are sharded with MindNLP 0.4 only")
@pytest.mark.skipif(dp.get_process_group().backend != "mpi", reason="MindSpore's CPU library has no messages")
@pytest.mark.parametrize("mesh", {2: ["ep=2", "tp=2"], 4: ["dp=2,ep=2"]}.get(dp.get_process_group().world_size, []))
def test_router_loss_of_sharded_models_equals_one_process(group, tmp_path, mesh):
    model_class = find("MixtralForCausalLM")
    rows = samples(model_class, build(model_class), 34)
    dp.init_device_mesh(parse_mesh(mesh))
    model = dp.parallelize(with_router_loss(build(model_class)))
    more = settings(group, 1, per_device_train_batch_size=16 // dp.get_device_mesh().dp_group.world_size)
    mine = train(model, rows, tmp_path, **more)
    with alone():
        dp.init_device_mesh({"dp": 1})
        one = train(
            with_router_loss(build(model_class)), rows, tmp_path / "1", **{**more, "per_device_train_batch_size": 16}
        )
    assert distance(whole_weights(mine.model), weights(one.model), weights(build(model_class))) < MOST
