"""Shards models over ranks: tensor, pipeline, expert and sequence parallelism, also combined with data parallelism."""
