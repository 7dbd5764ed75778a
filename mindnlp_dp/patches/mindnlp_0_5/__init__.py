"""Patches of MindNLP 0.5, whose ``mindtorch`` stands in PyTorch's place, by what they mend."""

from . import cpu_kernels as cpu_kernels
from . import start as start
from . import stock_trainer as stock_trainer
from . import torch_names as torch_names
