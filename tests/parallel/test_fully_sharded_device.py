"""Test fully sharded models on ranks that exchange as devices do: nothing passes the host, and gathers begin early."""

from __future__ import annotations

import pytest
from mccl_as_a_device import act_as_a_device
from sharded_models import one_mesh_at_a_time
from test_fully_sharded import assert_trains_the_same, pieces_of
from tiny_transformers import LORA, build, train

import mindnlp_dp as dp
from mindnlp_dp.parallel.fully_sharded.unit_exchange import DeviceExchange

__all__ = ["one_mesh_at_a_time"]
WORLD_SIZE = dp.get_process_group().world_size
NUM_LAYERS = 4
pytestmark = pytest.mark.skipif(WORLD_SIZE == 1, reason="one rank has nothing to shard")


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


@pytest.mark.core
@pytest.mark.parametrize("recompute", [False, True])
def test_each_layer_is_gathered_while_the_one_before_computes(group, monkeypatch, counts, recompute):
    """In the first update it is not known yet which layers the backward pass needs."""
    model = dp.fully_shard(build("llama"))
    dp.enable_recompute(model, recompute)
    early = []
    gather = DeviceExchange.gather

    def noted(self):
        early.append(self._begun is not None)
        return gather(self)

    monkeypatch.setattr(DeviceExchange, "gather", noted)
    train(model, "llama", pieces_of(group), num_updates=2)
    # The root unit and the layers in order, then the layers from the last to the first, whose gather begins no earlier.
    forward = [False, *[True] * NUM_LAYERS]
    assert early == [*forward, *[False] * NUM_LAYERS, *forward, False, *[True] * (NUM_LAYERS - 1)]
    assert counts["gather"] == counts["waits"] == len(early)
    assert counts["scatter"] == 2 * (NUM_LAYERS + 1)
    assert all(unit.exchange._begun is None for unit in model.parallel.units.by_name.values())
