"""Optimizers for large batches (LARS and LAMB, with the interface of MindNLP's) and rules for the learning rate."""

from mindnlp_dp.optim.lamb import LAMB
from mindnlp_dp.optim.lars import LARS
from mindnlp_dp.optim.learning_rate import scaled_learning_rate, warmup_factor
from mindnlp_dp.optim.parameter_groups import parameter_groups

__all__ = ["LAMB", "LARS", "parameter_groups", "scaled_learning_rate", "warmup_factor"]
