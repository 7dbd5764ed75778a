"""Test collectives on arrays filled with the rank, whose results have a closed form. test_types.py tests types."""

from __future__ import annotations

from types import SimpleNamespace

import mindspore
import numpy as np
import pytest

from mindnlp_dp.communication.operations import Operation

pytestmark = pytest.mark.core

KINDS = {"numpy": np.asarray, "tensor": mindspore.Tensor}


def ranks(group, dtype="float32", shape=(3, 2)):
    return np.full(shape, group.rank, dtype)


def check(result, expected, like):
    assert type(result) is type(like)
    array = result if isinstance(result, np.ndarray) else result.asnumpy()
    assert array.dtype == np.asarray(expected).dtype
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_all_reduce_gives_sum_mean_max_and_min(group, op, kind):
    n = group.world_size
    x = KINDS[kind](ranks(group))
    expected = {"sum": n * (n - 1) / 2, "mean": (n - 1) / 2, "max": n - 1, "min": 0}[op]
    check(group.all_reduce(x, op), np.full((3, 2), expected, np.float32), x)
    check(x, ranks(group), x)  # the argument is unchanged


@pytest.mark.parametrize("kind", KINDS)
def test_broadcast_and_gather_return_the_arrays_of_their_ranks(group, kind):
    n, last = group.world_size, group.world_size - 1
    x = KINDS[kind](ranks(group))
    check(group.broadcast(x, src=last), np.full((3, 2), last, np.float32), x)
    for rank, part in enumerate(group.all_gather(x)):
        check(part, np.full((3, 2), rank, np.float32), x)
    gathered = group.gather(x, dst=last)
    assert (gathered is None) == (group.rank != last)
    if gathered is not None:
        check(gathered[0], np.zeros((3, 2), np.float32), x)
        assert len(gathered) == n


