"""This module combines the exchanges of replicated and of expert parameters, whose groups of ranks differ.

A train step uses the combination like one window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

from mindnlp_dp.data_parallel.accumulation import ExchangeStats, GradientAccumulator
from mindnlp_dp.data_parallel.synchronizer import GradientSynchronizer


class MultiGroupExchange(GradientAccumulator):
    """Combines several windows over different groups; the first is over the ranks that split the samples.

    Args:
        windows: The windows, each over its own group and with its part of the parameters.
        places: For each window, the positions of its parameters among all parameters.
        weights_of: For each window, a function from a micro-batch's weight to its weight in this window.
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

    def accumulate(
        self, gradients: Sequence[Optional[Any]], weight: float = 1.0, *, loss: Optional[Any] = None
    ) -> None:
        assert loss is None, "windows of several groups need each loss at once"
        for window, places, weight_of in zip(self.windows, self.places, self._weights_of):
            window.accumulate([gradients[place] for place in places], weight_of(weight))

    def check_shapes(self) -> None:
        for window in self.windows:
            window.check_shapes()

    def skip(self) -> None:
        for window in self.windows:
            window.skip()

    def reset(self) -> None:
        for window in self.windows:
            window.reset()

    def repack_if_learned(self) -> None:
        for window in self.windows:
            window.repack_if_learned()

    def reset_error_feedback(self) -> None:
        for window in self.windows:
            window.reset_error_feedback()

    def reduce(self) -> list[Optional[Any]]:
        found: list[Optional[Any]] = [None] * len(self.parameters)
        for window, places in zip(self.windows, self.places):
            for place, gradient in zip(places, window.reduce()):
                found[place] = gradient
        self.collect_stats()
        return found

    def collect_stats(self) -> None:
        """Add up the costs of the windows."""
        reports = [window.last_window for window in self.windows]
        sent = [report.bytes_sent for report in reports]
        self.last_window = ExchangeStats(
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
