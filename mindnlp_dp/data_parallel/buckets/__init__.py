"""This package packs gradients into buckets, and has the memory in which they are summed.

Read bucket_layout.py first, which packs them; then bucket.py, the interface of the three kinds of memory, in
host_bucket.py, shared_memory_bucket.py and device_bucket.py.
"""
