"""Test fully sharded models: ranks that have shards of all weights train what one process trains (ZeRO stage 3)."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
import weakref
from typing import Any, NamedTuple

import mindspore
import numpy as np
import pytest
from across_ranks import ConvNet
from library import Stop, set_seed
from mindnlp.core import nn, optim
from mindspore import Tensor
from safetensors.numpy import load_file
from sharded_models import IS_MPI, needs_mpi, of_one_process, one_mesh_at_a_time
from tiny_transformers import DECODERS, LORA, batch, build, rows, train, whole_weights

import mindnlp_dp as dp
from mindnlp_dp import optim as dp_optim
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.parallel.fully_sharded import unit_exchange as exchange_module
from mindnlp_dp.parallel.fully_sharded.units import Unit
from mindnlp_dp.parallel.mixed_precision import MixedPrecision
from mindnlp_dp.runtime.arrays import to_host
from models import Rows, alone, tiny_roberta
from models import train as train_by_trainer

__all__ = ["one_mesh_at_a_time"]
WORLD_SIZE = dp.get_process_group().world_size
pytestmark = pytest.mark.skipif(WORLD_SIZE == 1, reason="one rank has nothing to shard")
needs_four = pytest.mark.skipif(WORLD_SIZE != 4, reason="needs four ranks")
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
KINDS = ["roberta", "llama", "gpt2", "llama, tied", "t5", "mixtral", "bert", "masked", *DECODERS]


def pieces_of(group, num_micro_steps=1):
    """Return a function that makes this rank's micro-batches; with three ranks, some have fewer rows, or none."""

    def pieces(columns):
        per_step = 8 // num_micro_steps
        each = -(-per_step // group.world_size)
        starts = [number * per_step + min(group.rank * each, per_step) for number in range(num_micro_steps)]
        ends = [min(start + each, (number + 1) * per_step) for number, start in enumerate(starts)]
        return [rows(columns, start, end) for start, end in zip(starts, ends)]

    return pieces


def relative_difference(found, expected, begin):
    """Return the size of the difference of weights, as a fraction of their change by training."""
    assert found.keys() == expected.keys()
    squares = [[np.sum((one[name] - other[name]) ** 2, dtype=np.float64) for name in expected] for one, other in
               ((found, expected), (expected, begin))]  # fmt: skip
    return np.sqrt(np.sum(squares[0]) / np.sum(squares[1]))


def assert_trains_the_same(model, kind, step, limit=1e-5):
    expected, norms = of_one_process(kind)
    assert relative_difference(whole_weights(model), expected, whole_weights(build(kind))) < limit
    np.testing.assert_allclose(step.norms, norms, rtol=1e-4)
    assert len(set(dp.get_process_group().all_gather_object(model.parallel.assert_in_sync()))) == 1


def cases(core):
    adapted = ("roberta", "gpt2", "t5", "mixtral", *DECODERS)
    for number, kind in enumerate(dict.fromkeys([*KINDS, *(f"{kind}{LORA}" for kind in adapted)])):
        for num_micro_steps in (1, 2):
            is_core = (kind, num_micro_steps) in core
            is_slow = number > 7 and number % 2 != num_micro_steps % 2
            marks = pytest.mark.core if is_core else pytest.mark.slow if is_slow else ()
            yield pytest.param(kind, num_micro_steps, marks=marks)


@pytest.mark.parametrize(("kind", "num_micro_steps"), cases(core=[("llama", 1), ("roberta, LoRA", 2)]))
def test_a_fully_sharded_model_trains_what_one_process_trains(group, kind, num_micro_steps):
    """Five updates with AdamW, clipping and accumulation; tied heads, frozen weights and adapters."""
    model = dp.fully_shard(build(kind))
    step = train(model, kind, pieces_of(group, num_micro_steps))
    # An element of Mistral's o_proj has a gradient that is rounding: on four ranks stage 0 is 1.4e-5 away, too.
    assert_trains_the_same(model, kind, step, limit=3e-5 if kind == "mistral" else 1e-5)


@pytest.mark.core
@needs_mpi
@pytest.mark.skipif(WORLD_SIZE == 3, reason="three ranks have other numbers of rows than powers of two")
@pytest.mark.parametrize("kind", ["roberta", f"roberta{LORA}"])
def test_one_micro_batch_per_update_gives_the_bits_of_stage_0(group, kind):
    """The loss weights are powers of two, so that it makes no difference when they are multiplied."""
    model = build(kind)
    train(model, kind, pieces_of(group), zero_stage=0)
    expected = whole_weights(model)
    model = dp.fully_shard(build(kind))
    train(model, kind, pieces_of(group), zero_stage=3)
    for name, weight in whole_weights(model).items():
        np.testing.assert_array_equal(weight, expected[name], err_msg=name)
    assert model.parallel.digest() == dp.replica_digest(model_with(expected, kind))


def model_with(weights, kind):
    """Return a model in one process with these weights."""
    model = build(kind)
    for name, parameter in model.named_parameters():
        if name in weights:
            parameter.assign_value(Tensor(weights[name]))
    return model


@pytest.mark.parametrize(
    "options", [{"recompute": True}, {"keep_gathered": True}, {"units": ["layers.[01]"]}, {"units": False}]
)
def test_what_is_kept_between_the_passes_changes_no_bit(group, options):
    def trained(recompute=False, **options):
        model = dp.fully_shard(build("llama", dropout=0.1), **options)
        dp.enable_recompute(model, recompute)
        train(model, "llama", pieces_of(group, 2))
        return whole_weights(model)

    expected = trained()
    for name, weight in trained(**options).items():
        np.testing.assert_array_equal(weight, expected[name], err_msg=name)


def test_gradients_that_are_reduced_in_parts_have_the_same_bits(group, monkeypatch):
    def trained():
        model = dp.fully_shard(build("llama"))
        train(model, "llama", pieces_of(group))
        return whole_weights(model)

    expected = trained()
    monkeypatch.setattr(exchange_module, "_PART_BYTES", 1000)
    for name, weight in trained().items():
        np.testing.assert_array_equal(weight, expected[name], err_msg=name)


class LiveBytes:
    """Counts the bytes of full weights that anything holds, now and at most."""

    def __init__(self, monkeypatch):
        self.now = self.most = 0
        make = exchange_module.new_array

        def counted(shape, dtype):
            array = make(shape, dtype)
            self._add(array.nbytes)
            weakref.finalize(array, self._add, -array.nbytes)
            return array

        monkeypatch.setattr(exchange_module, "new_array", counted)

    def _add(self, num_bytes):
        self.now += num_bytes
        self.most = max(self.most, self.now)


@pytest.mark.core
@pytest.mark.parametrize(
    ("kind", "recompute"), [("llama", False), ("llama", True), ("gpt2", False), (f"llama{LORA}", False)]
)
def test_at_most_the_root_unit_and_one_layer_are_full_at_a_time(group, monkeypatch, kind, recompute):
    model = dp.fully_shard(build(kind))
    units = model.parallel.units.by_name
    sizes = {name: sum(4 * np.prod(w.shape, dtype=int) for w in unit.weights) for name, unit in units.items()}
    live = LiveBytes(monkeypatch)
    dp.enable_recompute(model, recompute)
    train(model, kind, pieces_of(group), num_updates=2)
    gc.collect()
    assert live.now == 0
    assert live.most <= sizes.pop("") + max(sizes.values())


@pytest.mark.parametrize("kind", ["llama, tied", f"llama{LORA}"])
def test_a_fused_loss_trains_and_evaluates_the_same(group, kind):
    """The loss asks the output layer's weight, outside of the layer's forward pass, whether it trains."""
    model = build(kind)
    dp.fuse_cross_entropy(model)
    dp.fully_shard(model)
    assert_trains_the_same(model, kind, train(model, kind, pieces_of(group)))
    columns, (whole, _) = batch(kind, 2, 9), of_one_process(kind)
    model.set_train(False)
    loss = model(**{name: Tensor(x) for name, x in columns.items()})[0].asnumpy()
    expected = model_with(whole, kind)
    expected.set_train(False)
    np.testing.assert_allclose(loss, expected(**{n: Tensor(x) for n, x in columns.items()})[0].asnumpy(), rtol=1e-5)


def test_gathers_and_reduce_scatters_of_a_micro_batch(group, monkeypatch):
    """2 L + 1 gathers of L layers and the root unit, and L + 1 reduce-scatters."""
    calls = []
    model = dp.fully_shard(build("llama"))
    for name in ("gather", "reduce"):
        method = getattr(Unit, name)
        monkeypatch.setattr(Unit, name, lambda *args, n=name, m=method, **kw: calls.append(n) or m(*args, **kw))
    train(model, "llama", pieces_of(group), num_updates=1)
    assert (calls.count("gather"), calls.count("reduce")) == (9, 5)


def test_a_library_without_all_to_all_gives_the_same_sums(group, monkeypatch):
    """The simple way, an all-reduce of all gradients, is the reference for the exchange of rows."""
    exchange = dp.fully_shard(build("llama")).parallel.units.by_name["model.layers.1"].exchange
    rng = np.random.default_rng(group.rank)
    counts = [3 + rank for rank in range(group.world_size)]
    sent = rng.integers(-9, 9, sum(counts)).astype(np.float32)
    found = exchange._summed(sent.copy(), counts)
    monkeypatch.setattr(ProcessGroup, "library_without", lambda self, operation: "a library")
    np.testing.assert_array_equal(exchange._summed(sent, counts), found)


@pytest.mark.core
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("llama", {"fsdp": WORLD_SIZE}), pytest.param("llama", {"fsdp": 2, "tp": 2}, marks=needs_four),
        pytest.param("mixtral", {"fsdp": 2, "ep": 2}, marks=[needs_four, needs_mpi]),
    ],
)  # fmt: skip
def test_ranks_without_rows_and_bad_losses(group, kind, sizes):
    """Ranks run a dummy batch while others gather weights; a loss that is NaN is left out on all ranks."""
    data = dp.init_device_mesh(sizes).dp_group
    few, many = batch(kind, 1, 1), batch(kind, 2 * data.world_size, 2)

    def trained(model, num_ranks, rank, group=None):
        model.set_train(True)
        parameters = [p for p in model.parameters() if p.requires_grad]
        step = dp.make_train_step(
            lambda spoil, **inputs: model(**inputs)[0] * (float("nan") if spoil[0] else 1.0),
            optim.AdamW(parameters, lr=5e-4), parameters, max_grad_norm=0.5, group=group, model=model,
            loss_weight_of=lambda inputs: float((np.asarray(inputs["labels"]) >= 0).sum()),
        )  # fmt: skip
        for columns, spoils in ((few, False), (many, False), (many, True), (many, False)):
            each = -(-len(columns["labels"]) // num_ranks)
            mine = rows(
                columns, min(rank * each, len(columns["labels"])), min((rank + 1) * each, len(columns["labels"]))
            )
            if mine is not None:
                mine["spoil"] = np.full(1, spoils and rank == num_ranks - 1)
            step(mine)
        return whole_weights(model)

    with alone() as single, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        expected = trained(build(kind), 1, 0, single)
    dp.init_device_mesh(sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = trained(dp.fully_shard(build(kind)), data.world_size, data.rank)
    assert relative_difference(found, expected, whole_weights(build(kind))) < 1e-5


@needs_four
def test_replicas_of_shards(group):
    mesh = dp.init_device_mesh({"dp": 2, "fsdp": 2})
    model = dp.fully_shard(build("llama"), mesh)
    step = train(model, "llama", pieces_of(mesh.dp_group, 2))
    assert_trains_the_same(model, "llama", step)


@pytest.mark.core
@needs_mpi
@needs_four
@pytest.mark.parametrize("kind", ["llama", "roberta", f"llama{LORA}", "mixtral"])
def test_shards_of_weights_with_shards_of_rows(group, kind):
    assert_trains_the_same_on({"fsdp": 2, "sp": 2}, kind)


@pytest.mark.core
@needs_four
@pytest.mark.parametrize(
    "kind",
    ["llama", "t5", f"gpt2{LORA}", "mixtral", *map(slow, ["llama, tied", "roberta", "gpt2", "masked", f"llama{LORA}"])],
)
def test_shards_of_the_parts_of_tensor_parallelism(group, kind):
    assert_trains_the_same_on({"fsdp": 2, "tp": 2}, kind)


@pytest.mark.core
@pytest.mark.skipif(WORLD_SIZE != 2, reason="needs a mesh of one row")
def test_stage_3_on_the_one_row_that_is_left_of_an_elastic_job(group, capsys):
    mesh = dp.init_device_mesh({"fsdp": -1, "tp": 2})
    model = dp.parallelize(build("llama"), mesh)
    step = train(model, "llama", pieces_of(mesh.dp_group, 2), zero_stage=3)
    assert ("zero_stage=3 is 0 here: the axis fsdp has one rank" in capsys.readouterr().out) == group.is_main
    assert_trains_the_same(model, "llama", step)
    model = dp.parallelize(build("llama"), dp.init_device_mesh({"tp": 2}))
    with pytest.raises(ValueError, match='shards weights over the axis "fsdp", and this mesh has tp=2; name the axis'):
        train(model, "llama", pieces_of(model.parallel.mesh.dp_group), zero_stage=3)


@pytest.mark.core
@needs_mpi
@needs_four
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize("mesh", [{"fsdp": 2, "ep": 2}, slow({"ep": 2, "fsdp": 2})])
def test_shards_of_experts(group, kind, mesh):
    assert_trains_the_same_on(mesh, kind)


@pytest.mark.core
@needs_mpi
@needs_four
@pytest.mark.parametrize("sizes", [slow({"dp": 2, "ep": 2}), {"fsdp": 2, "ep": 2}])
@pytest.mark.parametrize("trained", ["everything", "only the experts", "all but the experts"])
def test_ranks_whose_experts_get_no_tokens_make_the_collectives_of_the_others(group, sizes, trained):
    """Half of the ranks send all of their tokens to one expert, and the others to an expert of another rank."""

    def make():
        model = build("mixtral", num_local_experts=16, num_experts_per_tok=1)
        table = model.model.embed_tokens.weight
        vectors, gate = table.asnumpy().copy(), np.zeros((16, table.shape[1]), np.float32)
        vectors[3], vectors[4], gate[0], gate[8] = 10, -10, 1, -1
        table.assign_value(Tensor(vectors))
        for layer in model.model.layers:
            layer.block_sparse_moe.gate.weight.assign_value(Tensor(gate))
        for name, parameter in model.named_parameters():
            parameter.requires_grad = trained == "everything" or (".experts." in name) == (
                trained == "only the experts"
            )
        return model

    ids = np.repeat([[3], [3], [4], [4]], 4, axis=1)

    def weights_after(model, first, last, group=None):
        model.set_train(True)
        parameters = [p for p in model.parameters() if p.requires_grad]
        step = dp.make_train_step(
            lambda **inputs: model(**inputs)[0], optim.AdamW(parameters, lr=5e-4), parameters, max_grad_norm=0.5,
            group=group, model=model,
        )  # fmt: skip
        for _ in range(2):
            step({"input_ids": ids[first:last], "labels": ids[first:last]})
        return whole_weights(model)

    with alone() as single:
        expected = weights_after(make(), 0, 4, single)
    dp.init_device_mesh(sizes)
    model = dp.parallelize(make())
    found = weights_after(model, group.rank, group.rank + 1)
    # Of the sixteen experts of a row of ranks, one got all tokens.
    assert all(np.count_nonzero(load.tokens) == 1 for load in model.parallel.loads())
    assert relative_difference(found, expected, whole_weights(make())) < 1e-5


@needs_mpi
@pytest.mark.skipif(WORLD_SIZE != 8, reason="needs eight ranks")
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("llama", {"dp": 2, "fsdp": 2, "tp": 2}), ("llama", {"fsdp": 2, "sp": 2, "tp": 2}),
        ("mixtral", {"dp": 2, "ep": 2, "fsdp": 2}), ("mixtral", {"ep": 2, "fsdp": 2, "tp": 2}),
        ("mixtral", {"ep": 2, "fsdp": 2, "sp": 2}),
    ],
)  # fmt: skip
def test_shards_on_meshes_of_three_axes(group, kind, mesh):
    assert_trains_the_same_on(mesh, kind)


