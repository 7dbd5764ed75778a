"""This module makes a Trainer that is not data parallel raise in a job of several processes."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Iterator
from typing import Any

from mindnlp_dp.compat.import_hook import Patch
from mindnlp_dp.runtime.launch_env import detect_launch


def refused_in_several_processes(whose: str) -> Patch:
    """Return a patch that makes ``whose`` Trainer raise in a job of several processes.

    Without it, each process would train a separate model.
    """

    def patch(module: types.ModuleType) -> Iterator[None]:
        yield
        stock_train = module.Trainer.train

        @functools.wraps(stock_train)
        def train(self: Any, *args: Any, **kwargs: Any) -> Any:
            launch = detect_launch(os.environ)
            if launch.num_known > 1 and not getattr(self, "is_data_parallel", False):
                raise RuntimeError(
                    f"{launch.by} started {launch.num_known} processes, and {whose} own Trainer would train "
                    f"{launch.num_known} separate models; call mindnlp_dp.init_process_group() and use "
                    "mindnlp_dp.DataParallelTrainer (for your own Trainer: mindnlp_dp.DataParallelTrainerMixin)"
                )
            return stock_train(self, *args, **kwargs)

        module.Trainer.train = train

    return patch
