"""Transports move bytes between ranks, one module per library; no other folder imports mpi4py or MindSpore's
collectives."""
