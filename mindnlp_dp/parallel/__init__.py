"""Shards models over ranks: tensor, pipeline, expert and sequence parallelism, also combined with data parallelism.

Read device_mesh.py first, then parallel_plan.py, which says what is sharded, parallelize.py, which does it, and
sharded_model.py, the result.
"""
