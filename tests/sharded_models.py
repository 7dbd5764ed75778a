"""Train models that are sharded over ranks, and the same models in one process, for the parallel tests."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import pytest
from library import Stop
from tiny_transformers import batch, build, rows, train, whole_weights

import mindnlp_dp as dp
from mindnlp_dp.communication.operations import Operation
from mindnlp_dp.parallel.device_mesh import get_device_mesh
from mindnlp_dp.runtime.mesh_spec import parse_mesh
from models import Rows, alone, tiny_roberta
from models import train as train_by_trainer

IS_MPI = dp.get_process_group().backend == "mpi"
# Meshes whose stages differ.
MIXED = "pp=2,dp=2|1,tp=1|2"
BACK = "pp=2,tp=2|1,dp=1|2"
UNEVEN = "pp=2,dp=3|1"
HAS_MESSAGES = not dp.get_process_group().library_without(Operation.MESSAGES)
needs_mpi = pytest.mark.skipif(
    not IS_MPI, reason="MindSpore's CPU library has no all-to-all, and takes no message back"
)
needs_messages = pytest.mark.skipif(not HAS_MESSAGES, reason="MindSpore's CPU library has messages from 2.8 on")


@pytest.fixture(params=[False, pytest.param(True, id="acknowledged")])
def acknowledged_sends(request, monkeypatch):
    """Run a test as it is, and with MCCL's sends as HCCL's are: complete when they are received."""
    if not request.param:
        return
    if IS_MPI:
        pytest.skip("MPI's sends are complete when they are buffered, or received")
    import mindspore

    from mindnlp_dp.communication.transports.mindspore.collective_calls import MCCLCalls

    begin_send, recv = MCCLCalls.begin_send, MCCLCalls.recv

    def send_and_wait(self, x, dst, tag):
        handle = begin_send(self, x, dst, tag)
        recv(self, mindspore.ops.zeros((1,), mindspore.int8), dst)
        return handle

    def receive_and_acknowledge(self, like, src, tag=0):
        received = recv(self, like, src, tag)
        begin_send(self, mindspore.ops.zeros((1,), mindspore.int8), src, tag)
        return received

    monkeypatch.setattr(MCCLCalls, "begin_send", send_and_wait)
    monkeypatch.setattr(MCCLCalls, "recv", receive_and_acknowledge)


@pytest.fixture(autouse=True)
def one_mesh_at_a_time(group):
    """Reset the job's mesh after each test."""
    yield
    dp.init_device_mesh({"dp": group.world_size})


def pieces_of(mesh, num_micro_steps):
    """Return a function that makes this rank's micro-batches from a global batch."""
    size, rank = mesh.dp_group.world_size, mesh.dp_group.rank

    def pieces(columns):
        per_step = 8 // num_micro_steps
        each = per_step // size
        starts = [number * per_step + rank * each for number in range(num_micro_steps)]
        return [rows(columns, start, start + each) for start in starts]

    return pieces


@functools.cache
def of_one_process(kind, zero_stage=0, optimizer="adamw"):
    with alone() as single:
        model = build(kind)
        step = train(model, kind, lambda columns: [columns], group=single, zero_stage=zero_stage, optimizer=optimizer)
        return whole_weights(model), step.norms


def assert_close(model, kind, tolerance=1e-6, optimizer="adamw"):
    expected, _ = of_one_process(kind, optimizer=optimizer)
    found = whole_weights(model)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight, rtol=0, atol=tolerance, err_msg=name)


def crashed(*args, **settings):
    """Interrupt training after update 1, whose checkpoint is left."""
    # Threads of all ranks complete it when the next one is written, at the latest.
    is_late = settings.get("async_save") and settings.get("sharded_checkpoints")
    with pytest.raises(KeyboardInterrupt), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the last checkpoint is incomplete", RuntimeWarning)
        trained_by_trainer(*args, callbacks=[Stop(3 if is_late else 2)], **settings)
    args[0].barrier()


def trained_by_trainer(group, mesh, folder, resume=None, **settings):
    dp.init_device_mesh(parse_mesh(mesh))
    model = dp.parallelize(tiny_roberta(seed=1, num_layers=2, dropout=settings.pop("dropout", 0.0)))
    data = get_device_mesh().dp_group
    return train_by_trainer(
        model, Rows(24), folder, resume=resume, per_device_train_batch_size=4 // data.world_size,
        gradient_accumulation_steps=2, logging_steps=1, learning_rate=1e-3, **settings,
    )  # fmt: skip


def assert_resumes_like_uninterrupted(group, first, second, folder, whole, **settings):
    """Check that a run that crashes on one mesh and resumes on another ends like ``whole``, an undisturbed run."""
    settings = {"save_strategy": "steps", "save_steps": 1, **settings}
    crashed(group, first, folder, **settings)
    resumed = trained_by_trainer(group, second, folder, resume=True, **settings)
    assert resumed.state.global_step == 3
    found, expected = whole_weights(resumed.model), whole_weights(whole.model)
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight, rtol=0, atol=2e-6, err_msg=f"{first} to {second}: {name}")
    np.testing.assert_allclose(
        [row["loss"] for row in resumed.state.log_history if "loss" in row],
        [row["loss"] for row in whole.state.log_history if "loss" in row],
        atol=2e-4,
    )


class Sentences:
    """Data set of thirteen rows for a language model."""

    def __init__(self, kind="gpt2"):
        self._kind = kind

    def __len__(self):
        return 13

    def __getitem__(self, index):
        return {name: array[0] for name, array in batch(self._kind, 1, index).items()}
