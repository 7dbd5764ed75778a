"""This module defines the channel on which ranks sum gradients, separate from the job's other collectives.

A background thread may use it while the main thread calls collectives. The library decides in which memory the buckets
lie (:mod:`mindnlp_dp.data_parallel.buckets`): a library of host memory sums an array in place, or rows that the ranks
of a host share; a device's library begins a sum of tensors.

When ranks leave an exchange half way, later ones would not match: the channel is abandoned, and a new one is opened.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.transports.polling_wait import PollingWait


class Channel(abc.ABC):
    """Exchanges gradients between all ranks of a group; synchronizers and updaters use it.

    Attributes:
        world_size: number of ranks.
        shares_memory: whether :meth:`share` returns memory.
        num_hosts: number of hosts; 1 if the library does not distinguish hosts.
        is_first_of_host: whether this rank writes the data that all ranks sharing its memory have in common.
        slice_index: number of the slice, out of ``world_size``, that this rank reduces.
        cannot_overlap: reason why gradients cannot be exchanged during a backward pass; empty if they can.
        abandoned: reason why this rank left an exchange half way; empty if it did not.
        is_superseded: whether a newer channel has replaced this one.
        bytes_sent: bytes of gradients that this rank has sent to other hosts; None if they are not counted.
    """

    world_size: int
    slice_index: int
    shares_memory = False
    is_first_of_host = True
    num_hosts = 1
    cannot_overlap = ""
    abandoned = ""
    is_superseded = False
    bytes_sent: Optional[int] = None

    @abc.abstractmethod
    def inverse_total(self, number: float, waiter: Optional[PollingWait] = None) -> Any:
        """Return one over the sum of the ranks' numbers, the scale of gradient sums; None if the sum is 0.

        On a background thread, pass ``waiter``. On a device, the result is a tensor, and the host does not wait.
        """

    # Weights, which ranks that shard an update keep in shared memory or send to each other.

    def share(self, num_bytes: int) -> Optional[np.ndarray]:
        """Return ``num_bytes`` zeroed bytes that all ranks of this host see; None without shared memory. A collective.

        A rank that writes there must make sure that no other rank reads meanwhile (:meth:`wait_for_host`).
        """
        return None

    def wait_for_host(self) -> None:  # noqa: B027
        """Wait in a barrier for the ranks that share memory with this one."""

    def gather_from_hosts(self, array: np.ndarray, bounds: Sequence[int]) -> None:  # noqa: B027
        """Copy the slices that other hosts' ranks have made into a flat array that this host's ranks share.

        Each rank has made the slice of its ``slice_index``; ``bounds`` say where slices begin, and the last one ends.
        The other ranks of this host see the slices after a barrier.
        """

    def abandon(self, error: BaseException) -> None:
        """Forbid later exchanges, because the ranks' exchanges do not match any more."""
        self.abandoned = f"{type(error).__name__}: {error}"

    def check_open(self, rank: int) -> None:
        """Raise RuntimeError if this channel can no longer be used."""
        if self.abandoned or self.is_superseded:
            reason = f" ({self.abandoned})" if self.abandoned else ""
            raise RuntimeError(
                f"rank {rank} left the exchange of an update before its end{reason}. If all ranks "
                "did, call train() again, "
                "or make a new synchronizer or train step, on all of them (on a device, start new processes); if not, "
                "the others wait for this one: end the job"
            )


class HostChannel(Channel):
    """Sums NumPy arrays in host memory."""

    @abc.abstractmethod
    def all_reduce_in_place(self, buffer: np.ndarray, waiter: Optional[PollingWait] = None) -> None:
        """Sum a contiguous float32 or float64 array over the ranks; on a background thread, pass ``waiter``."""

    def inverse_total(self, number: float, waiter: Optional[PollingWait] = None) -> Any:
        mine = np.array([number], np.float32)
        self.all_reduce_in_place(mine, waiter)
        return 1.0 / float(mine[0]) if mine[0] > 0 else None
