"""MPI through mpi4py: the transport, sums in memory that the ranks of a host share, rings between hosts, and faults."""
