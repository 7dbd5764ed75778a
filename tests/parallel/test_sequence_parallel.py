"""Test sequence parallelism: ranks that split the tokens of the same rows train the weights of one process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from mindnlp.core import nn, optim
from mindspore import Tensor
from sharded_models import IS_MPI, assert_close, of_one_process, one_mesh_at_a_time, pieces_of, trained_by_trainer
from tiny_transformers import DECODERS, LENGTH, LORA, VOCAB, build, train, whole_weights

import mindnlp_dp as dp
from mindnlp_dp.data_parallel.overlap import OverlapState
from mindnlp_dp.language_modeling.rows import Collator
from mindnlp_dp.parallel.parallel_plan import plan_for
from mindnlp_dp.runtime.mesh_spec import parse_mesh
from models import Rows, alone, tiny_roberta
from models import train as train_by_trainer

__all__ = ["one_mesh_at_a_time"]
WORLD_SIZE = dp.get_process_group().world_size
MESHES = {2: ["sp=2"], 4: ["sp=4", "dp=2,sp=2", "sp=2,tp=2"]}.get(WORLD_SIZE, [])
pytestmark = pytest.mark.skipif(not (IS_MPI and MESHES), reason="needs two or four ranks, and MPI's all-to-all")
needs_two = pytest.mark.skipif(WORLD_SIZE != 2, reason="shows the same on other numbers of ranks")


def make_mesh():
    """Return a mesh with the axis sp, and dp if there are four ranks."""
    return dp.init_device_mesh({2: {"sp": 2}, 4: {"dp": 2, "sp": 2}}[WORLD_SIZE])


def cases():
    others = ("gpt2", "qwen2_moe")
    for number, kind in enumerate([*DECODERS, *(f"{kind}{LORA}" for kind in (*DECODERS, *others))]):
        for mesh in MESHES if WORLD_SIZE != 3 else []:
            is_core = (kind, mesh) in {("llama", "sp=2"), ("qwen2, LoRA", "dp=2,sp=2"), ("llama", "sp=4")}
            is_slow = number % len(MESHES) != MESHES.index(mesh)
            yield pytest.param(kind, mesh, marks=pytest.mark.core if is_core else pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize(("kind", "mesh"), cases())
def test_sequence_parallelism_trains_a_decoder_like_one_process(group, kind, mesh):
    """Under sp=4, some of these models have two heads of keys and values, and two ranks have copies of each."""
    mesh = dp.init_device_mesh(parse_mesh(mesh))
    model = dp.parallelize(build(kind), mesh)
    step = train(model, kind, pieces_of(mesh, 2))
    assert_close(model, kind, 5e-6 if mesh.sizes["tp"] > 1 else 2e-6)
    np.testing.assert_allclose(step.norms, of_one_process(kind)[1], rtol=1e-4 if kind.endswith(LORA) else 2e-5)
    assert len(set(group.all_gather_object(model.parallel.assert_in_sync()))) == 1


# Of the rows of a data set, with two batches of four.
LENGTHS = (12, 7, 12, 9, 5, 11, 8, 4)


def rows_of(lengths, *, is_packed=False, first_label=0):
    """Return a batch of rows of these lengths as the language recipe's collator makes it."""
    rng, rows = np.random.default_rng(sum(lengths)), []
    for number, length in enumerate(lengths):
        ids = rng.integers(3, VOCAB, length)
        labels = np.where(np.arange(length) < first_label + number % 3, -100, ids)
        texts = np.searchsorted([2 + number % 2, length // 2], np.arange(length), side="right") * int(is_packed)
        rows.append({"input_ids": ids, "labels": labels, "texts": texts})
    return Collator(0, is_packed)(rows)


def train_on(model, batches, group=None, num_ranks=1, rank=0, **options):
    """Train on a share of each batch's rows; return the losses of the updates."""
    model.set_train(True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    step = dp.make_train_step(
        lambda **inputs: model(**inputs)[0], optim.AdamW(parameters, lr=5e-4), parameters, max_grad_norm=0.5,
        group=group, **options,
    )  # fmt: skip
    losses = []
    for batch in batches:
        each = -(-len(batch["input_ids"]) // num_ranks)
        share = {name: x[rank * each : (rank + 1) * each] for name, x in batch.items()} if num_ranks > 1 else batch
        step(share if len(share["input_ids"]) else None)
        losses.append(step.mean_loss())
    return losses


def compare(make, batches, tolerance=3e-6, mesh=None, **options):
    """Train on ``mesh`` and in one process; compare the losses and the weights."""
    with alone() as single:
        model = make()
        losses = train_on(model, batches, single)
        expected = whole_weights(model)
    mesh = mesh or make_mesh()
    model = dp.parallelize(make(), mesh)
    found = train_on(model, batches, None, mesh.dp_group.world_size, mesh.dp_group.rank, **options)
    np.testing.assert_allclose(found, losses, rtol=3e-6)
    for name, weight in whole_weights(model).items():
        np.testing.assert_allclose(weight, expected[name], rtol=0, atol=tolerance, err_msg=name)
    return model


@pytest.mark.core
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("lengths", [[16, 9, 11, 5], [15, 15, 15], [2, 2, 1]])
def test_sequence_parallelism_matches_one_process_for_padded_and_packed_rows(group, is_packed, lengths):
    """The longest rows have an odd length, or there are as few tokens as ranks."""
    if is_packed and max(lengths) < 5:
        pytest.skip("a row of two tokens has one text")
    compare(lambda: build("llama"), [rows_of(lengths, is_packed=is_packed), rows_of([13, 4], is_packed=is_packed)])


def test_sequence_parallelism_matches_one_process_if_one_rank_has_all_labels(group):
    """The first half of each row has no label, so the first rank's tokens have no loss; then there is one label."""
    one = rows_of([12, 12])
    one["labels"][:] = -100
    one["labels"][1, 7] = 5
    compare(lambda: build("llama"), [rows_of([12, 12], first_label=8), one])


def test_sequence_parallelism_matches_one_process_if_a_rank_has_no_rows(group):
    """One row, which the first of the data-parallel ranks has."""
    compare(lambda: build("gpt2"), [rows_of([9]), rows_of([8, 9])])


@needs_two
@pytest.mark.parametrize("zero_stage", [0, 2])
def test_muon_trains_like_one_process_with_sequence_parallelism(group, zero_stage):
    mesh = make_mesh()
    model = dp.parallelize(build("llama"), mesh)
    step = train(model, "llama", pieces_of(mesh, 2), zero_stage=zero_stage, optimizer="muon")
    assert_close(model, "llama", 5e-6, optimizer="muon")
    np.testing.assert_allclose(step.norms, of_one_process("llama", optimizer="muon")[1], rtol=2e-5)


@needs_two
@pytest.mark.parametrize("options", [{"recompute": True}, {"zero_stage": 2}, {"zero_stage": 1}])
def test_recompute_and_zero_do_not_change_a_bit_with_sequence_parallelism(group, options):
    def trained(recompute=False, **options):
        model = dp.parallelize(build("llama", dropout=0.1), make_mesh(), recompute=recompute)
        train_on(model, [rows_of([12, 7]), rows_of([9, 9])], **options)
        return whole_weights(model)

    expected = trained()
    for name, weight in trained(**options).items():
        np.testing.assert_array_equal(weight, expected[name], err_msg=name)


@pytest.mark.parametrize("kind", ["gpt2", "opt", "llama, LoRA", "masked"])
def test_dropout_with_sequence_parallelism_is_that_of_one_process(group, kind, recwarn):
    """Hidden states drop a rank's tokens, attention a rank's heads, and adapters the tokens that they project."""
    rng = np.random.default_rng(2)
    rows = [{"input_ids": ids, "labels": ids, "texts": 0 * ids} for ids in (rng.integers(3, VOCAB, n) for n in LENGTHS)]

    def batches(size, group=None):
        return [
            micro_batches[0]
            for micro_batches in dp.make_loader(rows, size, collate=Collator(0, False), group=group).updates()
        ]

    with alone() as single:
        model = build(kind, dropout=0.2)
        losses = train_on(model, batches(4, single), single)
        expected = whole_weights(model)
    mesh = make_mesh()
    model = dp.parallelize(build(kind, dropout=0.2), mesh)
    found = train_on(model, batches(4 // mesh.dp_group.world_size))
    np.testing.assert_allclose(found, losses, rtol=3e-6)
    for name, weight in whole_weights(model).items():
        np.testing.assert_allclose(weight, expected[name], rtol=0, atol=3e-6, err_msg=name)
    assert not [str(each.message) for each in recwarn if "dropout" in str(each.message)]


@needs_two
def test_dropout_per_rank_draws_another_mask_for_the_tokens_and_heads_of_each_rank(group):
    """Both ranks have the same rows; the embeddings are those of all tokens, which are split after their dropout."""
    model = dp.parallelize(build("gpt2", dropout=0.5), make_mesh())
    masks = {}

    def noted(name):
        return lambda module, args, output: masks.update({name: output.asnumpy() == 0})

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(noted(name))
    train_on(model, [rows_of([16, 16])], dropout="per-rank")
    first, second = group.all_gather_object(masks)
    agreeing = {name: (first[name] == second[name]).mean() for name in first}
    assert agreeing.pop("transformer.drop") == 1
    assert len(agreeing) == 4 * 3
    # Independent masks agree in half of their elements; half of the attention is 0 without a mask, for it is causal.
    for name, share in agreeing.items():
        assert share == pytest.approx(0.73 if name.endswith("attn_dropout") else 0.5, abs=0.12), name


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_fused_cross_entropy_uses_only_the_tokens_of_each_rank(group, kind, monkeypatch):
    from mindnlp_dp.kernels import functions

    seen, fused = [], functions.linear_cross_entropy

    def counting(hidden, *args, **kwargs):
        seen.append(hidden.shape[0])
        return fused(hidden, *args, **kwargs)

    monkeypatch.setattr(functions, "linear_cross_entropy", counting)

    def make():
        model = build(kind)
        dp.fuse_cross_entropy(model)
        return model

    compare(make, [rows_of([12, 11, 12, 12])])
    # One process has 11 tokens with a next one in each of 4 rows; a rank of sp=2 has half of its own rows.
    rows = 4 // make_mesh().dp_group.world_size
    assert seen == [44, rows * 6]


def test_the_output_layer_alone_returns_the_logits_of_all_tokens(group):
    """A custom loss may call the output layer itself, also after a training step whose logits were each rank's own."""
    model = dp.parallelize(build("llama"), make_mesh())
    train_on(model, [rows_of([8])])
    ids = Tensor(np.ones((1, 9), np.int64))
    logits = model.lm_head(model.model(input_ids=ids)[0])
    assert logits.shape == (1, 9, VOCAB)
    np.testing.assert_allclose(logits.asnumpy(), model(input_ids=ids)["logits"].asnumpy(), atol=1e-6)


def test_a_custom_loss_of_the_logits_trains_like_one_process(group):
    """Without labels the model returns the logits of all tokens, and their gradients reach all ranks' tokens."""

    def loss_of(model, **inputs):
        logits = model(**inputs)["logits"]
        assert logits.shape[1] == 11
        return (logits[:, 3:] ** 2).mean() + logits[:, 0].max()

    columns = {"input_ids": np.random.default_rng(1).integers(3, VOCAB, (4, 11))}

    def trained(model, group=None, num_ranks=1, rank=0):
        model.set_train(True)
        parameters = list(model.parameters())
        step = dp.make_train_step(
            lambda **inputs: loss_of(model, **inputs), optim.SGD(parameters, lr=0.1), parameters, group=group,
            loss_weight_of=lambda batch: len(batch["input_ids"]), model=model,
        )  # fmt: skip
        each = 4 // num_ranks
        step({"input_ids": columns["input_ids"][rank * each : (rank + 1) * each]})
        return whole_weights(model)

    if WORLD_SIZE > 2:
        pytest.skip("the largest logit of all rows is not a mean of the ranks'")
    with alone() as single:
        expected = trained(build("llama"), single)
    for name, weight in trained(dp.parallelize(build("llama"), make_mesh())).items():
        np.testing.assert_allclose(weight, expected[name], rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.core
def test_the_trainer_evaluates_and_predicts_full_rows_with_sequence_parallelism(group, tmp_path):
    """The last batch is not full; metrics see the logits of all rows, in their order."""

    def evaluated(parallel):
        model = tiny_roberta(seed=1)
        model = dp.parallelize(model, make_mesh()) if parallel else model
        trainer = train_by_trainer(
            model, Rows(8), tmp_path / str(group.rank), per_device_train_batch_size=2, logging_steps=1,
        )  # fmt: skip
        predicted = trainer.predict(Rows(11, seed=2))
        return trainer.evaluate(Rows(11, seed=2))["eval_loss"], predicted.predictions, trainer

    found = evaluated(parallel=True)
    with alone():
        dp.init_device_mesh({"dp": 1})
        size = 2 * (2 if WORLD_SIZE == 4 else 1)
        model = tiny_roberta(seed=1)
        trainer = train_by_trainer(
            model, Rows(8), tmp_path / f"alone-{group.rank}", per_device_train_batch_size=size, logging_steps=1,
        )  # fmt: skip
        assert trainer.evaluate(Rows(11, seed=2))["eval_loss"] == pytest.approx(found[0], abs=1e-5)
        np.testing.assert_allclose(trainer.predict(Rows(11, seed=2)).predictions, found[1], atol=1e-5)
    logged = [[row["loss"] for row in each.state.log_history if "loss" in row] for each in (found[2], trainer)]
    assert logged[0] == pytest.approx(logged[1], abs=2e-4)


@pytest.mark.core
def test_a_run_is_resumed_on_meshes_with_and_without_sp(group, shared_tmp_path):
    from sharded_models import assert_resumes_like_uninterrupted

    meshes = {2: ["sp=2", "tp=2", "dp=2"], 4: ["dp=2,sp=2", "dp=2,tp=2", "dp=4"]}[WORLD_SIZE]
    whole = trained_by_trainer(group, meshes[0], shared_tmp_path / "whole")
    for number, (first, second) in enumerate(zip(meshes, [*meshes[1:], meshes[0]])):
        settings = {"sharded_checkpoints": number % 2 == 0, "async_save": number % 3 > 0}
        assert_resumes_like_uninterrupted(group, first, second, shared_tmp_path / str(number), whole, **settings)


# What is refused, and what is seen.


@needs_two
def test_attention_that_reads_its_input_values_gives_a_nan_loss(group):
    """What a module reads of its input under sp is a placeholder of NaN; a shortcut in attention reads it."""
    model = build("llama")
    attention = type(model.model.layers[1].self_attn)
    stock = attention.forward

    class Shortcut(attention):
        def forward(self, hidden_states, *args, **kwargs):
            return (stock(self, hidden_states, *args, **kwargs)[0] + hidden_states.mean(), None, None)

    model.model.layers[1].self_attn.__class__ = Shortcut
    batch = rows_of([8, 8])
    model = dp.parallelize(model, make_mesh())
    model.set_train(True)
    loss = model(**{name: Tensor(x) for name, x in batch.items()})[0]
    assert np.isnan(loss.asnumpy())


@needs_two
@pytest.mark.core
@pytest.mark.parametrize(
    ("kind", "layer", "style", "message"),
    [
        # The keys are those of a rank's own tokens, which is another shape.
        ("llama", "k_proj", None, r"self_attn\.k_proj failed in the check of the plan"),
        # Queries, keys and values are exchanged as one block, so that their numbers have another order. The last layer
        # has the first output of all tokens.
        ("gpt2", "c_attn", "colwise", r"the loss of the batch is .*that differs is that of 'transformer\.h\.3'"),
    ],
)
def test_the_plan_check_refuses_a_wrong_sequence_parallel_plan(group, kind, layer, style, message):
    stock = plan_for(build(kind))
    layers = {pattern: style if layer in pattern else stock.tensor.layers[pattern] for pattern in stock.tensor.layers}
    tensor = replace(stock.tensor, layers={pattern: style for pattern, style in layers.items() if style is not None})
    with pytest.raises(ValueError, match=message):
        dp.parallelize(build(kind), make_mesh(), replace(stock, tensor=tensor), check=rows_of([8, 8]))
    dp.parallelize(build(kind), make_mesh(), check=rows_of([9, 7]))


@needs_two
def test_models_and_inputs_unsupported_by_sequence_parallelism_are_refused(group):
    mesh = make_mesh()
    for kind, config, says in (
        ("t5", {}, "has an encoder and a decoder; use tp or dp"),
        ("gpt2", {"n_head": 1}, "num_heads of transformer.h.0.attn is 1, which sp=2 does not divide"),
        ("llama", {"output_hidden_states": True}, "sp does not support outputs of each layer"),
        ("llama", {"pretraining_tp": 2}, "sp does not support pretraining_tp"),
    ):
        with pytest.raises(ValueError, match=says):
            dp.parallelize(build(kind, **config), mesh)
    model = dp.parallelize(build("llama"), mesh)
    row = {"input_ids": Tensor(np.ones((1, 1), np.int64))}
    with pytest.raises(ValueError, match="sp=2 needs rows of at least 2 tokens, got a batch of length 1"):
        model(**row)
    row["input_ids"] = Tensor(np.ones((1, LENGTH), np.int64))
    with pytest.raises(ValueError, match="sp does not support output_attentions"):
        model(**row, output_attentions=True)
    decoder = dp.parallelize(build("masked", is_decoder=True, add_cross_attention=True), mesh)
    with pytest.raises(ValueError, match="projects something else than the hidden states"):
        decoder(**row, encoder_hidden_states=Tensor(np.ones((1, 4, 16), np.float32)))


@pytest.mark.skipif(WORLD_SIZE != 4, reason="needs two axes")
def test_sp_is_refused_with_pp_and_with_tp_and_lora_dropout(group):
    with pytest.raises(ValueError, match="tp and sp together do not support the dropout of adapters"):
        dp.parallelize(build(f"llama{LORA}", dropout=0.1), dp.init_device_mesh({"sp": 2, "tp": 2}))
    with pytest.raises(ValueError, match="pp and sp together are not supported yet"):
        dp.parallelize(build("llama"), dp.init_device_mesh({"pp": 2, "sp": 2}))
    with pytest.raises(ValueError, match="the sizes of dp and tp may differ by stage, that of sp may not"):
        dp.init_device_mesh({"pp": 2, "sp": (2, 1)})


@needs_two
def test_overlap_stays_on_with_sequence_parallelism(group, capsys):
    """The exchange counts the same weights during the backward pass as after it: no update is exchanged again."""
    model = dp.parallelize(build("llama"), make_mesh())
    model.set_train(True)
    parameters = list(model.parameters())
    step = dp.make_train_step(
        lambda **inputs: model(**inputs)[0], optim.SGD(parameters, lr=0.1), parameters, overlap=True, bucket_cap_mb=0.01
    )
    for number in range(4):
        step(rows_of([12, 9 - number]))
    assert step.train_step.synchronizer.overlap.state is OverlapState.ON
    assert "from here on" not in capsys.readouterr().err
