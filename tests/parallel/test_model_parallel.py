"""Test that models sharded over ranks train like one process, on every mesh of this world size."""

from __future__ import annotations

import errno
import itertools
import warnings

import mindspore
import numpy as np
import pytest
from mindnlp.common.optimization import get_scheduler
from mindnlp.core import optim
from mindnlp.engine import TrainerCallback
from sharded_models import (
    BACK,
    HAS_MESSAGES,
    IS_MPI,
    MIXED,
    UNEVEN,
    Sentences,
    acknowledged_sends,
    assert_close,
    assert_resumes_like_uninterrupted,
    crashed,
    needs_messages,
    needs_mpi,
    of_one_process,
    one_mesh_at_a_time,
    pieces_of,
    trained_by_trainer,
)  # fmt: skip
from tiny_transformers import batch, build, rows, train, whole_weights

import mindnlp_dp as dp
from mindnlp_dp.checkpoint import writer
from mindnlp_dp.checkpoint.manifest import check_checkpoint
from mindnlp_dp.communication.operations import Operation
from mindnlp_dp.parallel.parallel_plan import ExpertPlan, PipelinePlan, ShardingPlan, TensorPlan, plan_for
from mindnlp_dp.runtime.mesh_spec import parse_mesh
from models import Rows, alone, weights
from models import train as train_by_trainer

# Fixtures: the second applies to every test here.
__all__ = ["acknowledged_sends", "one_mesh_at_a_time"]
MESHES = {
    2: ["tp=2", "pp=2", "ep=2", "sp=2"],
    4: ["tp=4", "pp=4", "dp=2,tp=2", "dp=2,pp=2", "pp=2,tp=2", "dp=2,ep=2", "ep=4", "ep=2,tp=2",
        "dp=2,sp=2", "sp=4", "sp=2,tp=2", "ep=2,sp=2",
        "pp=2,dp=2|1,tp=1|2", "pp=2,tp=2|1,dp=1|2", "pp=2,dp=3|1,tp=1", "pp=2,dp=1|3"],
    8: ["dp=2,pp=2,tp=2", "pp=2,dp=4|2,tp=1|2", "pp=3,dp=2|4|1,tp=1|1|2"],
}  # fmt: skip
CORE_MESHES = ("dp=2,tp=2", "dp=2,pp=2", "pp=2,tp=2", "dp=2,ep=2", "pp=2,dp=2|1,tp=1|2")
WORLD_SIZE = dp.get_process_group().world_size


def fits(kind, mesh):
    sizes = parse_mesh(mesh)
    if kind == "t5" and (sizes.get("pp", 1) > 2 or "sp" in sizes):
        return False
    if kind in ("mixtral", "qwen2_moe"):
        return sizes.get("pp", 1) <= 2
    return "ep" not in sizes


def cases():
    """Return every kind of model with every mesh.

    Some meshes of a decoder and of a model with experts are marked as core. Of each other kind, on more than two ranks,
    all meshes but one are slow; it is another mesh for each kind.
    """
    axes = {"dp", "tp"} | ({"pp"} if HAS_MESSAGES else set()) | ({"ep", "sp"} if IS_MPI else set())
    meshes = [mesh for mesh in MESHES.get(WORLD_SIZE, []) if set(parse_mesh(mesh)) <= axes]
    kinds = ("bert", "roberta", "masked", "gpt2", "t5", "mixtral", "qwen2_moe")
    if WORLD_SIZE == 8:
        kinds = ("masked", "gpt2")

    def marks(number, kind, fitting, mesh):
        if kind in ("gpt2", "mixtral"):
            if WORLD_SIZE <= 2 or mesh in CORE_MESHES:
                return pytest.mark.core
            return () if kind == "gpt2" else pytest.mark.slow
        return () if WORLD_SIZE <= 2 or mesh == fitting[number % len(fitting)] else pytest.mark.slow

    found = []
    for number, kind in enumerate(kinds):
        fitting = [mesh for mesh in meshes if fits(kind, mesh)]
        found += [pytest.param(kind, mesh, marks=marks(number, kind, fitting, mesh)) for mesh in fitting]
    return found


def failing_meshes():
    """Return the pipelines of this world size, each with the ranks on which a forward pass fails."""
    meshes = {2: ["pp=2"], 4: ["pp=4", MIXED, BACK]}.get(WORLD_SIZE, [])
    found = list(itertools.product(meshes, ["every stage", "the last stage", "the first stage"]))
    return found + [(mesh, "one rank of a stage") for mesh in meshes if mesh in (MIXED, BACK)]


def a_mesh(group):
    """Return a mesh that shards models at this world size, or None for one rank."""
    return {1: None, 2: "tp=2", 3: "tp=3", 4: "dp=2,tp=2", 8: "dp=2,pp=2,tp=2"}[group.world_size]


@pytest.mark.parametrize(("kind", "mesh"), cases())  # some are marked as core
def test_a_sharded_model_on_every_mesh_trains_the_weights_of_one_process(group, kind, mesh):
    mesh = dp.init_device_mesh(parse_mesh(mesh))
    model = dp.parallelize(build(kind), mesh)
    step = train(model, kind, pieces_of(mesh, 2))
    has_parallel_loss = mesh.sizes["tp"] > 1 and kind not in ("bert", "roberta")
    assert_close(model, kind, 5e-6 if has_parallel_loss else 1e-6)
    np.testing.assert_allclose(step.norms, of_one_process(kind)[1], rtol=1e-5)
    assert len(set(group.all_gather_object(model.parallel.assert_in_sync()))) == 1


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize(("kind", "axis"), [("gpt2", "pp"), ("mixtral", "ep"), ("gpt2", "tp")])
def test_muon_with_pp_and_ep_trains_the_weights_of_one_process_and_refuses_tp(group, kind, axis, zero_stage):
    if group.world_size not in (2, 4) or not IS_MPI:
        pytest.skip("needs an axis of two ranks")
    mesh = dp.init_device_mesh({"dp": group.world_size // 2, axis: 2})
    model = dp.parallelize(build(kind), mesh)
    if axis == "tp":
        with pytest.raises(ValueError, match=r"Muon needs full matrices, and each rank has a part of them \(tp > 1\)"):
            train(model, kind, pieces_of(mesh, 2), zero_stage=zero_stage, optimizer="muon")
        return
    step = train(model, kind, pieces_of(mesh, 2), zero_stage=zero_stage, optimizer="muon")
    assert_close(model, kind, 5e-6, optimizer="muon")
    np.testing.assert_allclose(step.norms, of_one_process(kind, optimizer="muon")[1], rtol=1e-5)
    assert len(set(group.all_gather_object(model.parallel.assert_in_sync()))) == 1


@pytest.mark.parametrize("zero_stage", [0, 1, pytest.param(2, marks=pytest.mark.core)])
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_zero_with_tp_or_pp_trains_the_weights_of_one_process(group, axis, zero_stage):
    if group.world_size != 4 or not IS_MPI:
        pytest.skip("needs two axes")
    mesh = dp.init_device_mesh({"dp": 2, axis: 2})
    model = dp.parallelize(build("masked"), mesh)
    train(model, "masked", pieces_of(mesh, 2), zero_stage=zero_stage)
    assert_close(model, "masked", 5e-6)


# Pipelines.


@needs_messages
@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.core), "eager-1f1b"])
@pytest.mark.parametrize(
    "mesh",
    {
        2: ["pp=2"],
        4: [
            *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("pp=4", UNEVEN)),
            MIXED,
            *([] if IS_MPI else ["pp=2,tp=2"]),
        ],
    }.get(WORLD_SIZE, []),
)
@pytest.mark.usefixtures("acknowledged_sends")
def test_every_pipeline_schedule_matches_one_process_and_its_in_flight_count(group, mesh, schedule):
    mesh = dp.init_device_mesh(parse_mesh(mesh))
    model = dp.parallelize(build("gpt2"), mesh, schedule=schedule)
    # Micro-batches are single rows: where two or three ranks of a stage split them, only one has a row.
    step = train(model, "gpt2", pieces_of(mesh, 8))
    assert_close(model, "gpt2")
    np.testing.assert_allclose(step.norms, of_one_process("gpt2")[1], rtol=1e-5)
    model.parallel.assert_in_sync()
    left = mesh.sizes["pp"] - mesh.index("pp")
    expected = {"gpipe": 8, "1f1b": left, "eager-1f1b": 2 * left - 1}
    assert model.parallel.pipeline.most_in_flight == expected[schedule]


