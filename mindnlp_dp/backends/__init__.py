"""Communication, one module a library; nothing outside this folder imports mpi4py or MindSpore's collectives."""
