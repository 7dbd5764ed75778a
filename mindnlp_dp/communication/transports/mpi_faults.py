"""This module recognizes MPI's error for a lost rank, and shrinks a communicator to the surviving ranks.

The MPI transport calls it. It uses ULFM, "User Level Failure Mitigation" (Bland et al., "Post-failure recovery of MPI
communication capability", 2013), which is in OpenMPI 5; mpirun must be started with ``--with-ft ulfm``, or it ends the
job.

A rank that notices the loss revokes its communicators, so that ranks that wait for other ranks notice it, too. All then
call ``Shrink``, in which they agree on the survivors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional


def tells_of_a_loss(error: Optional[BaseException]) -> bool:
    """Return whether an error, or one of its causes, is MPI's error for a lost rank."""
    while error is not None:
        if type(error).__module__ == "mpi4py.MPI":
            from mpi4py import MPI

            if error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED):  # type: ignore[attr-defined]
                return True
        error = error.__cause__ or error.__context__
    return False


def those_left(comm: Any, others: Sequence[Any]) -> Any:
    """Return a communicator of the surviving ranks of ``comm``, in its order; ``others`` are their other communicators.

    A collective of the surviving ranks. The old communicators can no longer be used. They are not freed, because
    freeing one is a collective of all of its ranks.
    """
    for each in (*others, comm):
        each.Revoke()
    return comm.Shrink()