def assert_trains_the_same_on(sizes, kind):
    mesh = dp.init_device_mesh(sizes)
    model = dp.fully_shard(build(kind), mesh)
    step = train(model, kind, pieces_of(mesh.dp_group, 2))
    assert_trains_the_same(model, kind, step)


def trained_by_trainer(folder, zero_stage, resume=None, **settings):
    return train_by_trainer(
        tiny_roberta(seed=1, num_layers=2), Rows(24), folder, resume=resume, zero_stage=zero_stage,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1, learning_rate=1e-3, **settings,
    )  # fmt: skip


def weights_of(model):
    return {name: to_host(weight) for name, weight in model.named_parameters()}


@pytest.mark.core
def test_the_trainer_trains_evaluates_predicts_and_saves(group, shared_tmp_path):
    """The last batch of the evaluation is one row: the other ranks run dummy batches."""
    both = []
    for stage in (0, 3):
        settings = {"save_strategy": "epoch", "evaluation_strategy": "epoch", "load_best_model_at_end": True}
        trainer = trained_by_trainer(
            shared_tmp_path / f"stage{stage}", stage, eval_dataset=Rows(2 * group.world_size + 1, seed=2), **settings
        )
        predicted = trainer.predict(Rows(4 * group.world_size + 1, seed=3))
        found = weights_of(trainer.model)
        if stage == 3:
            trainer.save_model(str(shared_tmp_path / "model"))
            group.barrier()
            found = weights_of(type(trainer.model).from_pretrained(str(shared_tmp_path / "model")))
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        both.append((predicted.predictions, predicted.metrics["test_loss"], losses, found, trainer.model))
    (logits, loss, losses, weights, model), (logits_3, loss_3, losses_3, weights_3, sharded) = both
    np.testing.assert_allclose(logits_3, logits, atol=1e-6)
    assert loss_3 == pytest.approx(loss, abs=1e-6)
    assert losses_3 == pytest.approx(losses, abs=1e-6)
    assert weights_3.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_allclose(weights_3[name], weight, atol=1e-6, err_msg=name)
    assert sharded.parallel is not None
    assert getattr(model, "parallel", None) is None


