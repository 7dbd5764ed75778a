"""Buckets: how gradients are packed (layout.py), and the memory in which they are summed."""
