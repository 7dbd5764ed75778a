"""Optimizers for large batches (LARS and LAMB, with the interface of MindNLP's) and rules for the learning rate."""

from .lamb import LAMB
from .lars import LARS
from .learning_rate import scaled_learning_rate, warmup_factor
from .parameter_groups import parameter_groups

__all__ = ["LAMB", "LARS", "parameter_groups", "scaled_learning_rate", "warmup_factor"]
