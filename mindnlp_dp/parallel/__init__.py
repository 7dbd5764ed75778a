"""Shards models over ranks: tensor, pipeline and expert parallelism, also combined with data parallelism."""
