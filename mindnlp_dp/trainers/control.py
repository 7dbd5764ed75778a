"""This module makes all ranks agree on the flags of a Trainer's control; the training loop calls it between updates.

Callbacks, signal handlers and time limits set flags on one rank, and a rank that stops or evaluates alone would leave
the others blocked in a collective. So all ranks follow the same flags at the same update:

* **Any rank can stop**: ``should_training_stop`` and ``should_epoch_stop`` hold when any rank sets them.
* **Rank 0 decides the rest**: whether to log, evaluate or save. If only another rank asks, one warning names it.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup

STOPS = ("should_training_stop", "should_epoch_stop")
ACTIONS = ("should_save", "should_evaluate", "should_log")
FLAGS = (*STOPS, *ACTIONS)


class ControlAgreement:
    """Agrees on the flags with one small all-reduce; every rank calls it between two updates.

    Attributes:
        agreed: the flags that all ranks agreed on in the last call. Ranks act on these: a rank's own ``control`` may
            be set at any moment, by a signal handler for instance, and counts at the next call.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._has_warned = False
        self.agreed = dict.fromkeys(FLAGS, False)

    def __call__(self, control: Any) -> dict[str, bool]:
        """Agree on the flags, and write them to ``control``, except where it was changed meanwhile."""
        group = self._group
        seen = {flag: bool(getattr(control, flag)) for flag in FLAGS}
        mine = np.array(list(seen.values()), np.int32)
        # Ranks count from 1 here: 0 means that no rank has set a flag, and the maximum names a rank that has.
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
