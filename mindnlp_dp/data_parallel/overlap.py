"""This module overlaps the exchange of gradients with the backward pass, for the gradient synchronizer.

In the last micro-batch of an update, hooks of the parameters receive the gradients from the last layer to the first.
The exchange of a bucket starts when it is full and all buckets before it have started; the order is the same on all
ranks::

    backward pass    layer 5   layer 4   layer 3   layer 2  …  embeddings │ reduce()
                       │put      │put
    bucket 0           ▼─full──▶ start ═══════ exchange ═══════▶          │
    bucket 1                     ▼────────────────full──▶ start ══════════╪══▶ wait ─▶ get

The first update only records the order in which gradients arrive. When every rank has recorded it, buckets are repacked
in rank 0's order. With "auto", updates with and without overlap then alternate, and the faster way stays. Both use the
same buckets and give the same bits. Every update compares the gradients that the hooks saw with those of the caller.

A hook never raises an exception, because MindNLP's backward function would not be usable afterwards. It records the
problem instead. If an update went wrong on any rank, all ranks exchange it again without overlap (synchronizer.py).
"""

from __future__ import annotations

import enum
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Optional, Union

import numpy as np

from mindnlp_dp.communication.transports.channel import Channel
from mindnlp_dp.communication.transports.polling_wait import PollingWait
from mindnlp_dp.data_parallel.buckets.bucket import Bucket
from mindnlp_dp.runtime import heartbeat
from mindnlp_dp.runtime.arrays import inspection

# "auto" measures so many pairs of updates, without and with overlap; the first pair is only a warm-up.
TRIAL_PAIRS = 8

# On a device, gradients are compared in each such update once their order is learned.
CHECKED_EVERY = 100

# Overlap stays on if it saves at least this fraction of the time, and more than this number of standard errors.
_WORTH_IT = 0.01

_BEYOND_CHANCE = 2.0


class OverlapState(enum.Enum):
    """Whether gradients are exchanged during the backward pass."""

    LEARNING = "learning the order of gradients"
    MEASURING = "measuring whether it is faster"
    ON = "on"
    OFF = "off"


