"""This module defines the options of a job; the command line makes them, and the whole launcher reads them."""

from __future__ import annotations

from dataclasses import dataclass

from mindnlp_dp.launch.log_dir import DEFAULT_MB
from mindnlp_dp.launch.termination import GRACE_PERIOD_SECONDS


@dataclass(frozen=True)
class JobOptions:
    """Options that say how a job is monitored and restarted; used by :class:`~mindnlp_dp.launch.job.Job`.

    Attributes:
        hang_timeout: seconds without progress of any rank after which the job is ended; 0: never.
        max_restarts: maximum number of restarts after failures.
        tee: ranks whose output is shown: "0", "all" or "none".
        grow_after: seconds after which an elastic job fills the place of a lost rank again.
        grace_period: seconds that the job gets to write a checkpoint when it is asked to end (SIGTERM).
        log_mb: size in MiB at which a rank's log is rotated; 0: never.
        in_place: whether ranks continue in their processes without a lost rank (MPI, on one host).
        scale_batch: whether the global batch of an elastic job is proportional to the number of its ranks.
    """

    hang_timeout: float = 1800.0
    max_restarts: int = 0
    tee: str = "0"
    grow_after: float = 60.0
    grace_period: float = GRACE_PERIOD_SECONDS
    log_mb: int = DEFAULT_MB
    in_place: bool = False
    scale_batch: bool = False
