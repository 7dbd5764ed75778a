"""The textbook algorithms of all-reduce, to run, count and compare.

Each algorithm is a function of an :class:`~.endpoint.Endpoint` and an array, uses only ``send`` and ``recv``, and
returns the sum over all ranks on every rank. They are for learning and measuring; training uses
:mod:`mindnlp_dp.data_parallel`. Nothing in this package imports MindSpore.

======================  ==========================================
``reduce_broadcast``    Reduce to rank 0, then Broadcast
``data_parallel``       one process owns the gradients
``parameter_server``    servers hold shards of the parameters
``ring``                scatter-reduce, then all-gather
======================  ==========================================
"""

from mindnlp_dp.commands.algorithms.all_reduce import (
    ParameterServer,
    all_reduce,
    broadcast,
    data_parallel_all_reduce,
    parameter_server_all_reduce,
    reduce,
    ring_all_reduce,
)
from mindnlp_dp.commands.algorithms.endpoint import Endpoint, Message, MPIEndpoint, run_ranks

ALGORITHMS = {
    "reduce_broadcast": all_reduce,
    "data_parallel": data_parallel_all_reduce,
    "parameter_server": parameter_server_all_reduce,
    "ring": ring_all_reduce,
}

__all__ = [
    "ALGORITHMS",
    "Endpoint",
    "MPIEndpoint",
    "Message",
    "ParameterServer",
    "all_reduce",
    "broadcast",
    "data_parallel_all_reduce",
    "parameter_server_all_reduce",
    "reduce",
    "ring_all_reduce",
    "run_ranks",
]
