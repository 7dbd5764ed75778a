"""Test the timeline of a run and the output that is printed for every update."""

from __future__ import annotations

import json

import pytest
from library import Stop

import mindnlp_dp as dp
from mindnlp_dp.kernels import functions
from mindnlp_dp.training import operator_times
from mindnlp_dp.training import timeline as timelines
from mindnlp_dp.training.timeline import LANES, StepTimeline
from models import Rows, tiny_roberta, train

NUM_UPDATES = 4


def run(group, folder, **settings):
    per_rank = 8 // group.world_size // 2
    settings = {"per_device_train_batch_size": per_rank, "gradient_accumulation_steps": 2, **settings}
    return train(tiny_roberta(), Rows(8 * NUM_UPDATES), folder, **settings)


@pytest.fixture(params=[False, True], ids=["after", "overlap"])
def overlap(request):
    return request.param


def lanes_of(events):
    """Return each lane's rank and name, by the numbers of its process and thread, as Perfetto reads them."""
    lanes = {(e["pid"], e["tid"]): (e["pid"] - 1, e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    # A thread with the number of a process is its main thread, numbers of threads count in all processes, 0 is none.
    numbers = [0, *{pid for pid, _ in lanes}, *(tid for _, tid in lanes)]
    assert len(set(numbers)) == len(numbers)
    return lanes


@pytest.mark.core
def test_the_timeline_has_the_spans_of_every_rank_and_update(group, shared_tmp_path, overlap):
    file = shared_tmp_path / "traces" / "run.json"
    run(group, shared_tmp_path / "out", trace=str(file), overlap=overlap)
    group.barrier()
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {rank + 1: f"rank {rank}" for rank in range(group.world_size)}
    lanes = lanes_of(events)
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["args"]["step"] for event in spans} == set(range(NUM_UPDATES))
    for rank in range(group.world_size):
        for step in range(NUM_UPDATES):
            mine = [event for event in spans if event["args"]["step"] == step]
            compute, exchange = (
                [event for event in mine if lanes[event["pid"], event["tid"]] == (rank, lane)]
                for lane in ("compute", "exchange")
            )
            assert [event["name"] for event in compute] == [
                "forward", "backward", "forward", "backward", "wait for gradients", "clip", "update",
            ]  # fmt: skip
            # Perfetto drops spans that overlap, if only by a rounding error.
            for one, other in zip(compute, compute[1:]):
                assert one["ts"] + one["dur"] <= other["ts"]
                assert isinstance(other["ts"], int)
            assert [event["name"] for event in exchange] == ["bucket 0"]
            if not overlap or step == 0 or group.world_size == 1:
                wait = compute[4]
                assert wait["ts"] <= exchange[0]["ts"]
    # A span that waits for a slower rank must not end before it begins.
    assert all(event["dur"] >= 0 for event in spans)


@pytest.mark.core
def test_a_profile_has_the_operators_of_the_requested_updates(group, shared_tmp_path):
    run(group, shared_tmp_path, profile="2:3")
    group.barrier()
    events = json.loads((shared_tmp_path / "profile.json").read_text())["traceEvents"]
    lanes = lanes_of(events)
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["args"]["step"] for event in spans} == {1, 2}
    for rank in range(group.world_size):
        for step in (1, 2):
            mine = [e for e in spans if e["args"]["step"] == step]
            by_lane = {name: [e for e in mine if lanes[e["pid"], e["tid"]] == (rank, name)] for name in LANES}
            compute = by_lane["compute"]
            begin, end = compute[0]["ts"], compute[-1]["ts"] + compute[-1]["dur"]
            for lane in ("operators", "kernels"):
                # MindSpore's times have the wall clock, which may be adjusted meanwhile.
                assert all(begin - 1e4 <= e["ts"] <= e["ts"] + e["dur"] <= end + 1e4 for e in by_lane[lane])
            assert {"Linear forward", "Linear backward"} <= {e["name"] for e in by_lane["kernels"]}
            assert by_lane["operators"]


def test_a_profile_restores_the_kernels_it_wrapped(group, shared_tmp_path):
    before = [vars(functions._Linear)[way] for way in ("forward", "backward")]
    with pytest.raises(KeyboardInterrupt):
        run(group, shared_tmp_path, profile="1:2", callbacks=[Stop(1)])
    assert [vars(functions._Linear)[way] for way in ("forward", "backward")] == before
    # A second profile in the same process.
    test_a_profile_has_the_operators_of_the_requested_updates(group, shared_tmp_path)


