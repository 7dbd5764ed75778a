"""This module reads and writes the environment variables by which the launcher describes a job to its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional

# The number of restarts of a job, and its unique name.
RESTART_COUNT_VARIABLE, JOB_VARIABLE = "MINDNLP_DP_RESTART_COUNT", "MINDNLP_DP_JOB"

_HOST_RANKS = "MINDNLP_DP_HOST_RANKS"

# The full number of ranks of an elastic job, for which its global batch is defined.
_FULL_SIZE = "MINDNLP_DP_FULL_SIZE"

# Whether that batch is smaller while ranks are missing.
_SCALE_BATCH = "MINDNLP_DP_SCALE_BATCH"


def attempt_env(number: int, job: str, max_world_size: Optional[int], *, scale_batch: bool = False) -> dict[str, str]:
    """Return the environment variables for the ranks of attempt ``number``, from 0, of the job named ``job``.

    Args:
        max_world_size: maximum number of ranks of an elastic job; None for other jobs.
        scale_batch: whether the global batch of an elastic job is proportional to the number of its ranks.
    """
    # All are set, so that none is inherited from a job in which this one is started.
    sizes = {_FULL_SIZE: str(max_world_size or ""), _SCALE_BATCH: str(int(scale_batch))}
    return {RESTART_COUNT_VARIABLE: str(number), JOB_VARIABLE: job, **sizes}


def max_world_size(environ: Mapping[str, str]) -> Optional[int]:
    """Return the full number of ranks of this process's job, which sets its global batch; None if not elastic."""
    return int(environ[_FULL_SIZE]) if environ.get(_FULL_SIZE) else None


def scales_batch(environ: Mapping[str, str]) -> bool:
    """Return whether this process's job is elastic, with a global batch proportional to its number of ranks."""
    return max_world_size(environ) is not None and environ.get(_SCALE_BATCH) == "1"


def job_id(environ: Mapping[str, str]) -> Optional[str]:
    """Return the name of this process's job, the same in every attempt; None if our launcher did not start it."""
    return environ.get(JOB_VARIABLE) or None


def job_if_restarted(environ: Mapping[str, str]) -> Optional[str]:
    """Return the name of this process's job if this is not its first attempt, else None."""
    return None if environ.get(RESTART_COUNT_VARIABLE, "0") == "0" else job_id(environ)


def host_environment(ranks: range) -> dict[str, str]:
    """Return the variable by which a host tells its ranks which of the job's ranks are on it."""
    return {_HOST_RANKS: f"{ranks.start}:{ranks.stop}"}


def ranks_of_this_host(environ: Mapping[str, str], nproc: int) -> range:
    """Return the ranks that :func:`host_environment` was given; all ranks if the variable is not set."""
    first, _, end = environ.get(_HOST_RANKS, f"0:{nproc}").partition(":")
    return range(int(first), int(end))
