"""This package packs gradients into buckets (layout.py) and has the memory in which they are summed."""
