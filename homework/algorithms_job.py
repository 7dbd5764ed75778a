"""Time and count every algorithm of all-reduce at one number of ranks; algorithms.py starts this job.

mpirun -n 4 python homework/algorithms_job.py --bytes 4096 1048576 --write FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from theory.all_reduce import ALGORITHMS
from theory.costs import fit
from theory.endpoint import MPIEndpoint

# The message sizes to which the cost model is fitted.
_FIT_BYTES = (4, 1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)

# The measurement of a size ends after this time or this number of repeats.
_SECONDS, _MOST_REPEATS = 0.4, 30


def main() -> None:
    """Time the algorithms on the ranks of this job; rank 0 writes the times as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, nargs="+", required=True)
    parser.add_argument("--write", type=Path, required=True)
    args = parser.parse_args()
    try:
        # Not above: this import starts MPI.
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        sys.exit(f'error: MPI cannot be used: {error}; pip install "mindnlp-dp[mpi]"')
    comm = MPI.COMM_WORLD
    endpoint = MPIEndpoint(comm)
    measured: dict[str, Any] = {"world_size": comm.size, "models": _fit_models(endpoint), "algorithms": {}}
    for name, algorithm in ALGORITHMS.items():
        rows = []
        for num_bytes in args.bytes:
            array = np.full(num_bytes // 4, comm.rank + 1, np.float32)
            before = endpoint.messages_sent, endpoint.bytes_sent
            total = algorithm(endpoint, array)
            assert (total == comm.size * (comm.size + 1) / 2).all(), f"{name}: the sum over the ranks is wrong"
            mine = endpoint.messages_sent - before[0], endpoint.bytes_sent - before[1]
            sent = comm.allgather(mine)
            seconds = _median_seconds(comm, partial(algorithm, endpoint, array))
            rows.append({"bytes": num_bytes, "seconds": seconds, "sent": sent})
        measured["algorithms"][name] = rows
    if comm.rank == 0:
        args.write.write_text(json.dumps(measured))


def _median_seconds(comm: Any, call: Callable[[], Any]) -> float:
    """Return the median time of ``call`` on the slowest rank; all ranks repeat it equally often."""
    times: list[float] = []
    began = time.perf_counter()
    while comm.bcast(len(times) < 3 or (time.perf_counter() - began < _SECONDS and len(times) < _MOST_REPEATS)):
        comm.Barrier()
        start = time.perf_counter()
        call()
        times.append(max(comm.allgather(time.perf_counter() - start)))
    return statistics.median(times)


def _fit_models(endpoint: MPIEndpoint) -> dict[str, list[float]]:
    """Fit latency, seconds per byte and seconds per added byte: for one message at a time, and for all ranks at once.

    The first model predicts a star, the second a ring. They differ when there are more ranks than cores, or when the
    ranks share one memory.
    """
    comm, rank, size = endpoint.comm, endpoint.rank, endpoint.world_size
    one: list[float] = []
    all_at_once: list[float] = []
    for num_bytes in _FIT_BYTES:
        x = np.zeros(num_bytes // 4, np.float32)

        def there_and_back(x: np.ndarray = x) -> None:
            if rank == 0:
                endpoint.send(x, 1)
                endpoint.recv(x, 1)
            elif rank == 1:
                endpoint.send(endpoint.recv(x, 0), 0)

        def round_the_ring(x: np.ndarray = x) -> None:
            endpoint.sendrecv(x, (rank + 1) % size, x, (rank - 1) % size)

        one.append(_median_seconds(comm, there_and_back) / 2)
        all_at_once.append(_median_seconds(comm, round_the_ring))
    x = np.ones(_FIT_BYTES[-1] // 4, np.float32)
    adding = _median_seconds(comm, lambda: x + x) / x.nbytes
    return {
        "one at a time": [*fit(_FIT_BYTES, one), adding],
        "all at once": [*fit(_FIT_BYTES, all_at_once), adding],
    }


if __name__ == "__main__":
    main()