@pytest.mark.parametrize("kind", KINDS)
def test_reduce_scatter_gives_each_rank_its_sum_and_reduce_only_dst_a_result(group, kind):
    n = group.world_size
    rows = np.arange(n, dtype=np.float32)[:, None] + ranks(group, shape=(n, 2))
    result = group.reduce_scatter(KINDS[kind](rows))
    check(result, np.full(2, n * group.rank + n * (n - 1) / 2, np.float32), KINDS[kind](rows))
    reduced = group.reduce(KINDS[kind](ranks(group)), dst=n - 1)
    assert (reduced is None) == (group.rank != n - 1)
    if reduced is not None:
        check(reduced, np.full_like(ranks(group), n * (n - 1) / 2), KINDS[kind](ranks(group)))
    with pytest.raises(ValueError, match="expected a first dimension of world_size"):
        group.reduce_scatter(np.zeros((n + 1, 2), np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_scatter_gives_each_rank_its_array(group, kind):
    last = group.world_size - 1
    xs = [KINDS[kind](np.full(2, 10 + r, np.int64)) for r in range(group.world_size)]
    check(group.scatter(xs if group.rank == last else None, src=last), np.full(2, 10 + group.rank), xs[0])
    with pytest.raises(ValueError, match=f"expected {group.world_size} arrays, one for each rank, got 0"):
        group.scatter([] if group.is_main else None)


def test_collectives_keep_scalar_empty_and_strided_shapes(group):
    scalar = np.array(group.rank, np.float32)
    for result in (group.all_reduce(scalar), group.all_reduce(scalar, "mean"), group.broadcast(scalar)):
        assert isinstance(result, np.ndarray)
        assert result.shape == ()
    row = group.reduce_scatter(np.arange(group.world_size, dtype=np.float32))
    assert (row.shape, float(row)) == ((), group.rank * group.world_size)
    empty = np.zeros((0, 4), np.float32)
    assert group.all_reduce(empty).shape == (0, 4)
    assert [part.shape for part in group.all_gather(empty)] == [(0, 4)] * group.world_size
    strided = np.arange(12, dtype=np.float32).reshape(3, 4).T[::2]
    np.testing.assert_array_equal(group.all_reduce(strided, "max"), strided)


def test_send_and_recv_pass_arrays_around_a_ring(group):
    if group.world_size == 1:
        with pytest.raises(ValueError, match="dst must be another rank, got 0 on rank 0 itself"):
            group.send(np.zeros(1), dst=0)
        return
    x = ranks(group)
    if group.library_without(Operation.MESSAGES):
        with pytest.raises(NotImplementedError, match="the mpi backend has them"):
            group.send(x, dst=(group.rank + 1) % group.world_size)
        return
    # Messages go around the ring. Even ranks send first, so that blocking sends cannot deadlock.
    right, left = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    if group.rank % 2 == 0:
        group.send(x, dst=right)
        received = group.recv(x, src=left)
    else:
        received = group.recv(x, src=left)
        group.send(x, dst=right)
    check(received, np.full((3, 2), left, np.float32), x)


def test_object_collectives_send_objects_of_any_length(group):
    assert group.all_gather_object({"rank": group.rank}) == [{"rank": r} for r in range(group.world_size)]
    assert group.broadcast_object(f"from {group.rank}", src=group.world_size - 1) == f"from {group.world_size - 1}"
    long = "x" * (1000 * (group.rank + 1))
    assert [len(part) for part in group.all_gather_object(long)] == [1000 * (r + 1) for r in range(group.world_size)]
    group.barrier()


def test_different_collectives_or_shapes_raise_on_all_ranks(group):
    if group.world_size == 1:
        pytest.skip("one rank agrees with itself")
    shape = (4 if group.is_main else 5,)
    with pytest.raises(RuntimeError, match=r"rank 0: all_reduce\(sum, float32 of shape \(4,\)\); rank 1: .*\(5,\)"):
        group.all_reduce(np.zeros(shape, np.float32))
    with pytest.raises(RuntimeError, match=r"rank 0: barrier\(\); rank 1: broadcast_object\(src=0\)"):
        group.barrier() if group.is_main else group.broadcast_object(None)
    assert group.all_reduce(np.ones(1, np.float32))[0] == group.world_size  # and the group still works


@pytest.mark.parametrize(
    ("kind", "says", "call"),
    [
        (ValueError, "op must be one of sum, mean, max, min, got 'avg'", lambda g, x: g.all_reduce(x, "avg")),
        (TypeError, "got list on rank", lambda g, x: g.all_gather([1, 2])),
        (TypeError, "the mean of int32 would be rounded", lambda g, x: g.all_reduce(x.astype(np.int32), "mean")),
        (ValueError, "src must be a rank from 0", lambda g, x: g.broadcast(x, src=99)),
        (ValueError, "dst must be a rank from 0", lambda g, x: g.reduce(x, dst=-1)),
        (ValueError, "expected a first dimension", lambda g, x: g.reduce_scatter(np.zeros((9, 1)))),
        (ValueError, "src must be a rank from 0", lambda g, x: g.broadcast_object(x, src=99)),
        (Exception, "pickle", lambda g, x: g.all_gather_object(lambda: 0)),
        (TypeError, "got SimpleNamespace", lambda g, x: g.all_reduce(SimpleNamespace(dtype=x.dtype, shape=x.shape))),
    ],
)
def test_invalid_arguments_on_one_rank_raise_on_all_ranks(group, kind, says, call):
    last = group.world_size - 1
    with pytest.raises(kind, match=says if group.rank == last else f"failed on rank {last}: .*{says}"):
        call(group, ranks(group)) if group.rank == last else group.all_reduce(ranks(group))
    assert group.all_reduce(np.ones(1, np.float32))[0] == group.world_size  # and the group still works


def test_unpicklable_results_of_rank_0_raise_on_all_ranks(group):
    for call in (
        lambda: group.run_on_rank0(lambda: lambda: 0, "metrics"),
        lambda: group.broadcast_object((lambda: 0) if group.is_main else None),
    ):
        with pytest.raises(Exception, match="pickle"):
            call()
    assert group.broadcast_object(group.rank) == 0


def test_unsupported_dtype_in_send_raises_on_sender_and_receiver(group):
    if group.world_size == 1 or group.library_without(Operation.MESSAGES):
        pytest.skip("needs point-to-point calls")
    if group.rank == 0:
        with pytest.raises(TypeError, match="got complex128 on rank 0"):
            group.send(np.array([1j]), dst=1)
        group.send(np.ones(2), dst=1)
    elif group.rank == 1:
        with pytest.raises(ValueError, match="rank 0 could not send its message"):
            group.recv(np.zeros(2), src=0)
        assert group.recv(np.zeros(2), src=0).tolist() == [1, 1]
    group.barrier()


def test_recv_refuses_messages_of_another_shape_or_dtype(group):
    if group.world_size == 1 or group.library_without(Operation.MESSAGES):
        pytest.skip("needs point-to-point calls")
    sent = np.arange(6, dtype=np.float64).reshape(2, 3)
    for like in (np.zeros(6), np.zeros((2, 3), np.float32), np.zeros((0, 3)), np.zeros((2, 3), np.int64)):
        if group.rank == 0:
            group.send(sent, dst=1)
        elif group.rank == 1:
            with pytest.raises(
                ValueError, match=r"recv on rank 1: expected .*, and rank 0 sent float64 of shape \(2, 3\)"
            ):
                group.recv(like, src=0)
    if group.rank == 0:
        group.send(np.zeros((0, 2)), dst=1)
        group.send(sent, dst=1)
    elif group.rank == 1:
        with pytest.raises(ValueError, match=r"rank 0 sent float64 of shape \(0, 2\)"):
            group.recv(sent, src=0)
        np.testing.assert_array_equal(group.recv(np.zeros((2, 3)), src=0), sent)
    group.barrier()


def test_large_arrays_are_sent_in_pieces_under_mpi(group, monkeypatch):
    """Arrays beyond 1 GiB are sent in pieces under MPI (failure/test_large_arrays.py sends real ones)."""
    if group.backend != "mpi":
        pytest.skip("MPI counts in 32 bits")
    from mindnlp_dp.communication.transports.mpi import mpi_transport

    monkeypatch.setattr(mpi_transport, "PIECE_BYTES", 1000)
    n, last = group.world_size, group.world_size - 1
    x = np.arange(777, dtype=np.float64) + group.rank
    np.testing.assert_array_equal(group.broadcast(x, src=last), np.arange(777) + last)
    for rank, part in enumerate(group.all_gather(x)):
        np.testing.assert_array_equal(part, np.arange(777) + rank)
    for op, expected in {"sum": np.arange(777) * n + n * (n - 1) / 2, "max": np.arange(777) + last}.items():
        np.testing.assert_array_equal(group.all_reduce(x, op), expected)
    data = bytes(range(256)) * (5 + group.rank)
    assert group.all_gather_object(data) == [bytes(range(256)) * (5 + rank) for rank in range(n)]
    assert group.broadcast_object(data, src=last) == bytes(range(256)) * (5 + last)
    assert group.all_gather_object(b"") == [b""] * n
    if n > 1 and group.rank in (0, 1):
        if group.rank == 0:
            group.send(x, dst=1)
        else:
            np.testing.assert_array_equal(group.recv(x, src=0), np.arange(777))
    group.barrier()


def test_invalid_op_and_src_are_refused(group):
    with pytest.raises(ValueError, match="op must be one of sum, mean, max, min, got 'avg'"):
        group.all_reduce(ranks(group), "avg")
    with pytest.raises(ValueError, match=f"src must be a rank from 0 to {group.world_size - 1}"):
        group.broadcast(ranks(group), src=group.world_size)


def test_run_on_rank0_returns_its_result_or_raises_on_all_ranks(group):
    assert group.run_on_rank0(lambda: group.rank, "asking") == 0

    def fail():
        raise KeyError("nothing")

    with pytest.raises(KeyError, match="nothing"):
        group.run_on_rank0(fail, "failing")


def test_unpicklable_errors_are_raised_on_all_ranks(group):
    class LocalError(Exception):
        pass

    error = LocalError("lost") if group.rank == group.world_size - 1 else None
    with pytest.raises(LocalError if error else RuntimeError, match="lost"):
        group.raise_on_all_ranks(error, "looking")


def test_raise_on_all_ranks_names_the_rank(group):
    last = group.world_size - 1
    error = OSError("disk full") if group.rank == last else None
    expected = "disk full" if error else f"saving failed on rank {last}: disk full"
    with pytest.raises(OSError, match=f"^{expected}$"):
        group.raise_on_all_ranks(error, "saving")
