"""Test fully sharded models on ranks that exchange as devices do: nothing passes the host, and gathers begin early."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mccl_as_a_device import act_as_a_device
from mindnlp.core import nn, optim
from mindspore import Tensor
from sharded_models import one_mesh_at_a_time
from test_fully_sharded import assert_trains_the_same, pieces_of, relative_difference
from tiny_transformers import LORA, build, train, whole_weights

import mindnlp_dp as dp
from mindnlp_dp.parallel.fully_sharded.unit_exchange import DeviceExchange
from mindnlp_dp.runtime.versions import mindspore_is_before

__all__ = ["one_mesh_at_a_time"]
WORLD_SIZE = dp.get_process_group().world_size
NUM_LAYERS = 4
pytestmark = pytest.mark.skipif(WORLD_SIZE == 1, reason="one rank has nothing to shard")
needs_products = pytest.mark.skipif(mindspore_is_before("2.10"), reason="its CPU has no product in bfloat16")


@pytest.fixture(autouse=True)
def counts(group, monkeypatch):
    if group.backend != "mccl":
        pytest.skip("tensors that MindSpore's own library exchanges")
    return act_as_a_device(monkeypatch)


@pytest.mark.core
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"keep_gathered": True}, {"units": False}])
@pytest.mark.parametrize("kind", ["llama", "llama, tied", f"roberta{LORA}", "t5"])
def test_a_device_trains_what_one_process_trains(group, kind, options):
    options = dict(options)
    recompute = options.pop("recompute", False)
    model = dp.fully_shard(build(kind), **options)
    assert all(isinstance(unit.exchange, DeviceExchange) for unit in model.parallel.units.by_name.values())
    dp.enable_recompute(model, recompute)
    step = train(model, kind, pieces_of(group, 2))
    assert_trains_the_same(model, kind, step)


def test_weights_with_as_many_rows_as_ranks_are_copied_out_of_the_gathered_memory(group):
    """Their slices of the gathered rows could be views, which begin within it and would keep it."""
    model = dp.fully_shard(build("roberta", type_vocab_size=group.world_size))
    for unit in model.parallel.units.by_name.values():
        for weight in unit.gather():
            assert weight.is_contiguous()
            assert not weight.storage_offset()


def test_a_gather_that_began_before_weights_were_loaded_is_not_used(group):
    """A forward pass that leaves out a layer has begun its gather."""
    model, other = dp.fully_shard(build("llama")), build("llama", seed=4)
    unit = model.parallel.units.by_name["model.layers.1"]
    unit.exchange.begin_gather()
    arrays = dict(other.named_parameters())
    model.parallel.scatter(lambda placement: arrays[placement.name].asnumpy(), names=[w.name for w in unit.weights])
    for weight, full in zip(unit.weights, unit.gather()):
        np.testing.assert_array_equal(full.asnumpy(), arrays[weight.name].asnumpy())


@needs_products
def test_a_unit_without_shards_begins_no_gather(group, monkeypatch):
    """Check a group of one rank, which has an exchange for devices on a device, too."""
    model = dp.parallelize(Products(), dp.init_device_mesh({"dp": group.world_size}), param_dtype="bfloat16")
    units = model.mixed_precision.units
    exchange = DeviceExchange(group, [], "bfloat16", group._transport.channel)
    for unit in units.by_name.values():
        unit.exchange = exchange
    train_products(group, model)
    assert exchange._begun is None


@pytest.mark.core
@pytest.mark.parametrize("recompute", [False, True])
def test_each_layer_is_gathered_while_the_one_before_computes(group, monkeypatch, counts, recompute):
    """In the first update it is not known yet which layers the backward pass needs."""
    model = dp.fully_shard(build("llama"))
    dp.enable_recompute(model, recompute)
    early = []
    gather = DeviceExchange.gather

    def noted(self, *args):
        early.append(self._begun is not None)
        return gather(self, *args)

    monkeypatch.setattr(DeviceExchange, "gather", noted)
    train(model, "llama", pieces_of(group), num_updates=2)
    # The root unit and the layers in order, then the layers from the last to the first, whose gather begins no earlier.
    forward = [False, *[True] * NUM_LAYERS]
    assert early == [*forward, *[False] * NUM_LAYERS, *forward, False, *[True] * (NUM_LAYERS - 1)]
    assert counts["gather"] == counts["waits"] == len(early)
    assert counts["scatter"] == 2 * (NUM_LAYERS + 1)
    assert all(unit.exchange._begun is None for unit in model.parallel.units.by_name.values())


class Products(nn.Module):
    """Layers of products and sums, the operators that MindSpore's CPU has in bfloat16."""

    class Layer(nn.Module):
        def __init__(self, values):
            super().__init__()
            self.weight, self.bias = (nn.Parameter(Tensor(value)) for value in values)

        def forward(self, x):
            seen.append((x.dtype, self.weight.dtype, self.bias.dtype))
            return x * self.weight + self.bias

    def __init__(self):
        super().__init__()
        values = np.random.default_rng(0).standard_normal((NUM_LAYERS, 2, 3, 5)).astype(np.float32)
        self.layers = nn.ModuleList(map(self.Layer, values))
        self.shift = nn.Parameter(Tensor(np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5)))

    def forward(self, x):
        x = x + self.shift
        for layer in self.layers:
            x = layer(x)
        return x


