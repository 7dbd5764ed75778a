"""Data-parallel training for MindNLP and MindSpore.

The names below follow the way of the data: the processes meet, agree on one
set of weights, cut the data, take a step, exchange gradients, evaluate::

    import mindnlp_dp as dp            # before mindnlp: makes it run on this MindSpore

    group = dp.init_process_group()
    trainer = dp.DataParallelTrainer(model, dp.DataParallelArguments(...), ...)

Names are resolved at first use (PEP 562), so that the launcher starts without
paying for MindSpore's import. The one thing that happens at import is the
registration of the patches in :mod:`mindnlp_dp.compat` and its kin.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import compat as compat
from . import compat_autograd as compat_autograd
from . import compat_optim as compat_optim
from . import compat_quiet as compat_quiet
from . import import_hook

__version__ = "0.1.0"

_HOME = {
    "init_process_group": "process_group",
    "get_process_group": "process_group",
    "destroy_process_group": "process_group",
    "ProcessGroup": "process_group",
    "broadcast_parameters": "replicas",
    "broadcast_buffers": "replicas",
    "assert_replicas_in_sync": "replicas",
    "replica_digest": "replicas",
    "GlobalBatchSampler": "sharding",
    "NaiveGradientSynchronizer": "gradient_sync",
    "GradientSynchronizer": "gradient_sync",
    "make_loader": "loader",
    "make_train_step": "functional",
    "FunctionalRun": "functional_run",
    "evaluate": "evaluation",
    "DataParallelArguments": "arguments",
    "DataParallelTrainerMixin": "trainer",
    "DataParallelTrainer": "trainer",
}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from .arguments import DataParallelArguments as DataParallelArguments
    from .evaluation import evaluate as evaluate
    from .functional import make_train_step as make_train_step
    from .functional_run import FunctionalRun as FunctionalRun
    from .gradient_sync import GradientSynchronizer as GradientSynchronizer
    from .gradient_sync import NaiveGradientSynchronizer as NaiveGradientSynchronizer
    from .loader import make_loader as make_loader
    from .process_group import ProcessGroup as ProcessGroup
    from .process_group import destroy_process_group as destroy_process_group
    from .process_group import get_process_group as get_process_group
    from .process_group import init_process_group as init_process_group
    from .replicas import assert_replicas_in_sync as assert_replicas_in_sync
    from .replicas import broadcast_buffers as broadcast_buffers
    from .replicas import broadcast_parameters as broadcast_parameters
    from .replicas import replica_digest as replica_digest
    from .sharding import GlobalBatchSampler as GlobalBatchSampler
    from .trainer import DataParallelTrainer as DataParallelTrainer
    from .trainer import DataParallelTrainerMixin as DataParallelTrainerMixin

import_hook.install_import_hook()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME))
