"""Tensor and expert parallelism: sharded layers, and their application to a model."""
