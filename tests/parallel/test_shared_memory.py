"""Test the shared memory of the MPI backend: sums of any size equal those of MPI itself."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mindnlp_dp as dp
from mindnlp_dp.communication.transports.mpi import host_memory
from mindnlp_dp.communication.transports.mpi.host_memory import HostExchange, allocate_shared_rows, slice_bounds
from mindnlp_dp.communication.transports.mpi.ring import wire_for
from mindnlp_dp.communication.transports.polling_wait import PollingWait
from mindnlp_dp.data_parallel.buckets.shared_memory_bucket import SharedBucket, copy_range
from mindnlp_dp.runtime.shard_bounds import shard_bounds


@pytest.fixture(autouse=True)
def mpi(group):
    if group.backend != "mpi":
        pytest.skip("only the MPI backend shares memory")


@pytest.fixture
def comm(mpi):
    from mpi4py import MPI

    return MPI.COMM_WORLD


@given(st.integers(0, 5000), st.integers(1, 9), st.sampled_from([1, 2, 4, 8]))
def test_slices_cover_everything_once_and_begin_at_cache_lines(numel, num_slices, item_bytes):
    bounds = slice_bounds(numel, num_slices, item_bytes)
    assert len(bounds) == num_slices + 1
    assert (bounds[0], bounds[-1]) == (0, numel)
    assert list(bounds) == sorted(bounds)
    assert all(bound * item_bytes % 64 == 0 or bound == numel for bound in bounds)


@pytest.mark.core
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "int8", "bool"])
@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("numel", [70_000, 262_144, 262_145, 1_000_003])
def test_all_reduce_in_shared_memory_is_exact_for_any_size(group, comm, dtype, op, numel):
    everyone = [np.random.default_rng(rank).integers(-20, 20, numel) for rank in range(group.world_size)]
    everyone = np.stack(everyone).astype(dtype)
    add = everyone.any(0) if dtype == "bool" else everyone.sum(0, dtype=dtype)
    expected = {"sum": add, "max": everyone.max(0), "min": everyone.min(0)}
    x = everyone[group.rank]
    for _ in range(3):  # the staging areas are used in turn
        np.testing.assert_array_equal(group.all_reduce(x, op), expected[op])


def test_late_ranks_do_not_change_the_result_of_all_reduce(group):
    """An early rank must not overwrite data that a late rank still reads."""
    import random
    import time

    rng = random.Random(group.rank)
    for number in range(30):
        if rng.random() < 0.3:
            time.sleep(rng.random() / 200)
        total = group.all_reduce(np.full(300_000, number + group.rank, np.float32))
        size = group.world_size
        assert (total == number * size + size * (size - 1) / 2).all()


def test_late_ranks_do_not_change_averaged_gradients(group):
    import random
    import time

    import mindspore

    rng = random.Random(group.rank)
    parameters = [mindspore.Tensor(np.zeros(shape, np.float32)) for shape in [(300, 301), (7,), (70_001,)]]
    sync = dp.GradientSynchronizer(parameters, group, bucket_cap_mb=0.5)
    for number in range(20):
        if rng.random() < 0.3:
            time.sleep(rng.random() / 200)
        gradients = sync([p + (number + group.rank) for p in parameters])
        if rng.random() < 0.3:
            time.sleep(rng.random() / 200)
        for gradient in gradients:
            np.testing.assert_array_equal(gradient.asnumpy(), np.float32(number + (group.world_size - 1) / 2))


def test_no_rank_overwrites_a_bucket_while_another_rank_reads_it(group, monkeypatch):
    import time

    import mindspore

    copy_result = SharedBucket._copy_result

    def slowly(self, slot, out):
        time.sleep(0.05 * (group.rank == group.world_size - 1))
        copy_result(self, slot, out)

    monkeypatch.setattr(SharedBucket, "_copy_result", slowly)
    parameter = mindspore.Tensor(np.zeros(50_000, np.float32))
    sync = dp.GradientSynchronizer([parameter], group)
    for number in range(4):
        (gradient,) = sync([parameter + number])
        assert (gradient.asnumpy() == number).all()


def test_the_bucket_size_does_not_change_a_bit_of_the_gradients(group):
    """Sums are added in rank order, so their bits do not depend on the bucket size."""
    import mindspore

    parameters = [mindspore.Tensor(np.zeros(shape, np.float32)) for shape in [(41, 37), (5,), (900,), (64, 3)]]
    everyone = [[rng.standard_normal(p.shape) for p in parameters] for rng in map(np.random.default_rng, range(4))]
    everyone = [[x.astype(np.float32) for x in mine] for mine in everyone[: group.world_size]]
    factor = np.float32(1 / group.world_size)
    for cap in (1e-4, 2e-3, 4):
        sync = dp.GradientSynchronizer(parameters, group, bucket_cap_mb=cap)
        results = sync([mindspore.Tensor(x) for x in everyone[group.rank]])
        for index, result in enumerate(results):
            total = everyone[0][index] * factor
            for other in everyone[1:]:
                total = total + other[index] * factor
            np.testing.assert_array_equal(result.asnumpy(), total)


@pytest.mark.core
def test_averaged_gradients_are_in_private_memory(group):
    """Clipping in place on one rank is not visible to other ranks, and no later exchange changes its result."""
    import mindspore

    parameter = mindspore.Tensor(np.zeros(50_000, np.float32))
    sync = dp.GradientSynchronizer([parameter], group)
    (first,) = sync([parameter + 1])
    first.assign_value(first * (group.rank + 5))
    (second,) = sync([parameter + 2])
    assert (second.asnumpy() == 2).all()
    group.barrier()
    assert (first.asnumpy() == group.rank + 5).all()


def test_shared_memory_closes_its_file_descriptors(group, comm):
    before = len(os.listdir("/proc/self/fd"))
    rows = allocate_shared_rows(comm, 1000)
    assert rows.shape == (group.world_size, 1024)
    assert not rows.any()
    del rows
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.core
@pytest.mark.parametrize("where", ["memfd_create", "posix_fallocate", "open"])
def test_mpi_exchanges_gradients_without_shared_memory_and_prints_it_once(group, comm, monkeypatch, capsys, where):
    """The rank that creates the memory gets none, or one other rank may not open it."""
    if group.world_size == 1:
        pytest.skip("one rank shares with no other")
    import mindspore

    def refuse(*args):
        raise OSError(12, "no memory")

    if where != "open" or group.rank == group.world_size - 1:
        monkeypatch.setattr(host_memory.os, where, refuse)
    assert allocate_shared_rows(comm, 1000) is None
    monkeypatch.setattr(group._transport.channel.memory, "is_available", True)
    parameters = [mindspore.Tensor(np.zeros(shape, np.float32)) for shape in [(300, 301), (70_001,)]]
    sync = dp.GradientSynchronizer(parameters, group, bucket_cap_mb=0.1)
    said = capsys.readouterr().out
    assert said.count("MPI itself moves gradients") == group.is_main
    for gradient in sync([p + group.rank for p in parameters]):
        np.testing.assert_array_equal(gradient.asnumpy(), np.float32((group.world_size - 1) / 2))
    monkeypatch.setattr(group._transport.channel.memory, "is_available", True)


# Derandomized, because every rank must draw the same examples.
@settings(max_examples=40, derandomize=True, database=None)
@given(
    numel=st.integers(1, 3000),
    dtype=st.sampled_from(["float32", "float64"]),
    compression=st.sampled_from([None, "fp16", "bf16"]),
    skip_zeros=st.booleans(),
    is_patient=st.booleans(),
    seed=st.integers(0, 100),
)
def test_two_hosts_of_two_ranks_exchange_exact_sums(group, numel, dtype, compression, skip_zeros, is_patient, seed):  # noqa: PLR0917
    """Four ranks act as two hosts: slices are summed within a host, then exchanged between the hosts."""
    from mpi4py import MPI

    if group.world_size != 4:
        pytest.skip("two hosts of two ranks")
    comm = MPI.COMM_WORLD
    host, peers = comm.Split(comm.rank // 2), comm.Split(comm.rank % 2)
    exchange = HostExchange(host, peers)
    exchange.skip_zeros = skip_zeros
    rng = np.random.default_rng(seed)
    # Half types represent these small integers exactly. The second half of the elements is zero on all ranks.
    values = rng.integers(-9, 9, (4, numel)).astype(dtype)
    values[:, numel // 2 :] = 0
    rows = allocate_shared_rows(host, numel * values.itemsize).view(dtype)[:, :numel]
    rows[host.rank] = values[comm.rank]
    parts = shard_bounds(numel, 4, 64)
    exchange.sum_rows(rows, parts, 0.5, wire_for(compression, values.dtype), PollingWait() if is_patient else None)
    out = np.empty(numel, dtype)
    copy_range(rows, parts[::2], 0, out)
    np.testing.assert_array_equal(out, values.sum(0) * 0.5)
    # With two hosts, each rank sends its slice once, in two halves. Half types take half the bytes of float32.
    sent = sum(comm.allgather(exchange.bytes_sent))
    item_bytes = 2 if compression and dtype == "float32" else values.itemsize
    assert sent == 2 * numel * item_bytes if not skip_zeros else sent <= 2 * numel * item_bytes
    for split in (host, peers):
        split.Free()
