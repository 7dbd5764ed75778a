"""Test the wrappers of MindSpore's collectives, those of mint and the primitives for GPUs, with the CPU library."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest

from mindnlp_dp.communication.transports.mindspore.collective_calls import MintCalls, PrimitiveCalls


@pytest.fixture(params=[MintCalls, PrimitiveCalls])
def calls(request, group):
    if group.backend != "mccl":
        pytest.skip("calls of MindSpore's own library")
    return request.param()


def test_mint_and_primitive_collectives_give_the_same_results(calls, group):
    size = group.world_size
    mine = mindspore.Tensor(np.full((2, 3), group.rank + 1, np.float32))
    np.testing.assert_array_equal(calls.all_reduce(mine, "sum").asnumpy(), size * (size + 1) / 2)
    np.testing.assert_array_equal(calls.broadcast(mine, size - 1).asnumpy(), size)
    gathered = calls.all_gather(mine, size)
    assert [part.shape for part in gathered] == [(2, 3)] * size
    assert [float(part.asnumpy().max()) for part in gathered] == [rank + 1.0 for rank in range(size)]
    if isinstance(calls, MintCalls):
        without_dimensions = calls.all_gather(mindspore.Tensor(np.float32(group.rank)), size)
        assert [(part.shape, float(part.asnumpy())) for part in without_dimensions] == [((), r) for r in range(size)]
    # The caller's tensor is unchanged.
    np.testing.assert_array_equal(mine.asnumpy(), group.rank + 1)
    total, handle = calls.all_reduce_async(mine * 2)
    if handle is not None:
        handle.wait()
    np.testing.assert_array_equal(total.asnumpy(), size * (size + 1))
