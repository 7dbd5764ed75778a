"""This package replaces every rank's gradients by their weighted mean over all ranks, as PyTorch's DDP does.

Read naive_synchronizer.py first, one all-reduce per parameter; then synchronizer_base.py for the interface,
synchronizer.py with buckets/ for the fast way to the same means, and overlap.py.
"""