@pytest.mark.core
@pytest.mark.parametrize(("first", "second"), [(3, 3), (3, 0), (2, 3)])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_run_is_resumed_at_another_stage(group, shared_tmp_path, first, second, is_sharded):
    everyone = {"dp": group.world_size}
    assert_resumes(group, shared_tmp_path, (first, everyone), (second, everyone), sharded_checkpoints=is_sharded)


@needs_four
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"dp": 2, "fsdp": 2}, {"dp": 2, "fsdp": 2}), ({"fsdp": 4}, {"dp": 2, "fsdp": 2}),
        ({"dp": 2, "fsdp": 2}, {"fsdp": 4}), ({"fsdp": 2, "tp": 2}, {"fsdp": 2, "tp": 2}),
        ({"fsdp": 2, "tp": 2}, {"tp": 2, "fsdp": 2}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_run_is_resumed_on_another_mesh(group, shared_tmp_path, first, second, is_sharded):
    assert_resumes(group, shared_tmp_path, (3, first), (3, second), sharded_checkpoints=is_sharded)


def assert_resumes(group, folder, first, second, **settings):
    """Run with the stage and mesh ``first``, stop, and resume with ``second``; the weights are those without a stop."""

    def run(stage, mesh, name, **settings):
        dp.init_device_mesh(mesh)
        trainer = trained_by_trainer(folder / name, stage, **settings)
        return trainer, (whole_weights if stage == 3 else weights_of)(trainer.model)

    expected = run(*second, "reference")[1]
    settings = {"save_strategy": "steps", "save_steps": 1, **settings}
    with pytest.raises(KeyboardInterrupt):
        run(*first, "run", callbacks=[Stop(2)], **settings)
    group.barrier()
    resumed, found = run(*second, "run", resume=True, **settings)
    assert resumed.resumed_from is not None
    for name, weight in found.items():
        np.testing.assert_allclose(weight, expected[name], rtol=0, atol=0 if first == second else 2e-6, err_msg=name)


@needs_four
@pytest.mark.parametrize("is_sharded", [slow(False), True])
def test_a_run_on_two_kinds_of_shards_is_resumed_with_one_or_none(group, shared_tmp_path, is_sharded):
    """The global batch is that of two ranks with samples, on each mesh."""

    def run(mesh, name, **settings):
        data = dp.init_device_mesh(mesh).dp_group
        model = dp.parallelize(tiny_roberta(seed=1, num_layers=2))
        trainer = train_by_trainer(
            model, Rows(24), shared_tmp_path / name, per_device_train_batch_size=4 // data.world_size,
            gradient_accumulation_steps=2, learning_rate=1e-3, save_strategy="steps", save_steps=1,
            sharded_checkpoints=is_sharded, **settings,
        )  # fmt: skip
        return (whole_weights if getattr(model, "parallel", None) else weights_of)(trainer.model)

    both, others = {"fsdp": 2, "tp": 2}, [{"dp": 4}, {"tp": 2, "dp": 2}, {"fsdp": 4}]
    expected = run(both, "reference")
    for number, (first, second) in enumerate([(both, other) for other in others] + [(other, both) for other in others]):
        with pytest.raises(KeyboardInterrupt):
            run(first, f"run{number}", callbacks=[Stop(2)])
        group.barrier()
        found = run(second, f"run{number}", resume=True)
        for name, weight in expected.items():
            np.testing.assert_allclose(found[name], weight, rtol=0, atol=2e-6, err_msg=f"{first} to {second}: {name}")


@needs_four
def test_a_model_with_tp_generates_within_gathered_and_is_saved_by_the_trainer(group, shared_tmp_path):
    dp.init_device_mesh({"fsdp": 2, "tp": 2})
    model, whole = dp.fully_shard(build("llama")), build("llama")
    ids = Tensor(batch("llama", 2)["input_ids"])
    with dp.gathered(model):
        assert np.array_equal(*(m.generate(input_ids=ids, max_new_tokens=3).asnumpy() for m in (model, whole)))
        for call in (lambda: model.save_pretrained(str(shared_tmp_path)), model.state_dict):
            with pytest.raises(RuntimeError, match="with tp and ep, rank .* has parts of the weights also when"):
                call()
    assert not list(shared_tmp_path.iterdir())


def test_weights_are_read_from_files_without_a_full_model_on_any_rank(group, shared_tmp_path):
    group.run_on_rank0(lambda: build("llama").save_pretrained(str(shared_tmp_path)), "writing")
    expected = build("llama")
    with dp.empty_weights():
        model = build("llama")
    model = dp.fully_shard(model, weights=shared_tmp_path)
    assert model.parallel.digest() == dp.replica_digest(expected)


def test_all_weights_are_in_full_within_gathered(group, shared_tmp_path):
    model, whole = dp.fully_shard(build("llama")), build("llama")
    step = train(model, "llama", pieces_of(group), num_updates=0)
    folder = str(shared_tmp_path / str(group.rank))
    inputs = {"input_ids": Tensor(batch("llama", 2)["input_ids"])}
    for call in (
        lambda: model.save_pretrained(folder), lambda: model.generate(**inputs), model.state_dict,
        model.model.state_dict, model.lm_head.state_dict,
    ):  # fmt: skip
        with pytest.raises(
            RuntimeError, match=r"\(\) needs weights of which rank .* gathered within the forward pass of "
        ):
            call()
    with dp.gathered(model):
        assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
            name: tuple(p.shape) for name, p in whole.named_parameters()
        }
        assert {name: to_host(x).shape for name, x in model.state_dict().items()} == {
            name: to_host(x).shape for name, x in whole.state_dict().items()
        }
        assert np.array_equal(*(m.generate(**inputs, max_new_tokens=3).asnumpy() for m in (model, whole)))
        np.testing.assert_array_equal(model(**inputs)[0].asnumpy(), whole(**inputs)[0].asnumpy())
        with pytest.raises(RuntimeError, match="train outside of it"):
            step(pieces_of(group)(batch("llama", 8)))
    assert all(len(p.shape) == 1 for p in model.parameters())


