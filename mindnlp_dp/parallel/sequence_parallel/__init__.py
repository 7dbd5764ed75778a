"""Sequence parallelism: each rank of the axis "sp" has a part of every row's tokens (token_shards.py, sequence_edits.py)."""
