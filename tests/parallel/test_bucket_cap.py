"""bucket_cap_mb="auto": measured once, remembered, the same on every rank."""

from __future__ import annotations

import json

import mindspore
import numpy as np
import pytest

import mindnlp_dp as dp
from mindnlp_dp import bucket_cap

SHAPES = [(1000, 300), (300,), (300, 300)]


@pytest.fixture(autouse=True)
def file(shared_tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_tmp_path))
    return shared_tmp_path / "mindnlp_dp" / "bucket_caps.json"


def make(group, shapes=SHAPES, **options):
    parameters = [mindspore.Tensor(np.zeros(shape, np.float32)) for shape in shapes]
    return dp.GradientSynchronizer(parameters, group, bucket_cap_mb="auto", **options)


def test_it_is_measured_once_and_the_same_on_all_ranks(group, file, monkeypatch):
    first = make(group)
    assert first.bucket_cap_mb in bucket_cap.CANDIDATES_MB
    assert len(set(group.all_gather_object(first.bucket_cap_mb))) == 1
    monkeypatch.setattr(bucket_cap, "_trial", lambda *_: pytest.fail("measured again"))
    assert make(group).bucket_cap_mb == first.bucket_cap_mb
    (remembered,) = json.loads(file.read_text()).values()
    assert remembered == first.bucket_cap_mb


def test_what_is_remembered_is_of_this_model_and_compression(group, file):
    make(group)
    make(group, SHAPES[:2])
    make(group, compression="bf16")
    group.barrier()
    assert len(json.loads(file.read_text())) == 3


def test_the_smallest_that_is_nearly_the_fastest(group, monkeypatch):
    seconds = {1.0: 9.0, 2.0: 1.04, 4.0: 1.2, 8.0: 1.0, 16.0: 1.0, 25.0: 3.0}
    monkeypatch.setattr(bucket_cap, "pack_buckets", lambda shapes, dtypes, cap: cap)
    monkeypatch.setattr(bucket_cap, "_trial", lambda cap, *_: seconds[cap])
    assert bucket_cap.choose_bucket_cap_mb(SHAPES, ["float32"] * 3, group) == 2.0


@pytest.mark.parametrize("damage", ["{", "[1]", "null", ""])
def test_a_damaged_file_is_measured_over(group, file, damage):
    if group.is_main:
        file.parent.mkdir()
        file.write_text(damage)
    group.barrier()
    chosen = make(group).bucket_cap_mb
    group.barrier()
    assert list(json.loads(file.read_text()).values()) == [chosen]


def test_where_nothing_can_be_written_it_is_measured_every_time(group, shared_tmp_path, monkeypatch):
    blocked = shared_tmp_path / "file"
    if group.is_main:
        blocked.write_text("no folder")
    group.barrier()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert make(group).bucket_cap_mb in bucket_cap.CANDIDATES_MB


@pytest.mark.parametrize("cap", ["much", 0, -1, None, float("nan")])
def test_anything_else_is_refused(group, cap):
    with pytest.raises(ValueError, match='bucket_cap_mb must be positive, or "auto", got'):
        dp.GradientSynchronizer([mindspore.Tensor(np.zeros(3, np.float32))], group, bucket_cap_mb=cap)
