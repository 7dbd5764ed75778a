"""Estimates this machine as a cluster with one device per core, by timing NumPy for a second.

:func:`~mindnlp_dp.planner.load_cluster` calls it for "this-machine", for a first plan without MindSpore. Products and
memory are timed with all cores busy; the overhead of MindSpore's operators is taken from the machine of
docs/benchmarks.md. ``mindnlp-dp plan --measure`` measures all of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

_SIZE = 768
_VALUES = 1 << 23
# Microseconds per operator call, and billions per second of attention scores and of dropout's random numbers, with
# MindSpore 2.8 on one core of an AMD EPYC.
_CALL_US, _GSCORES, _GDRAWS = 90, 0.085, 0.5


def this_machine() -> dict[str, Any]:
    """Return the keys of a cluster (:func:`~mindnlp_dp.planner.cluster.load_cluster`)."""
    from threadpoolctl import threadpool_limits

    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with threadpool_limits(1), ThreadPoolExecutor(num_cores) as pool:
        products = _slowest(pool, num_cores, _product)
        copies = _slowest(pool, num_cores, _copy)
    bandwidth = 8 * _VALUES / copies
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / num_cores
    return {
        "name": "this machine, a device a core", "hosts": 1, "devices_per_host": num_cores,
        "memory_gib": memory / 2**30, "tflops": 2e-12 * _SIZE**3 / products, "efficiency": 0.8,
        "memory_bandwidth_gbs": 1e-9 * bandwidth, "gscores": _GSCORES, "gdraws": _GDRAWS, "call_us": _CALL_US,
        "precision": "float32",
        # A message is written by one rank and read by another.
        "inside": {"latency_us": 25, "bandwidth_gbs": 0.5e-9 * bandwidth},
        "source": "timed for a second with NumPy; --measure FILE measures with MindSpore",
    }  # fmt: skip


def _slowest(pool: ThreadPoolExecutor, num: int, function: Callable[[], float]) -> float:
    """Return the slowest core's time with all cores busy, the best of three rounds."""
    return min(max(pool.map(lambda _: function(), range(num))) for _ in range(3))


def _product() -> float:
    a = np.ones((_SIZE, _SIZE), np.float32)
    a @ a
    began = time.perf_counter()
    a @ a
    return time.perf_counter() - began


def _copy() -> float:
    a = np.ones(_VALUES, np.float32)
    b = a.copy()
    began = time.perf_counter()
    np.copyto(b, a)
    return time.perf_counter() - began
