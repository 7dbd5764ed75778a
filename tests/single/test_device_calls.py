"""Test the device path on a simulated NPU or GPU: the arguments of its calls, its sums, and its host reads."""

from __future__ import annotations

import contextlib
import math

import mindspore
import numpy as np
import pytest
from mindnlp.core import nn, optim
from mindnlp.core.autograd import value_and_grad

from mindnlp_dp.communication.gradient_channel import open_gradient_channel
from mindnlp_dp.communication.p2p import ACTIVATIONS, GRADIENTS, PipelineP2P
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.communication.transports.mindspore.mindspore_transport import MindSporeTransport
from mindnlp_dp.data_parallel import overlap
from mindnlp_dp.data_parallel.buckets.bucket_factory import make_buckets
from mindnlp_dp.data_parallel.buckets.bucket_layout import pack_buckets
from mindnlp_dp.data_parallel.buckets.device_bucket import DeviceBucket
from mindnlp_dp.data_parallel.overlap import TRIAL_PAIRS, OverlapState
from mindnlp_dp.data_parallel.synchronizer import GradientSynchronizer
from mindnlp_dp.optim.updater_factory import make_updater
from mindnlp_dp.optim.zero.device_updater import DeviceUpdater
from mindnlp_dp.parallel.device_mesh import DeviceMesh, init_device_mesh
from mindnlp_dp.runtime import heartbeat
from mindnlp_dp.runtime.arrays import number_of
from mindnlp_dp.runtime.devices import set_device_from_env
from mindnlp_dp.training.loss_check import NUM_UPDATES
from mindnlp_dp.training.make_train_step import make_train_step
from stand_in_device import StandInDevice, bound, counted, counted_host_reads, counted_operators

EXCHANGES = {
    1: {"hccl": "all_reduce", "nccl": "AllReduce"},
    2: {"hccl": "reduce_scatter_tensor", "nccl": "ReduceScatter"},
}
GATHERS = {"hccl": "all_gather_into_tensor", "nccl": "AllGather"}
SHAPES = [(30, 20), (20,), (50, 10), (), (3, 2)]


# What MindSpore's versions and the chips accept: 2.7 to 2.9 and 2.10 differ, and so do the 910A, the 910B and the 310P.
DEVICES = {
    "910B": {"target": "Ascend", "version": (2, 7)},
    "910B, MindSpore 2.10": {"target": "Ascend", "version": (2, 10)},
    "910A": {"target": "Ascend", "version": (2, 7), "chip": "ascend910"},
    "310P": {"target": "Ascend", "version": (2, 7), "chip": "ascend310p"},
    "GPU": {"target": "GPU"},
}


every_device = pytest.mark.parametrize("device", DEVICES, indirect=True)


@pytest.fixture(params=["910B", "310P", "GPU"])
def device(request, monkeypatch):
    return StandInDevice(monkeypatch, **DEVICES[request.param])


@pytest.fixture
def group(device):
    return ProcessGroup(MindSporeTransport())


@pytest.fixture
def parameters():
    return [nn.Parameter(mindspore.Tensor(np.zeros(shape, np.float32))) for shape in SHAPES]


def tensors(value, dtype="float32"):
    return [mindspore.Tensor(np.full(shape, value, np.float32)).astype(getattr(mindspore, dtype)) for shape in SHAPES]


def backward(parameters, value):
    run = value_and_grad(lambda: sum((p * value).sum() for p in parameters), tuple(parameters), attach_grads=False)
    return run()[1]


def run_update(sync, parameters, value, weight=4.0):
    with sync.backward(weight):
        gradients = backward(parameters, value)
    sync.accumulate(gradients, weight)
    return sync.reduce()


def test_the_simulated_device_refuses_calls_that_the_real_one_refuses(monkeypatch):
    StandInDevice(monkeypatch, "GPU")
    x = mindspore.Tensor(np.ones(3, np.float32))
    with pytest.raises(TypeError, match="dest"):
        mindspore.mint.distributed.send(x, dest=1)
    with pytest.raises(TypeError, match="root"):
        mindspore.ops.Broadcast(root=1)
    with pytest.raises(AssertionError, match="all_reduce is documented for .*'Ascend', 'CPU'.*, not for GPU"):
        mindspore.mint.distributed.all_reduce(x)
    with pytest.raises(AssertionError, match="AllReduce of BFloat16"):
        mindspore.ops.AllReduce("sum")(x.astype(mindspore.bfloat16))


