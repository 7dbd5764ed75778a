"""Shards all weights of a model over the ranks, and gathers those of a layer while it computes (ZeRO stage 3)."""