@pytest.mark.core
def test_weights_outside_of_the_forward_pass_that_gathers_them_are_refused(group):
    """Shards of one element, or of adapters' matrices, would have shapes with which products are possible."""
    model = dp.fully_shard(build("roberta"))
    hidden = Tensor(np.zeros((2, 3, 16), np.float32))
    for call, name, unit in (
        (lambda: model.classifier(hidden), "classifier.dense", "the model"),
        (lambda: model.roberta.embeddings.word_embeddings(Tensor([[3]])), "embeddings.word_embeddings", "the model"),
        (lambda: model.roberta(input_ids=Tensor([[3]])), "embeddings", "the model"),
        (lambda: model.roberta.encoder.layer[1].output(hidden, hidden), "layer.1.output.dense", "encoder.layer.1"),
    ):
        with pytest.raises(RuntimeError, match=rf"{name}\S*: forward\(\) needs weights.*pass of \S*{unit};"):
            call()
    tuned = dp.fully_shard(build(f"llama{LORA}"))
    layer = next(module for module in tuned.modules() if hasattr(module, "get_delta_weight"))
    with pytest.raises(RuntimeError, match=r"q_proj: get_delta_weight\(\) needs weights"):
        layer.get_delta_weight("default")
    for method in (layer.merge, tuned.merge_adapter, tuned.base_model.merge_and_unload, tuned.base_model.unload):
        for block in (contextlib.nullcontext(), dp.gathered(tuned)):
            with (
                pytest.raises(RuntimeError, match=rf"{method.args[2]}.*export --merge-lora".replace("()", r"\(\)")),
                block,
            ):
                method()
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\) would change weights"):
        tuned.load_state_dict({})


