"""This package gives every rank the same weights and buffers (broadcast.py) and verifies it (digests.py)."""
