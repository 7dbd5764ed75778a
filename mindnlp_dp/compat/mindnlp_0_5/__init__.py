"""Patches for MindNLP 0.5, whose ``mindtorch`` replaces PyTorch; one module for each subject."""

from mindnlp_dp.compat.mindnlp_0_5 import cpu_kernels as cpu_kernels
from mindnlp_dp.compat.mindnlp_0_5 import one_process as one_process
from mindnlp_dp.compat.mindnlp_0_5 import start as start
from mindnlp_dp.compat.mindnlp_0_5 import stock_trainer as stock_trainer
from mindnlp_dp.compat.mindnlp_0_5 import torch_names as torch_names
from mindnlp_dp.compat.mindnlp_0_5 import value_and_grad as value_and_grad