def test_shards_of_matrices_are_known_as_matrices(group):
    """Otherwise weights that are flat on a rank would have no weight decay."""
    expected, found = (
        dp_optim.parameter_groups(model, 0.1) for model in (build("llama"), dp.fully_shard(build("llama")))
    )
    assert [len(g["params"]) for g in found] == [len(g["params"]) for g in expected]
    edits = str(dp.parallelize(build("llama"), dp.init_device_mesh({"fsdp": group.world_size}), dry_run=True))
    assert "fsdp=" in edits
    assert "5 edits" in edits
    assert "model.embed_tokens.weight (51, 16) -> (" in edits


@pytest.mark.core
def test_what_fully_sharded_models_cannot_do_is_refused(group):
    def step(model, kind=optim.AdamW, **options):
        parameters = list(model.parameters())
        groups = dp_optim.muon_groups(model) if kind is dp_optim.Muon else parameters
        return dp.make_train_step(
            lambda **inputs: model(**inputs)[0], kind(groups, lr=0.1), parameters, model=model, **options
        )

    with pytest.raises(ValueError, match=r"call model = mindnlp_dp.fully_shard\(model\) before its optimizer"):
        step(build("roberta"), zero_stage=3)
    model = dp.fully_shard(build("roberta"))
    with pytest.raises(ValueError, match="zero_stage=2, and this model is fully sharded"):
        step(model, zero_stage=2)
    for kind in (dp_optim.LAMB, dp_optim.LARS, dp_optim.Muon, type("Own", (optim.AdamW,), {})):
        with pytest.raises(ValueError, match=f"{kind.__name__} may need whole weights"):
            step(model, kind)
    with pytest.raises(ValueError, match="compression='powersgd' is not supported with fsdp"):
        step(model, compression="powersgd")
    with pytest.raises(ValueError, match="cannot be recomputed: this model is fully sharded"):
        dp.enable_recompute(model, "attention.self")
    with pytest.raises(ValueError, match="is sharded already"):
        dp.fully_shard(model)
    mixture = build("mixtral")
    with pytest.raises(ValueError, match=r"names model.layers.0.block_sparse_moe.experts.0, .* name whole layers"):
        dp.fully_shard(mixture, units="experts.*")
    for units in (True, "nothing"):
        with pytest.raises(ValueError, match=rf"ConvNet has no layers units={units!r} that gather .*, or False to"):
            dp.fully_shard(ConvNet(), units=units)
    model = build("roberta")
    dp.enable_recompute(model)
    dp.init_device_mesh({"dp": group.world_size})
    with pytest.raises(ValueError, match="shard the model first"):
        dp.fully_shard(model)
    if group.world_size == 4:
        with pytest.raises(ValueError, match="param_dtype is combined with dp, fsdp, sp only.*leave out tp=2"):
            dp.parallelize(build("llama"), dp.init_device_mesh({"fsdp": 2, "tp": 2}), param_dtype="float16")
        if IS_MPI:
            with pytest.raises(ValueError, match="fsdp is combined with dp, ep, fsdp, sp, tp only.*leave out pp=2"):
                dp.parallelize(build("llama"), dp.init_device_mesh({"fsdp": 2, "pp": 2}))


