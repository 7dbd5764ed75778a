"""Tests that pipelines complete on the streams of devices, where messages are matched in the order of their issue."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from stream_model import DeadlockError, LazyArray, Streams, StreamTransport

from mindnlp_dp.data_parallel.synchronizer_base import MicroStep
from mindnlp_dp.parallel.device_mesh import DeviceMesh
from mindnlp_dp.parallel.pipeline_parallel.pipeline_micro_batch import PipelineMicroBatch
from mindnlp_dp.parallel.pipeline_parallel.runner import Pipeline
from mindnlp_dp.parallel.pipeline_parallel.stage_messages import StageP2P
from mindnlp_dp.pipeline_schedules.schedules import SCHEDULES
from mindnlp_dp.runtime.arrays import to_host
from mindnlp_dp.runtime.mesh_spec import parse_mesh

COLUMNS = 3
UNEVEN = ["pp=2,dp=2|1,tp=1|2", "pp=2,tp=2|1,dp=1|2", "pp=2,dp=3|1,tp=1", "pp=2,dp=1|3", "pp=3,dp=2|4|1,tp=1|1|2"]


class Group:
    """A group of the modeled job, for one of its ranks."""

    def __init__(self, streams, ranks, rank, matches_in_order):
        self._given = streams, matches_in_order
        self.ranks, self.rank, self.world_size = ranks, ranks.index(rank), len(ranks)
        self._rank = rank
        self._transport = StreamTransport(streams, ranks, rank, matches_in_order=matches_in_order)

    def all_gather_object(self, value):
        return [value] * self.world_size

    def split(self, ranks, labels=()):
        streams, matches_in_order = self._given
        return Group(streams, tuple(ranks), self._rank, matches_in_order)

    def set_rank_labels(self, labels):
        pass

    def label(self, rank=None):
        return str(self.rank if rank is None else rank)


class NumberedPipeline(Pipeline):
    """The package's pipeline, whose stages compute numbers that name their stage and micro-batch."""

    def __init__(self, mesh, schedule, streams, fails_at=None):
        self.mesh, self.schedule, self.ties = mesh, schedule, []
        self.stage, self.num_stages = mesh.index("pp"), mesh.sizes["pp"]
        self.messages = StageP2P(mesh)
        self._is_first, self._is_last = mesh.is_first_stage, mesh.is_last_stage
        self._sharers = mesh.group("dp_in_stage")
        self._streams, self._fails_at = streams, fails_at
        self.received = []
        self._broken_by = ""

    def _reports_losses(self, batch):
        return False

    def _check(self, kind, share, came, stage):
        if (kind, self.stage, share.number) == self._fails_at:
            raise ValueError(f"{kind} pass {share.number} of stage {self.stage} fails")
        if came is not None:
            self.received.append((came, 1000 * (kind == "backward") + 10 * share.number + stage))

    def _compute(self, received, share):
        self._check("forward", share, received, self.stage - 1)
        if self._is_last:
            return received, LazyArray(self._streams, self.mesh.world.rank, np.array(1.0))
        return received, np.full((len(share.batch["x"]), COLUMNS), 10.0 * share.number + self.stage)

    def _differentiate(self, share, received, output, incoming, parameters):
        self._check("backward", share, None if self._is_last else incoming, self.stage + 1)
        return [], None if received is None else np.full(received.shape, 1000.0 + 10 * share.number + self.stage)


def run_update(mesh, schedule, num_micro_batches, *, matches_in_order=True, fails_at=None):
    """Run an update of a pipeline on all ranks of a mesh; return the losses or the error of each rank."""
    sizes = parse_mesh(mesh)
    world_size = sum(
        np.prod([size[stage] if isinstance(size, tuple) else size for axis, size in sizes.items() if axis != "pp"])
        for stage in range(sizes["pp"])
    )
    streams, results = Streams(int(world_size)), [None] * int(world_size)

    def run(rank):
        streams.begin(rank)
        try:
            world = Group(streams, tuple(range(len(results))), rank, matches_in_order)
            pipeline = NumberedPipeline(DeviceMesh(sizes, world), schedule, streams, fails_at)
            batches = [
                PipelineMicroBatch({"x": np.zeros((12, 2))}, None, lambda batch: 1.0, seed=0)
                for _ in range(num_micro_batches)
            ]
            try:
                steps = list(pipeline.run(batches, []))
            except ValueError:
                with pytest.raises(RuntimeError, match="cannot continue after an error in an update .*ValueError"):
                    list(pipeline.run(batches, []))
                raise
            assert all(isinstance(step, MicroStep) for step in steps)
            streams.synchronize(rank)
            for came, number in pipeline.received:
                np.testing.assert_array_equal(to_host(came), number)
            results[rank] = [step.loss for step in steps]
        except Exception as error:  # noqa: BLE001
            # The caller compares it.
            results[rank] = error
        finally:
            streams.end(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


@pytest.mark.core
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_stages", range(2, 9))
def test_every_pipeline_schedule_completes_on_device_streams(schedule, num_stages):
    for num_micro_batches in range(1, 17):
        results = run_update(f"pp={num_stages}", schedule, num_micro_batches)
        assert results == [[1.0] * num_micro_batches] * num_stages


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mesh", ["pp=2,tp=2", "dp=2,pp=3", *UNEVEN])
def test_pipeline_stages_of_several_ranks_complete_on_device_streams(schedule, mesh):
    for num_micro_batches in (1, 2, 5):
        for losses in run_update(mesh, schedule, num_micro_batches):
            # Ranks that split a micro-batch have their part of its loss.
            assert len(losses) == num_micro_batches


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_stages", [2, 4])
def test_pipeline_messages_in_program_order_deadlock_on_device_streams(schedule, num_stages):
    """Check the model: it finds the deadlock of sends that are issued as soon as an activation is made."""
    for num_micro_batches in (1, 2, 4):
        results = run_update(f"pp={num_stages}", schedule, num_micro_batches, matches_in_order=False)
        if schedule == "gpipe" or num_micro_batches == 1:
            assert results == [[1.0] * num_micro_batches] * num_stages
        else:
            assert {type(result) for result in results} == {DeadlockError}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_failing_pipeline_stage_raises_its_error_without_waiting(schedule, kind):
    """The other stages wait for it until the launcher ends them, because a device cannot take a message back."""
    for stage in range(4):
        for number in (0, 2, 5):
            results = run_update("pp=4", schedule, 6, fails_at=(kind, stage, number))
            assert str(results[stage]) == f"{kind} pass {number} of stage {stage} fails"
            assert all(isinstance(result, (list, DeadlockError)) for r, result in enumerate(results) if r != stage)
