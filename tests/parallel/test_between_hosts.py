"""Test the all-reduce between hosts: its sums, equal bits on all ranks, bytes sent. Each rank acts as one host here."""

from __future__ import annotations

import threading
import time

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindnlp_dp.communication.transports.mpi.ring import BLOCK_ELEMENTS, reduce_round_ring, sum_over_hosts, wire_for
from mindnlp_dp.communication.transports.polling_wait import AbandonedError, PollingWait, barrier

HALVES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}


@pytest.fixture(scope="module")
def comm(group):
    if group.backend != "mpi":
        pytest.skip("only the MPI backend has its own ring")
    from mpi4py import MPI

    return MPI.COMM_WORLD


def random(rank, numel, dtype="float32"):
    return np.random.default_rng([rank, numel]).standard_normal(numel).astype(dtype)


def assert_all_ranks_have_the_same_bits(comm, array):
    assert len({part.tobytes() for part in comm.allgather(array)}) == 1


@pytest.mark.core
@pytest.mark.parametrize("waiter", [None, PollingWait()])
@pytest.mark.parametrize("numel", [0, 1, 3, 1000, 4097])
def test_ring_all_reduce_sends_two_times_n_minus_1_over_n(comm, numel, waiter):
    """The count of bytes holds for every length; without even division, a rank deviates by a few elements."""
    size = comm.size
    array = np.arange(numel, dtype=np.float32) + comm.rank
    sent = reduce_round_ring(comm, array, waiter=waiter)
    np.testing.assert_array_equal(array, np.arange(numel) * size + size * (size - 1) / 2)
    everyone = sum(comm.allgather(sent))
    assert everyone == 2 * (size - 1) * numel * 4
    assert abs(sent - everyone / size) <= 2 * size * 4


@pytest.mark.core
@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("numel", [1, 3, 1000, 4097])
def test_compressed_ring_all_reduce_sends_half_and_all_ranks_get_the_same_bits(comm, kind, numel):
    size = comm.size
    array = random(comm.rank, numel)
    exact = sum(random(rank, numel).astype(np.float64) for rank in range(size))
    sent = reduce_round_ring(comm, array, wire=wire_for(kind, array.dtype))
    assert sum(comm.allgather(sent)) == 2 * (size - 1) * numel * 2
    assert_all_ranks_have_the_same_bits(comm, array)
    # Each hop rounds a sum of at most this size by at most half a unit in its last place.
    largest = sum(abs(random(rank, numel)) for rank in range(size))
    error = size * float(ml_dtypes.finfo(HALVES[kind]).eps) / 2
    assert (abs(array - exact) <= error * largest + 1e-6).all()


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e-5, 1.0, 6e4, 1e9, 1e30])
@pytest.mark.parametrize("kind", HALVES)
def test_compression_keeps_its_precision_at_any_scale(kind, size):
    """Precision holds at any scale: gradients may be far too small for float16, their weighted sums too large."""
    wire, array = wire_for(kind, np.dtype("float32")), (size * random(3, 1000)).astype(np.float32)
    error = float(ml_dtypes.finfo(HALVES[kind]).eps) / 2
    # The smallest numbers of a message keep fewer digits.
    np.testing.assert_allclose(wire.decode(wire.encode(array)), array, rtol=error, atol=1e-9 * size)


@pytest.mark.parametrize("kind", HALVES)
def test_compression_keeps_nan_inf_and_zeros(kind):
    wire = wire_for(kind, np.dtype("float32"))
    array = np.array([np.nan, np.inf, -np.inf, 0.0, 1.0], np.float32)
    np.testing.assert_array_equal(wire.decode(wire.encode(array)), array)
    for array in (np.zeros(4, np.float32), np.zeros(0, np.float32)):
        np.testing.assert_array_equal(wire.decode(wire.encode(array)), array)


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_only_float32_is_compressed(dtype):
    assert wire_for("fp16", np.dtype(dtype)) is None
    assert wire_for(None, np.dtype("float32")) is None


