"""Sequence parallelism: each rank of the axis "sp" has a part of every row's tokens (shards.py, edits.py)."""
