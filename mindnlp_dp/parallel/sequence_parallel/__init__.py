"""Sequence parallelism: each rank of the axis "sp" has a part of every row's tokens.

sequence_edits.py plans the changes of a model, token_shards.py has the operators that it puts there.
"""
