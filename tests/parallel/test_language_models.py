"""Test the plans of decoder models, with and without LoRA adapters, on the meshes of this world size."""

from __future__ import annotations

import numpy as np
import pytest
from sharded_models import (
    IS_MPI,
    Sentences,
    assert_close,
    needs_mpi,
    of_one_process,
    one_mesh_at_a_time,
    pieces_of,
)  # fmt: skip
from tiny_transformers import DECODERS, LORA, VOCAB, batch, build, train, whole_weights, with_lora

import mindnlp_dp as dp
from mindnlp_dp.parallel.parallel_plan import PipelinePlan, ShardingPlan, TensorPlan, plan_for
from mindnlp_dp.runtime.mesh_spec import parse_mesh
from models import Rows, alone
from models import train as train_by_trainer

__all__ = ["one_mesh_at_a_time"]
WORLD_SIZE = dp.get_process_group().world_size
MESHES = {2: ["tp=2", "pp=2"], 4: ["dp=2,tp=2", "dp=2,pp=2", "pp=2,tp=2", "tp=4"]}.get(WORLD_SIZE, [])
CORE = {
    ("llama", "tp=2"),
    ("gemma", "pp=2"),
    ("opt, LoRA", "tp=2"),
    ("llama, LoRA", "pp=2,tp=2"),
    ("qwen2", "dp=2,tp=2"),
}
SHARDED = pytest.mark.skipif(WORLD_SIZE not in (2, 4), reason="needs two or four ranks")
# Of tests that show the same with two ranks.
SLOW_ON_FOUR = pytest.mark.slow if WORLD_SIZE == 4 else pytest.mark.filterwarnings("default")


def cases():
    others = ("gpt2", "t5", "mixtral", "qwen2_moe")
    kinds = [*DECODERS, *(f"{kind}{LORA}" for kind in (*DECODERS, *others))]
    for mesh in MESHES:
        if not IS_MPI and "pp" in mesh:
            continue
        for number, kind in enumerate(kinds):
            if mesh == "tp=4" and kind.removesuffix(LORA) not in ("llama, tied", "phi", "opt", *others):
                continue
            # Every kind has one mesh; the others are slow.
            is_slow = IS_MPI and number % len(MESHES) != MESHES.index(mesh)
            mark = pytest.mark.core if (kind, mesh) in CORE else pytest.mark.slow if is_slow else ()
            yield pytest.param(kind, mesh, marks=mark)


@pytest.mark.parametrize(("kind", "mesh"), cases())
def test_sharded_decoders_and_lora_adapters_train_the_weights_of_one_process(group, kind, mesh):
    mesh = dp.init_device_mesh(parse_mesh(mesh))
    model = dp.parallelize(build(kind), mesh, check=batch(kind, 8))
    step = train(model, kind, pieces_of(mesh, 2))
    assert_close(model, kind, 5e-6 if mesh.sizes["tp"] > 1 else 1e-6)
    # An update of the adapters moves the weights by the product of two.
    rtol = 1e-4 if kind.endswith(LORA) else 1e-5
    np.testing.assert_allclose(step.norms, of_one_process(kind)[1], rtol=rtol)
    assert len(set(group.all_gather_object(model.parallel.assert_in_sync()))) == 1