class Overlap:
    """Starts bucket exchanges from gradient hooks, and decides with all ranks whether overlap stays on.

    Attributes:
        state: The same on every rank once learning has ended.
        off_reason: Why overlap is off; empty if it is not.
        is_sending: Whether this update's exchange begins during its backward pass; the same on every rank.
        is_learning: Whether this update only records the order of gradients; the same on every rank.
        problem: The first problem on this rank in this update; None if there was none.
        has_changed: Whether a gradient was changed in place after its backward pass: a bool, or a tensor with one
            element that is nonzero in this case.
        seen: The indices of the parameters whose gradients the hooks saw in this update, in order of arrival.
    """

    def __init__(
        self, parameters: Sequence[Any], wanted: Union[bool, str], channel: Channel, *, on_device: bool
    ) -> None:
        self.state = OverlapState.LEARNING
        self.off_reason = ""
        self.problem: Optional[str] = None
        self.has_changed: Any = False
        self._wanted = wanted
        self._channel = channel
        self._inspection = inspection(on_device)
        self._on_device = on_device
        self._parameters = parameters
        self._handles: list[Any] = []
        self._buckets: Sequence[Bucket] = ()
        # State of the current backward pass.
        self._loss_weight: Optional[float] = None
        self.seen: list[int] = []
        # Parameter, gradient and its fingerprint, as the hooks saw them.
        self._evidence: list[tuple[int, Any, Any]] = []
        # State of the update.
        self._runner: Union[ExchangeThread, ImmediateExchange, None] = None
        self._scale: Any = None
        self._missing: list[int] = []
        self._next = 0
        self._spans: list[tuple[str, float, float]] = []
        # State of the trial.
        self._trial = self._num_updates = 0
        self._began: Optional[float] = None
        self._seconds = np.zeros((2, TRIAL_PAIRS))

    @property
    def is_learning(self) -> bool:
        return self.state is OverlapState.LEARNING

    @property
    def is_sending(self) -> bool:
        return self.state is OverlapState.ON or (self.state is OverlapState.MEASURING and self._trial % 2 == 1)

    @property
    def is_open(self) -> bool:
        """Return whether this rank's exchange has begun and has not ended."""
        return self._runner is not None

    def turn_off(self, reason: str) -> None:
        """Disable overlap permanently and remove the hooks. Called by all ranks in the same update."""
        self.state, self.off_reason = OverlapState.OFF, reason
        self.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # Before and during the backward pass.

    def begin(self, buckets: Sequence[Bucket], loss_weight: float, loss_weight_so_far: float) -> None:
        """Prepare for the last backward pass of an update, whose gradients have the weight ``loss_weight``."""
        self._began = self._clock()
        self._num_updates += 1
        if loss_weight == 0 or self.state is OverlapState.OFF:
            return
        if not self._handles:
            self._install()
        if self.is_sending:
            self._open(buckets, loss_weight_so_far + loss_weight)
        # In a trial update without overlap the hooks do nothing: a reference to each gradient would cost memory.
        self._loss_weight = loss_weight if self.is_sending or self.is_learning else None

    def _install(self) -> None:
        # The hooks have a weak reference only: parameters must not keep the synchroniser's memory alive.
        me = weakref.ref(self)

        def hook_of(index: int) -> Callable[[Any], Any]:
            def hook(gradient: Any) -> Any:
                overlap = me()
                if overlap is not None:
                    overlap._on_gradient(index, gradient)
                return gradient

            return hook

        self._handles = [parameter.register_hook(hook_of(index)) for index, parameter in enumerate(self._parameters)]
        weakref.finalize(self, _remove, self._handles).atexit = False

    def _open(self, buckets: Sequence[Bucket], loss_weight: float) -> None:
        """Begin the exchange with the sum of the ranks' loss weights, because every bucket is scaled by its inverse."""
        self._runner = ImmediateExchange() if buckets[0].is_asynchronous else ExchangeThread()
        self._buckets = buckets
        self._bucket_of = {slot.index: number for number, bucket in enumerate(buckets) for slot in bucket.layout.slots}
        self._missing = [len(bucket.layout.slots) for bucket in buckets]
        self._next = 0
        for bucket in buckets:
            bucket.snapshot()
        runner = self._runner

        def agree() -> None:
            # The scale is None if the total weight is zero; then no rank exchanges anything.
            self._scale = self._channel.inverse_total(loss_weight, runner.waiter)

        runner.submit(agree)

    def _on_gradient(self, index: int, gradient: Any) -> None:
        if self._loss_weight is None or not self._parameters[index].requires_grad:
            return
        try:
            self._evidence.append((index, gradient, self._fingerprint(gradient)))
            self.seen.append(index)
            if self.is_sending:
                number = self._bucket_of[index]
                self._buckets[number].put(index, gradient, self._loss_weight)
                self._missing[number] -= 1
                self._start_full_ones()
        except Exception as error:  # noqa: BLE001
            self.problem = self.problem or f"a hook failed: {type(error).__name__}: {error}"

    def _start_full_ones(self) -> None:
        while self._next < len(self._buckets) and self._missing[self._next] <= 0:
            self._start(self._next)
            self._next += 1

    def _start(self, number: int) -> None:
        runner, bucket = self._runner, self._buckets[number]
        assert runner is not None, "sends in an update that was not opened"

        def exchange() -> None:
            if self._scale is not None:
                began = time.perf_counter()
                bucket.start(self._scale, runner.waiter)
                self._spans.append((f"bucket {number}", began, time.perf_counter()))

        runner.submit(exchange)

    def end_backward(self) -> None:
        self._loss_weight = None

    # After the backward pass.

    def compare(self, gradients: Sequence[Optional[Any]]) -> None:
        """Check that the caller's gradients are those that the hooks saw, and record a problem if not.

        On a host this is done in every update, because a caller may clip, mask or add noise in some updates only. On a
        device, where it is nine operators per gradient and two waits for what was dispatched, it is done while the
        order is learned and in every ``CHECKED_EVERY``-th update; a gradient that is missing is seen in all of them.
        Afterwards the references to the gradients are released.
        """
        pairs = self._pairs_with_seen(gradients)
        if not self._is_checked:
            there = [mine is not None for mine, _ in pairs]
        else:
            there = [mine is not None and mine.data_ptr() == seen.data_ptr() for mine, seen in pairs]
        if not all(there):
            self.problem = self.problem or "a gradient was replaced after its backward pass"
        elif self._is_checked:
            now = [self._fingerprint(mine) for mine, _ in pairs]
            self.has_changed = self._inspection.have_changed([then for _, _, then in self._evidence], now)
        if len(set(self.seen)) != len(self.seen):
            self.problem = self.problem or "a parameter's gradient came in several parts"
        self._evidence.clear()

    def _pairs_with_seen(self, gradients: Sequence[Optional[Any]]) -> list[tuple[Optional[Any], Any]]:
        """Return pairs of the caller's gradient and the gradient that a hook saw for the same parameter."""
        return [(gradients[index], seen) for index, seen, _ in self._evidence]

    def _fingerprint(self, gradient: Any) -> Any:
        return self._inspection.fingerprint(gradient) if self._is_checked else None

    @property
    def _is_checked(self) -> bool:
        """Return whether this update's gradients are compared with those that the hooks saw."""
        return not self._on_device or self.is_learning or self._num_updates % CHECKED_EVERY == 0

    def finish(self, buckets: Sequence[Bucket], loss_weight: float) -> list[tuple[str, float, float]]:
        """Start the remaining buckets, wait for this rank's part of the exchange, and return its spans."""
        if self._runner is None:
            self._open(buckets, loss_weight)
        assert self._runner is not None, "opened above"
        for number in range(self._next, len(self._buckets)):
            self._start(number)
        runner, self._runner = self._runner, None
        runner.finish()
        return list(self._spans)

    def clear(self) -> None:
        """Reset the state of the update and stop the exchange thread, even in the middle of an exchange."""
        if self._runner is not None:
            self._runner.abandon()
            self._runner = None
        self._loss_weight = self.problem = self._began = None
        self.has_changed = False
        self.seen.clear()
        self._evidence.clear()
        self._spans.clear()
        self._buckets, self._missing = (), []

    # All ranks make these decisions together.

    def recorded_order(self) -> None:
        """End the learning state; called when every rank has recorded the order of its gradients."""
        self.state = OverlapState.MEASURING if self._wanted == "auto" else OverlapState.ON

    def _clock(self) -> float:
        """Return the time; on a device, in a trial, after everything that was launched has been done.

        Otherwise an exchange after the backward pass would only be launched by then, and one that overlaps be done.
        """
        if self._on_device and self.state is OverlapState.MEASURING:
            _synchronize()
        return time.perf_counter()

    def measure(self, all_reduce: Callable[..., Any]) -> None:
        """Record the time of an update; after the last trial update all ranks choose the same way, in a collective."""
        if self.state is not OverlapState.MEASURING:
            return
        if self._began is not None:
            self._seconds[self._trial % 2, self._trial // 2] = self._clock() - self._began
        self._trial += 1
        if self._trial == 2 * TRIAL_PAIRS:
            without, overlapped = np.asarray(all_reduce(self._seconds, op="max"))[:, 1:]
            if is_significant_speedup(without, overlapped):
                self.state = OverlapState.ON
            else:
                slow, fast = (1e3 * np.median(seconds) for seconds in (overlapped, without))
                self.turn_off(f"measured {slow:.1f} ms with it and {fast:.1f} ms without")


def _synchronize() -> None:
    """Wait until the device has done everything that was launched."""
    import mindspore

    with heartbeat.waiting("the device"):
        mindspore.runtime.synchronize()


def is_significant_speedup(without: np.ndarray, overlapped: np.ndarray) -> bool:
    """Return whether updates with overlap are significantly faster than the alternating updates without it.

    >>> is_significant_speedup(np.array([1.0, 1.1, 1.0]), np.array([0.8, 0.9, 0.8]))
    True
    >>> is_significant_speedup(np.array([1.0, 1.1]), np.array([1.05, 1.0]))
    False
    """
    saved = without - overlapped
    error = saved.std(ddof=1) / np.sqrt(len(saved))
    return bool(saved.mean() > max(_WORTH_IT * without.mean(), _BEYOND_CHANCE * error))


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


class ExchangeThread:
    """Runs the submitted tasks in order on a separate thread, which ends with the update."""

    def __init__(self) -> None:
        self.waiter = PollingWait()
        self._tasks: queue.SimpleQueue[Optional[Callable[[], None]]] = queue.SimpleQueue()
        self._error: Optional[BaseException] = None
        self._thread = threading.Thread(target=self._run, name="gradient-exchange", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                if self._error is None:
                    task()
            except BaseException as error:  # noqa: BLE001
                # finish() raises it in the thread that waits for the result.
                self._error = error

    def submit(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def finish(self) -> None:
        """Wait until all tasks are done; raise the error of a task that failed."""
        self._tasks.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Stop the thread, even if it is blocked in a wait for other ranks."""
        self.waiter.abandon()
        self._error = self._error or RuntimeError("abandoned")
        self._tasks.put(None)
        self._thread.join()


class ImmediateExchange:
    """Runs each task immediately: a task only enqueues work that the device continues in the background."""

    waiter = None

    def submit(self, task: Callable[[], None]) -> None:
        task()

    def finish(self) -> None:
        """Do nothing: :meth:`.Bucket.wait` waits for each result."""

    def abandon(self) -> None:
        """Do nothing: the device completes the operations that were enqueued."""