seen = []


def train_products(group, model, **options):
    optimizer = optim.SGD(list(model.parameters()), lr=0.01)
    step = dp.make_train_step(
        lambda x: (model(x) ** 2).mean(), optimizer, list(model.parameters()), model=model, loss_weight_of=len,
        max_grad_norm=1.0, group=group, **options,
    )  # fmt: skip
    for number in range(4):
        step(Tensor(np.random.default_rng((number, group.rank)).standard_normal((3, 5)).astype(np.float32)))
    return whole_weights(model), step


@pytest.mark.core
@needs_products
def test_bfloat16_is_gathered_and_computed_in_and_masters_and_gradients_are_float32(group, monkeypatch, counts):
    # HCCL has it on chips that compute in it.
    monkeypatch.setattr(group._transport, "_reduces", {"float32", "bfloat16"})
    expected, _ = train_products(group, dp.fully_shard(Products()))
    assert {dtype for _, dtype in counts["types"]} == {mindspore.float32}
    counts["types"].clear()
    seen.clear()
    dp.init_device_mesh({"dp": group.world_size})
    model = dp.fully_shard(Products(), param_dtype="bfloat16")
    found, _ = train_products(group, model)
    assert set(seen) == {(mindspore.bfloat16,) * 3}
    assert counts["types"] == {("gather", mindspore.bfloat16), ("scatter", mindspore.float32)}
    assert all(p.dtype == mindspore.float32 for p in model.parameters())
    begin = whole_weights(Products())
    assert 1e-4 < relative_difference(found, expected, begin) < 0.02
    assert model.parallel.assert_in_sync()
    with dp.gathered(model):
        # What save_pretrained() would write within it: the masters.
        for name, weight in model.named_parameters():
            assert weight.dtype == mindspore.float32
            np.testing.assert_array_equal(weight.asnumpy(), found[name])


@pytest.mark.core
@needs_products
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_bfloat16_without_shards_is_near_to_float32(group, counts, zero_stage):
    begin = whole_weights(Products())
    dp.init_device_mesh({"dp": group.world_size})
    expected, _ = train_products(group, Products())
    model = dp.parallelize(Products(), param_dtype="bfloat16")
    seen.clear()
    found, _ = train_products(group, model, zero_stage=zero_stage)
    assert set(seen) == {(mindspore.bfloat16,) * 3}
    assert all(dtype == mindspore.float32 for _, dtype in counts["types"])
    assert 1e-4 < relative_difference(found, expected, begin) < 0.02
    assert all(p.dtype == mindspore.float32 for p in model.parameters())


@pytest.mark.parametrize(("chip", "dtype"), [("ascend910", "bfloat16"), ("ascend910", "float16")])
def test_a_chip_without_bfloat16_is_asked_for_float16(group, monkeypatch, chip, dtype):
    transport = group._transport
    monkeypatch.setattr(transport, "waits_for_a_device", True)
    monkeypatch.setattr(transport, "chip", chip)
    if dtype == "float16":
        assert dp.fully_shard(Products(), param_dtype=dtype).mixed_precision.dtype == "float16"
        return
    for shard in (dp.fully_shard, dp.parallelize):
        dp.init_device_mesh({"dp": group.world_size})
        with pytest.raises(ValueError, match='chip has no bfloat16; use param_dtype="float16", or fp16=True'):
            shard(Products(), param_dtype=dtype)