@SLOW_ON_FOUR
@SHARDED
@pytest.mark.parametrize("kind", ["llama", f"llama{LORA}"])
@pytest.mark.parametrize("zero_stage", [0, 2])
def test_zero_for_decoders_and_lora_adapters_trains_the_weights_of_one_process(group, kind, zero_stage):
    mesh = dp.init_device_mesh({"dp": 2, "tp": group.world_size // 2})
    model = build(kind)
    if not mesh.is_data_parallel:
        model = dp.parallelize(model, mesh)
    train(model, kind, pieces_of(mesh, 2), zero_stage=zero_stage)
    assert_close(model, kind, 5e-6)


@needs_mpi
@SHARDED
def test_the_plan_check_accepts_uneven_labels_and_does_not_change_the_model(group):
    """A stage that splits rows with different numbers of labels is no wrong plan; modules keep their modes."""
    mesh = {"pp": 2, "dp": (2, 1), "tp": (1, 2)} if group.world_size == 4 else {"pp": 2}
    columns = batch("llama", 4)
    columns["labels"][0, 2:] = -100
    columns["labels"][2:] = -100
    model = build("llama", dropout=0.1)
    model.set_train(True)
    model.model.norm.training = False
    dp.parallelize(model, dp.init_device_mesh(mesh), check=columns)
    assert model.model.training
    assert not model.model.norm.training or not hasattr(model.model.norm, "weight")
    expected = {name: p.asnumpy() for name, p in build("llama").named_parameters()}
    for name, weight in whole_weights(model).items():
        np.testing.assert_array_equal(weight, expected[name], err_msg=name)


@SLOW_ON_FOUR
@SHARDED
@pytest.mark.parametrize("kind", [f"opt{LORA}", f"llama{LORA}", f"gpt2{LORA}"])
def test_lora_dropout_under_tp_equals_one_process(group, tmp_path, kind):
    """OPT's feed-forward layers take (batch * length, width); an adapter's dropout is on the layer's input."""

    def trained(model, folder, size):
        settings = {"per_device_train_batch_size": size, "optim": "sgd", "learning_rate": 0.1}
        return whole_weights(train_by_trainer(model, Sentences(kind), folder, **settings).model)

    mesh = dp.init_device_mesh({"dp": group.world_size // 2, "tp": 2})
    found = trained(dp.parallelize(build(kind, dropout=0.1), mesh), tmp_path, 4 // mesh.dp_group.world_size)
    with alone():
        dp.init_device_mesh({"dp": 1})
        expected = trained(build(kind, dropout=0.1), tmp_path / "alone", 4)
        without = trained(build(kind), tmp_path / "without", 4)
    assert any(np.abs(without[name] - weight).max() > 1e-4 for name, weight in expected.items())
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight, rtol=0, atol=2e-6, err_msg=name)


@SLOW_ON_FOUR
@SHARDED
def test_lora_adapters_missing_from_the_weights_start_as_in_peft(group, shared_tmp_path):
    from mindnlp.peft import LoraConfig, get_peft_model

    def adapted(model):
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))

    if group.is_main:
        build("llama").save_pretrained(str(shared_tmp_path / "base"))
    group.barrier()
    with dp.empty_weights():
        model = adapted(build("llama"))
    mesh = dp.init_device_mesh({"tp": 2, "dp": group.world_size // 2})
    found = whole_weights(dp.parallelize(model, mesh, weights=shared_tmp_path / "base"))
    assert not any(weight.any() for name, weight in found.items() if "lora_B" in name)
    assert all(weight.any() for name, weight in found.items() if "lora_A" in name)
    base = {p.name: array for p, array in model.parallel.full_arrays()}
    layer = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    np.testing.assert_array_equal(base[layer], build("llama").model.layers[0].self_attn.q_proj.weight.asnumpy())


@SLOW_ON_FOUR
@SHARDED
@pytest.mark.parametrize(
    "mesh", [{"dp": WORLD_SIZE}, *([{"tp": 2, "dp": WORLD_SIZE // 2}] if WORLD_SIZE in (2, 4) else [])]
)
def test_lora_trains_modules_to_save(group, tmp_path, mesh):
    """PEFT copies it while it is frozen."""
    from library import set_seed
    from mindnlp.peft import LoraConfig, get_peft_model
    from mindnlp.transformers import GPT2Config, GPT2ForSequenceClassification

    mesh = dp.init_device_mesh(mesh)
    set_seed(1)
    sizes = {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
    model = GPT2ForSequenceClassification(GPT2Config(**sizes, pad_token_id=0, num_labels=3))
    config = LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=["c_attn"], modules_to_save=["score"], fan_in_fan_out=True
    )
    model = get_peft_model(model, config)
    if not mesh.is_data_parallel:
        model = dp.parallelize(model, mesh)
    before = whole_weights(model)
    trainer = train_by_trainer(model, Rows(12), tmp_path, per_device_train_batch_size=2)
    after = whole_weights(trainer.model)
    moved = {name for name in before if np.abs(after[name] - before[name]).max() > 0}
    assert any("score.modules_to_save" in name for name in moved), moved
    assert any("lora_B" in name for name in moved)


@needs_mpi
@SHARDED
def test_lora_beside_experts_trains_like_one_process_and_within_them_is_refused(group):
    mesh = dp.init_device_mesh({"ep": 2, "dp": group.world_size // 2})
    kind = f"mixtral{LORA}"  # the attention's layers only
    model = dp.parallelize(build(kind), mesh, check=batch(kind, 4))
    train(model, kind, pieces_of(mesh, 2))
    assert_close(model, kind)
    with pytest.raises(
        ValueError, match=r"mlp.experts.0.gate_proj has LoRA adapters, which ep does not support within"
    ):
        dp.parallelize(build(f"qwen2_moe{LORA}"), mesh)


def llama_plan(**changes):
    plan = plan_for(build("llama"))
    layers = {**plan.tensor.layers, **changes.pop("layers", {})}
    layers = {pattern: style for pattern, style in layers.items() if style is not None}
    return ShardingPlan(
        TensorPlan(layers, plan.tensor.per_rank_attributes, plan.tensor.sharded_dropout, changes.get("head", "causal"))
    )


@SLOW_ON_FOUR
@SHARDED
@pytest.mark.parametrize(
    ("layers", "names"),
    [
        # Without a sum over the ranks, and with a sum of what every rank has in full.
        ({"*mlp.down_proj": None, "*mlp.gate_proj": None, "*mlp.up_proj": None, "*self_attn.o_proj": None}, "o_proj"),
        ({"*mlp.gate_proj": None}, "mlp"),
        ({"*self_attn.v_proj": None}, "self_attn"),
    ],
)
def test_the_plan_check_finds_wrong_tp_plans_before_training(group, layers, names):
    mesh = dp.init_device_mesh({"tp": 2, "dp": group.world_size // 2})
    with pytest.raises(ValueError, match=f"{names}"):
        dp.parallelize(build("llama"), mesh, llama_plan(layers=layers), check=batch("llama", 4))


@SLOW_ON_FOUR
@SHARDED
def test_the_plan_check_names_the_first_wrong_layer(group):
    """Two outputs in one weight, of which the plan knows nothing, give each rank wrong halves of both."""
    from mindnlp.core import nn, ops
    from mindnlp.core.nn import functional

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)

        def forward(self, x):
            gate, up = ops.chunk(self.gate_up(x), 2, dim=-1)
            return self.down(functional.relu(gate) * up)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.gated, self.after = nn.Linear(8, 8), Gated(), nn.Linear(8, 1)

        def forward(self, x, labels):
            return ((self.after(self.gated(self.before(x)))[:, 0] - labels) ** 2).mean(), None

    def sharded(style):
        np.random.seed(3)
        plan = ShardingPlan(TensorPlan({"*gate_up": style, "*down": "rowwise"}))
        return dp.parallelize(Net(), mesh, plan, check=columns)

    mesh = dp.init_device_mesh({"tp": 2, "dp": group.world_size // 2})
    rng = np.random.default_rng(0)
    columns = {"x": rng.standard_normal((6, 8)).astype(np.float32), "labels": rng.standard_normal(6).astype(np.float32)}
    with pytest.raises(ValueError, match=r"the loss of the batch is .*the first output that differs is that of 'gated"):
        sharded("colwise")
    sharded("packed_colwise:2")


@SLOW_ON_FOUR
@SHARDED
def test_parallelize_refuses_plans_and_check_batches_that_do_not_fit(group):
    mesh = dp.init_device_mesh({"tp": 2, "dp": group.world_size // 2})
    with pytest.raises(ValueError, match=r"pattern '\*self_attn.q_porj', which fits no module; .*self_attn.q_proj"):
        dp.parallelize(build("llama"), mesh, llama_plan(layers={"*self_attn.q_porj": "colwise"}))
    with pytest.raises(ValueError, match="head is 'masked' in the plan, .* are those of head='causal'"):
        dp.parallelize(build("llama"), mesh, llama_plan(head="masked"))
    with pytest.raises(ValueError, match=r"num_key_value_heads of .* is 3, which tp=2 does not divide"):
        dp.parallelize(build("llama", num_attention_heads=6, hidden_size=24, num_key_value_heads=3), mesh)
    with pytest.raises(ValueError, match="tp does not support qk_layernorm"):
        dp.parallelize(build("phi", qk_layernorm=True), mesh)
    for columns, message in (
        ({"input_ids": batch("llama", 2)["input_ids"]}, "for which the model returns a loss"),
        (batch("llama", 2, group.rank), "the same batch on every rank; rank 1 .* has another one"),
        (batch("llama", 2) if group.rank else None, "the same batch on every rank, and some ranks have none"),
        ({**batch("llama", 2), "labels": np.full((2, 10), -100)}, "a finite loss, got nan: are there labels"),
        (batch("llama", 0), "needs a batch with rows"),
        ([1, 2], "a mapping of columns, got a list"),
    ):
        with pytest.raises(ValueError, match=message):
            dp.parallelize(build("llama"), mesh, check=columns)
    inside = llama_plan(layers={"*q_proj.base_layer": "colwise"})
    with pytest.raises(ValueError, match=r"'\*q_proj.base_layer', which fits no module"):
        dp.parallelize(build(f"llama{LORA}"), mesh, inside)
    for style in ("columns of 3", "packed_colwise:1", "packed_colwise:", "packed_colwise:two", "diagonal"):
        with pytest.raises(ValueError, match="the styles of layers are"):
            TensorPlan({"*": style})


@needs_mpi
@SLOW_ON_FOUR
@SHARDED
def test_bloom_is_refused_under_tp_and_split_by_a_plan_under_pp(group):
    from library import set_seed
    from mindnlp.transformers import BloomConfig, BloomForCausalLM

    def bloom():
        set_seed(1)
        return BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=4, n_head=4))

    first = [f"transformer.{name}" for name in ("word_embeddings", "word_embeddings_layernorm")]
    plan = ShardingPlan(TensorPlan({"*query_key_value": "colwise"}), PipelinePlan("transformer.h", first))
    with pytest.raises(ValueError, match="tp does not support ALiBi"):
        dp.parallelize(bloom(), dp.init_device_mesh({"tp": 2, "dp": group.world_size // 2}), plan)
    for model in (bloom(), with_lora(bloom())):
        dp.parallelize(model, dp.init_device_mesh({"pp": group.world_size}), plan, check=batch("llama", 4))
    with pytest.raises(ValueError, match="pp does not support layerdrop"):
        dp.parallelize(build("opt", layerdrop=0.1), dp.init_device_mesh({"pp": group.world_size}))


def trained_adapters(group, mesh, folder, **settings):
    dp.init_device_mesh(parse_mesh(mesh))
    model = build(f"llama{LORA}")
    model = model if set(parse_mesh(mesh)) == {"dp"} else dp.parallelize(model)
    data = group.world_size if not hasattr(model, "parallel") else model.parallel.mesh.dp_group.world_size
    return train_by_trainer(
        model, Sentences("llama"), folder, per_device_train_batch_size=4 // data, gradient_accumulation_steps=2,
        learning_rate=1e-3, save_strategy="steps", save_steps=1, **settings,
    )  # fmt: skip


@needs_mpi
@SHARDED
@pytest.mark.parametrize(
    ("first", "second"), [("tp=2", "pp=2"), ("pp=2", "dp=2")] if WORLD_SIZE == 2 else [("pp=2,tp=2", "dp=2,tp=2")]
)
def test_lora_adapters_resume_on_another_mesh_and_merge(group, shared_tmp_path, first, second):
    from mindnlp.peft import PeftModel
    from mindspore import Tensor

    whole = trained_adapters(group, first, shared_tmp_path / "whole")
    last = f"checkpoint-{whole.state.global_step}"
    expected = whole_weights(whole.model)
    resumed = trained_adapters(
        group, second, shared_tmp_path / "again", resume=str(shared_tmp_path / "whole" / "checkpoint-1")
    )
    for name, weight in whole_weights(resumed.model).items():
        np.testing.assert_allclose(weight, expected[name], rtol=0, atol=2e-6, err_msg=name)

    def logits(model):
        model.set_train(False)
        return model(input_ids=Tensor(batch("llama", 3)["input_ids"]))[0].asnumpy()

    sharded = logits(whole.model)
    loaded = PeftModel.from_pretrained(build("llama"), str(shared_tmp_path / "whole" / last))
    np.testing.assert_allclose(logits(loaded), sharded, atol=1e-5)
    np.testing.assert_allclose(logits(loaded.merge_and_unload()), sharded, atol=1e-5)
    whole.model.merge_adapter()
    np.testing.assert_allclose(logits(whole.model), sharded, atol=1e-5)
    whole.model.unmerge_adapter()
    np.testing.assert_allclose(logits(whole.model), sharded, atol=1e-5)


@pytest.mark.core
@pytest.mark.parametrize(
    "mesh", [{"dp": WORLD_SIZE}, *([{"pp": 2, "dp": WORLD_SIZE // 2}] if WORLD_SIZE in (2, 4) and IS_MPI else [])]
)
def test_lora_adapters_without_a_gradient_give_a_warning(group, mesh, recwarn):
    def first_update(skips):
        mesh_now = dp.init_device_mesh(mesh)
        model = build(f"gpt2{LORA}")
        layer = model.base_model.model.transformer.h[1]
        if skips:
            # The layer runs, and nothing of it is used.
            forward = layer.forward
            layer.forward = lambda x, *args, **kwargs: (x, *forward(x, *args, **kwargs)[1:])
        if not mesh_now.is_data_parallel:
            model = dp.parallelize(model, mesh_now)
        train(model, "gpt2", pieces_of(mesh_now, 2), num_updates=2)
        return [str(each.message) for each in recwarn.list if "received no gradient" in str(each.message)]

    assert first_update(skips=False) == []
    if group.is_main:
        (message,) = first_update(skips=True)
        assert "update: 'default' of 'base_model.model.transformer.h.1.attn.c_attn', " in message
    else:
        assert first_update(skips=True) == []


@SLOW_ON_FOUR
@SHARDED
@pytest.mark.parametrize("kind", ["llama", f"qwen2{LORA}"])
def test_fused_cross_entropy_on_meshes_trains_the_weights_of_one_process(group, kind):
    meshes = [{"dp": 2, "tp": group.world_size // 2}]
    meshes += [{"pp": 2, "dp": group.world_size // 2}, {"tp": 2, "dp": group.world_size // 2}] if IS_MPI else []
    for sizes in meshes:
        mesh = dp.init_device_mesh(sizes)
        model = build(kind)
        dp.fuse_cross_entropy(model)
        if not mesh.is_data_parallel:
            model = dp.parallelize(model, mesh, check=batch(kind, 8))
        train(model, kind, pieces_of(mesh, 2))
        assert_close(model, kind, 5e-6)


@SLOW_ON_FOUR
@SHARDED
def test_the_trainer_with_fused_cross_entropy_trains_the_same_weights(group, tmp_path):
    def trained(**more):
        dp.init_device_mesh({"dp": group.world_size})
        trainer = train_by_trainer(
            build("llama"), Sentences("llama"), tmp_path, per_device_train_batch_size=2, optim="sgd", **more
        )
        return whole_weights(trainer.model), trainer.evaluate(Sentences("llama"))["eval_loss"]

    (expected, loss), (found, of_fused) = trained(), trained(fused_cross_entropy=True)
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight, rtol=0, atol=1e-6, err_msg=name)
    assert of_fused == pytest.approx(loss, abs=1e-5)
    model = dp.parallelize(build("llama"), dp.init_device_mesh({"tp": 2, "dp": group.world_size // 2}))
    dp.fuse_cross_entropy(model)  # its loss is on sharded logits already
    if IS_MPI:
        model = dp.parallelize(build("llama"), dp.init_device_mesh({"pp": 2, "dp": group.world_size // 2}))
        with pytest.raises(ValueError, match="comes before parallelize"):
            dp.fuse_cross_entropy(model)