def trained_in_half_precision(kind, pieces, *, is_sharded=False, **options):
    shard = dp.fully_shard if is_sharded else dp.parallelize
    model = shard(build(kind), param_dtype="float16")
    step = train(model, kind, pieces, **options)
    return whole_weights(model), step


@pytest.mark.core
@pytest.mark.parametrize("kind", ["llama", pytest.param(f"roberta{LORA}", marks=pytest.mark.slow)])
def test_ranks_compute_in_param_dtype_what_one_process_computes_in_it(group, kind):
    """Stage 3 and 2 give what one process gives up to the rounding of float16, and that is near to float32."""
    begin, (in_float32, _) = whole_weights(build(kind)), of_one_process(kind)
    with alone():
        expected, step = trained_in_half_precision(kind, lambda columns: [columns])
    assert 1e-6 < relative_difference(expected, in_float32, begin) < 0.02
    for is_sharded, options in ((True, {}), (False, {"zero_stage": 2 if IS_MPI else 0})):
        dp.init_device_mesh({"dp": group.world_size})
        found, mine = trained_in_half_precision(kind, pieces_of(group, 2), is_sharded=is_sharded, **options)
        assert all(array.dtype == np.float32 for array in found.values())
        assert relative_difference(found, expected, begin) < 0.02
        np.testing.assert_allclose(mine.norms, step.norms, rtol=0.02)