@needs_messages
def test_pipeline_stages_have_different_and_reproducible_dropout_masks(group):
    if group.world_size not in (2, 4):
        pytest.skip("needs stages")
    mesh = dp.init_device_mesh({"pp": group.world_size})

    def masks():
        model = dp.parallelize(build("bert", dropout=0.3), mesh)
        seen = []
        for name, module in model.named_modules():
            if name.endswith("attention.self.dropout"):
                module.register_forward_hook(lambda module, args, output: seen.append(output.asnumpy() == 0))
        train(model, "bert", pieces_of(mesh, 2), num_updates=1)
        return seen[0]

    mine = masks()
    # After the first stage, which draws for the embedding first, only the seed makes stages differ.
    for one, other in itertools.combinations(group.all_gather(mine), 2):
        assert not (one == other).all()
    np.testing.assert_array_equal(masks(), mine)


@needs_messages
def test_a_pipeline_accepts_fewer_micro_batches_than_stages(group):
    if group.world_size not in (2, 4):
        pytest.skip("needs stages")
    mesh = dp.init_device_mesh({"pp": group.world_size})
    model = dp.parallelize(build("masked"), mesh)
    train(model, "masked", pieces_of(mesh, 1))
    assert_close(model, "masked")
    assert model.parallel.pipeline.most_in_flight == 1


