"""Test how many updates an elastic run makes when its batch size changes: it reads the planned samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindnlp_dp.data.loader import IndexedLoader
from mindnlp_dp.data.sampler import GlobalBatchSampler
from mindnlp_dp.runtime.job_context import attempt_env, max_world_size, scales_batch
from mindnlp_dp.training.run_state import Position
from mindnlp_dp.training.trainer.batch_scaling import ElasticBatchSchedule, batch_of


def pace_of(num_samples, size, planned, saved):
    loader = IndexedLoader(range(num_samples), GlobalBatchSampler(num_samples, 4, samples_per_update=size), None)
    return loader, ElasticBatchSchedule(loader, planned, size, saved)


@given(
    num_samples=st.integers(1, 60), planned=st.integers(1, 16), planned_updates=st.integers(1, 30),
    tries=st.lists(st.tuples(st.integers(1, 16), st.integers(0, 9)), max_size=4), last=st.integers(1, 16),
)  # fmt: skip
def test_an_elastic_run_reads_the_planned_samples_at_any_batch_size(num_samples, planned, planned_updates, tries, last):
    """Make some updates with each batch size, finish with the last size, and resume the finished run once more."""
    saved, position, step, read = {"is_scaled": True}, Position(), 0, 0
    for size, most in [*tries, (last, 10_000)]:
        loader, pace = pace_of(num_samples, size, planned, saved)
        position = pace.resume(position, {"global_batch_size": size, **saved})
        total = pace.total(planned_updates, step, position)
        assert total >= step
        for _ in range(min(most, total - step)):
            if position.update == len(loader):
                position = Position(position.epoch + 1)
            begin = position.update * size + position.offset
            assert begin < num_samples
            read += min(begin + size, num_samples) - begin
            position.update, step = position.update + 1, step + 1
            assert pace.total(planned_updates, step, position) == total
        saved = {"is_scaled": True, "global_batch_size": size}
    _, pace = pace_of(num_samples, planned, planned, saved)
    assert pace.total(planned_updates, step, pace.resume(position, saved)) == step
    per_epoch = -(-num_samples // planned)
    epochs, rest = divmod(planned_updates, per_epoch)
    wanted = epochs * num_samples + min(rest * planned, num_samples)
    # An update is full unless it ends its epoch: it may read past the last planned sample by less than its own size.
    assert wanted <= read < wanted + max(size for size, _ in [*tries, (last, 0)])


def test_scale_batch_makes_the_batch_proportional_to_the_world_size(monkeypatch):
    for name, value in attempt_env(0, "job", 3, scale_batch=True).items():
        monkeypatch.setenv(name, value)
    assert [batch_of(32, ranks) for ranks in (3, 2, 1)] == [32, 21, 11]
    assert batch_of(1, 1) == 1


def test_a_nested_job_does_not_inherit_the_elastic_world_size():
    outer = attempt_env(0, "job", 8, scale_batch=True)
    assert (max_world_size(outer), scales_batch(outer)) == (8, True)
    inner = {**outer, **attempt_env(0, "job", None)}
    assert (max_world_size(inner), scales_batch(inner)) == (None, False)


def test_a_loader_with_another_batch_size_is_refused_only_with_scale_batch():
    _, pace = pace_of(20, 5, 8, None)
    assert (pace.planned, pace.is_slower) == (5, False)
    loader, _ = pace_of(20, 5, 8, None)
    with pytest.raises(ValueError, match="own loader has updates of 5 samples, and with --scale-batch they have 4 now"):
        ElasticBatchSchedule(loader, 8, 4, {"is_scaled": True})