@pytest.mark.parametrize(
    ("version", "chip", "call", "dtype"),
    [
        ((2, 7), "ascend910b", "all_gather", "bool"),
        ((2, 10), "ascend910", "all_gather", "bfloat16"),
        ((2, 10), "ascend910", "all_reduce", "bfloat16"),
        ((2, 10), "ascend910b", "all_reduce", "uint8"),
        ((2, 10), "ascend310p", "all_reduce", "int64"),
        ((2, 10), "ascend310p", "send", "float32"),
    ],
)
def test_the_simulated_device_refuses_dtypes_by_version_and_chip(monkeypatch, version, chip, call, dtype):
    StandInDevice(monkeypatch, "Ascend", version=version, chip=chip)
    x = mindspore.Tensor(np.ones(2, np.float32)).astype(getattr(mindspore, dtype))
    arguments = ([x, x], x) if call == "all_gather" else (x,)
    with pytest.raises(TypeError, match=f"{call} of {dtype}: MindSpore 2.* on {chip} refuses it"):
        getattr(mindspore.mint.distributed, call)(*arguments)


def test_the_simulated_device_refuses_non_contiguous_views(monkeypatch):
    StandInDevice(monkeypatch, "Ascend")
    x = mindspore.Tensor(np.ones((2, 3), np.float32))
    for call in (mindspore.mint.distributed.all_reduce, mindspore.mint.distributed.send):
        call(x)
        with pytest.raises(ValueError, match="does not support not-contiguous tensor"):
            call(x.T)


def test_device_target_selects_the_device(monkeypatch):
    chosen = []
    monkeypatch.setenv("DEVICE_TARGET", "Ascend")
    monkeypatch.setattr(mindspore, "set_device", bound(mindspore.set_device, lambda **given: chosen.append(given)))
    set_device_from_env()
    assert chosen == [{"device_target": "Ascend", "device_id": None}]


TYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "uint8", "bool"]


def of_type(values, dtype):
    return mindspore.Tensor(np.array(values, np.int64)).astype(getattr(mindspore, dtype))


def assert_same(y, x, times=1):
    """Check that ``y`` has the type, the shape and ``times`` the values of ``x``."""
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    if str(x.dtype).lower().endswith("float16"):
        x, y = x.astype(mindspore.float32), y.astype(mindspore.float32)
    np.testing.assert_array_equal(y.asnumpy(), (x.asnumpy() * times).astype(x.asnumpy().dtype))


@pytest.mark.core
@every_device
@pytest.mark.parametrize("values", [[[1, 0, 3]], 3])
@pytest.mark.parametrize("dtype", TYPES)
def test_collectives_work_for_every_dtype(device, group, dtype, values):
    if dtype == "bfloat16" and device.chip in ("ascend910", "ascend310p"):
        pytest.skip("the chip has no such tensors")
    x = of_type(values, dtype)
    assert_same(group.all_reduce(x), x, 2)
    assert_same(group.all_reduce(x, op="max"), x)
    assert_same(group.broadcast(x, src=1), x)
    for part in group.all_gather(x):
        assert_same(part, x)


def test_collectives_work_for_non_contiguous_views(group):
    x = mindspore.Tensor(np.arange(6, dtype=np.float32).reshape(2, 3)).T
    assert_same(group.all_reduce(x), x, 2)
    assert_same(group.broadcast(x, src=1), x)
    for part in group.all_gather(x):
        assert_same(part, x)


