"""One set of weights and buffers on every rank (broadcast.py), and the proof of it (digests.py)."""
