"""The asynchronous path of a device, with a stream that only ends what was begun when it is waited for.

No NPU or GPU has run it. Two ranks are played by one: the other one's gradients are known.
"""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mindnlp.core import nn
from mindnlp.core.autograd import value_and_grad

from mindnlp_dp.communication.collectives import ProcessGroup
from mindnlp_dp.communication.transports.channel import TensorChannel
from mindnlp_dp.communication.transports.single import SingleProcessTransport
from mindnlp_dp.gradients.synchronizer import GradientSynchronizer

SHAPES = [(30, 20), (20,), (50, 10)]
OTHERS = 3.0


class Stream:
    """Work in the order in which it was begun; nothing is done before somebody waits."""

    def __init__(self):
        self.queue = []
        self.log = []

    def begin(self, tensor):
        handle = Handle(self, tensor)
        self.queue.append(handle)
        self.log.append("begin")
        return handle


class Handle:
    def __init__(self, stream, tensor):
        self.stream, self.tensor = stream, tensor

    def wait(self):
        self.stream.log.append("wait")
        while self in self.stream.queue:
            done = self.stream.queue.pop(0)
            # The other rank's gradients are all OTHERS, with the same weight; a scale of half a weight is applied.
            done.tensor.assign_value(done.tensor + mindspore.Tensor(OTHERS / 2, done.tensor.dtype))


class DeviceChannel(TensorChannel):
    world_size, slice_index = 2, 0

    def __init__(self, stream):
        self.stream = stream

    def inverse_total(self, number, patience=None):
        return 0.5 / number

    def sum(self, x):
        raise AssertionError("every type is begun here")

    def begin_sum(self, x):
        return x, self.stream.begin(x)

    def begin_scatter_sum(self, x):
        raise AssertionError("whole sums are asked for here")

    gather_slices = begin_scatter_sum

    def reduces_natively(self, dtype):
        return True

    def check_compression(self, compression):
        pass


class DeviceTransport(SingleProcessTransport):
    """Rank 0 of 2 on a device."""

    name = "hccl"

    def __init__(self):
        self.stream = Stream()
        self.channel = DeviceChannel(self.stream)

    def all_reduce(self, x, op):
        # The header: weight, notes and used parameters of both ranks, which agree.
        return 2 * x if op == "sum" and x.dtype == np.float32 and x.ndim == 1 else x.copy()


class TwoRanks(ProcessGroup):
    """What the rank of the other one would say is what this one says."""

    world_size = 2

    def all_gather_object(self, obj):
        return [obj, obj]


@pytest.fixture
def group(monkeypatch):
    for module in ("collectives", "rank_group"):
        monkeypatch.setattr(f"mindnlp_dp.communication.{module}.check_agreement", lambda *_, **__: None)
    monkeypatch.setattr("mindnlp_dp.gradients.window.check_same_structure", lambda *_: None)
    return TwoRanks(DeviceTransport())


@pytest.fixture
def parameters():
    return [nn.Parameter(mindspore.Tensor(np.zeros(shape, np.float32))) for shape in SHAPES]


def backward(parameters, value):
    for parameter in parameters:
        parameter.grad = None
    run = value_and_grad(lambda: sum((p * value).sum() for p in parameters), tuple(parameters), attach_grads=True)
    run()
    return [p.grad for p in parameters]


def window(sync, parameters, value, weight=4.0):
    with sync.backward(weight):
        gradients = backward(parameters, value)
        begun = sync.group._transport.stream.log.count("begin")
    sync.accumulate(gradients, weight)
    return begun, [g.asnumpy() for g in sync.reduce()]


def expected(value):
    return [np.full(shape, (value + OTHERS) / 2, np.float32) for shape in SHAPES]


def test_buckets_begin_within_the_backward_pass_and_are_waited_for_behind_it(group, parameters):
    sync = GradientSynchronizer(parameters, group, overlap=True, bucket_cap_mb=1e-3)
    stream = group._transport.stream
    begun, results = window(sync, parameters, 1.0)
    assert begun == 0
    assert sync.overlap.state == "on"
    stream.log.clear()
    begun, results = window(sync, parameters, 2.0)
    assert begun == len(sync.buckets) == 3
    assert stream.log == ["begin"] * 3 + ["wait"] * 3
    assert not stream.queue
    for mine, wanted in zip(results, expected(2.0)):
        np.testing.assert_array_equal(mine, wanted)


def test_the_same_without_overlap(group, parameters):
    sync = GradientSynchronizer(parameters, group, overlap=False, bucket_cap_mb=1e-3)
    begun, results = window(sync, parameters, 2.0)
    assert begun == 0
    # Begun one after the other, and only then waited for.
    assert group._transport.stream.log == ["begin"] * 3 + ["wait"] * 3
    for mine, wanted in zip(results, expected(2.0)):
        np.testing.assert_array_equal(mine, wanted)


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_a_compressed_bucket_is_a_half_type_on_the_wire_only(group, parameters, compression):
    sync = GradientSynchronizer(parameters, group, overlap=True, compression=compression)
    wire = []
    begin = group._transport.stream.begin
    group._transport.stream.begin = lambda tensor: (wire.append(tensor.dtype), begin(tensor))[1]
    for value in (1.0, 2.0):
        _, results = window(sync, parameters, value)
    assert set(wire) == {mindspore.float16 if compression == "fp16" else mindspore.bfloat16}
    assert all(result.dtype == np.float32 for result in results)
    for mine, wanted in zip(results, expected(2.0)):
        np.testing.assert_allclose(mine, wanted, rtol=1e-2)


def test_a_skipped_step_is_exchanged_again_without_it(group, parameters):
    """Both ranks skip their last micro step: what they had before it remains."""
    sync = GradientSynchronizer(parameters, group, overlap=True, bucket_cap_mb=1e-3)
    window(sync, parameters, 1.0)
    sync.accumulate(backward(parameters, 5.0), 2.0)
    with sync.backward(2.0):
        backward(parameters, float("nan"))
    sync.skip()
    for mine, wanted in zip(sync.reduce(), expected(5.0)):
        np.testing.assert_array_equal(mine.asnumpy(), wanted)


def test_an_exception_leaves_no_bucket_half_filled(group, parameters):
    sync = GradientSynchronizer(parameters, group, overlap=True, bucket_cap_mb=1e-3)
    window(sync, parameters, 1.0)
    with pytest.raises(KeyError), sync.backward(1.0):
        backward(parameters, 1.0)
        raise KeyError
    assert not any(bucket._waiting or bucket._sum is not None for bucket in sync.buckets)
    with pytest.raises(RuntimeError, match="half way"):
        sync.reduce()
