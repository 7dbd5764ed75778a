"""This module combines the exchanges of replicated and of expert parameters, whose groups of ranks differ.

A train step uses the combination like one synchronizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

from mindnlp_dp.data_parallel.synchronizer import GradientSynchronizer
from mindnlp_dp.data_parallel.synchronizer_base import ExchangeStats, InPlace, Synchronizer


class MultiGroupSynchronizer(Synchronizer):
    """Combines several synchronizers over different groups; the first is over the ranks that split the samples.

    Args:
        synchronizers: The synchronizers, each over its own group and with its part of the parameters.
        places: For each synchronizer, the positions of its parameters among all parameters.
        loss_weights_of: For each of them, a function from a micro-batch's weight to its weight there.
    """

    def __init__(
        self,
        synchronizers: Sequence[GradientSynchronizer],
        places: Sequence[Sequence[int]],
        loss_weights_of: Sequence[Callable[[float], float]],
    ) -> None:
        self.synchronizers, self.places, self._loss_weights_of = synchronizers, places, loss_weights_of
        by_place = {
            place: (synchronizer.names[index], synchronizer.parameters[index])
            for synchronizer, theirs in zip(synchronizers, places)
            for index, place in enumerate(theirs)
        }
        self.names = [by_place[place][0] for place in sorted(by_place)]
        self.parameters = [by_place[place][1] for place in sorted(by_place)]
        self.group, self.channel = synchronizers[0].group, synchronizers[0].channel

    @property
    def total_loss_weight(self) -> float:
        return self.synchronizers[0].total_loss_weight

    @property
    def num_skipped(self) -> int:
        return self.synchronizers[0].num_skipped

    def accumulate(
        self, gradients: Sequence[Optional[Any]], loss_weight: float = 1.0, *, loss: Optional[Any] = None
    ) -> None:
        assert loss is None, "synchronizers of several groups do not support deferred losses"
        for synchronizer, places, loss_weight_of in zip(self.synchronizers, self.places, self._loss_weights_of):
            synchronizer.accumulate([gradients[place] for place in places], loss_weight_of(loss_weight))

    def check_shapes(self) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.check_shapes()

    def skip(self) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.skip()

    def reset(self) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.reset()

    def repack_if_learned(self) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.repack_if_learned()

    def reset_error_feedback(self) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.reset_error_feedback()

    def reduce(self, *, in_place: InPlace = False) -> Any:
        """Return the means in the order of the parameters; with a list ``in_place``, each synchronizer's result."""
        each_in_place = in_place if isinstance(in_place, list) else [in_place] * len(self.synchronizers)
        results = [each.reduce(in_place=value) for each, value in zip(self.synchronizers, each_in_place)]
        self._add_up_costs()
        if isinstance(in_place, list):
            return results
        found: list[Optional[Any]] = [None] * len(self.parameters)
        for places, result in zip(self.places, results):
            for place, gradient in zip(places, result):
                found[place] = gradient
        return found

    def _add_up_costs(self) -> None:
        reports = [synchronizer.last_exchange for synchronizer in self.synchronizers]
        sent = [report.bytes_sent for report in reports]
        self.last_exchange = ExchangeStats(
            sum(report.num_bytes for report in reports),
            sum(report.num_calls for report in reports),
            None if None in sent else sum(filter(None, sent)),
            sum(report.exposed_seconds for report in reports),
            sum(report.hidden_seconds for report in reports),
            tuple(span for report in reports for span in report.spans),
        )
        self.seconds += self.last_exchange.exposed_seconds
        self.num_bytes += self.last_exchange.num_bytes
        self.num_calls += self.last_exchange.num_calls
