"""This module defines the launcher's errors; :func:`mindnlp_dp.launch.run.run_job` turns them into exit codes."""

from __future__ import annotations


class LaunchError(Exception):
    """Raised when the job cannot be started as asked: the command line is wrong, or a program is not installed."""

    exit_code = 2


class TemporaryError(LaunchError):
    """Raised when the job cannot be started now, but may be later: a disk is full, a port is in use."""

    # EX_TEMPFAIL of sysexits.h. Programs that start jobs would not try again after 2.
    exit_code = 75


class LeaderLostError(TemporaryError):
    """Raised on a host that has joined its job, when the first host is lost and does not return.

    The failure is the first host's, so what restarts hosts need not count this one.
    """

    # No convention has this code: sysexits.h has 64 to 78, shells, timeout and xargs 120 to 255, pytest 0 to 5.
    exit_code = 83