@needs_messages
def test_a_pipeline_accepts_uneven_and_empty_micro_batches(group):
    if group.world_size not in (2, 4):
        pytest.skip("needs stages")
    mesh = dp.init_device_mesh({"dp": group.world_size // 2, "pp": 2})
    model = dp.parallelize(build("gpt2"), mesh)
    size, rank = mesh.dp_group.world_size, mesh.dp_group.rank
    # With two data-parallel ranks, the first has 3 and 1 of the 8 rows, the second 4 and none.
    bounds = [(0, 5, 8)] if size == 1 else [(0, 3, 4), (4, 8, 8)]
    first, middle, last = bounds[rank]
    train(model, "gpt2", lambda columns: [rows(columns, first, middle), rows(columns, middle, last)])
    assert_close(model, "gpt2")


@pytest.mark.core
@needs_messages
def test_a_nan_loss_is_left_out_on_every_pipeline_stage(group):
    if group.world_size not in (2, 4):
        pytest.skip("needs stages")
    mesh = dp.init_device_mesh({"pp": group.world_size})

    def trained(micro_steps, spoil):
        model = dp.parallelize(build("bert"), mesh)
        optimizer = optim.SGD(list(model.parameters()), lr=0.1)

        def forward(bad=None, **inputs):
            loss = model(**inputs)[0]
            return loss * float("nan") if bad is not None else loss

        step = dp.make_train_step(forward, optimizer, list(model.parameters()), accumulation_steps=len(micro_steps))
        model.set_train(True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                step([{**part, "bad": np.ones(1)} if n == spoil else part for n, part in enumerate(micro_steps)])
        return whole_weights(model), [str(w.message) for w in caught if "micro-batch" in str(w.message)]

    columns = batch("bert", 8)
    parts = [rows(columns, first, first + 2) for first in range(0, 8, 2)]
    poisoned, said = trained(parts, spoil=3)
    expected, _ = trained(parts[:3], spoil=None)
    for name, weight in expected.items():
        np.testing.assert_array_equal(poisoned[name], weight, err_msg=name)
    assert said
    assert "nan" in said[0]


@needs_mpi
@pytest.mark.parametrize("num_rows", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("mesh", "fails_on"), failing_meshes())
def test_a_pipeline_trains_correctly_after_a_failed_update(mesh, fails_on, num_rows):
    """No rank hangs, and no message from before the failure is taken for one of the next update.

    This also holds if only one of the ranks that split a micro-batch fails, and for a model made afterwards.
    """
    mesh = dp.init_device_mesh(parse_mesh(mesh))
    fails = {
        "every stage": True, "the last stage": mesh.is_last_stage, "the first stage": mesh.is_first_stage,
        "one rank of a stage": mesh.group("dp_in_stage").world_size > 1 and mesh.index("dp_in_stage") == 0,
    }  # fmt: skip
    columns = batch("gpt2", 8)
    micro_batches = [rows(columns, first, first + num_rows) for first in (0, 2, 4, 6)]

    def make():
        model = dp.parallelize(build("gpt2"), mesh)
        model.set_train(True)
        calls = [0]

        def forward(**inputs):
            calls[0] += 1
            if fails[fails_on] and calls[0] == 3:
                raise KeyError("a mistake of the user's")
            return model(**inputs)[0]

        optimizer = optim.AdamW(list(model.parameters()), lr=1e-3)
        return model, dp.make_train_step(forward, optimizer, list(model.parameters()), accumulation_steps=4), calls

    model, step, calls = make()
    with pytest.raises((KeyError, ValueError), match="mistake|could not send its message|has failed; its own error"):
        step(micro_batches[::-1])
    # No model receives what the failed update has left: neither a new one nor this one.
    trained = []
    for found, again, number in (make(), (model, step, calls), make()):
        number[0] = 3
        again(micro_batches)
        found.parallel.assert_in_sync()
        trained.append(whole_weights(found))
    for other in trained[1:]:
        for name, weight in trained[0].items():
            np.testing.assert_array_equal(other[name], weight, err_msg=name)


@needs_mpi
def test_unused_experts_in_a_pipeline_decay_as_in_one_process(group):
    if group.world_size not in (2, 4):
        pytest.skip("needs stages")
    # There are more experts than the tokens of an update use.
    config = {"num_local_experts": 16, "num_experts_per_tok": 1}
    with alone() as single:
        one = build("mixtral", **config)
        train(one, "mixtral", lambda columns: [rows(columns, 0, 1)], group=single, zero_stage=0)
        expected = whole_weights(one)
    mesh = dp.init_device_mesh({"dp": group.world_size // 2, "pp": 2})
    model = dp.parallelize(build("mixtral", **config), mesh)
    train(model, "mixtral", lambda columns: [rows(columns, 0, 1)])
    found = whole_weights(model)
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight, rtol=0, atol=1e-6, err_msg=name)


@needs_messages
def test_a_custom_pipeline_plan_trains_and_layers_per_stage_is_validated(group):
    if group.world_size != 2:
        pytest.skip("needs two stages")
    from mindnlp.core import nn
    from mindnlp.engine.utils import set_seed

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

        def forward(self, input_ids, labels):
            x = input_ids.astype(mindspore.float32)[:, :6] / 51
            for layer in self.layers:
                x = layer(x)
            return ((x - labels.astype(mindspore.float32).reshape(-1, 1)) ** 2).mean(), x

    def make():
        set_seed(1)
        return Net()

    with alone() as single:
        one = make()
        train(one, "bert", lambda c: [without_mask(c)], group=single, zero_stage=0)
        expected = whole_weights(one)
    mesh = dp.init_device_mesh({"pp": 2})
    plan = ShardingPlan(pipeline=PipelinePlan(layers="layers", tuples=False))
    for layers in ([], [1, 2], [2, 1]):
        model = dp.parallelize(make(), mesh, plan, layers_per_stage=layers)
        if layers:
            own = {name.split(".")[1] for name, _ in model.named_parameters()}
            assert len(own) == layers[mesh.index("pp")]
        train(model, "bert", lambda c: [rows(without_mask(c), 0, 4), rows(without_mask(c), 4, 8)])
        found = whole_weights(model)
        for name, weight in expected.items():
            np.testing.assert_allclose(found[name], weight, rtol=0, atol=1e-6, err_msg=name)
    for layers in ([3], [3, 0], [2, 2], [1, 1, 1]):
        with pytest.raises(ValueError, match="does not split 3 layers over pp=2 stages"):
            dp.parallelize(make(), mesh, plan, layers_per_stage=layers)
    for sizes in ({"tp": 2}, {"dp": 2}):
        with pytest.raises(ValueError, match="layers_per_stage is for a pipeline, and the mesh is"):
            dp.parallelize(build("bert"), dp.init_device_mesh(sizes), layers_per_stage=[1, 1])


def without_mask(columns):
    return {name: columns[name] for name in ("input_ids", "labels")}


@needs_mpi
def test_a_pipeline_refuses_hidden_states_generation_and_frozen_stages(group):
    if group.world_size not in (2, 4):
        pytest.skip("needs stages")
    mesh = dp.init_device_mesh({"dp": group.world_size // 2, "pp": 2})
    model = dp.parallelize(build("mixtral", use_cache=True), mesh)
    model.set_train(False)
    ids = mindspore.Tensor(batch("mixtral", 2)["input_ids"])
    with pytest.raises(
        ValueError, match="output_hidden_states is not supported with pp, whose stages have only their own layers"
    ):
        model(ids, output_hidden_states=True)
    with pytest.raises(ValueError, match="needs the keys and values of all layers"):
        model.generate(ids)
    expected = build("mixtral")
    expected.set_train(False)
    np.testing.assert_allclose(model(ids).logits.asnumpy(), expected(ids).logits.asnumpy(), atol=1e-6)
    frozen = build("bert")
    for parameter in frozen.bert.parameters():
        parameter.requires_grad = False
    with pytest.raises(ValueError, match=r"the stage of rank 0 \(.*pp=0\) has no trainable weights"):
        dp.parallelize(frozen, mesh)


@needs_messages
def test_pipeline_stages_exchange_one_hidden_state_per_micro_batch_and_its_gradient(group):
    if group.world_size != 2:
        pytest.skip("needs two stages")
    mesh = dp.init_device_mesh({"pp": 2})
    model = dp.parallelize(build("gpt2"), mesh)
    train(model, "gpt2", pieces_of(mesh, 4), num_updates=3)
    # b * s * h floats cross the boundary per micro-batch in each direction.
    assert model.parallel.pipeline.messages.p2p.bytes_sent == 3 * 4 * (2 * 10 * 16 * 4)


# Tensor parallelism.


def test_tp_does_four_all_reduces_per_layer_and_step(group, monkeypatch):
    if group.world_size not in (2, 3, 4):
        pytest.skip("nothing is cut, or too few heads are there")
    mesh = dp.init_device_mesh({"tp": group.world_size})
    model = dp.parallelize(build("bert", num_attention_heads=4 if group.world_size != 3 else 3,
                                 hidden_size=16 if group.world_size != 3 else 15), mesh)  # fmt: skip
    model.set_train(True)
    sizes = []
    tp = mesh.group("tp")
    all_reduce = type(tp).all_reduce

    def counted(self, x, *args, **kwargs):
        if self is tp and getattr(x, "ndim", 0) == 3:
            sizes.append(x.size)
        return all_reduce(self, x, *args, **kwargs)

    monkeypatch.setattr(type(tp), "all_reduce", counted)
    from mindnlp.core.autograd import value_and_grad

    inputs = {name: mindspore.Tensor(array) for name, array in batch("bert", 2).items()}
    value_and_grad(lambda: model(**inputs).loss, tuple(model.parameters()), attach_grads=False)()
    # One more all-reduce is for the embedding, whose gradient needs none.
    assert len(sizes) == 4 * 4 + 1
    assert set(sizes) == {2 * 10 * model.config.hidden_size}


def drawn(model, kind, seed, **options):
    """Return the loss of a model with dropout, and the output of the dropout of one attention layer."""
    from mindnlp_dp.runtime.random_state import seeded

    model.set_train(True)
    seen = []
    layer = next(m for name, m in model.named_modules() if name.endswith("layer.0.attention.self.dropout"))
    handle = layer.register_forward_hook(lambda module, args, output: seen.append(output.asnumpy()))
    inputs = {name: mindspore.Tensor(array) for name, array in batch(kind, 2).items()}
    with seeded(seed):
        loss = float(model(**inputs)[0].asnumpy())
    handle.remove()
    return loss, seen[0]


def test_tp_dropout_is_equal_for_replicated_and_different_for_sharded_activations(group):
    if group.world_size not in (2, 4):
        pytest.skip("nothing is cut")
    mesh = dp.init_device_mesh({"tp": group.world_size})
    model = dp.parallelize(build("bert", dropout=0.3), mesh)
    loss, mask = drawn(model, "bert", 5)
    assert len(set(group.all_gather_object(loss))) == 1
    masks = [m == 0 for m in group.all_gather(mask)]
    assert not any((masks[0] == other).all() for other in masks[1:])
    # The same seed draws the same masks again; another seed draws others.
    assert drawn(model, "bert", 5)[0] == loss
    assert drawn(model, "bert", 6)[0] != loss


@pytest.mark.parametrize("name", ["BertLMHeadModel", "RobertaForCausalLM"])
def test_tp_encoders_with_a_causal_lm_head_have_the_loss_of_one_process(group, name):
    """Its labels are shifted, unlike those of a masked language model."""
    if group.world_size not in (2, 4):
        pytest.skip("nothing is cut")
    import mindnlp.transformers as models
    from mindnlp.engine.utils import set_seed

    mesh = dp.init_device_mesh({"tp": group.world_size})
    config = build("bert" if name.startswith("Bert") else "roberta").config
    config.is_decoder = True
    inputs = {key: mindspore.Tensor(array) for key, array in batch("gpt2", 4).items()}

    def loss_of(model):
        model.set_train(True)
        return float(model(**inputs)[0].asnumpy())

    def make():
        set_seed(2)
        return getattr(models, name)(config)

    np.testing.assert_allclose(loss_of(dp.parallelize(make(), mesh)), loss_of(make()), rtol=1e-6)


def test_tp_logits_without_labels_are_full_and_have_correct_gradients(group):
    if group.world_size not in (2, 4):
        pytest.skip("nothing is cut")
    from mindnlp.core.autograd import value_and_grad

    mesh = dp.init_device_mesh({"tp": group.world_size})
    ids = mindspore.Tensor(batch("gpt2", 2)["input_ids"])

    def gradient_of(model):
        model.set_train(True)
        weight = dict(model.named_parameters())["transformer.h.0.ln_1.weight"]

        def loss():
            return (model(ids).logits ** 2).mean()

        function = value_and_grad(loss, (weight,), attach_grads=False)
        value, (gradient,) = function()
        return float(value.asnumpy()), gradient.asnumpy()

    model = dp.parallelize(build("gpt2"), mesh)
    for mine, expected in zip(gradient_of(model), gradient_of(build("gpt2"))):
        np.testing.assert_allclose(mine, expected, atol=1e-6)
    # With labels, logits are None instead of a shard.
    assert model(ids, labels=ids).logits is None


def test_an_optimizer_made_before_parallelize_is_refused(group):
    if group.world_size not in (2, 4):
        pytest.skip("nothing is cut")
    mesh = dp.init_device_mesh({"tp": group.world_size})
    model = build("bert")
    optimizer = optim.SGD(list(model.parameters()), lr=0.1)
    model = dp.parallelize(model, mesh)
    with pytest.raises(ValueError, match=r"make the optimizer after parallelize\(\)"):
        dp.make_train_step(lambda **inputs: model(**inputs)[0], optimizer, list(model.parameters()))


def test_a_custom_tp_plan_trains_the_weights_of_one_process(group):
    if group.world_size not in (2, 4):
        pytest.skip("nothing is cut")
    mesh = dp.init_device_mesh({"tp": group.world_size})
    plan = ShardingPlan(TensorPlan({"*intermediate.dense": "colwise", "*layer.?.output.dense": "rowwise"}))
    model = dp.parallelize(build("bert"), mesh, plan)
    cut = {name for name in model.parallel.placements if model.parallel.placements[name].shard is not None}
    assert len(cut) == 3 * 4
    train(model, "bert", pieces_of(mesh, 1))
    assert_close(model, "bert")


# Experts.


@needs_mpi
def test_ep_ranks_with_uneven_micro_batches_train_the_weights_of_one_process(group):
    if group.world_size not in (2, 4):
        pytest.skip("needs a row")
    mesh = dp.init_device_mesh({"ep": group.world_size})
    model = dp.parallelize(build("mixtral"), mesh)
    # The first four rows are split unevenly. Rank 0 has all of the last four, and the other ranks have none.
    bounds = {2: [(0, 3), (3, 4)], 4: [(0, 1), (1, 2), (2, 4), (4, 4)]}[group.world_size][group.rank]
    last = (4, 8) if group.rank == 0 else (8, 8)
    train(model, "mixtral", lambda columns: [rows(columns, *bounds), rows(columns, *last)])
    assert_close(model, "mixtral", 1e-6)
    load = model.parallel.loads()[0]
    assert sum(load.tokens) > 0
    assert load.balance >= 1


@needs_mpi
def test_ep_ranks_with_different_numbers_of_micro_batches_train_the_weights_of_one_process(group):
    """Ranks join each other in every update, not only in the first one, which finds out what the model needs."""
    if group.world_size not in (2, 4):
        pytest.skip("needs a row")
    model = dp.parallelize(build("mixtral"), dp.init_device_mesh({"ep": group.world_size}))
    each = 4 // group.world_size
    mine = (each * group.rank, each * (group.rank + 1))
    model.set_train(True)
    parameters = list(model.parameters())
    step = dp.make_train_step(
        lambda **inputs: model(**inputs)[0], optim.AdamW(parameters, lr=5e-4, weight_decay=0.1), parameters,
        model=model, accumulation_steps=2, max_grad_norm=0.5,
    )  # fmt: skip
    for number in range(5):
        columns = batch("mixtral", 8, number)
        step([rows(columns, *mine), *([rows(columns, 4, 8)] if group.is_main else [])])
    assert_close(model, "mixtral", 1e-6)


@needs_mpi
def test_a_nan_loss_on_one_ep_rank_is_left_out_on_all_ranks(group):
    if group.world_size not in (2, 4):
        pytest.skip("needs a row")
    mesh = dp.init_device_mesh({"ep": group.world_size})
    columns = batch("mixtral", 8)

    def trained(is_bad, num_micro_steps):
        model = dp.parallelize(build("mixtral"), mesh)
        parameters = list(model.parameters())

        def forward(bad=None, **inputs):
            loss = model(**inputs)[0]
            return loss * float("nan") if bad is not None else loss

        step = dp.make_train_step(
            forward, optim.SGD(parameters, lr=0.1), parameters, accumulation_steps=num_micro_steps
        )
        model.set_train(True)
        micro_batches = [rows(columns, group.rank, group.rank + 1), rows(columns, 4 + group.rank, 5 + group.rank)]
        if is_bad and group.rank == 1:
            micro_batches[1]["bad"] = np.ones(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(micro_batches[:num_micro_steps] if num_micro_steps > 1 else micro_batches[0])
        return whole_weights(model)

    poisoned, expected = trained(True, 2), trained(False, 1)
    for name, weight in expected.items():
        np.testing.assert_allclose(poisoned[name], weight, rtol=0, atol=1e-7, err_msg=name)


@needs_mpi
def test_the_trainer_with_ep_ignores_micro_batches_without_labels(group, tmp_path):
    """The loss of such a micro-batch is 0 / 0 and must not reach the experts, which other ranks use too."""
    if group.world_size not in (2, 4):
        pytest.skip("needs a row")

    class Tokens:
        def __len__(self):
            return 16

        def __getitem__(self, index):
            ids = batch("mixtral", 1, index)["input_ids"][0]
            # In every update, the first rank's samples have nothing to predict.
            return {"input_ids": ids, "labels": np.full_like(ids, -100) if index % 8 < 8 // group.world_size else ids}

    class ByTokens(dp.DataParallelTrainer):
        def loss_weight(self, inputs):
            return float((inputs["labels"].asnumpy()[:, 1:] != -100).sum())

    def trained(mesh):
        dp.init_device_mesh(mesh)
        model = dp.parallelize(build("mixtral"))
        trainer = train_by_trainer(
            model, Tokens(), tmp_path, ByTokens, per_device_train_batch_size=8 // group.world_size,
            dataset_shuffle=False, learning_rate=1e-3,
        )  # fmt: skip
        assert trainer.state.global_step == 2
        return whole_weights(trainer.model)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the norm of the averaged gradient")
        by_experts, expected = trained({"ep": group.world_size}), trained({"dp": group.world_size})
    for name, weight in expected.items():
        np.testing.assert_allclose(by_experts[name], weight, rtol=0, atol=1e-6, err_msg=name)


# Weights, files and checkpoints.


@pytest.mark.core
def test_a_sharded_empty_model_loads_pretrained_weights_and_writes_them_again(group, shared_tmp_path):
    mesh = a_mesh(group)
    if mesh is None or group.world_size == 3:
        pytest.skip("nothing is cut")
    original = build("masked", seed=8)
    if group.is_main:
        original.save_pretrained(str(shared_tmp_path / "full"))
    group.barrier()
    mesh = dp.init_device_mesh(parse_mesh(mesh))
    with dp.empty_weights():
        model = build("masked")
    model = dp.parallelize(model, mesh, weights=shared_tmp_path / "full")
    for name, weight in original.named_parameters():
        np.testing.assert_array_equal(whole_weights(model)[name], weight.asnumpy(), err_msg=name)
    assert model.parallel.digest() == dp.replica_digest(original)
    # The ranks of a replica hold the sharded weights once together, and the replicated weights once each.
    held = sum(p.size for p in model.parameters())
    assert held < 0.75 * sum(p.size for p in original.parameters())
    model.parallel.write_weights(shared_tmp_path / "again" / "model.safetensors" if group.is_main else None)
    from mindnlp_dp.checkpoint.reader import read_weights

    other = build("masked", seed=9)
    read_weights(other, shared_tmp_path / "again")
    assert dp.replica_digest(other) == dp.replica_digest(original)


def test_a_sharded_model_with_a_new_head_loads_pretrained_base_weights(group, shared_tmp_path):
    if group.world_size not in (2, 4):
        pytest.skip("nothing is cut")
    import mindnlp.transformers as models

    original = build("bert", seed=8)
    if group.is_main:
        original.bert.save_pretrained(str(shared_tmp_path))
    group.barrier()
    with dp.empty_weights():
        model = models.BertForSequenceClassification(original.config)
    model = dp.parallelize(model, dp.init_device_mesh({"tp": group.world_size}), weights=shared_tmp_path)
    found = whole_weights(model)
    np.testing.assert_array_equal(found["bert.pooler.dense.weight"], original.bert.pooler.dense.weight.asnumpy())
    # The head is newly initialized, not zero.
    assert 0.005 < found["classifier.weight"].std() < 0.05


@pytest.mark.core
def test_a_trainer_run_resumes_on_another_mesh(group, shared_tmp_path):
    meshes = {2: ["dp=2", "tp=2", "pp=2"], 4: ["dp=2,tp=2", "pp=2,tp=2", "dp=2,pp=2"]}.get(group.world_size)
    if meshes is None:
        pytest.skip("needs meshes")
    if not IS_MPI:
        meshes = [mesh for mesh in meshes if "pp" not in mesh]
    whole = trained_by_trainer(group, meshes[0], shared_tmp_path / "whole")
    for number, (first, second) in enumerate(zip(meshes, [*meshes[1:], meshes[0]])):
        settings = {"sharded_checkpoints": number % 2 == 0, "async_save": number % 3 > 0}
        assert_resumes_like_uninterrupted(group, first, second, shared_tmp_path / str(number), whole, **settings)


def test_a_custom_loop_resumes_on_another_mesh_with_the_same_evaluation(group, shared_tmp_path):
    meshes = {2: ["tp=2", "pp=2", "dp=2"], 4: ["dp=2,tp=2", "pp=4", "tp=4"]}.get(group.world_size)
    if meshes is None:
        pytest.skip("needs meshes")
    if not IS_MPI:
        meshes = [mesh for mesh in meshes if "pp" not in mesh]

    def run(mesh, folder, stop_after=None, sharded=False):
        mesh = dp.init_device_mesh(parse_mesh(mesh))
        model = dp.parallelize(build("gpt2"), mesh)
        model.set_train(True)
        parameters = list(model.parameters())
        step = dp.make_train_step(
            lambda **inputs: model(**inputs)[0], optim.AdamW(parameters, lr=5e-4), parameters,
            accumulation_steps=2, max_grad_norm=0.5,
        )  # fmt: skip
        loader = dp.make_loader(Sentences(), 4 // mesh.dp_group.world_size, 2, shuffle=True, seed=1)
        run = dp.FunctionalRun(folder, model, step, loader, sharded=sharded)
        run.resume()
        for micro_batches in run.updates(num_epochs=3):
            step(micro_batches)
            if step.num_updates == 2:
                run.save()
            if step.num_updates == stop_after:
                break
        model.set_train(False)
        evaluation = dp.evaluate(
            lambda **inputs: model(**inputs)[:2], dp.make_loader(Sentences(), 2), model=model, has_loss=True
        )
        return whole_weights(model), evaluation

    expected, evaluated = run(meshes[0], shared_tmp_path / "whole")
    assert evaluated.outputs.shape == (13, 10, 51)
    for number, (first, second) in enumerate(zip(meshes, [*meshes[1:], meshes[0]])):
        folder = shared_tmp_path / str(number)
        run(first, folder, stop_after=3, sharded=number % 2 == 0)
        found, again = run(second, folder)
        for name, weight in expected.items():
            np.testing.assert_allclose(found[name], weight, rtol=0, atol=5e-6, err_msg=f"{first} to {second}: {name}")
        np.testing.assert_allclose(again.outputs, evaluated.outputs, atol=2e-5)
        np.testing.assert_allclose(again.loss, evaluated.loss, atol=1e-5)


@needs_messages
@pytest.mark.core
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_pipeline_whose_stages_have_different_parameter_groups_resumes(group, shared_tmp_path, kind):
    """Each layer has its own learning rate, and with Muon the middle stages have no embeddings."""
    if group.world_size not in (2, 4):
        pytest.skip("needs stages")

    def run(mesh, folder, stop_after=None, scale=1.0):
        model = dp.parallelize(build("gpt2"), dp.init_device_mesh(parse_mesh(mesh)))
        model.set_train(True)
        parameters = list(model.parameters())
        if kind == "muon":
            # Without decay, the groups of embeddings and of vectors have the same options.
            groups = dp.optim.muon_groups(model, weight_decay=0.0)
            optimizer = dp.optim.Muon(groups, lr=5e-4 * scale, adjust_lr_fn="match_rms_adamw")
        else:
            groups = {}
            for name, parameter in model.named_parameters():
                layer = int(name.split(".h.")[1].split(".")[0]) if ".h." in name else 9
                new = {"params": [], "lr": 1e-4 * scale * (1 + layer), "weight_decay": 0.01 * layer}
                groups.setdefault(layer, new)["params"].append(parameter)
            optimizer = optim.AdamW(list(groups.values()))
        # The library's own schedules have a state for each group.
        scheduler = get_scheduler("linear", optimizer, 2, 30)
        step = dp.make_train_step(
            lambda **inputs: model(**inputs)[0], optimizer, parameters, scheduler=scheduler, accumulation_steps=2
        )
        size = group.world_size if mesh.startswith("dp") else 1
        loader = dp.make_loader(Sentences(), 4 // size, 2, shuffle=True, seed=1)
        run = dp.FunctionalRun(folder, model, step, loader)
        run.resume()
        for micro_batches in run.updates(num_epochs=3):
            step(micro_batches)
            if step.num_updates == 2:
                run.save()
            if step.num_updates == stop_after:
                break
        return whole_weights(model) if mesh.startswith("pp") else weights(model)

    pipeline = f"pp={group.world_size}"
    expected = run(pipeline, shared_tmp_path / "whole")
    run(pipeline, shared_tmp_path / "stopped", stop_after=3)
    group.barrier()
    # The rates of the checkpoint count.
    resumed = run(pipeline, shared_tmp_path / "stopped", scale=3.0)
    for name, weight in expected.items():
        np.testing.assert_array_equal(resumed[name], weight, err_msg=name)
    for name, weight in run(f"dp={group.world_size}", shared_tmp_path / "stopped", scale=3.0).items():
        np.testing.assert_allclose(weight, expected[name], rtol=0, atol=5e-6, err_msg=name)


@needs_messages
def test_a_tied_weight_that_is_unfrozen_after_parallelize_stays_tied(group):
    if group.world_size not in (2, 4):
        pytest.skip("needs stages")
    mesh = dp.init_device_mesh({"pp": group.world_size})
    model = build("gpt2")
    model.transformer.wte.weight.requires_grad = False
    model = dp.parallelize(model, mesh)
    for parameter in model.parameters():
        parameter.requires_grad = True
    train(model, "gpt2", pieces_of(mesh, 2))
    model.parallel.assert_in_sync()
    # The last stage has it by another name.
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "wte" not in name
    with pytest.raises((ValueError, RuntimeError), match="is trained on some stages and frozen on others"):
        train(model, "gpt2", pieces_of(mesh, 2))
    found = {p.name: array.copy() for p, array in model.parallel.full_arrays()}
    for name, weight in of_one_process("gpt2")[0].items():
        np.testing.assert_allclose(found[name], weight, rtol=0, atol=1e-6, err_msg=name)


class Counting(optim.AdamW):
    """Has a state without a dimension beside its moments, and one of another shape than its parameter."""

    def step(self):
        super().step()
        for parameter, state in self.state.items():
            state["count"] = mindspore.Tensor(float(state["step"]))
            state["row"] = mindspore.Tensor(np.arange(3, dtype=np.float32) + parameter.ndim)


@pytest.mark.core
@pytest.mark.parametrize("sharded", [False, True])
def test_checkpoints_keep_optimizer_state_of_other_shapes_than_the_parameters(group, shared_tmp_path, sharded):
    meshes = {2: ["tp=2", "pp=2"], 4: ["dp=2,tp=2"]}.get(group.world_size)
    if meshes is None:
        pytest.skip("needs meshes")
    for text in meshes if IS_MPI else meshes[:1]:
        mesh = dp.init_device_mesh(parse_mesh(text))

        def make(mesh=mesh, folder=shared_tmp_path / text):
            model = dp.parallelize(build("gpt2"), mesh)
            model.set_train(True)
            parameters = list(model.parameters())
            optimizer = Counting(parameters, lr=5e-4)
            step = dp.make_train_step(lambda **inputs: model(**inputs)[0], optimizer, parameters, accumulation_steps=2)
            loader = dp.make_loader(Sentences(), 4 // mesh.dp_group.world_size, 2, shuffle=True, seed=1)
            return dp.FunctionalRun(folder, model, step, loader, sharded=sharded), optimizer

        run, first = make()
        for micro_batches in run.updates(num_epochs=1):
            run.step(micro_batches)
        run.save()
        again, second = make()
        assert again.resume()
        # The order of an optimizer's own state is another one after it was loaded.
        states = [[o.state[p] for group in o.param_groups for p in group["params"]] for o in (first, second)]
        assert len(states[0]) == len(states[1]) > 0
        for one, other in zip(*states):
            for name in ("count", "row", "exp_avg", "exp_avg_sq"):
                np.testing.assert_array_equal(one[name].asnumpy(), other[name].asnumpy(), err_msg=f"{text}: {name}")


@pytest.mark.core
@pytest.mark.parametrize("sharded", [False, True])
def test_async_save_of_a_sharded_model_writes_to_disk_if_memory_is_full(group, shared_tmp_path, monkeypatch, sharded):
    """The weights are in memory already, and the state does not fit: all is copied to the disk."""
    mesh = {2: "tp=2", 4: "dp=2,tp=2"}.get(group.world_size)
    if mesh is None:
        pytest.skip("nothing is cut")
    save_file = writer.save_file

    def fails_in_memory(arrays, path, **options):
        if path.is_relative_to("/dev/shm"):
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(arrays, path, **options)

    monkeypatch.setattr(writer, "save_file", fails_in_memory)
    settings = {"save_strategy": "steps", "save_steps": 1, "async_save": True, "sharded_checkpoints": sharded}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        trained_by_trainer(group, mesh, shared_tmp_path, **settings)
    group.barrier()
    check_checkpoint(shared_tmp_path / "checkpoint-3")
    assert not list(shared_tmp_path.glob(".*-*"))


def test_save_on_each_node_is_refused_for_sharded_models(group, shared_tmp_path):
    if group.world_size != 2:
        pytest.skip("needs a mesh")
    with pytest.raises(ValueError, match="save_on_each_node with a sharded model: rank 0 gathers and writes it"):
        trained_by_trainer(group, "tp=2", shared_tmp_path, save_on_each_node=True)


@needs_mpi
def test_ep_evaluation_with_ranks_without_rows_equals_data_parallelism(group):
    if group.world_size not in (2, 4):
        pytest.skip("needs a row")

    def evaluated(mesh):
        dp.init_device_mesh(mesh)
        model = dp.parallelize(build("mixtral"))
        model.set_train(False)
        loader = dp.make_loader(Sentences(), 3)
        return dp.evaluate(lambda **inputs: model(**inputs)[:2], loader, model=model, has_loss=True)

    mine, expected = evaluated({"ep": group.world_size}), evaluated({"dp": group.world_size})
    np.testing.assert_allclose(mine.outputs, expected.outputs, atol=1e-6)
    np.testing.assert_allclose(mine.loss, expected.loss, rtol=1e-6)


def test_a_sharded_run_with_dropout_resumes_to_the_bit(group, shared_tmp_path):
    mesh = {2: "tp=2", 4: "pp=2,tp=2" if IS_MPI else "dp=2,tp=2"}.get(group.world_size)
    if mesh is None:
        pytest.skip("nothing is cut")
    whole = trained_by_trainer(group, mesh, shared_tmp_path / "whole", dropout=0.2)
    settings = {"dropout": 0.2, "save_strategy": "steps", "save_steps": 1}
    crashed(group, mesh, shared_tmp_path / "cut", **settings)
    resumed = trained_by_trainer(group, mesh, shared_tmp_path / "cut", resume=True, **settings)
    assert resumed.replica_digest == whole.replica_digest


@pytest.mark.core
def test_the_trainer_evaluates_and_saves_sharded_models_like_one_process(group, shared_tmp_path):
    mesh = {2: ["tp=2", "pp=2"], 4: ["dp=2,tp=2", "dp=2,pp=2"]}.get(group.world_size)
    if mesh is None:
        pytest.skip("nothing is cut")
    for text in mesh if IS_MPI else mesh[:1]:
        trainer = trained_by_trainer(group, text, shared_tmp_path / "run", eval_dataset=Rows(13, seed=2))
        metrics, predictions = trainer.evaluate(), trainer.predict(Rows(13, seed=2))
        trainer.save_model(str(shared_tmp_path / text))
        from mindnlp.transformers import RobertaForSequenceClassification

        single = RobertaForSequenceClassification.from_pretrained(str(shared_tmp_path / text))
        single.set_train(False)
        data = Rows(13, seed=2)
        ids, mask = mindspore.Tensor(data.input_ids), mindspore.Tensor(np.ones((13, 8), np.int64))
        expected = single(ids, attention_mask=mask, labels=mindspore.Tensor(data.labels))
        np.testing.assert_allclose(predictions.predictions, expected.logits.asnumpy(), atol=2e-6)
        np.testing.assert_allclose(metrics["eval_loss"], float(expected.loss.asnumpy()), atol=2e-6)
        assert len(set(group.all_gather_object(trainer.replica_digest))) == 1
        group.barrier()


# Mistakes.


@pytest.mark.core
def test_invalid_device_meshes_are_refused(group):
    n = group.world_size
    with pytest.raises(ValueError, match=rf"dp={n + 1} does not match the {n} ranks of this job"):
        dp.init_device_mesh({"dp": n + 1})
    with pytest.raises(ValueError, match="a mesh has axes dp, pp, ep, fsdp, sp, tp, got 'cp'"):
        dp.init_device_mesh({"cp": n})
    with pytest.raises(ValueError, match="must be a whole number of at least 1"):
        dp.init_device_mesh({"dp": 0})
    with pytest.raises(ValueError, match="at most one axis may be -1"):
        dp.init_device_mesh({"dp": -1, "tp": -1})
    with pytest.raises(TypeError, match="the sizes of a mesh are a dict, .* got 'tp=2'"):
        dp.init_device_mesh("tp=2")
    assert dp.init_device_mesh({"dp": 1, "tp": -1}, group).sizes["tp"] == n
    if n > 1:
        with pytest.raises(ValueError, match="ranks must make the same mesh"):
            dp.init_device_mesh({"dp": n} if group.rank else {"tp": n})
        if not IS_MPI:
            if group.library_without(Operation.MESSAGES):
                with pytest.raises(ValueError, match=r"before MindSpore 2.8, which has no messages .*; MPI has"):
                    dp.init_device_mesh({"pp": n})
            for axis in ("ep", "sp"):
                with pytest.raises(ValueError, match=f"{axis}={n} is not supported by .*, which has no all-to-all"):
                    dp.init_device_mesh({axis: n})


@needs_mpi
@pytest.mark.parametrize("mesh", {2: ["tp=2", "pp=2", "ep=2"], 4: ["pp=2,tp=2"]}.get(WORLD_SIZE, []))
def test_a_dry_run_of_parallelize_shows_the_edits_and_changes_nothing(group, mesh):
    mesh = dp.init_device_mesh(parse_mesh(mesh))
    model = build("mixtral" if mesh.sizes["ep"] > 1 else "gpt2")

    def structure():
        return {name: type(module).__name__ for name, module in model.named_modules()}

    kinds, forward, digest = structure(), model.forward, dp.replica_digest(model)
    edits = dp.parallelize(model, mesh, dry_run=True)
    assert (structure(), model.forward, dp.replica_digest(model)) == (kinds, forward, digest)
    assert not hasattr(model, "parallel")
    text = str(edits)
    assert text.splitlines()[0] == f"{type(model).__name__} on rank {group.label()} of {mesh}: {len(edits)} edits"
    dp.parallelize(model, mesh)
    changed = {name for name, kind in structure().items() if kinds.get(name) != kind}
    shown = dict(line.strip().split(": ", 1) for line in text.splitlines()[1:] if " -> " in line)
    assert changed
    for name in changed:
        assert f"{kinds[name]} -> {structure()[name]}" in shown[name]
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        if owner in shown and f"{kind} (" in shown[owner]:
            assert shown[owner].count(f"-> {tuple(parameter.shape)}") >= 1


def test_a_failed_parallelize_does_not_change_the_model(group):
    if group.world_size not in (2, 4):
        pytest.skip("nothing is cut")
    model = build("bert")
    kinds = [type(module) for module in model.modules()]
    plan = ShardingPlan(TensorPlan({"*query": "colwise", "*LayerNorm": "rowwise"}))
    with pytest.raises(ValueError, match="is to be sharded as 'rowwise', and is a LayerNorm"):
        dp.parallelize(model, dp.init_device_mesh({"tp": group.world_size}), plan)
    assert [type(module) for module in model.modules()] == kinds
    if IS_MPI:
        with pytest.raises(ValueError, match="1f2b"):
            dp.parallelize(build("gpt2"), dp.init_device_mesh({"pp": group.world_size}), schedule="1f2b")
        frozen = build("gpt2")
        for name, parameter in frozen.named_parameters():
            parameter.requires_grad = "wpe" in name
        kinds = [type(module) for module in frozen.modules()]
        with pytest.raises(ValueError, match="has no trainable weights"):
            dp.parallelize(frozen, dp.init_device_mesh({"pp": group.world_size}))
        assert [type(module) for module in frozen.modules()] == kinds


def test_parallelize_refuses_models_and_plans_that_do_not_fit_tp(group):
    if group.world_size not in (2, 4):
        pytest.skip("nothing is cut")
    mesh = dp.init_device_mesh({"tp": group.world_size})
    with pytest.raises(ValueError, match=r"num_attention_heads of .* is 3, which tp=. does not divide"):
        dp.parallelize(build("bert", hidden_size=15, num_attention_heads=3), mesh)
    with pytest.raises(ValueError, match="no plan is known for Linear"):
        from mindnlp.core import nn

        dp.parallelize(nn.Linear(4, 4), mesh)
    with pytest.raises(ValueError, match="fits no module"):
        dp.parallelize(build("bert"), mesh, ShardingPlan(TensorPlan({"*nowhere": "rowwise"})))
    with pytest.raises(ValueError, match="does not say how to shard tensors"):
        dp.parallelize(build("bert"), mesh, ShardingPlan())
    with pytest.raises(ValueError, match="say where its weights are"):
        with dp.empty_weights():
            model = build("bert")
        dp.parallelize(model, mesh)
    with pytest.raises(ValueError, match="tp does not support relative positions that all heads share"):
        dp.parallelize(build("bert", position_embedding_type="relative_key"), mesh)
    model = dp.parallelize(build("bert"), mesh)
    with pytest.raises(ValueError, match="is sharded already"):
        dp.parallelize(model, mesh)
    from mindnlp_dp.optim import LAMB

    parameters = list(model.parameters())
    with pytest.raises(ValueError, match="LAMB needs the norm of each whole parameter"):
        dp.make_train_step(lambda **inputs: model(**inputs)[0], LAMB(parameters, lr=1e-3), parameters)
    with pytest.raises(ValueError, match="the styles of layers are"):
        TensorPlan({"*": "diagonally"})


@needs_mpi
def test_parallelize_refuses_stages_and_experts_that_do_not_fit(group):
    if group.world_size not in (2, 4):
        pytest.skip("nothing is cut")
    n = group.world_size
    mesh = dp.init_device_mesh({"pp": n})
    with pytest.raises(ValueError, match=f"has {n - 1} layers, which cannot be split over pp={n} stages"):
        dp.parallelize(build("bert", num_layers=n - 1), mesh)
    if n == 4:
        with pytest.raises(ValueError, match="into two stages, its encoder and its decoder, got pp=4"):
            dp.parallelize(build("t5"), mesh)
    mesh = dp.init_device_mesh({"ep": n})
    with pytest.raises(ValueError, match=f"has 3 experts, which ep={n} does not divide"):
        dp.parallelize(build("mixtral", num_local_experts=3), mesh)
    with pytest.raises(ValueError, match="does not say how to shard experts"):
        dp.parallelize(build("bert"), mesh)
    with pytest.raises(ValueError, match="fits no block"):
        dp.parallelize(build("mixtral"), mesh, ShardingPlan(experts=ExpertPlan("*.nowhere")))


def test_parallelize_refuses_models_that_differ_between_ranks(group):
    if group.world_size < 2:
        pytest.skip("no rank differs")
    mesh = dp.init_device_mesh({"tp": group.world_size})
    with pytest.raises(RuntimeError, match="models differ by construction"):
        dp.parallelize(build("bert", num_layers=1 + group.rank), mesh)


def test_assert_in_sync_finds_a_changed_replicated_parameter(group):
    if group.world_size not in (2, 4):
        pytest.skip("nothing is cut")
    mesh = dp.init_device_mesh({"tp": group.world_size})
    model = dp.parallelize(build("bert"), mesh)
    bias = dict(model.named_parameters())["bert.embeddings.LayerNorm.bias"]
    if group.rank == 1:
        bias.assign_value(bias + 1)
    with pytest.raises(RuntimeError, match=r"'bert.embeddings.LayerNorm.bias' on rank 1 \(tp=1\) differs from rank 0"):
        model.parallel.assert_in_sync()


def test_assert_in_sync_reports_a_changed_shard_on_all_ranks(group):
    """Ranks whose own group is in sync get the error too."""
    if group.world_size != 4:
        pytest.skip("needs two groups of two")
    model = dp.parallelize(build("bert"), dp.init_device_mesh({"dp": 2, "tp": 2}))
    cut = dict(model.named_parameters())["bert.encoder.layer.0.attention.self.query.weight"]
    if group.rank == 2:
        cut.assign_value(cut + 1)
    with pytest.raises(
        RuntimeError, match=r"query.weight' on rank 2 \(dp=1, tp=0\) differs from rank 0 \(dp=0, tp=0\)"
    ):
        model.parallel.assert_in_sync()
    group.barrier()


def test_a_mesh_with_dp_only_is_plain_data_parallelism(group):
    mesh = dp.init_device_mesh({"dp": group.world_size})
    assert mesh.is_data_parallel
    assert group.label() == str(group.rank)
    assert mesh.dp_group is group
    assert mesh.grad_sync_group_of(("ep", "fsdp")) is group
    model = dp.parallelize(build("bert", seed=group.rank), mesh)
    assert getattr(model, "parallel", None) is None
    dp.assert_replicas_in_sync(model)
    assert plan_for(model).pipeline.layers == "bert.encoder.layer"


@pytest.mark.skipif(WORLD_SIZE == 1, reason="one rank cuts nothing")
def test_unsharded_models_are_refused_under_a_model_parallel_mesh(group, tmp_path):
    """All ranks would train the full model, but only on samples for the fewer data-parallel ranks."""
    dp.init_device_mesh(parse_mesh(a_mesh(group)))
    model = build("gpt2")
    refused = pytest.raises(ValueError, match=r"the mesh that was made last shards models.*parallelize\(model\) before")
    with refused:
        train(model, "gpt2", lambda columns: [columns])
    with refused:
        train_by_trainer(model, Sentences(), tmp_path)
    dp.init_device_mesh({"dp": group.world_size})
    train_by_trainer(model, Sentences(), tmp_path, per_device_train_batch_size=2)


@pytest.mark.skipif(WORLD_SIZE == 1, reason="one rank cuts nothing")
def test_a_sharded_model_keeps_its_mesh_after_another_mesh_is_made(group, tmp_path):
    def trained(meanwhile):
        mesh = dp.init_device_mesh(parse_mesh(a_mesh(group)))
        model = dp.parallelize(build("gpt2"), mesh)
        if meanwhile:
            dp.init_device_mesh({"dp": group.world_size})
        train_by_trainer(
            model, Sentences(), tmp_path, per_device_train_batch_size=4 // mesh.dp_group.world_size, optim="sgd"
        )
        return whole_weights(model)

    expected = trained(meanwhile=False)
    for name, weight in trained(meanwhile=True).items():
        np.testing.assert_array_equal(weight, expected[name], err_msg=name)


@pytest.mark.skipif(WORLD_SIZE == 1, reason="one rank cuts nothing")
def test_model_init_may_return_a_sharded_model(group, tmp_path):
    mesh = dp.init_device_mesh(parse_mesh(a_mesh(group)))

    class ByInit(dp.DataParallelTrainer):
        def __init__(self, model, *args, **kwargs):
            super().__init__(None, *args, model_init=lambda: dp.parallelize(build("gpt2"), mesh), **kwargs)

    trainer = train_by_trainer(None, Sentences(), tmp_path, ByInit, per_device_train_batch_size=2)
    assert trainer.group is mesh.dp_group
    assert trainer.state.global_step > 0


@needs_mpi
@pytest.mark.skipif(WORLD_SIZE not in (2, 4), reason="two ranks share the experts")
def test_a_callback_may_change_the_averaged_gradients_of_experts_and_of_other_layers(group, tmp_path):
    class ZeroesEveryOther(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            for name, parameter in model.named_parameters():
                if "q_proj" in name or "w1" in name:
                    assert parameter.grad is not None, name
                    parameter.grad = parameter.grad * 0

    model = dp.parallelize(build("mixtral"), dp.init_device_mesh({"ep": 2, "dp": group.world_size // 2}))
    before = whole_weights(model)
    settings = {"per_device_train_batch_size": 4, "optim": "sgd", "learning_rate": 0.1, "max_steps": 2}
    trainer = train_by_trainer(model, Sentences("mixtral"), tmp_path, callbacks=[ZeroesEveryOther()], **settings)
    for name, weight in whole_weights(trainer.model).items():
        if name.endswith("_proj.weight") or ".w" in name:
            assert np.array_equal(weight, before[name]) == ("q_proj" in name or "w1" in name), name