@pytest.mark.core
def test_an_overflow_in_float16_halves_the_scale_and_leaves_the_weights_on_all_ranks(group):
    kind = "llama"
    model = dp.fully_shard(build(kind), param_dtype="float16")
    precision = model.mixed_precision
    precision.scale = 2.0**40
    begin = whole_weights(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, kind, pieces_of(group), num_updates=2)
    assert precision.scale == 2.0**38
    for name, weight in whole_weights(model).items():
        np.testing.assert_array_equal(weight, begin[name], err_msg=name)
    precision.scale = 2.0**14
    train(model, kind, pieces_of(group), num_updates=1)
    assert precision.scale == 2.0**14
    assert any((weight != begin[name]).any() for name, weight in whole_weights(model).items())


def test_the_scale_of_the_gradient_grows_back_and_is_resumed():
    precision = MixedPrecision("float16", None)
    precision.reduce_scale()
    for _ in range(1000):
        precision.count_update()
    assert precision.scale == 2.0**15
    for _ in range(2000):
        precision.count_update()
    assert precision.scale == 2.0**15
    precision.reduce_scale()
    precision.count_update()
    resumed = MixedPrecision("float16", None)
    resumed.load_state(precision.state())
    assert resumed.state() == precision.state() == {"scale": 2.0**14, "num_finite": 1}
    assert not MixedPrecision("bfloat16", None).reduce_scale()


@pytest.mark.core
@pytest.mark.parametrize("stage", [0, 3])
def test_the_trainer_computes_in_param_dtype_and_resumes_with_the_same_digest(group, shared_tmp_path, stage):
    def run(name, **settings):
        dp.init_device_mesh({"dp": group.world_size})
        trainer = trained_by_trainer(
            shared_tmp_path / name, stage, param_dtype="float16", eval_dataset=Rows(3, seed=2), **settings
        )
        loss = trainer.evaluate()["eval_loss"]
        assert trainer.predict(Rows(3, seed=2)).predictions.dtype == np.float32
        return trainer.distributed_model.digest(), loss

    expected = run("reference")
    settings = {"save_strategy": "steps", "save_steps": 1}
    with pytest.raises(KeyboardInterrupt):
        run("run", callbacks=[Stop(2)], **settings)
    group.barrier()
    assert run("run", resume=True, **settings) == expected


def test_a_second_training_begins_with_the_largest_scale_again(group, shared_tmp_path):
    dp.init_device_mesh({"dp": group.world_size})
    trainer = trained_by_trainer(shared_tmp_path, 0, param_dtype="float16", max_steps=1)
    trainer.model.mixed_precision.scale = 2.0**5
    trainer.train()
    assert trainer.model.mixed_precision.scale == 2.0**15


def test_unsupported_param_dtypes_are_refused(group):
    with pytest.raises(
        ValueError, match="param_dtype must be 'bfloat16' or 'float16', or None for float32; got 'fp16'"
    ):
        dp.fully_shard(build("llama"), param_dtype="fp16")
    with pytest.raises(ValueError, match='"bfloat16" needs a device.*matmul_precision="medium"'):
        dp.parallelize(build("llama"), param_dtype="bfloat16")
    model = dp.fully_shard(build("llama"), param_dtype="float16")
    with pytest.raises(ValueError, match="is sharded already"):
        dp.parallelize(model, param_dtype="float16")
    dp.init_device_mesh({"dp": group.world_size})
    model = dp.parallelize(build("llama"), param_dtype="float16")
    with pytest.raises(ValueError, match="computes in float16 already"):
        dp.parallelize(model, param_dtype="float16")


