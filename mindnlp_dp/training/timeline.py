"""Records the activities of every rank over time and writes them as a Chrome trace.

The train step and the Trainer add spans (name, lane, begin and end time). The result is one JSON file for
chrome://tracing or https://ui.perfetto.dev. It shows two lanes for each rank: "compute" with forward, backward, wait
and update, and "exchange" with the buckets that are being reduced. A profile of some updates also has MindSpore's
operators, and this package's kernels::

    rank 0  compute    │ forward │      backward      │ wait │ clip │ update │
            exchange             │   bucket 0 │ bucket 1 │ bucket 2 │
            operators  ││ │││ │  │ │ ││ │ │ │││ │ │ │
            kernels    │ │ ││    ││ │ │ │ ││ │ │ ││

The format is described in "Trace Event Format" (Google, the Chromium project).
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.runtime.atomic_write import atomic_write

LANES = ("compute", "exchange", "operators", "kernels")
# Those that every timeline has.
_ALWAYS = LANES[:2]

# The maximum per rank: more spans would fill the memory to no use. 100,000 spans are several thousand steps.
MAX_SPANS = 100_000


def updates_of(text: str) -> range:
    """Return the updates from "FROM:TO", both included and counted from 1, as a range that begins at 0.

    Raises ValueError for anything else.

    >>> updates_of("10:12")
    range(9, 12)
    """
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"profile must be FROM:TO, the first and the last update, such as 10:12; got {text!r}")
    return range(int(found[1]) - 1, int(found[2]))


def _microseconds(seconds: float) -> int:
    """Return whole microseconds: Perfetto drops a span that begins before the one before it ends, by any fraction."""
    return round(1e6 * seconds)


class StepTimeline:
    """Records the spans of this rank, or nothing without a ``path``. Constructor and :meth:`write` are collectives.

    With ``updates``, only the spans of these updates are recorded, which begin at 0; and also their operators.

    Raises:
        OSError: the file cannot be written; raised on every rank, at the beginning and not after the run.
    """

    def __init__(self, group: ProcessGroup, path: Optional[str] = None, updates: Optional[range] = None) -> None:
        self._group = group
        self._updates = updates
        self._path = Path(path) if path else None
        self._spans: list[tuple[str, str, float, float, dict[str, Any]]] = []
        self._num_dropped = 0
        # Whether a profile is in its file.
        self._is_written = False
        if self._path is not None:
            group.run_on(group.is_main, self._prepare, "preparing the trace")
            # Times are relative to this barrier, because the clocks of hosts differ.
            group.barrier()
        self._zero = time.perf_counter()

    def add(self, name: str, began: float, ended: float, lane: str = "compute", **details: Any) -> None:
        """Record a span; times are values of ``time.perf_counter()``."""
        if self._path is None or (self._updates is not None and details.get("step") not in self._updates):
            return
        if len(self._spans) < MAX_SPANS:
            self._spans.append((name, lane, began - self._zero, ended - self._zero, details))
        else:
            self._num_dropped += 1

    @contextlib.contextmanager
    def span(self, name: str, **details: Any) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.add(name, began, time.perf_counter(), **details)

    @contextlib.contextmanager
    def operators(self, step: int) -> Iterator[None]:
        """Record the operators of an update if it is one of ``updates``."""
        if self._path is None or self._updates is None or step not in self._updates:
            yield
            return
        # MindSpore's profiler is imported only if it is used.
        from mindnlp_dp.training.operator_times import recorded_operators

        lanes = [functools.partial(self.add, lane=lane, step=step) for lane in ("operators", "kernels")]
        with recorded_operators(*lanes):
            yield

    @contextlib.contextmanager
    def forward_and_backward(self, model: Any, **details: Any) -> Iterator[None]:
        """Record a forward and a backward span for a block that calls ``model`` once and differentiates it."""
        if self._path is None:
            yield
            return
        began, forward_ended = time.perf_counter(), []
        handle = model.register_forward_hook(lambda *_: forward_ended.append(time.perf_counter()))
        try:
            yield
        finally:
            handle.remove()
        between = forward_ended[-1] if forward_ended else began
        self.add("forward", began, between, **details)
        self.add("backward", between, time.perf_counter(), **details)

    def _prepare(self) -> None:
        """Check that the file can be written; a profile that an interrupted run has written stays there."""
        assert self._path is not None, "called with a path only"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._path.parent):
            pass

    def end_update(self, num_updates: int) -> None:
        """Write a profile as soon as the last of its updates is done. A collective of that update."""
        if self._updates is not None and num_updates == self._updates.stop:
            self.write()

    def write(self) -> None:
        """Write the spans of all ranks to the file, a profile only once. A collective."""
        if self._path is None or self._is_written:
            return
        everyone = self._group.all_gather_object((self._spans, self._num_dropped))
        if self._updates is not None and not any(spans for spans, _ in everyone):
            if self._group.is_main:
                first, last = self._updates.start + 1, self._updates.stop
                print(f"nothing was profiled: this run made none of the updates {first} to {last}", flush=True)
            return
        self._is_written = self._updates is not None
        events: list[dict[str, Any]] = []
        for rank, (spans, num_dropped) in enumerate(everyone):
            name = f"rank {rank}" + (f" ({num_dropped} later spans were not kept)" if num_dropped else "")
            # Perfetto takes a thread with the number of its process for its main thread, and 0 for no thread at all.
            pid, tids = rank + 1, {lane: 10_000 * (rank + 1) + number for number, lane in enumerate(LANES)}
            events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
            used = {lane for _, lane, *_ in spans}
            events += [
                {"ph": "M", "name": "thread_name", "pid": pid, "tid": tids[lane], "args": {"name": lane}}
                for lane in LANES
                if lane in _ALWAYS or lane in used
            ]
            events += [
                {
                    "ph": "X", "name": name, "pid": pid, "tid": tids[lane],
                    "ts": _microseconds(began), "dur": _microseconds(ended) - _microseconds(began), "args": details,
                }
                for name, lane, began, ended, details in spans
            ]  # fmt: skip
        self._write(events)

    def _write(self, events: list[dict[str, Any]]) -> None:
        path = self._path
        assert path is not None, "called with a path only"

        def write() -> None:
            with atomic_write(path) as temporary:
                temporary.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

        self._group.run_on(self._group.is_main, write, "writing the trace")
