"""Patches for MindNLP 0.4.1; one module for each subject."""

from . import cpu_kernels as cpu_kernels
from . import models as models
from . import operators as operators
from . import optimizers as optimizers
from . import parameters as parameters
from . import start as start
from . import stock_trainer as stock_trainer
from . import value_and_grad as value_and_grad