class Returns(nn.Module):
    """A model whose output another class wraps."""

    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.kind = kind

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.kind(x)


class Named(NamedTuple):
    value: Any


class Wrapped:
    def __init__(self, value):
        self.value = value


@pytest.mark.core
def test_gradients_in_float16_are_those_of_float32_for_whatever_goes_in_and_out(group):
    """A module before the model, outputs in a named tuple, and a model that a wrapper has."""

    def gradients(param_dtype):
        with alone() as single:
            set_seed(3)
            first, inner = nn.Linear(4, 4), Returns(Named)
            if param_dtype:
                dp.parallelize(inner, param_dtype=param_dtype)
            outer = nn.Sequential(first, inner)
            parameters = list(outer.parameters())
            step = dp.make_train_step(
                lambda x: (outer(x).value.astype(mindspore.float32) ** 2).mean(), optim.SGD(parameters, lr=1.0),
                parameters, model=outer, loss_weight_of=len, group=single,
            )  # fmt: skip
            before = [to_host(p).copy() for p in parameters]
            step(Tensor(np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)))
            assert (step.train_step.precision is not None) is (param_dtype is not None)
            return [old - to_host(p) for old, p in zip(before, parameters)]

    for half, full in zip(gradients("float16"), gradients(None)):
        np.testing.assert_allclose(half, full, rtol=0.02, atol=1e-3)


@pytest.mark.core
def test_uses_of_float16_whose_gradients_would_not_be_scaled_are_refused(group):
    from mindnlp.peft import LoraConfig, get_peft_model

    x = Tensor(np.ones((2, 4), np.float32))
    dp.init_device_mesh({"dp": group.world_size})
    model = dp.parallelize(Returns(Wrapped), param_dtype="float16")
    with pytest.raises(TypeError, match="the model returns a Wrapped, in which its tensors cannot be found"):
        model(x)
    model = dp.parallelize(Returns(Named), param_dtype="float16")
    weights = list(model.parameters())
    step = dp.make_train_step(
        lambda x: model.layers[0](x).sum(), optim.SGD(weights, lr=0.1), weights, model=model, loss_weight_of=len
    )
    with pytest.raises(RuntimeError, match="layers.0 is called outside of the forward pass of its model"):
        step(x)
    with pytest.raises(ValueError, match="cannot be recomputed: .* casts its weights"):
        dp.enable_recompute(dp.parallelize(build("llama"), param_dtype="float16"), "self_attn")
    late = get_peft_model(
        dp.parallelize(build("llama"), param_dtype="float16"), LoraConfig(r=2, target_modules=["q_proj"])
    )
    parameters = [p for p in late.parameters() if p.requires_grad]
    with pytest.raises(ValueError, match="lora_.*was not in the model when its param_dtype was set; add adapters"):
        dp.make_train_step(lambda **b: late(**b)[0], optim.SGD(parameters, lr=0.1), parameters, model=late)


def test_inputs_are_not_changed_and_labels_not_rounded(group):
    seen = []

    class Reads(Returns):
        def forward(self, batch, labels=None):
            seen.append((batch["x"].dtype, batch["labels"].dtype, labels.dtype))
            return super().forward(batch["x"])

    dp.init_device_mesh({"dp": group.world_size})
    model = dp.parallelize(Reads(Named), param_dtype="float16")
    given = {"x": Tensor(np.ones((2, 4), np.float32)), "labels": Tensor(np.ones(2, np.float32))}
    assert model(given, labels=given["labels"]).value.dtype == mindspore.float32
    assert seen == [(mindspore.float16, mindspore.float32, mindspore.float32)]
    assert given["x"].dtype == mindspore.float32


@pytest.mark.core
@pytest.mark.parametrize("kind", ["llama", "t5", f"llama{LORA}"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_model_with_param_dtype_generates_and_is_saved_in_float32(group, shared_tmp_path, kind, is_sharded):
    ids, whole = Tensor(batch(kind, 2)["input_ids"]), build(kind)
    expected = whole.generate(input_ids=ids, max_new_tokens=3).asnumpy()
    dp.init_device_mesh({"dp": group.world_size})
    model = (dp.fully_shard if is_sharded else dp.parallelize)(build(kind), param_dtype="float16")
    with dp.gathered(model):
        np.testing.assert_array_equal(model.generate(input_ids=ids, max_new_tokens=3).asnumpy(), expected)
        folder = shared_tmp_path / str(group.rank)
        model.save_pretrained(str(folder))
    saved = {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}
    assert saved
    assert all(x.dtype == np.float32 for x in saved.values())
