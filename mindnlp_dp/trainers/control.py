"""What the ranks do next: the flags of a Trainer's control, the same on every rank.

Goes in: the flags that each rank's own callbacks, signal handlers and time limits have set. Comes out: those that all
ranks follow, at the same update, for one that stops or evaluates alone leaves the others waiting:

* **A stop is anybody's**: ``should_training_stop`` and ``should_epoch_stop`` hold when any rank sets them.
* **The rest is rank 0's**: whether to log, evaluate or save. Another rank that asks for it alone is told so, once.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from mindnlp_dp.communication.collectives import ProcessGroup

STOPS = ("should_training_stop", "should_epoch_stop")
ACTIONS = ("should_save", "should_evaluate", "should_log")
FLAGS = (*STOPS, *ACTIONS)


class ControlAgreement:
    """Called by every rank between two updates; one small all-reduce.

    Attributes:
        agreed: the flags as all ranks have them since the last call. Ranks go by these: a rank's own ``control`` may
            be set at any moment, by a signal handler for instance, and counts at the next call.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._has_warned = False
        self.agreed = dict.fromkeys(FLAGS, False)

    def __call__(self, control: Any) -> dict[str, bool]:
        """Agree on the flags; ``control`` has them as well then, but for what was set in it meanwhile."""
        group = self._group
        seen = {flag: bool(getattr(control, flag)) for flag in FLAGS}
        mine = np.array(list(seen.values()), np.int32)
        # Ranks count from 1 here, so that the largest number names one that has set a flag.
        set_by = mine * (group.rank + 1)
        of_rank_0 = mine[len(STOPS) :] * group.is_main
        result = group.all_reduce(np.concatenate([set_by, of_rank_0]), op="max", is_hot=True)
        anybody, actions = result[: len(FLAGS)], result[len(FLAGS) :]
        self.agreed = {flag: bool(value) for flag, value in zip(FLAGS, [*anybody[: len(STOPS)], *actions])}
        for flag, value in self.agreed.items():
            if value != seen[flag]:
                setattr(control, flag, value)
        dropped = [
            (flag, int(rank) - 1)
            for flag, rank, is_set in zip(ACTIONS, anybody[len(STOPS) :], actions)
            if rank and not is_set
        ]
        if dropped and not self._has_warned:
            self._has_warned = True
            flag, rank = dropped[0]
            warnings.warn(
                f"rank {rank} set {flag} and rank 0 did not: rank 0 decides when to log, evaluate and save, for all "
                "ranks (a stop counts from any rank); set it on every rank",
                RuntimeWarning,
                stacklevel=3,
            )
        return self.agreed
