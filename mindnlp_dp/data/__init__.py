"""This package turns a data set into this rank's micro-batches: sampling order, batch sizes, sharding, loaders.

Read sampler.py first, which says which rank reads which samples; then loader.py, and loss_weight.py, which says how
much the loss of a micro-batch counts.
"""
