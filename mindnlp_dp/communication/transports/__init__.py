"""How bytes get from rank to rank, one module a library; nothing outside this folder imports mpi4py or MindSpore's
collectives."""
