"""This module creates the buckets for a channel: in shared memory, in host memory or on a device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Optional

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.communication.transports.channel import Channel, HostChannel
from mindnlp_dp.communication.transports.mindspore.mindspore_transport import MindSporeChannel
from mindnlp_dp.communication.transports.mpi.host_memory import CACHE_LINE_BYTES, round_up
from mindnlp_dp.communication.transports.mpi.mpi_transport import MPIChannel
from mindnlp_dp.data_parallel.buckets.bucket import Bucket
from mindnlp_dp.data_parallel.buckets.bucket_layout import BucketLayout
from mindnlp_dp.data_parallel.buckets.device_bucket import DeviceBucket
from mindnlp_dp.data_parallel.buckets.host_bucket import HostBucket, sum_dtype
from mindnlp_dp.data_parallel.buckets.shared_memory_bucket import SharedBucket


def make_buckets(
    layouts: Sequence[BucketLayout], group: ProcessGroup, channel: Channel, compression: Optional[str] = None
) -> list[Bucket]:
    """Return one bucket for each layout, exchanged over ``channel``. A collective.

    ``compression`` is None, or "fp16" or "bf16" for gradients that are sent between processes. Ranks of a host that
    share memory send nothing to each other, so nothing is rounded there.
    """
    if isinstance(channel, MindSporeChannel):
        if group.backend == "mccl" and 1 < group.world_size == group.local_world_size:
            _hint_at_mpi(group.world_size, group.is_main)
        channel.check_types([layout.dtype for layout in layouts], compression)
        return [DeviceBucket(layout, channel, compression) for layout in layouts]
    assert isinstance(channel, HostChannel), "a channel sums arrays or tensors"
    shared = _shared(layouts, channel, compression) if isinstance(channel, MPIChannel) else None
    if shared is not None:
        return shared
    if compression and group.world_size > 1 and group.is_main:
        print(
            f"compression={compression!r} has no effect, because MPI itself exchanges the gradients, and it has no "
            "sums of half types"
        )
    return [HostBucket(layout, channel) for layout in layouts]


def _shared(layouts: Sequence[BucketLayout], channel: MPIChannel, compression: Optional[str]) -> Optional[list[Bucket]]:
    """Return buckets that are consecutive in rows of shared memory; None if memory cannot be shared."""
    dtypes: list[np.dtype] = [np.dtype(sum_dtype(layout)) for layout in layouts]
    edges = [0]
    for layout, dtype in zip(layouts, dtypes):
        edges.append(edges[-1] + round_up(layout.numel * dtype.itemsize, CACHE_LINE_BYTES))
    rows = channel.memory.rows(edges[-1])
    if rows is None:
        return None
    return [
        SharedBucket(layout, channel, rows[:, begin:end].view(dtype)[:, : layout.numel], compression)
        for layout, dtype, begin, end in zip(layouts, dtypes, edges, edges[1:])
    ]


@functools.cache
def _hint_at_mpi(world_size: int, is_main: bool) -> None:
    """Print, once per process, that the mpi backend is faster on one host."""
    if is_main:
        print(
            "hint: MindSpore's own library moves gradients here; on one host the mpi backend is faster "
            f"(docs/benchmarks.md): mindnlp-dp run --nproc {world_size} SCRIPT",
            flush=True,
        )
