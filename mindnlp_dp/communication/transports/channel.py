"""What the gradients of a job travel on: a line of their own beside its other collectives.

Goes in: buffers, perhaps from another thread than the one that calls collectives meanwhile. Comes out: their sums over
the ranks. What moves them decides in which memory they wait (:mod:`mindnlp_dp.gradients.buckets`): a library of host
memory sums an array in place, or rows that the ranks of a host share; a device's library begins a sum of tensors.

When ranks leave an exchange half way, later ones would not match: the channel is abandoned, and a new one is opened.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from .patience import Patience


class Channel(abc.ABC):
    """The exchange of gradients, of all ranks of a job.

    Attributes:
        world_size: how many ranks there are.
        shares_memory: whether :meth:`share` gives any.
        num_hosts: how many hosts' memories there are.
        is_first_of_host: whether this rank is the one that writes what those who share its memory have in common.
        slice_index: which slice of an exchanged array this rank makes, of ``world_size``.
        cannot_overlap: why nothing can be exchanged during a backward pass; empty when it can.
        abandoned: why this rank left an exchange half way, if it did.
        is_superseded: whether a newer channel took this one's place.
        bytes_sent: how many bytes of gradients this rank sent to other hosts; None where nobody counts them.
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
    def inverse_total(self, number: float, patience: Optional[Patience] = None) -> Any:
        """One over the sum of the ranks' numbers, by which sums are scaled; None where it is 0.

        From another thread, with patience. On a device a tensor, which nobody waits for.
        """

    # Weights, which ranks that divide an update between them share, or give each other.

    def share(self, num_bytes: int) -> Optional[np.ndarray]:
        """So many bytes, zeroed, that all ranks of this host see; None where none share memory. A collective.

        Who writes there sees to it that nobody reads meanwhile (:meth:`wait_for_host`).
        """
        return None

    def wait_for_host(self) -> None:  # noqa: B027
        """A barrier of the ranks that share memory."""

    def gather_from_hosts(self, array: np.ndarray, bounds: Sequence[int]) -> None:  # noqa: B027
        """Fill in, in a flat array that this host's ranks share, what other hosts' ranks have made.

        Each rank has made the slice of its ``slice_index``; ``bounds`` are where slices begin, and the last one ends.
        The other ranks of this host see it behind a barrier.
        """

    def abandon(self, error: BaseException) -> None:
        """The ranks' exchanges do not match any more: no later one may begin."""
        self.abandoned = f"{type(error).__name__}: {error}"

    def check_open(self, rank: int) -> None:
        """Raise RuntimeError when this channel is of no use any more."""
        if self.abandoned or self.is_superseded:
            reason = f" ({self.abandoned})" if self.abandoned else ""
            raise RuntimeError(
                f"rank {rank} left the exchange of a window half way{reason}. If all ranks did, call train() again, or "
                "make a new synchroniser or train step, on all of them (on a device, start new processes); if not, the "
                "others wait for this one: end the job"
            )


class HostChannel(Channel):
    """Sums NumPy arrays."""

    @abc.abstractmethod
    def all_reduce_in_place(self, buffer: np.ndarray, patience: Optional[Patience] = None) -> None:
        """Sum a contiguous float32 or float64 array over the ranks; from another thread, with patience."""

    def inverse_total(self, number: float, patience: Optional[Patience] = None) -> Any:
        mine = np.array([number], np.float32)
        self.all_reduce_in_place(mine, patience)
        return 1.0 / float(mine[0]) if mine[0] > 0 else None


class TensorChannel(Channel):
    """Sums MindSpore tensors of float64, float32, float16 and bfloat16, on their device."""

    @abc.abstractmethod
    def sum(self, x: Any) -> Any:
        """The sum over the ranks, as a new tensor."""

    @abc.abstractmethod
    def begin_sum(self, x: Any) -> tuple[Any, Optional[Any]]:
        """Begin to sum a tensor, in its memory or new one; the sum to be, and a handle to wait for, if any.

        On a device its stream goes on with it. MCCL, dispatched synchronously as a CPU wants it, has ended by then.
        """

    @abc.abstractmethod
    def begin_scatter_sum(self, x: Any) -> tuple[Any, Optional[Any]]:
        """Begin to sum a flat tensor of as many equal slices as there are ranks: this rank's to be, and a handle."""

    @abc.abstractmethod
    def gather_slices(self, x: Any) -> Any:
        """Every rank's flat tensor, of one length and type, one behind the other."""

    @abc.abstractmethod
    def reduces_natively(self, dtype: str) -> bool:
        """Whether the library itself sums this type, exactly as it should."""

    @abc.abstractmethod
    def check_compression(self, compression: Optional[str]) -> None:
        """Raise ValueError where the library cannot sum what ``compression`` makes of gradients."""
