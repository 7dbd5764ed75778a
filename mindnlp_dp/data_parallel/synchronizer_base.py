"""This module defines the interface of synchronizers, which accumulate gradients and average them over the ranks.

A train step accumulates the gradients of micro-batches and reduces them once per update. Subclasses
(naive_synchronizer.py, synchronizer.py) choose how to average. This module has what they share: input checks, and the
header, one small all-reduce that tells every rank the total weight of the update and which parameters were used.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

import numpy as np

from mindnlp_dp.communication.default_group import get_data_group
from mindnlp_dp.communication.gradient_channel import open_gradient_channel
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.communication.replicas import check_same_structure
from mindnlp_dp.communication.transports.channel import Channel

# Whether means stay in the buckets; of several synchronizers combined, a list with the answer for each.
InPlace = Union[bool, list[bool]]


@dataclass(frozen=True)
class ExchangeStats:
    """Holds the cost of one update's exchange on this rank.

    Attributes:
        num_bytes: The bytes of gradients given to the exchange.
        num_calls: The number of collective calls.
        bytes_sent: The bytes sent to other hosts; None if the transport does not count them.
        exposed_seconds: The seconds that the computing thread spent on the exchange, waits for slower ranks included.
        hidden_seconds: The seconds of exchange on another thread during the backward pass. (This process cannot
            measure what a device does in the background.)
        spans: The parts of the exchange: name, and ``time.perf_counter()`` at begin and end.
    """

    num_bytes: int
    num_calls: int
    bytes_sent: Optional[int]
    exposed_seconds: float
    hidden_seconds: float
    spans: tuple[tuple[str, float, float], ...]

    def __str__(self) -> str:
        sent = "" if self.bytes_sent is None else f"; {self.bytes_sent / 1e6:.1f} MB to other hosts"
        return (
            f"{self.num_bytes / 1e6:.1f} MB of gradients in {self.num_calls} calls, "
            f"{1e3 * self.exposed_seconds:.1f} ms exposed, {1e3 * self.hidden_seconds:.1f} ms hidden{sent}"
        )


class Synchronizer(abc.ABC):
    """Interface through which a train step accumulates weighted gradients and averages them over the ranks.

    Attributes:
        names: The names of the parameters.
        parameters: The parameters that the gradients belong to.
        group: The ranks that exchange gradients.
        total_loss_weight: The weight of the last reduced update, summed over all ranks.
        num_skipped: The micro-batches of that update that ranks left out with :meth:`skip`, summed over all ranks.
        seconds: The seconds that the computing thread has spent on the exchange, waits for slower ranks included.
        num_bytes: This rank's bytes of gradients given to the exchange so far.
        num_calls: This rank's collective calls so far.
        last_exchange: The cost of the last update's exchange.
        channel: The channel that transports the gradients.
        order: The order in which gradients are packed, if it affects the last bits of the result; else None.
        defers_losses: Whether :meth:`accumulate` takes losses that a device is still computing. They are read with the
            header, so that an update waits for the device once.
        losses: The values of the last update's losses that :meth:`accumulate` was given, in this order.
        sum_of_squares: The sum of squares of the last update's averaged gradients, over all of their elements on all
            ranks, if it was read with the header; else None.
    """

    names: list[str]
    parameters: list[Any]
    group: ProcessGroup
    channel: Channel
    last_exchange: ExchangeStats
    order: Optional[Sequence[int]] = None
    defers_losses = False
    losses: Sequence[float] = ()
    sum_of_squares: Optional[float] = None
    seconds = 0.0
    num_bytes = num_calls = 0
    _exchange_is_off = False

    @property
    @abc.abstractmethod
    def total_loss_weight(self) -> float: ...

    @property
    @abc.abstractmethod
    def num_skipped(self) -> int: ...

    def __call__(self, gradients: Sequence[Optional[Any]], loss_weight: float = 1.0) -> list[Optional[Any]]:
        """Accumulate one micro-batch and reduce, for an update of one micro-batch.

        Within :meth:`no_sync` nothing is exchanged, and the gradients are returned unchanged.
        """
        self.accumulate(gradients, loss_weight)
        return list(gradients) if self._exchange_is_off else list(self.reduce())

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make calls only accumulate, like DistributedDataParallel's ``no_sync``; the next call outside reduces all.

        An exception inside the context drops what this rank has accumulated, so that no partial sum is exchanged.
        """
        before, self._exchange_is_off = self._exchange_is_off, True
        try:
            yield
        except BaseException:
            self.reset()
            raise
        finally:
            self._exchange_is_off = before

    @contextlib.contextmanager
    def backward(self, loss_weight: float) -> Iterator[None]:
        """Enclose the last forward and backward pass of an update; pass its gradients to :meth:`accumulate` afterwards.

        ``loss_weight`` is the weight of these gradients. An exchange that overlaps begins inside this context;
        otherwise the context does nothing.
        """
        yield

    # These defaults are for synchronizers that sum each gradient separately: they have no buckets to pack, and no
    # rounding to compensate.

    def pack_in_order(self, order: Sequence[int]) -> None:  # noqa: B027
        """Pack gradients in the ``order`` of an earlier run; called by every rank, between two updates."""

    def reset_error_feedback(self) -> None:  # noqa: B027
        """Clear the error feedback of compression, as a resumed process does; called by every rank."""

    def repack_if_learned(self) -> None:  # noqa: B027
        """Repack the buckets if a new order was learned; called after the update. A collective."""

    @abc.abstractmethod
    def accumulate(
        self, gradients: Sequence[Optional[Any]], loss_weight: float = 1.0, *, loss: Optional[Any] = None
    ) -> None:
        """Add ``loss_weight * gradient`` for every parameter, in the order of ``parameters``; None adds nothing.

        With a ``loss``, a scalar tensor (only if :attr:`defers_losses`), the micro-batch is left out as by :meth:`skip`
        if the loss turns out to be NaN or infinite.

        Raises:
            ValueError: If the number of gradients or a shape is wrong, or the weight is negative or not finite.
        """

    @abc.abstractmethod
    def check_shapes(self) -> None:
        """Raise ValueError with the parameter's name if a parameter's shape has changed since construction."""

    @abc.abstractmethod
    def skip(self) -> None:
        """Leave out one micro-batch, such as one whose loss is NaN; the next reduce tells all ranks the number."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Discard what this rank has accumulated, as after an exception, so that no partial sum is exchanged."""

    @abc.abstractmethod
    def reduce(self, *, in_place: InPlace = False) -> Any:
        """Exchange the accumulated gradients and begin a new update; a collective, called by every rank.

        Returns the weighted mean for every parameter, in private memory of this rank; only None if the ranks skipped
        all of their micro-batches.

        With ``in_place``, which needs buckets, the means stay in the buckets until the next update begins
        (:meth:`.Bucket.sums`). Returns a mask of the parameters that any rank used (a bucket without any is not
        exchanged), or None if all micro-batches were skipped. Call :meth:`repack_if_learned` after the use.

        Raises:
            ValueError: Raised on every rank if the total weight is zero and no micro-batch was skipped.
        """


