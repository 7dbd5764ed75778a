"""This job tests a backend for ``mindnlp-dp doctor``: it starts a group, sums 4 MiB, and prints the times as JSON."""

from __future__ import annotations

import json
import time

import numpy as np

import mindnlp_dp as dp

NUM_TRIES = 5

if __name__ == "__main__":
    began = time.perf_counter()
    group = dp.init_process_group()
    started = time.perf_counter() - began
    ones = np.ones(1 << 20, np.float32)
    seconds = []
    for _ in range(NUM_TRIES):
        began = time.perf_counter()
        total = group.all_reduce(ones)
        seconds.append(time.perf_counter() - began)
        assert (total == group.world_size).all(), "the sum over the ranks is wrong"
    if group.is_main:
        print(json.dumps({"backend": group.backend, "started": started, "all_reduce": sorted(seconds)[NUM_TRIES // 2]}))
