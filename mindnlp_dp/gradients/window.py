"""One window of gradients: what every rank accumulates between two updates, with its weights.

Goes in: micro steps, each with its gradients and what they weigh. Comes out: their weighted mean over all ranks, in a
way that subclasses choose (naive.py, synchronizer.py). Here is what they have in common: what counts, what is refused,
and the header, one small all-reduce that tells every rank how much the window weighs and which parameters were used.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.collectives import ProcessGroup
from mindnlp_dp.communication.gradient_channel import open_gradient_channel
from mindnlp_dp.communication.process_group import get_data_group
from mindnlp_dp.communication.transports.channel import Channel
from mindnlp_dp.replicas.weights import check_same_structure


@dataclass(frozen=True)
class WindowReport:
    """What the exchange of one window took, on this rank.

    Attributes:
        num_bytes, num_calls: of gradients handed to the exchange, and in how many pieces.
        bytes_sent: to other hosts; None where nobody counts them.
        exposed_seconds: the computing thread spent on the exchange, waits for slower ranks included.
        hidden_seconds: of the exchange went by on another thread while the backward pass was computed. (What a device
            does meanwhile, this process cannot see.)
        spans: what was under way when: names, and ``time.perf_counter()`` at begin and end.
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


class GradientWindow(abc.ABC):
    """A window of weighted gradients, as a step sees it.

    Attributes:
        names, parameters: whose gradients they are.
        group: whose ranks exchange them.
        total_weight: of the last window that was reduced, over all ranks.
        num_skipped: micro steps of that window that some rank left out with :meth:`skip`.
        seconds: the computing thread spent on the exchange so far, waits for slower ranks included.
        num_bytes, num_calls: bytes of gradients handed to the exchange so far, on this rank, and in how many pieces.
        last_window: what the last window took.
        channel: what they travel on.
        order: in which gradients are packed, where it makes a difference to the last bits; else None.
    """

    names: list[str]
    parameters: list[Any]
    group: ProcessGroup
    channel: Channel
    last_window: WindowReport
    order: Optional[Sequence[int]] = None
    seconds = 0.0
    num_bytes = num_calls = 0
    _exchange_is_off = False

    @property
    @abc.abstractmethod
    def total_weight(self) -> float: ...

    @property
    @abc.abstractmethod
    def num_skipped(self) -> int: ...

    def __call__(self, gradients: Sequence[Optional[Any]], weight: float = 1.0) -> list[Optional[Any]]:
        """Accumulate one micro step and reduce: the whole window at once.

        Within :meth:`no_sync` nothing is exchanged, and the gradients come back as they are.
        """
        self.accumulate(gradients, weight)
        return list(gradients) if self._exchange_is_off else self.reduce()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, calls only accumulate, as with DistributedDataParallel's; the next call outside reduces them all.

        An exception within it drops what this rank has accumulated, so that no half window is ever exchanged.
        """
        before, self._exchange_is_off = self._exchange_is_off, True
        try:
            yield
        except BaseException:
            self.drop()
            raise
        finally:
            self._exchange_is_off = before

    @contextlib.contextmanager
    def backward(self, weight: float) -> Iterator[None]:
        """Around the last forward and backward pass of a window, whose gradients :meth:`accumulate` then gets.

        ``weight`` is what they will weigh. Where exchange overlaps, it begins within; else nothing happens.
        """
        yield

    # Where sums are made one by one there is nothing to pack, and nothing is rounded that could be made up for.

    def pack_in_order(self, order: Sequence[int]) -> None:  # noqa: B027
        """Go on in an ``order`` that another run had; called by every rank, between two windows."""

    def forget_errors(self) -> None:  # noqa: B027
        """Forget what the next window would make up for, as a process does that resumes here; called by every rank."""

    def settle(self) -> None:  # noqa: B027
        """Behind the update that a window was reduced for: whatever waited for it. A collective."""

    @abc.abstractmethod
    def accumulate(self, gradients: Sequence[Optional[Any]], weight: float = 1.0) -> None:
        """Add ``weight * gradient`` for every parameter, in the order of ``parameters``; None adds nothing.

        Raises:
            ValueError: the number of gradients or a shape is wrong, or the weight is negative or not finite.
        """

    @abc.abstractmethod
    def check_shapes(self) -> None:
        """Raise ValueError, which names it, when a parameter was given another shape since this was made."""

    @abc.abstractmethod
    def skip(self) -> None:
        """Leave a micro step out, such as one whose loss is no number; all ranks learn how many there were."""

    @abc.abstractmethod
    def drop(self) -> None:
        """Forget what this rank has accumulated, as after an exception: no half window is ever exchanged."""

    @abc.abstractmethod
    def reduce(self) -> list[Optional[Any]]:
        """Exchange the window and begin a new one; a collective, called by every rank.

        Returns the weighted mean for every parameter, in memory of this rank's own; nothing but None
        when every micro step that any rank had was skipped.

        Raises:
            ValueError: on every rank, when the window weighs nothing on any of them.
        """


class AccumulatingWindow(GradientWindow):
    """One that accumulates gradients itself; subclasses say how they are stored and summed over the ranks."""

    def __init__(self, parameters: Iterable[Any], group: Optional[ProcessGroup] = None) -> None:
        self.group = group or get_data_group()
        named = [p if isinstance(p, tuple) else (str(i), p) for i, p in enumerate(parameters)]
        check_same_structure(named, self.group)
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._shapes = [tuple(parameter.shape) for parameter in self.parameters]
        self._total_weight = 0.0
        self._num_skipped = 0
        self.channel = open_gradient_channel(self.group)
        self._sent_before = self.channel.bytes_sent or 0
        self._spans: list[tuple[str, float, float]] = []
        # Whether what is exchanged during the backward pass leaves the computing thread alone.
        self._hides = False
        self._weight = 0.0
        self._skipped = 0
        self._used = np.zeros(len(named), np.float32)

    @property
    def total_weight(self) -> float:
        return self._total_weight

    @property
    def num_skipped(self) -> int:
        return self._num_skipped

    def drop(self) -> None:
        self._begin_window()

    def _begin_window(self) -> None:
        self._weight, self._skipped = 0.0, 0
        self._used[:] = 0
        self._spans.clear()
        self._clear()

    def accumulate(self, gradients: Sequence[Optional[Any]], weight: float = 1.0) -> None:
        if len(gradients) != len(self.parameters):
            raise ValueError(
                f"expected {len(self.parameters)} gradients, one a parameter, got {len(gradients)} "
                f"(rank {self.group.label()})"
            )
        if not 0 <= weight < float("inf"):
            raise ValueError(f"a weight must be finite and not negative, got {weight} on rank {self.group.label()}")
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
        # A weight of zero adds nothing, not even zero times NaN.
        if weight > 0:
            self._weight += weight
            self._used[[index for index, gradient in enumerate(gradients) if gradient is not None]] = 1
            self._add(gradients, weight)

    def check_shapes(self) -> None:
        for name, parameter, shape in zip(self.names, self.parameters, self._shapes):
            if tuple(parameter.shape) != shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(parameter.shape)} now, and had {shape} when training began (rank "
                    f"{self.group.label()}); change a model before it is trained (as resize_token_embeddings does), or "
                    "make a new optimizer and a new train step behind it"
                )

    def _add(self, gradients: Sequence[Optional[Any]], weight: float) -> None:
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._put(index, gradient, weight)

    def skip(self) -> None:
        self._skipped += 1

    def reduce(self) -> list[Optional[Any]]:
        began = time.perf_counter()
        num_bytes, num_calls = self.num_bytes, self.num_calls
        try:
            return self._reduce()
        finally:
            ended, sent = time.perf_counter(), self.channel.bytes_sent
            during_backward = sum(max(0.0, min(end, began) - start) for _, start, end in self._spans)
            hidden, exposed = (during_backward, 0.0) if self._hides else (0.0, during_backward)
            self.seconds += ended - began + exposed
            self.last_window = WindowReport(
                self.num_bytes - num_bytes,
                self.num_calls - num_calls,
                None if sent is None else sent - self._sent_before,
                ended - began + exposed,
                hidden,
                tuple(self._spans),
            )
            self._sent_before = sent or 0
            self._begin_window()

    def _timed(self, name: str, began: float) -> None:
        """Something of the exchange has just ended."""
        self._spans.append((name, began, time.perf_counter()))

    def _reduce(self) -> list[Optional[Any]]:
        used, _ = self._exchange_header([])
        return self._average(used)

    def _exchange_header(self, notes: Sequence[float], last_note: Any = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """Add up the ranks' weights; returns which parameters any rank used, and the sums of their ``notes``.

        ``last_note``, whose sum is the last one, may be a tensor that a device is still at work on.
        """
        mine = np.array([self._weight, self._skipped, *notes], np.float32)
        header = self.group.sum_header(np.concatenate([self._used, mine]), last_note)
        used, (weight, skipped, *sums) = header[: len(self._used)], header[len(self._used) :]
        self._total_weight, self._num_skipped = float(weight), int(skipped)
        return used > 0, np.array(sums)

    def _average(self, used: np.ndarray) -> list[Optional[Any]]:
        if self.total_weight > 0:
            return self._exchange(used, 1.0 / self.total_weight)
        if self.num_skipped:
            return [None] * len(self.parameters)
        raise ValueError("no rank had a sample in this window: there is no gradient to average")

    @abc.abstractmethod
    def _put(self, index: int, gradient: Any, weight: float) -> None: ...

    @abc.abstractmethod
    def _exchange(self, used: np.ndarray, scale: float) -> list[Optional[Any]]: ...

    @abc.abstractmethod
    def _clear(self) -> None: ...
