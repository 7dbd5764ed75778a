"""Patches for MindNLP 0.4.1; one module for each subject."""

from mindnlp_dp.compat.mindnlp_0_4 import cpu_kernels as cpu_kernels
from mindnlp_dp.compat.mindnlp_0_4 import models as models
from mindnlp_dp.compat.mindnlp_0_4 import operators as operators
from mindnlp_dp.compat.mindnlp_0_4 import optimizers as optimizers
from mindnlp_dp.compat.mindnlp_0_4 import parameters as parameters
from mindnlp_dp.compat.mindnlp_0_4 import peft as peft
from mindnlp_dp.compat.mindnlp_0_4 import start as start
from mindnlp_dp.compat.mindnlp_0_4 import stock_trainer as stock_trainer
from mindnlp_dp.compat.mindnlp_0_4 import tokenization as tokenization
from mindnlp_dp.compat.mindnlp_0_4 import value_and_grad as value_and_grad