# The simulated rank 1 sends as many rows to this rank as this rank keeps.
@every_device
@pytest.mark.parametrize("counts", [(1, 2), (0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("dtype", TYPES)
def test_exchange_rows_works_for_every_dtype_and_is_refused_under_nccl(device, group, dtype, counts):
    if dtype == "bfloat16" and device.chip in ("ascend910", "ascend310p"):
        pytest.skip("the chip has no such tensors")
    x = of_type(np.arange(12).reshape(6, 2), dtype)[::2][: sum(counts)]
    if group.backend == "nccl":
        with pytest.raises(NotImplementedError, match=r"MindSpore's library for GPUs \(nccl\) has no all-to-all"):
            group.exchange_rows(x, counts, (counts[0], counts[0]))
        return
    rows = group.exchange_rows(x, counts, (counts[0], counts[0]))
    assert (rows.dtype, rows.shape) == (x.dtype, (2 * counts[0], 2))
    if counts[0]:
        assert_same(rows, mindspore.ops.cat((x[: counts[0]], x[: counts[0]])))


def test_all_to_all_returns_the_number_of_rows_from_each_rank(group):
    if group.backend == "nccl":
        pytest.skip("refused")
    rows, theirs = group.all_to_all(np.arange(6, dtype=np.float32).reshape(3, 2), [2, 1])
    np.testing.assert_array_equal(rows, [[0, 1], [2, 3], [0, 1], [2, 3]])
    assert theirs == [2, 2]


@every_device
def test_all_reduce_keeps_large_integers_exact(device, group):
    x = mindspore.Tensor(np.array([2**61 + 1, -(2**61) - 1], np.int64))
    np.testing.assert_array_equal(group.all_reduce(x, op="max").asnumpy(), x.asnumpy())


def test_objects_are_gathered_and_broadcast(group):
    assert group.all_gather_object({"a": [1, None]}) == [{"a": [1, None]}] * 2
    assert group.broadcast_object(("b", 2.5)) == ("b", 2.5)
    group.barrier()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int16", "bool"])
def test_pipeline_messages_keep_dtype_and_values(device, group, dtype):
    if device.chip == "ascend310p":
        pytest.skip("HCCL has no messages on this chip")
    x = mindspore.Tensor(np.array([[1, 0], [3, 2], [0, 1]])).astype(getattr(mindspore, dtype))
    p2p = PipelineP2P(group)
    p2p.begin()
    p2p.send(x.T, 1, 0, ACTIVATIONS, note=2.5)
    received, note = p2p.receive(1, 0, GRADIENTS)
    p2p.wait()
    assert (note, received.dtype) == (2.5, x.dtype)
    np.testing.assert_array_equal(received.asnumpy(), x.asnumpy().T)


def test_send_and_recv_transfer_a_tensor(device, group):
    if device.chip == "ascend310p":
        pytest.skip("HCCL has no messages on this chip")
    x = mindspore.Tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
    group.send(x, dst=1)
    np.testing.assert_array_equal(group.recv(x * 0, src=1).asnumpy(), x.asnumpy())


# Groups of one rank, and meshes.


@pytest.mark.core
def test_a_data_parallel_mesh_creates_no_communicator(device, group):
    mesh = DeviceMesh({"dp": 2}, group)
    assert device.groups == {}
    assert mesh.dp_group is group
    assert (mesh.group("tp").world_size, mesh.group("tp").on_device) == (1, True)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_group_of_one_rank_returns_copies_on_the_device(device, group, dtype):
    alone = group.split([0])
    x = of_type([[2, 0], [1, 3]], dtype)
    device.calls.clear()
    with counted_host_reads() as reads:
        results = [
            alone.all_reduce(x), alone.all_reduce(x, op="max"), alone.broadcast(x), alone.all_gather(x)[0],
            alone.exchange_rows(x, [2], [2]),
        ]  # fmt: skip
    assert (device.calls, device.groups, reads) == ([], {}, [])
    assert alone.all_gather_object({"a": 1}) == [{"a": 1}]
    before = of_type([[2, 0], [1, 3]], dtype)
    for y in results:
        assert_same(y, before)
        y.assign_value(of_type([[0, 0], [0, 0]], dtype))
    assert_same(x, before)
    alone._transport.close()


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_a_group_of_one_rank_updates_without_a_communicator(device, group, parameters, zero_stage):
    alone = group.split([0])
    sync = GradientSynchronizer(parameters, alone, overlap=True)
    updater = make_updater(optim.SGD(parameters, lr=1.0), sync, zero_stage)
    device.calls.clear()
    for value in (1.0, 2.0):
        with sync.backward(4.0):
            gradients = backward(parameters, value)
        sync.accumulate(gradients, 4.0)
        updater.update(updater.receive(sync.reduce(in_place=updater.reads_buckets), sync))
        updater.finish()
    for parameter in parameters:
        np.testing.assert_array_equal(parameter.asnumpy(), np.full(parameter.shape, -3.0, np.float32))
    assert (device.calls, device.groups) == ([], {})


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("GPU", {"ep": 2}, r"ep=2 is not supported by MindSpore's library for GPUs \(nccl\), which has no all-to-all"),
        ("310P", {"pp": 2}, r"pp=2 is not supported by HCCL on this chip \(ascend310p\), which has no messages"),
    ],
)
def test_meshes_that_the_communication_library_does_not_support_are_refused(monkeypatch, name, sizes, message):
    StandInDevice(monkeypatch, **DEVICES[name])
    with pytest.raises(ValueError, match=message + ".*; use dp or tp on this device; on CPU, MPI has: mindnlp-dp run"):
        init_device_mesh(sizes, ProcessGroup(MindSporeTransport()))


# Gradient accumulation.


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("compression", [None, "fp16"])
def test_buckets_are_exchanged_during_the_backward_pass_only_with_overlap(
    device, group, parameters, compression, overlap
):
    """Check the type of the exchanged buckets; gradients are float32 before and after the exchange."""
    sync = GradientSynchronizer(parameters, group, overlap=overlap, bucket_cap_mb=1e-3, compression=compression)
    for number, value in enumerate((1.0, 2.0, 3.0)):
        device.calls.clear()
        device.types.clear()
        with sync.backward(4.0):
            gradients = backward(parameters, value)
            begun, types = device.calls.count(EXCHANGES[1][group.backend]), list(device.types)
        sync.accumulate(gradients, 4.0)
        for shape, mean in zip(SHAPES, sync.reduce()):
            assert mean.dtype == mindspore.float32
            np.testing.assert_array_equal(mean.asnumpy(), np.full(shape, value, np.float32))
        # The first update records the order in which gradients arrive.
        if overlap and number > 0:
            # The header is exchanged as well: it carries the weights of all ranks.
            assert begun == len(sync.buckets) + 1
            assert types.count(mindspore.float16) == (len(sync.buckets) if compression else 0)
        else:
            assert begun == 0
    assert len(sync.buckets) > 1


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_overlap_detects_a_gradient_changed_in_place_in_the_first_update(group, parameters, value):
    sync = GradientSynchronizer(parameters, group, overlap=True, bucket_cap_mb=1e-3)
    with sync.backward(4.0):
        gradients = backward(parameters, 2.0)
    mindspore.ops.assign(gradients[0], mindspore.ops.full_like(gradients[0], value))
    sync.accumulate(gradients, 4.0)
    with pytest.warns(RuntimeWarning, match="a gradient was changed after its backward pass"):
        means = sync.reduce()
    np.testing.assert_array_equal(means[0].asnumpy(), np.full(SHAPES[0], value, np.float32))
    np.testing.assert_array_equal(means[2].asnumpy(), np.full(SHAPES[2], 2, np.float32))
    assert sync.overlap.off_reason.startswith("a gradient was changed")


def test_overlap_detects_a_gradient_replaced_in_a_later_update(group, parameters, monkeypatch):
    monkeypatch.setattr(overlap, "CHECKED_EVERY", 4)
    sync = GradientSynchronizer(parameters, group, overlap=True, bucket_cap_mb=1e-3)
    for _ in range(3):
        run_update(sync, parameters, 1.0)
    with sync.backward(4.0):
        gradients = backward(parameters, 2.0)
    sync.accumulate([gradient * 0 for gradient in gradients], 4.0)
    with pytest.warns(RuntimeWarning, match="a gradient was (changed|replaced) after its backward pass"):
        means = sync.reduce()
    assert not any(mean.asnumpy().any() for mean in means)


def test_overlap_hooks_add_no_operators_once_the_order_is_learned(device, group):
    """Count three operators per parameter, as without hooks: two views and one copy."""

    def operators(num_parameters):
        parameters = [nn.Parameter(mindspore.Tensor(np.zeros((2, 3), np.float32))) for _ in range(num_parameters)]
        sync = GradientSynchronizer(parameters, group, overlap=True)
        for _ in range(3):
            run_update(sync, parameters, 1.0)
        gradients = [mindspore.Tensor(np.ones((2, 3), np.float32)) for _ in parameters]
        with counted_operators() as (methods, functions), counted(mindspore.Tensor, ["data_ptr"]) as addresses:
            with sync.backward(1.0):
                for index, gradient in enumerate(gradients):
                    sync.overlap._on_gradient(index, gradient)
            sync.accumulate(gradients, 1.0)
            sync.reduce()
        assert sync.overlap.state is OverlapState.ON
        assert not addresses, "an address waits for the operators that were dispatched"
        return len(methods) + len(functions)

    assert operators(30) - operators(20) == 3 * 10


def test_the_device_is_synchronized_only_in_the_overlap_trial(device, group, parameters):
    """Check that updates with and without overlap are measured alike, and updates after the trial do not wait."""
    sync = GradientSynchronizer(parameters, group, overlap="auto")
    waits = []
    for _ in range(2 * TRIAL_PAIRS + 4):
        device.calls.clear()
        run_update(sync, parameters, 1.0)
        waits.append(device.calls.count("synchronize"))
    assert waits == [0, *[2] * 2 * TRIAL_PAIRS, 0, 0, 0]


def test_overlap_does_not_take_nan_gradients_for_changed_ones(group, parameters):
    sync = GradientSynchronizer(parameters, group, overlap=True)
    for value in (1.0, 2.0, float("nan"), 3.0):
        run_update(sync, parameters, value)
    assert sync.overlap.state is OverlapState.ON


def test_the_default_bucket_cap_is_25_mb_on_a_device(group, parameters):
    assert GradientSynchronizer(parameters, group).bucket_cap_mb == 25
    assert GradientSynchronizer(parameters, group, bucket_cap_mb=3).bucket_cap_mb == 3


@every_device
def test_bf16_compression_is_refused_where_the_library_has_no_bfloat16_sum(device, group, parameters):
    refusals = {"": "GPUs", "ascend910": r"this chip \(ascend910\)", "ascend310p": r"this chip \(ascend310p\)"}
    if device.chip in refusals:
        what = refusals[device.chip]
        with pytest.raises(ValueError, match=f'on rank 0: MindSpore has no sum of bfloat16 for {what}; use "fp16"'):
            GradientSynchronizer(parameters, group, compression="bf16")
    else:
        sync = GradientSynchronizer(parameters, group, overlap=False, compression="bf16")
        np.testing.assert_array_equal(run_update(sync, parameters, 2.0)[0].asnumpy(), 2)


@pytest.mark.parametrize("name", ["910A", "310P"])
def test_bfloat16_parameters_are_refused_on_chips_without_bfloat16(monkeypatch, name):
    device = StandInDevice(monkeypatch, **DEVICES[name])
    group = ProcessGroup(MindSporeTransport())
    parameters = [nn.Parameter(mindspore.Tensor(np.zeros(3, np.float32)).astype(mindspore.bfloat16))]
    with pytest.raises(ValueError, match=rf"chip \({device.chip}\) has no bfloat16; load the model in float32"):
        GradientSynchronizer(parameters, group)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_buckets_average_float16_bfloat16_and_float64_gradients(device, group, dtype):
    if dtype == "bfloat16" and device.chip == "ascend310p":
        pytest.skip("refused")
    (layout,) = pack_buckets(SHAPES, [dtype] * len(SHAPES), 25)
    (bucket,) = make_buckets([layout], group, open_gradient_channel(group))
    for index, gradient in enumerate(tensors(3, dtype)):
        bucket.put(index, gradient, 2.0)
    bucket.start(0.25)
    bucket.wait()
    for index, shape in enumerate(SHAPES):
        mean = bucket.get(index)
        assert mean.dtype == getattr(mindspore, dtype)
        np.testing.assert_array_equal(mean.astype(mindspore.float32).asnumpy(), np.full(shape, 3, np.float32))


def adamw(parameters):
    parameters = [nn.Parameter(parameter) for parameter in parameters]
    return optim.AdamW(parameters, lr=1e-3), parameters


def mindspores_adam(parameters):
    return mindspore.nn.Adam(parameters, 1e-3), parameters


def test_an_exchange_of_gradients_reads_from_the_device_once(group, parameters):
    """Count the waits, each of which idles the device: only the header is read; it carries all that ranks exchange."""
    sync = GradientSynchronizer(parameters, group, overlap=True, bucket_cap_mb=1e-3)
    for _ in range(3):
        run_update(sync, parameters, 1.0)
    with counted_host_reads() as reads:
        run_update(sync, parameters, 2.0)
    print(f"{group.backend}: {len(reads)} waits in an update of {len(sync.buckets)} buckets: {', '.join(reads)}")
    assert len(reads) == 1


@pytest.mark.parametrize("make", [adamw, mindspores_adam])
def test_a_training_step_reads_from_the_device_once(group, make):
    """Count one wait: the update's header has the losses and the gradient norm; the optimizers add none."""
    parameters = [
        mindspore.Parameter(mindspore.Tensor(np.ones(shape, np.float32)), name=f"p{index}")
        for index, shape in enumerate([(30, 20), (20,), (50, 10)])
    ]
    optimizer, parameters = make(parameters)
    step = make_train_step(
        lambda x: sum((p * p).sum() for p in parameters) * x.mean(),
        optimizer,
        parameters,
        max_grad_norm=1.0,
        group=group,
        overlap=True,
    )
    batch = mindspore.Tensor(np.ones((4, 2), np.float32))
    # In the first updates, losses are compared.
    for _ in range(NUM_UPDATES):
        step(batch)
    with counted_host_reads() as reads:
        loss = step(batch)
    print(f"{group.backend}, {type(optimizer).__module__}: {len(reads)} waits in a step: {', '.join(reads)}")
    assert len(reads) == 1
    assert isinstance(loss, float)
    assert isinstance(step.grad_norm, float)


def test_the_heartbeat_names_what_a_device_read_waits_for(group, tmp_path, monkeypatch):
    """Check every host read of an update, and that of a number: other ranks may not have begun what it waits for."""
    path, calls = tmp_path / "heartbeats", []
    memory = heartbeat.create(path, 1)
    monkeypatch.setattr(heartbeat.writer, "_memory", memory)
    optimizer, parameters = adamw([mindspore.Tensor(np.ones(3, np.float32))])
    step = make_train_step(
        lambda x: (parameters[0] * x).mean(), optimizer, parameters, group=group, overlap=True, max_grad_norm=1.0
    )
    batch = mindspore.Tensor(np.ones((2, 3), np.float32))
    for _ in range(NUM_UPDATES):
        step(batch)
    original = mindspore.Tensor.asnumpy

    def asnumpy(self):
        calls.append(heartbeat.read(memory)[0].blocked_in)
        return original(self)

    monkeypatch.setattr(mindspore.Tensor, "asnumpy", asnumpy)
    step(batch)
    number_of(batch.mean())
    assert calls == ["the exchange of gradients", "the device"]
    assert heartbeat.read(memory)[0].blocked_in == ""


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_gradient_accumulation_reads_from_the_device_once_per_update(group, overlap, max_grad_norm):
    """Check an update of four micro-batches, with and without clipping, whose losses are looked at for NaN."""
    optimizer, parameters = adamw([mindspore.Tensor(np.ones(3, np.float32))])
    step = make_train_step(
        lambda x: (parameters[0] * x).mean(), optimizer, parameters, group=group, overlap=overlap,
        accumulation_steps=4, max_grad_norm=max_grad_norm,
    )  # fmt: skip
    batches = [mindspore.Tensor(np.full((2, 3), value, np.float32)) for value in (1.0, 2.0, 3.0, 4.0)]
    for _ in range(NUM_UPDATES):
        step(batches)
    with counted_host_reads() as reads:
        loss = step(batches)
    assert reads == ["asnumpy"]
    weight = float(parameters[0].asnumpy().mean())
    assert loss == pytest.approx(2.5 * weight, rel=1e-2)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bad", [(0,), (1,), (2,), (0, 2)])
def test_a_micro_batch_with_a_nan_loss_is_left_out_of_the_mean(group, parameters, overlap, bad):
    sync = GradientSynchronizer(parameters, group, overlap=overlap, bucket_cap_mb=1e-3)
    for _ in range(3):
        run_update(sync, parameters, 1.0)
    assert sync.overlap.is_sending is overlap
    values, weights = (2.0, 6.0, 10.0), (1.0, 3.0, 2.0)
    for number, (value, weight) in enumerate(zip(values, weights)):
        is_last = number == 2
        with sync.backward(weight) if is_last else contextlib.nullcontext():
            gradients = backward(parameters, float("nan") if number in bad else value)
        loss = mindspore.Tensor(np.float32(np.nan if number in bad else value))
        sync.accumulate(gradients, weight, loss=loss)
    means = sync.reduce()
    good = [number for number in range(3) if number not in bad]
    expected = np.average([values[n] for n in good], weights=[weights[n] for n in good])
    for mean, shape in zip(means, SHAPES):
        np.testing.assert_allclose(mean.asnumpy(), np.full(shape, expected, np.float32), rtol=1e-6)
    np.testing.assert_array_equal(sync.losses, [np.nan if n in bad else values[n] for n in range(3)])
    # The simulated rank has left out the same micro-batches.
    assert sync.num_skipped == 2 * len(bad)
    assert sync.total_loss_weight == 2 * sum(weights[n] for n in good)
    assert sync.overlap.off_reason == ("" if overlap else "not asked for")
    # The next update has forgotten them.
    np.testing.assert_array_equal(run_update(sync, parameters, 3.0)[0].asnumpy(), 3)
    assert sync.num_skipped == 0


def test_an_update_with_only_nan_losses_is_skipped_with_a_warning(group):
    optimizer, parameters = adamw([mindspore.Tensor(np.ones(3, np.float32))])
    step = make_train_step(
        lambda x: (parameters[0] * x).mean(), optimizer, parameters, group=group, overlap=True, max_grad_norm=1.0
    )
    good, bad = (mindspore.Tensor(np.full((2, 3), value, np.float32)) for value in (1.0, float("nan")))
    for _ in range(NUM_UPDATES):
        step(good)
    before = parameters[0].asnumpy().copy()
    with pytest.warns(RuntimeWarning, match="the loss of a micro-batch is nan at step 4 on rank 0"):
        assert np.isnan(step(bad))
    np.testing.assert_array_equal(parameters[0].asnumpy(), before)
    step(good)
    assert (parameters[0].asnumpy() != before).all()


def test_a_parameter_used_only_by_a_nan_micro_batch_has_no_gradient(group, parameters):
    sync = GradientSynchronizer(parameters, group, overlap=False)
    for number, loss in enumerate((1.0, float("nan"))):
        gradients = tensors(2)
        if number == 0:
            gradients[1] = None
        sync.accumulate(gradients, 1.0, loss=mindspore.Tensor(np.float32(loss)))
    means = sync.reduce()
    assert [mean is None for mean in means] == [False, True, False, False, False]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_device_error_is_raised_at_the_next_read_and_drops_the_gradients(device, group, parameters, overlap):
    sync = GradientSynchronizer(parameters, group, overlap=overlap, bucket_cap_mb=1e-3)
    for _ in range(3):
        run_update(sync, parameters, 1.0)
    with sync.backward(4.0):
        gradients = backward(parameters, 2.0)
        device.fail("HcclAllReduce failed")
    sync.accumulate(gradients, 4.0)
    with pytest.raises(RuntimeError, match="HcclAllReduce failed"):
        sync.reduce()
    for shape, mean in zip(SHAPES, run_update(sync, parameters, 3.0)):
        np.testing.assert_array_equal(mean.asnumpy(), np.full(shape, 3, np.float32))
    assert sync.total_loss_weight == 2 * 4.0


def test_the_simulated_async_all_reduce_has_no_result_before_wait(monkeypatch):
    StandInDevice(monkeypatch, "Ascend")
    x = mindspore.Tensor(np.ones(3, np.float32))
    handle = mindspore.mint.distributed.all_reduce(x, async_op=True)
    too_early = x * 1
    handle.wait()
    assert np.isnan(too_early.asnumpy()).all()
    np.testing.assert_array_equal(x.asnumpy(), 2)


@pytest.mark.parametrize("target", ["Ascend", "GPU"])
def test_overlap_tolerates_sums_of_a_nondeterministic_device(monkeypatch, parameters, target):
    """Check a device that is not deterministic, which adds the same gradient to other bits the second time."""
    StandInDevice(monkeypatch, target, is_deterministic=False)
    x = mindspore.Tensor(np.full(3, 0.1, np.float32))
    assert float(x.sum().asnumpy()) != float(x.sum().asnumpy())
    sync = GradientSynchronizer(parameters, ProcessGroup(MindSporeTransport()), overlap=True)
    for value in (0.1, 0.2, 0.3):
        run_update(sync, parameters, value)
    assert sync.overlap.state is OverlapState.ON


# Sharded updates (ZeRO).


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_zero_stages_update_as_one_process_on_a_device(device, group, parameters, zero_stage):
    """Give all gradients of an update one value, so that the slices of the simulated rank equal those of this rank."""
    optimizer = optim.AdamW(parameters, lr=1e-2)
    sync = GradientSynchronizer(parameters, group, overlap=True)
    updater = make_updater(optimizer, sync, zero_stage)
    assert isinstance(updater, DeviceUpdater)
    alone = [nn.Parameter(mindspore.Tensor(np.zeros(shape, np.float32))) for shape in SHAPES]
    own = optim.AdamW(alone, lr=1e-2)
    for number, value in enumerate((1.0, 2.0, 3.0, 4.0)):
        device.calls.clear()
        with counted_host_reads() as reads:
            with sync.backward(4.0):
                gradients = backward(parameters, value)
            sync.accumulate(gradients, 4.0)
            clipped, norm = updater.clip(updater.receive(sync.reduce(in_place=updater.reads_buckets), sync), 1.0)
            updater.update(clipped)
        updater.finish()
        sync.repack_if_learned()
        # Where the sums are scattered, the norm covers this rank's slice and the equal slice of the simulated rank.
        first, last = sync.buckets[0].own_range
        numel = 2 * (last - first) if zero_stage == 2 else sum(map(math.prod, SHAPES))
        assert norm == pytest.approx(value * np.sqrt(numel), rel=1e-6)
        for parameter in alone:
            parameter.grad = mindspore.Tensor(np.full(parameter.shape, value / norm, np.float32))
        own.step()
        for mine, other in zip(parameters, alone):
            np.testing.assert_allclose(mine.asnumpy(), other.asnumpy(), rtol=1e-5)
        if number == 3:
            # The header has the norm.
            assert len(reads) == 1
            # The update's weights and its header are all-reduced as well.
            assert device.calls.count(EXCHANGES[zero_stage][group.backend]) == {1: 3, 2: 1}[zero_stage]
            assert device.calls.count(GATHERS[group.backend]) == 1


# The bucket alone.


@pytest.fixture
def bucket(group):
    (layout,) = pack_buckets(SHAPES, ["float32"] * len(SHAPES), 25)
    (bucket,) = make_buckets([layout], group, open_gradient_channel(group))
    assert isinstance(bucket, DeviceBucket)
    return bucket


def put_all(bucket, value, weight):
    for index, gradient in enumerate(tensors(value)):
        bucket.put(index, gradient, weight)


def results(bucket, scale=1.0):
    bucket.start(scale)
    bucket.wait()
    return [bucket.get(index) for index in range(len(SHAPES))]


def assert_all(means, value):
    for mean, shape in zip(means, SHAPES):
        np.testing.assert_array_equal(mean.asnumpy(), np.full(shape, value, np.float32))


def operators_of_an_update(group, num_parameters):
    (layout,) = pack_buckets([(2, 3)] * num_parameters, ["float32"] * num_parameters, 25)
    (bucket,) = make_buckets([layout], group, open_gradient_channel(group))
    gradients = [mindspore.Tensor(np.ones((2, 3), np.float32)) for _ in range(num_parameters)]
    with counted_operators() as (methods, functions):
        for index, gradient in enumerate(gradients):
            bucket.put(index, gradient, 2.0)
        bucket.start(0.5)
        bucket.wait()
        for index in range(num_parameters):
            bucket.get(index)
    return len(methods) + len(functions)


def test_an_update_runs_three_operators_per_parameter(group):
    """Count three operators per parameter, two views and one copy; all other operators are per bucket."""
    assert operators_of_an_update(group, 30) - operators_of_an_update(group, 20) == 3 * 10


def test_a_bucket_adds_weighted_gradients(bucket):
    put_all(bucket, 1, 3.0)
    put_all(bucket, 5, 0.5)
    assert_all(results(bucket, scale=0.25), 2 * (3 + 2.5) / 4)


def test_a_bucket_counts_a_missing_gradient_as_zeros(bucket):
    bucket.put(1, tensors(1)[1], 2.0)
    bucket.put(1, tensors(1)[1], 3.0)
    bucket.put(0, tensors(4)[0], 1.0)
    one, two, *rest = results(bucket)
    assert (one.asnumpy() == 8).all()
    assert (two.asnumpy() == 10).all()
    assert not any(mean.asnumpy().any() for mean in rest)


def test_a_bucket_accepts_float16_gradients_of_float32_parameters(bucket):
    """Check that a caller may pass float16 gradients for float32 parameters."""
    for index, (wide, half) in enumerate(zip(tensors(4), tensors(4, "float16"))):
        bucket.put(index, half if index % 2 else wide, 1.0)
    assert_all(results(bucket), 8)


def test_rollback_restores_the_snapshot_of_a_bucket(bucket):
    put_all(bucket, 2, 1.0)
    bucket.snapshot()
    put_all(bucket, 100, 1.0)
    assert_all(results(bucket), 204)
    bucket.rollback()
    bucket.put(0, tensors(100)[0], 1.0)
    bucket.rollback()
    assert_all(results(bucket), 4)
    bucket.clear()
    bucket.rollback()
    assert_all(results(bucket), 0)


def test_gradients_read_from_a_bucket_are_writable_copies(bucket):
    """Check that gradients are not views: MindNLP's clip_grad_norm_ assigns to them, and MindSpore refuses views."""
    put_all(bucket, 1, 1.0)
    means = results(bucket)
    for mean in means:
        mindspore.ops.assign(mean, mean * 0)
    assert_all([bucket.get(index) for index in range(len(SHAPES))], 2)


def test_a_gradient_may_change_after_its_bucket_is_full(bucket):
    gradients = tensors(1)
    for index, gradient in enumerate(gradients):
        bucket.put(index, gradient, 1.0)
    for gradient in gradients:
        gradient.assign_value(gradient * 7)
    assert_all(results(bucket), 2)
