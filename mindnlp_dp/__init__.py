"""Data-parallel training for MindNLP and MindSpore.

The public names below are in the order of a training run: the processes form a
group, broadcast the weights, shard the data, run a step, exchange gradients,
evaluate::

    import mindnlp_dp as dp            # before mindnlp: patches it for the installed MindSpore

    group = dp.init_process_group()
    trainer = dp.DataParallelTrainer(model, dp.DataParallelArguments(...), ...)

Names are resolved at first use (PEP 562), so that the launcher starts without
importing MindSpore. The import itself only registers the patches in
:mod:`mindnlp_dp.compat`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mindnlp_dp import compat
from mindnlp_dp.runtime.versions import __version__ as __version__
from mindnlp_dp.runtime.versions import advice_for, mindnlp_series

# The package with the Trainer for the installed MindNLP.
_TRAINER = f"training.trainer.mindnlp_{mindnlp_series().replace('.', '_')}"

_HOME = {
    "init_process_group": "training.initialize",
    "get_process_group": "communication.default_group",
    "destroy_process_group": "communication.default_group",
    "ProcessGroup": "communication.process_group",
    "broadcast_parameters": "communication.replicas",
    "broadcast_buffers": "communication.replicas",
    "assert_replicas_in_sync": "communication.replicas",
    "replica_digest": "communication.replicas",
    "GlobalBatchSampler": "data.sampler",
    "make_loader": "data.dataset_adapter",
    "PaddingCollator": "data.padding",
    "NaiveGradientSynchronizer": "data_parallel.naive_synchronizer",
    "GradientSynchronizer": "data_parallel.synchronizer",
    "make_train_step": "training.make_train_step",
    "FunctionalRun": "training.resumable_run",
    "DeviceMesh": "parallel.device_mesh",
    "init_device_mesh": "parallel.device_mesh",
    "get_device_mesh": "parallel.device_mesh",
    "empty_weights": "parallel.weights.meta_init",
    "parallelize": "parallel.parallelize",
    "fully_shard": "parallel.fully_shard",
    "gathered": "parallel.fully_shard",
    "enable_recompute": "runtime.recompute",
    "fuse_cross_entropy": "training.fused_cross_entropy",
    "convert_sync_batchnorm": "data_parallel.sync_batchnorm",
    "all_gather_with_grad": "communication.batch_across_ranks",
    "evaluate": "training.evaluate",
    "count_labels": "data.loss_weight",
    "DataParallelArguments": f"{_TRAINER}.arguments",
    "DataParallelTrainerMixin": f"{_TRAINER}.trainer",
    "DataParallelTrainer": f"{_TRAINER}.trainer",
}

# They work on the layer classes of MindNLP 0.4 only.
_OF_0_4_ALONE = ("parallelize", "fully_shard", "gathered", "empty_weights")
__all__ = [name for name in _HOME if mindnlp_series() == "0.4" or name not in _OF_0_4_ALONE]

if TYPE_CHECKING:
    from mindnlp_dp import optim as optim
    from mindnlp_dp.communication.batch_across_ranks import all_gather_with_grad as all_gather_with_grad
    from mindnlp_dp.communication.default_group import destroy_process_group as destroy_process_group
    from mindnlp_dp.communication.default_group import get_process_group as get_process_group
    from mindnlp_dp.communication.process_group import ProcessGroup as ProcessGroup
    from mindnlp_dp.communication.replicas import assert_replicas_in_sync as assert_replicas_in_sync
    from mindnlp_dp.communication.replicas import broadcast_buffers as broadcast_buffers
    from mindnlp_dp.communication.replicas import broadcast_parameters as broadcast_parameters
    from mindnlp_dp.communication.replicas import replica_digest as replica_digest
    from mindnlp_dp.data.dataset_adapter import make_loader as make_loader
    from mindnlp_dp.data.loss_weight import count_labels as count_labels
    from mindnlp_dp.data.padding import PaddingCollator as PaddingCollator
    from mindnlp_dp.data.sampler import GlobalBatchSampler as GlobalBatchSampler
    from mindnlp_dp.data_parallel.naive_synchronizer import NaiveGradientSynchronizer as NaiveGradientSynchronizer
    from mindnlp_dp.data_parallel.sync_batchnorm import convert_sync_batchnorm as convert_sync_batchnorm
    from mindnlp_dp.data_parallel.synchronizer import GradientSynchronizer as GradientSynchronizer
    from mindnlp_dp.parallel.device_mesh import DeviceMesh as DeviceMesh
    from mindnlp_dp.parallel.device_mesh import get_device_mesh as get_device_mesh
    from mindnlp_dp.parallel.device_mesh import init_device_mesh as init_device_mesh
    from mindnlp_dp.parallel.fully_shard import fully_shard as fully_shard
    from mindnlp_dp.parallel.fully_shard import gathered as gathered
    from mindnlp_dp.parallel.parallelize import parallelize as parallelize
    from mindnlp_dp.parallel.weights.meta_init import empty_weights as empty_weights
    from mindnlp_dp.runtime.recompute import enable_recompute as enable_recompute
    from mindnlp_dp.training.evaluate import evaluate as evaluate
    from mindnlp_dp.training.fused_cross_entropy import fuse_cross_entropy as fuse_cross_entropy
    from mindnlp_dp.training.initialize import init_process_group as init_process_group
    from mindnlp_dp.training.make_train_step import make_train_step as make_train_step
    from mindnlp_dp.training.resumable_run import FunctionalRun as FunctionalRun
    from mindnlp_dp.training.trainer.mindnlp_0_4.arguments import DataParallelArguments as DataParallelArguments
    from mindnlp_dp.training.trainer.mindnlp_0_4.trainer import DataParallelTrainer as DataParallelTrainer
    from mindnlp_dp.training.trainer.mindnlp_0_4.trainer import DataParallelTrainerMixin as DataParallelTrainerMixin

compat.install_import_hook()


if not TYPE_CHECKING:
    # Hidden from type checkers: with a module __getattr__ they would accept any attribute name.

    def __getattr__(name: str) -> Any:
        if name == "optim":
            return importlib.import_module(".optim", __name__)
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name not in __all__:
            raise AttributeError(
                f"{__name__}.{name} is for models of MindNLP 0.4, and MindNLP {mindnlp_series()} is installed, whose "
                "models are not sharded here"
            )
        try:
            value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(advice_for(error), name=error.name) from error
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