def num_sent(gradients):
    """Return how many elements are sent of gradients: blocks that a rank has, or all if more than 90% are such."""
    length = len(gradients[0]) // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    is_sent = np.any([x[:length].reshape(-1, BLOCK_ELEMENTS) for x in gradients], axis=(0, 2))
    left_out = (~is_sent).sum() if is_sent.sum() <= 0.9 * len(is_sent) else 0
    return len(gradients[0]) - left_out * BLOCK_ELEMENTS


# Derandomized, because every rank must draw the same examples.
@settings(max_examples=40, derandomize=True, database=None)
@given(
    num_rows=st.integers(0, 60),
    width=st.integers(1, 200),
    share=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    dtype=st.sampled_from(["float32", "float64"]),
    compression=st.sampled_from([None, "fp16", "bf16"]),
    seed=st.integers(0, 99),
)
def test_skipping_zero_blocks_keeps_the_sum(comm, num_rows, width, share, dtype, compression, seed):  # noqa: PLR0917
    """Skipping zero blocks gives the sum of the full array; on two hosts, which add in the same order, to the bit."""

    def gradient(rank):
        rng = np.random.default_rng([seed, rank])
        rows = rng.standard_normal((num_rows, width))
        rows[rng.random(num_rows) >= share] = 0
        return rows.astype(dtype).reshape(-1)

    whole, sparse = gradient(comm.rank), gradient(comm.rank)
    wire = wire_for(compression, whole.dtype)
    dense = sum_over_hosts(comm, whole, wire, None, skip_zeros=False)
    sent = sum_over_hosts(comm, sparse, wire, PollingWait())
    per_element = 2 * (comm.size - 1) * (sparse.itemsize if wire is None else 2)
    assert sum(comm.allgather(dense)) == per_element * len(whole)
    assert sum(comm.allgather(sent)) == per_element * num_sent([gradient(rank) for rank in range(comm.size)])
    if comm.size <= 2:
        np.testing.assert_array_equal(sparse, whole)
    else:
        tolerance = {None: 1e-6, "fp16": 4e-3, "bf16": 4e-2}[compression]
        np.testing.assert_allclose(sparse, whole, rtol=tolerance, atol=5 * tolerance)
    assert_all_ranks_have_the_same_bits(comm, sparse)


def test_only_nonzero_embedding_rows_are_sent(comm):
    table = np.zeros((1000, 64), np.float32)
    table[10 * comm.rank : 10 * comm.rank + 3] = comm.rank + 1
    sent = sum_over_hosts(comm, table.reshape(-1), None, None)
    size = comm.size
    assert sum(comm.allgather(sent)) == 2 * (size - 1) * (3 * size * 64) * 4
    for rank in range(size):
        assert (table[10 * rank : 10 * rank + 3] == rank + 1).all()
    assert np.count_nonzero(table) == size * 3 * 64


def test_negative_zeros_give_the_same_bits_on_all_ranks(comm):
    """Otherwise one rank would keep its -0.0, and replicas would differ by a sign."""
    array = np.zeros(640, np.float32)
    if comm.rank == comm.size - 1:
        array[:] = -0.0
    sum_over_hosts(comm, array, None, None)
    assert_all_ranks_have_the_same_bits(comm, array)


def test_polling_wait_uses_little_cpu_time(comm):
    """A rank that waits for a late rank uses little CPU time."""
    if comm.size == 1:
        pytest.skip("no rank to wait for")
    barrier(comm, None)
    if comm.rank == 0:
        time.sleep(0.5)
    began, used = time.perf_counter(), time.thread_time()
    barrier(comm, PollingWait())
    waited, used = time.perf_counter() - began, time.thread_time() - used
    if comm.rank > 0:
        assert used < waited / 2


def test_polling_wait_can_be_abandoned(comm):
    if comm.size == 1:
        pytest.skip("no rank to wait for")
    waiter, mine = PollingWait(), comm.Dup()
    raised = []

    def wait():
        try:
            barrier(mine, waiter)
        except AbandonedError as error:
            raised.append(error)

    if comm.rank == 0:
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.05)
        waiter.abandon()
        thread.join(5)
        assert not thread.is_alive()
        assert len(raised) == 1
    comm.Barrier()