class BufferedSynchronizer(Synchronizer):
    """Accumulates gradients in its own memory; subclasses define how to store and sum them over the ranks."""

    def __init__(self, parameters: Iterable[Any], group: Optional[ProcessGroup] = None) -> None:
        self.group = group or get_data_group()
        named = [p if isinstance(p, tuple) else (str(i), p) for i, p in enumerate(parameters)]
        check_same_structure(named, self.group)
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._shapes = [tuple(parameter.shape) for parameter in self.parameters]
        self._total_loss_weight = 0.0
        self._num_skipped = 0
        self.channel = open_gradient_channel(self.group)
        self._sent_before = self.channel.bytes_sent or 0
        self._spans: list[tuple[str, float, float]] = []
        # Whether the exchange during the backward pass runs on another thread than the computation.
        self._hides = False
        self._loss_weight = 0.0
        self._skipped = 0
        self._used = np.zeros(len(named), np.float32)

    @property
    def total_loss_weight(self) -> float:
        return self._total_loss_weight

    @property
    def num_skipped(self) -> int:
        return self._num_skipped

    def reset(self) -> None:
        self._begin_update()

    def _begin_update(self) -> None:
        self._loss_weight, self._skipped = 0.0, 0
        self._used[:] = 0
        self._spans.clear()
        self._clear()

    def accumulate(
        self, gradients: Sequence[Optional[Any]], loss_weight: float = 1.0, *, loss: Optional[Any] = None
    ) -> None:
        if len(gradients) != len(self.parameters):
            raise ValueError(
                f"expected {len(self.parameters)} gradients, one for each parameter, got {len(gradients)} "
                f"(rank {self.group.label()})"
            )
        if not 0 <= loss_weight < float("inf"):
            raise ValueError(
                f"a weight must be finite and not negative, got {loss_weight} on rank {self.group.label()}"
            )
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            expected = self._shapes[index]
            if tuple(gradient.shape) != expected:
                self.check_shapes()
                raise ValueError(
                    f"the gradient of {self.names[index]!r} has shape {tuple(gradient.shape)}, expected {expected} "
                    f"(rank {self.group.label()})"
                )
        # With a weight of zero nothing may be added: zero times NaN would be NaN.
        if loss_weight > 0:
            self._count(gradients, loss_weight, loss)
            self._add(gradients, loss_weight)

    def _count(self, gradients: Sequence[Optional[Any]], loss_weight: float, loss: Optional[Any]) -> None:
        assert loss is None, "a loss is deferred on devices only"
        self._loss_weight += loss_weight
        self._used[[index for index, gradient in enumerate(gradients) if gradient is not None]] = 1

    def check_shapes(self) -> None:
        for name, parameter, shape in zip(self.names, self.parameters, self._shapes):
            if tuple(parameter.shape) != shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(parameter.shape)} now, and had {shape} when training began (rank "
                    f"{self.group.label()}); change a model before it is trained (as resize_token_embeddings does), or "
                    "make a new optimizer and a new train step after it"
                )

    def _add(self, gradients: Sequence[Optional[Any]], loss_weight: float) -> None:
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._put(index, gradient, loss_weight)

    def skip(self) -> None:
        self._skipped += 1

    def reduce(self, *, in_place: InPlace = False) -> Any:
        assert not in_place, "only buckets keep means in place"
        began = time.perf_counter()
        num_bytes, num_calls = self.num_bytes, self.num_calls
        try:
            return self._reduce()
        finally:
            ended, sent = time.perf_counter(), self.channel.bytes_sent
            during_backward = sum(max(0.0, min(end, began) - start) for _, start, end in self._spans)
            hidden, exposed = (during_backward, 0.0) if self._hides else (0.0, during_backward)
            self.seconds += ended - began + exposed
            self.last_exchange = ExchangeStats(
                self.num_bytes - num_bytes,
                self.num_calls - num_calls,
                None if sent is None else sent - self._sent_before,
                ended - began + exposed,
                hidden,
                tuple(self._spans),
            )
            self._sent_before = sent or 0
            self._begin_update()

    def _timed(self, name: str, began: float) -> None:
        """Record a span of the exchange that ends now."""
        self._spans.append((name, began, time.perf_counter()))

    def _reduce(self) -> list[Optional[Any]]:
        used, _ = self._exchange_header([])
        return self._average(used)

    def _exchange_header(self, notes: Sequence[float], last_note: Any = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """Sum the ranks' weights; return which parameters any rank used, and the sums of the ranks' ``notes``.

        The sum of ``last_note`` comes last; it may be a tensor that a device is still computing.
        """
        mine = np.array([self._loss_weight, self._skipped, *notes], np.float32)
        header = self.group.all_reduce_header(np.concatenate([self._used, mine]), last_note)
        used, (loss_weight, skipped, *sums) = header[: len(self._used)], header[len(self._used) :]
        self._total_loss_weight, self._num_skipped = float(loss_weight), int(skipped)
        return used > 0, np.array(sums)

    def _average(self, used: np.ndarray) -> list[Optional[Any]]:
        if self.total_loss_weight > 0:
            return self._exchange(used, 1.0 / self.total_loss_weight)
        if self.num_skipped:
            return [None] * len(self.parameters)
        raise ValueError("no rank had a sample in this update, so no gradient can be averaged")

    @abc.abstractmethod
    def _put(self, index: int, gradient: Any, loss_weight: float) -> None: ...

    @abc.abstractmethod
    def _exchange(self, used: np.ndarray, scale: float) -> list[Optional[Any]]: ...

    @abc.abstractmethod
    def _clear(self) -> None: ...


@dataclass(frozen=True)
class MicroStep:
    """The result of one forward and backward pass on this rank.

    Attributes:
        loss: the mean loss of the micro-batch; if the exchange defers losses, perhaps a scalar tensor.
        gradients: gradients in the order of the synchronizer's parameters; None if the micro-batch has no weight and
            was not computed.
        loss_weight: the weight of the loss in the mean over ranks and micro-batches.
        indices: indices of the samples, if known.
        has_nonfinite_peer: whether the gradients contain NaN or infinity from another rank's loss; experts get
            gradients from several ranks.
        loss_replication: number of ranks that split this micro-batch. Each has the full loss, and the gradients of its
            part times ``loss_replication``, so that the weighted mean of the exchange is the full gradient.
    """

    loss: Any
    gradients: Optional[Sequence[Optional[Any]]]
    loss_weight: float
    indices: Optional[np.ndarray] = None
    has_nonfinite_peer: bool = False
    loss_replication: int = 1

    @classmethod
    def without_weight(cls, indices: Optional[np.ndarray] = None) -> MicroStep:
        """Return a micro-step that was not computed because nothing in it counts, such as when all labels are -100."""
        return cls(0.0, None, 0.0, indices)
