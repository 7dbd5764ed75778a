"""Models cut among ranks: tensor, pipeline and expert parallelism, and their mixtures with data parallelism."""
