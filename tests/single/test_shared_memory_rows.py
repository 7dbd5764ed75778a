"""Test the shared memory of the ranks of a host: how it is opened, verified, allocated and reused."""

from __future__ import annotations

import os
import tempfile

import mindspore
import numpy as np
import pytest

from mindnlp_dp.communication.transports.mpi import host_memory
from mindnlp_dp.communication.transports.mpi.host_memory import allocate_shared_rows, why_not_shared
from mindnlp_dp.communication.transports.single import SingleProcessChannel
from mindnlp_dp.data_parallel.buckets import host_bucket
from mindnlp_dp.data_parallel.buckets.bucket_layout import pack_buckets
from mindnlp_dp.data_parallel.buckets.host_bucket import HostBucket, refcount_is_reliable
from mindnlp_dp.runtime.arrays import from_host as tensor_from_host


class Host:
    """One rank of a two-rank host in this process; the other rank's answers are given."""

    size = 2

    def __init__(self, rank, told=None):
        self.rank = rank
        self.told = told

    def bcast(self, mine, root):
        return self.told or mine

    def allgather(self, has_it):
        return [has_it, True]


def test_a_rank_opens_the_shared_memory_of_its_host():
    made = os.memfd_create("rows")
    os.ftruncate(made, 2 * 128)
    os.pwrite(made, b"n" * 16, 2 * 128)
    rows = allocate_shared_rows(Host(1, (os.getpid(), made, b"n" * 16)), 100)
    assert rows.shape == (2, 128)
    rows[1, :3] = [1, 2, 3]
    assert os.pread(made, 3, 128) == bytes([1, 2, 3])
    os.close(made)


@pytest.mark.parametrize("what", ["another file", "another nonce", "a longer file", "nothing", "a folder"])
def test_another_file_with_the_same_descriptor_number_is_refused(what, tmp_path):
    """Refuse a process and a descriptor with the same numbers that, in another PID namespace, are different ones."""
    with tempfile.TemporaryFile() as file:
        file.write(bytes(256) + (b"x" if what == "another nonce" else b"n") * (17 if what == "a longer file" else 16))
        file.truncate(200 if what == "another file" else None)
        file.flush()
        number = {"nothing": 9999, "a folder": os.open(tmp_path, os.O_RDONLY)}.get(what, file.fileno())
        before = os.pread(file.fileno(), 1000, 0)
        assert allocate_shared_rows(Host(1, (os.getpid(), number, b"n" * 16)), 100) is None
        assert os.pread(file.fileno(), 1000, 0) == before, "it was written to"


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_allocates_its_own_row(rank, monkeypatch):
    allocated = []
    monkeypatch.setattr(host_memory.os, "posix_fallocate", lambda fd, start, length: allocated.append((start, length)))
    made = os.memfd_create("rows")
    os.ftruncate(made, 2 * 4096)
    os.pwrite(made, b"n" * 16, 2 * 4096)
    rows = allocate_shared_rows(Host(rank, (os.getpid(), made, b"n" * 16) if rank else None), 4096)
    os.close(made)
    assert rows is not None
    assert allocated == [(rank * 4096, 4096)]


def test_shared_rows_are_none_without_free_memory(monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host_memory.os, "posix_fallocate", full)
    assert allocate_shared_rows(Host(0), 4096) is None


def test_hosts_with_different_numbers_of_ranks_are_reported():
    assert why_not_shared([3, 3, 3]) == ""
    assert why_not_shared([2, 2, 1]).startswith("hosts have 1 to 2 ranks; start the same number on every host")


def bucket():
    (layout,) = pack_buckets([(3, 2)], ["float32"], 1.0)
    return HostBucket(layout, SingleProcessChannel())


def result_of(one, value):
    one.put(0, np.full((3, 2), value, np.float32), 1.0)
    one.start(1.0)
    result = one.get(0)
    one.clear()
    return result


def test_the_memory_of_a_released_result_is_reused():
    assert refcount_is_reliable(tensor_from_host)
    one = bucket()
    address = result_of(one, 1.0).data_ptr()
    assert result_of(one, 2.0).data_ptr() == address
    held = result_of(one, 3.0)
    array = held.asnumpy()
    del held
    assert (result_of(one, 4.0).asnumpy() == 4.0).all()
    assert (array == 3.0).all(), "a reader still looked at it"


def test_a_loop_that_keeps_its_last_gradients_alternates_two_arrays():
    one = bucket()
    seen = set()
    for value in range(6):
        gradients = result_of(one, float(value))
        assert (gradients.asnumpy() == value).all()
        seen.add(gradients.data_ptr())
    assert len(seen) == 2


def test_memory_is_not_reused_if_reference_counts_are_unreliable(monkeypatch):
    """Simulate tensors that share an array's memory without a reference to the array."""
    held = []

    def from_host(array, dtype):
        tensor = mindspore.Tensor.from_numpy(array.copy())
        held.append(tensor)
        return tensor

    def shares(first, second):
        return True

    monkeypatch.setattr(host_bucket.np, "shares_memory", shares)
    assert not refcount_is_reliable(from_host)
    monkeypatch.setattr(host_bucket, "refcount_is_reliable", lambda from_host: False)
    one = bucket()
    first = result_of(one, 1.0)
    memory = one._results[0][-1]
    del first
    result_of(one, 2.0)
    assert one._results[0][-1] is not memory
