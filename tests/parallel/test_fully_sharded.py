"""Test fully sharded models: ranks that have shards of all weights train what one process trains (ZeRO stage 3)."""

from __future__ import annotations

import numpy as np
import pytest
from sharded_models import of_one_process, one_mesh_at_a_time
from tiny_transformers import DECODERS, LORA, build, rows, train, whole_weights

import mindnlp_dp as dp

__all__ = ["one_mesh_at_a_time"]
WORLD_SIZE = dp.get_process_group().world_size
pytestmark = pytest.mark.skipif(WORLD_SIZE == 1, reason="one rank has nothing to shard")
needs_four = pytest.mark.skipif(WORLD_SIZE != 4, reason="needs four ranks")
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


def cases():
    for number, kind in enumerate(dict.fromkeys([*KINDS, *(f"{kind}{LORA}" for kind in ("roberta", *DECODERS))])):
        for num_micro_steps in (1, 2):
            is_core = (kind, num_micro_steps) in {("llama", 1), ("roberta, LoRA", 2)}
            is_slow = number > 7 and number % 2 != num_micro_steps % 2
            marks = pytest.mark.core if is_core else pytest.mark.slow if is_slow else ()
            yield pytest.param(kind, num_micro_steps, marks=marks)


@pytest.mark.parametrize(("kind", "num_micro_steps"), cases())
def test_a_fully_sharded_model_trains_what_one_process_trains(group, kind, num_micro_steps):
    """Five updates with AdamW, clipping and accumulation; tied heads, frozen weights and adapters."""
    model = dp.fully_shard(build(kind))
    step = train(model, kind, pieces_of(group, num_micro_steps))
    assert_trains_the_same(model, kind, step)
