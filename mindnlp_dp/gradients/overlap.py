"""Exchange during the backward pass: what it has finished is on its way while it goes on.

Goes in: the gradients of the last micro step of a window, as the parameters' hooks see them, from the last layer
to the first. Comes out: buckets whose exchange has begun, each as soon as it is full and those before it
have begun, on every rank in the same order::

    backward pass    layer 5   layer 4   layer 3   layer 2  …  embeddings │ reduce()
                       │put      │put
    bucket 0           ▼─full──▶ start ═══════ exchange ═══════▶          │
    bucket 1                     ▼────────────────full──▶ start ══════════╪══▶ wait ─▶ get

The first window only looks in which order gradients come. When every rank has seen that, buckets are packed anew in
rank 0's order. With "auto", windows with and without overlap then take turns, and the faster way stays. Both pack the
same buckets, and give the same bits. In every window, what the hooks saw is compared with what the caller hands over.

A hook never raises: MindNLP's backward function is of no use any more when one has. It takes notes, and a window
that went wrong on any rank is exchanged again, by all, without overlap (synchronizer.py).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Optional, Union

import numpy as np

from mindnlp_dp.arrays.inspection import inspection
from mindnlp_dp.communication.transports.channel import Channel

from .buckets.bucket import Bucket
from .exchange_thread import ExchangeThread, ImmediateExchange

# Pairs of windows, without and with overlap, that decide "auto"; the first pair only warms up.
TRIAL_PAIRS = 8
# Overlap stays when it saves at least this share of the time, and more than chance would: so many standard errors.
_WORTH_IT = 0.01
_BEYOND_CHANCE = 2.0


class Overlap:
    """The hooks of a synchroniser's parameters, and what they do in this window.

    Attributes:
        state: "learning", "measuring", "on", or "off: " and why; the same on every rank once learning has ended.
        is_sending: whether this window's exchange begins during its backward pass; the same on every rank.
        is_learning: whether this window only looks; the same on every rank.
        problem: what went wrong on this rank in this window, None if nothing did.
        has_changed: whether a gradient was changed in place after its backward pass: a truth, or a tensor of one number
            that is not zero then.
        seen: the parameters whose gradients the hooks saw in this window, in that order.
    """

    def __init__(
        self, parameters: Sequence[Any], wanted: Union[bool, str], channel: Channel, *, on_device: bool
    ) -> None:
        self.state = "learning"
        self.problem: Optional[str] = None
        self.has_changed: Any = False
        self._wanted = wanted
        self._channel = channel
        self._inspection = inspection(on_device)
        self._parameters = parameters
        self._handles: list[Any] = []
        self._buckets: Sequence[Bucket] = ()
        # Of the backward pass that is under way.
        self._weight: Optional[float] = None
        self.seen: list[int] = []
        # Parameter, gradient and its fingerprint, as the hooks saw them.
        self._evidence: list[tuple[int, Any, Any]] = []
        # Of the window.
        self._runner: Union[ExchangeThread, ImmediateExchange, None] = None
        self._scale: Any = None
        self._missing: list[int] = []
        self._next = 0
        self._spans: list[tuple[str, float, float]] = []
        # Of the trial.
        self._window = 0
        self._began: Optional[float] = None
        self._seconds = np.zeros((2, TRIAL_PAIRS))

    @property
    def is_learning(self) -> bool:
        return self.state == "learning"

    @property
    def is_sending(self) -> bool:
        return self.state == "on" or (self.state == "measuring" and self._window % 2 == 1)

    @property
    def is_open(self) -> bool:
        """Whether this rank's exchange has begun and not ended."""
        return self._runner is not None

    def turn_off(self, reason: str) -> None:
        """For good. Called by all ranks in the same window."""
        self.state = f"off: {reason}"
        self.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # Around the backward pass.

    def begin(self, buckets: Sequence[Bucket], weight: float, weight_so_far: float) -> None:
        """The last backward pass of a window begins; its gradients will weigh ``weight``."""
        self._began = time.perf_counter()
        if weight == 0 or self.state.startswith("off"):
            return
        if not self._handles:
            self._install()
        if self.is_sending:
            self._open(buckets, weight_so_far + weight)
        # In a window of the trial that sends nothing, hooks have nothing to do: what they held on to would cost memory.
        self._weight = weight if self.is_sending or self.is_learning else None

    def _install(self) -> None:
        # Through a weak reference: parameters must not keep the synchroniser's memory alive.
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

    def _open(self, buckets: Sequence[Bucket], weight: float) -> None:
        """Begin to send: at first the weight of this rank's window, which every scale depends on."""
        self._runner = ImmediateExchange() if buckets[0].is_asynchronous else ExchangeThread()
        self._buckets = buckets
        self._bucket_of = {slot.index: number for number, bucket in enumerate(buckets) for slot in bucket.layout.slots}
        self._missing = [len(bucket.layout.slots) for bucket in buckets]
        self._next = 0
        for bucket in buckets:
            bucket.keep()
        runner = self._runner

        def agree() -> None:
            # Without any weight there is nothing to exchange, on any rank.
            self._scale = self._channel.inverse_total(weight, runner.patience)

        runner.submit(agree)

    def _on_gradient(self, index: int, gradient: Any) -> None:
        if self._weight is None:
            return
        try:
            self._evidence.append((index, gradient, self._inspection.fingerprint(gradient)))
            self.seen.append(index)
            if self.is_sending:
                number = self._bucket_of[index]
                self._buckets[number].put(index, gradient, self._weight)
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
        assert runner is not None, "sends in a window that was not opened"

        def exchange() -> None:
            if self._scale is not None:
                began = time.perf_counter()
                bucket.start(self._scale, runner.patience)
                self._spans.append((f"bucket {number}", began, time.perf_counter()))

        runner.submit(exchange)

    def end_backward(self) -> None:
        self._weight = None

    # Behind it.

    def compare(self, gradients: Sequence[Optional[Any]]) -> None:
        """See whether the gradients that the caller hands over are those that the hooks saw; notes a problem if not.

        In every window, for a caller may clip, mask or add noise in one that did not in another. After that, nothing of
        them is held on to.
        """
        there = [mine is not None and mine.data_ptr() == seen.data_ptr() for mine, seen in self._handed_over(gradients)]
        if not all(there):
            self.problem = self.problem or "a gradient was replaced after its backward pass"
        else:
            now = [self._inspection.fingerprint(mine) for mine, _ in self._handed_over(gradients)]
            self.has_changed = self._inspection.have_changed([then for _, _, then in self._evidence], now)
        if len(set(self.seen)) != len(self.seen):
            self.problem = self.problem or "a parameter's gradient came in several parts"
        self._evidence.clear()

    def _handed_over(self, gradients: Sequence[Optional[Any]]) -> list[tuple[Optional[Any], Any]]:
        """Every gradient that a hook saw, behind what the caller has in its place."""
        return [(gradients[index], seen) for index, seen, _ in self._evidence]

    def finish(self, buckets: Sequence[Bucket], weight: float) -> list[tuple[str, float, float]]:
        """Send what is not under way yet, and return when this rank's part of the exchange is done: what took when."""
        if self._runner is None:
            self._open(buckets, weight)
        assert self._runner is not None, "opened above"
        for number in range(self._next, len(self._buckets)):
            self._start(number)
        runner, self._runner = self._runner, None
        runner.finish()
        return list(self._spans)

    def clear(self) -> None:
        """The window has ended, be it in the midst of something: no thread is left."""
        if self._runner is not None:
            self._runner.abandon()
            self._runner = None
        self._weight = self.problem = self._began = None
        self.has_changed = False
        self.seen.clear()
        self._evidence.clear()
        self._spans.clear()
        self._buckets, self._missing = (), []

    # Decisions, which all ranks make together.

    def learnt(self) -> None:
        """Every rank has seen its gradients come, and the buckets are packed in that order."""
        self.state = "measuring" if self._wanted == "auto" else "on"

    def measure(self, all_reduce: Callable[..., Any]) -> None:
        """A window has ended; when enough have, all ranks choose the same way. A collective then."""
        if self.state != "measuring":
            return
        if self._began is not None:
            self._seconds[self._window % 2, self._window // 2] = time.perf_counter() - self._began
        self._window += 1
        if self._window == 2 * TRIAL_PAIRS:
            without, overlapped = np.asarray(all_reduce(self._seconds, op="max"))[:, 1:]
            if pays(without, overlapped):
                self.state = "on"
            else:
                slow, fast = (1e3 * np.median(seconds) for seconds in (overlapped, without))
                self.turn_off(f"measured {slow:.1f} ms with it and {fast:.1f} ms without")


def pays(without: np.ndarray, overlapped: np.ndarray) -> bool:
    """Whether windows with overlap are faster than the ones without that they took turns with.

    >>> pays(np.array([1.0, 1.1, 1.0]), np.array([0.8, 0.9, 0.8])), pays(np.array([1.0, 1.1]), np.array([1.05, 1.0]))
    (True, False)
    """
    saved = without - overlapped
    error = saved.std(ddof=1) / np.sqrt(len(saved))
    return bool(saved.mean() > max(_WORTH_IT * without.mean(), _BEYOND_CHANCE * error))


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()
