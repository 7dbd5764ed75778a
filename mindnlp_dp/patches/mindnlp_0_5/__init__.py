"""Patches for MindNLP 0.5, whose ``mindtorch`` replaces PyTorch; one module for each subject."""

from . import cpu_kernels as cpu_kernels
from . import one_process as one_process
from . import start as start
from . import stock_trainer as stock_trainer
from . import torch_names as torch_names
from . import value_and_grad as value_and_grad
