"""Two exchanges as one: of parameters that all ranks have, and of those that some of them have (experts).

Goes in: windows over different groups, each with its part of a model's parameters. Comes out: what the step takes for
one window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

from .synchronizer import GradientSynchronizer
from .window import GradientWindow, WindowReport


class JointWindow(GradientWindow):
    """The first window is the one of the ranks that share out the samples.

    Args:
        windows: each over its own group.
        places: of each window's parameters in the order of the whole.
        weights_of: what a micro step of a given weight weighs in each window.
    """

    def __init__(
        self,
        windows: Sequence[GradientSynchronizer],
        places: Sequence[Sequence[int]],
        weights_of: Sequence[Callable[[float], float]],
    ) -> None:
        self.windows, self.places, self._weights_of = windows, places, weights_of
        by_place = {
            place: (window.names[index], window.parameters[index])
            for window, theirs in zip(windows, places)
            for index, place in enumerate(theirs)
        }
        self.names = [by_place[place][0] for place in sorted(by_place)]
        self.parameters = [by_place[place][1] for place in sorted(by_place)]
        self.group, self.channel = windows[0].group, windows[0].channel

    @property
    def total_weight(self) -> float:
        return self.windows[0].total_weight

    @property
    def num_skipped(self) -> int:
        return self.windows[0].num_skipped

    def accumulate(self, gradients: Sequence[Optional[Any]], weight: float = 1.0) -> None:
        for window, places, weight_of in zip(self.windows, self.places, self._weights_of):
            window.accumulate([gradients[place] for place in places], weight_of(weight))

    def check_shapes(self) -> None:
        for window in self.windows:
            window.check_shapes()

    def skip(self) -> None:
        for window in self.windows:
            window.skip()

    def drop(self) -> None:
        for window in self.windows:
            window.drop()

    def settle(self) -> None:
        for window in self.windows:
            window.settle()

    def forget_errors(self) -> None:
        for window in self.windows:
            window.forget_errors()

    def reduce(self) -> list[Optional[Any]]:
        found: list[Optional[Any]] = [None] * len(self.parameters)
        for window, places in zip(self.windows, self.places):
            for place, gradient in zip(places, window.reduce()):
                found[place] = gradient
        self.note_windows()
        return found

    def note_windows(self) -> None:
        """Take over what the windows took."""
        reports = [window.last_window for window in self.windows]
        sent = [report.bytes_sent for report in reports]
        self.last_window = WindowReport(
            sum(report.num_bytes for report in reports),
            sum(report.num_calls for report in reports),
            None if None in sent else sum(filter(None, sent)),
            sum(report.exposed_seconds for report in reports),
            sum(report.hidden_seconds for report in reports),
            tuple(span for report in reports for span in report.spans),
        )
        self.seconds += self.last_window.exposed_seconds
        self.num_bytes += self.last_window.num_bytes
        self.num_calls += self.last_window.num_calls
