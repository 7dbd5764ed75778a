"""Send arrays longer than MPI can count in 32 bits; test_large_arrays.py runs this script with two ranks."""

from __future__ import annotations

import numpy as np

import mindnlp_dp as dp

NUM_BYTES = 2**31 + 2**27

if __name__ == "__main__":
    group = dp.init_process_group()
    mine = np.zeros(NUM_BYTES, np.uint8)
    # Distinct values at both ends, and on both sides of every boundary between chunks.
    places = [0, 2**30 - 1, 2**30, 2**31 - 1, 2**31, NUM_BYTES - 1]
    mine[places] = np.arange(len(places)) + 10 * (group.rank + 1)

    def holds(array: np.ndarray, rank: int) -> bool:
        return array.shape == mine.shape and array[places].tolist() == [10 * (rank + 1) + n for n in range(len(places))]

    assert holds(group.broadcast(mine, src=1), 1)
    print("broadcast", flush=True)
    for rank, part in enumerate(group.all_gather(mine)):
        assert holds(part, rank)
    del part
    print("all_gather", flush=True)
    if group.rank == 0:
        group.send(mine, dst=1)
    else:
        assert holds(group.recv(mine, src=0), 0)
    group.barrier()
    print("send and recv", flush=True)
    total = group.all_reduce(mine)
    assert total[places].tolist() == [30 + 2 * n for n in range(len(places))]
    del total
    print("all_reduce", flush=True)
    text = group.broadcast_object(bytes(mine) if group.rank == 0 else None, src=0)
    assert (len(text), text[-1]) == (NUM_BYTES, 10 + len(places) - 1)
    print("broadcast_object", flush=True)
