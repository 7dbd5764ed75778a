"""Large batches: LARS and LAMB, with the interface of MindNLP's optimizers, and how learning rates grow."""

from .lamb import LAMB
from .lars import LARS
from .scaling import parameter_groups, scaled_learning_rate, warmup_factor

__all__ = ["LAMB", "LARS", "parameter_groups", "scaled_learning_rate", "warmup_factor"]