def test_a_resumed_run_keeps_the_profile_of_the_failed_run(group, shared_tmp_path):
    settings = {"profile": "1:2", "save_strategy": "steps", "save_steps": 2}
    with pytest.raises(KeyboardInterrupt):
        run(group, shared_tmp_path, callbacks=[Stop(3)], **settings)
    group.barrier()
    before = (shared_tmp_path / "profile.json").read_bytes()
    assert b"Linear backward" in before
    run(group, shared_tmp_path, resume=True, **settings)
    assert (shared_tmp_path / "profile.json").read_bytes() == before


def test_a_failed_profiler_does_not_end_the_run(group, shared_tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("in use")

    monkeypatch.setattr(operator_times.mindspore_profiler, "profile", fail)
    with pytest.warns(RuntimeWarning, match="the profile has no operators of MindSpore: RuntimeError: in use"):
        trainer = run(group, shared_tmp_path, profile="1:2")
    assert trainer.state.global_step == NUM_UPDATES
    group.barrier()
    assert "Linear backward" in (shared_tmp_path / "profile.json").read_text()


def test_a_profile_of_updates_outside_the_run_prints_a_message(group, shared_tmp_path, capsys):
    run(group, shared_tmp_path, profile="50:60")
    said = "nothing was profiled: this run made none of the updates 50 to 60"
    assert (said in capsys.readouterr().out) == group.is_main


@pytest.mark.parametrize("wrong", ["", "3", "3:", "0:2", "4:3", "-1:2", "1:2:3", "a:b"])
def test_a_profile_that_is_not_a_range_is_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="profile must be FROM:TO, the first and the last update, such as 10:12"):
        dp.DataParallelArguments(str(tmp_path), profile=wrong)
    with pytest.raises(ValueError, match="trace and profile"):
        dp.DataParallelArguments(str(tmp_path), profile="1:2", trace="t.json")


def test_a_trace_file_that_is_not_writable_is_an_error(group, shared_tmp_path):
    blocked = shared_tmp_path / "file"
    if group.is_main:
        blocked.write_text("no folder")
    group.barrier()
    with pytest.raises(OSError, match="file"):
        run(group, shared_tmp_path / "out", trace=str(blocked / "run.json"))


def test_the_timeline_keeps_a_limited_number_of_spans(group, shared_tmp_path, monkeypatch):
    monkeypatch.setattr(timelines, "MAX_SPANS", 3)
    timeline = StepTimeline(group, str(shared_tmp_path / "run.json"))
    for number in range(5):
        with timeline.span(f"span {number}"):
            pass
    timeline.write()
    group.barrier()
    events = json.loads((shared_tmp_path / "run.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 3 * group.world_size
    assert events[0]["args"]["name"] == "rank 0 (2 later spans were not kept)"


def test_a_timeline_without_a_file_keeps_no_spans(group):
    timeline = StepTimeline(group)
    with timeline.span("nothing"):
        pass
    timeline.write()
    assert timeline._spans == []


def test_sync_stats_prints_a_line_for_each_update(group, shared_tmp_path, capsys):
    run(group, shared_tmp_path / "out", sync_stats=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("update ")]
    assert len(lines) == (NUM_UPDATES if group.is_main else 0)
    for number, line in enumerate(lines):
        assert line.startswith(f"update {number}: ")
        assert "MB of gradients in 1 calls" in line
        assert "ms exposed" in line
        assert "ms hidden" in line


def test_exchange_statistics_count_buckets_bytes_and_exposed_seconds(group, shared_tmp_path):
    trainer = run(group, shared_tmp_path / "out", overlap=True, bucket_cap_mb=0.01)
    micro_batches = trainer._synchronizer.last_exchange
    assert micro_batches.num_calls == len(trainer._synchronizer.buckets) > 1
    assert micro_batches.num_bytes == sum(bucket.layout.num_bytes for bucket in trainer._synchronizer.buckets)
    assert micro_batches.exposed_seconds > 0
    if group.backend == "mpi":
        assert micro_batches.bytes_sent == 0
    if group.world_size == 1:
        assert micro_batches.hidden_seconds == 0
