"""Test that a rank has its cores and scheduling policy again after the initialization of MindSpore's cluster."""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace

import pytest

from mindnlp_dp.communication.transports.mindspore.mindspore_cluster import init_cluster


def state(thread=0):
    return os.sched_getaffinity(thread), os.sched_getscheduler(thread)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("device", ["CPU", "Ascend"])
def test_cores_and_scheduling_policy_are_restored_after_cluster_init(monkeypatch, device, fails):
    usual, seen, is_over = state(), [], threading.Event()
    begun = threading.Barrier(2)

    def live():
        begun.wait()
        is_over.wait()

    # A thread that already exists is not changed.
    old = threading.Thread(target=live)
    old.start()
    begun.wait()
    kept = {sorted(usual[0])[-1]}
    os.sched_setaffinity(old.native_id, kept)
    new = threading.Thread(target=live)

    def init():
        new.start()
        begun.wait()
        seen.extend([state(), state(new.native_id), state(old.native_id)])
        if fails:
            raise RuntimeError("no rank comes")

    ms = SimpleNamespace(communication=SimpleNamespace(init=init), get_context=lambda name: device)
    monkeypatch.setitem(sys.modules, "mindspore", ms)
    monkeypatch.delenv("MS_ROLE", raising=False)
    try:
        if fails:
            with pytest.raises(RuntimeError, match="no rank comes"):
                init_cluster()
        else:
            init_cluster()
        of_one_core = (seen[0][0], os.SCHED_BATCH) if device == "CPU" else usual
        assert seen == [of_one_core, of_one_core, (kept, os.SCHED_OTHER)]
        assert len(seen[0][0]) == (1 if device == "CPU" else len(usual[0]))
        assert (state(), state(new.native_id), state(old.native_id)) == (usual, usual, (kept, os.SCHED_OTHER))
    finally:
        is_over.set()
        for thread in (old, new):
            thread.join()


def test_cluster_init_works_without_permission_to_change_the_scheduling_policy(monkeypatch):
    def refuse(*args):
        raise PermissionError("seccomp")

    usual, met = state(), []
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    ms = SimpleNamespace(
        communication=SimpleNamespace(init=lambda: met.append(state())), get_context=lambda name: "CPU"
    )
    monkeypatch.setitem(sys.modules, "mindspore", ms)
    init_cluster()
    assert (met, state()) == ([usual], usual)
