"""This package turns a data set into this rank's micro-batches: sampling order, batch sizes, sharding, loaders."""
