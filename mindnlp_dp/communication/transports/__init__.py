"""Transports move bytes between ranks, one for each library.

No other folder imports mpi4py or MindSpore's collectives.
"""
