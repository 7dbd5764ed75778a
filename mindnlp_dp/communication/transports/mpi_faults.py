"""When a rank of an MPI job is lost: the others' word for it, and those that are left.

Goes in: the error that a call ended with, communicators. Comes out: a communicator of the ranks that are left. By
ULFM, "User Level Failure Mitigation" (Bland et al., "Post-failure recovery of MPI communication capability", 2013),
which is in OpenMPI 5; mpirun has to be started with ``--with-ft ulfm``, and else ends the job.

A rank that notices revokes what it talks by, so that those that wait for somebody else notice, too. All then come to
``Shrink``, in which they agree on who is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional


def tells_of_a_loss(error: Optional[BaseException]) -> bool:
    """Whether an error, or what it came of, is MPI's word for a rank that was lost."""
    while error is not None:
        if type(error).__module__ == "mpi4py.MPI":
            from mpi4py import MPI

            if error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED):  # type: ignore[attr-defined]
                return True
        error = error.__cause__ or error.__context__
    return False


def those_left(comm: Any, others: Sequence[Any]) -> Any:
    """A communicator of the ranks of ``comm`` that are left, in its order; ``others`` are what they talk by besides.

    A collective of those that are left. The old communicators are of no use any more, and stay as they are: to free
    one is a collective of all of its ranks.
    """
    for each in (*others, comm):
        each.Revoke()
    return comm.Shrink()
