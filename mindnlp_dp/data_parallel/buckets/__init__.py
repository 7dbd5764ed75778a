"""This package packs gradients into buckets (bucket_layout.py) and has the memory in which they are summed."""
