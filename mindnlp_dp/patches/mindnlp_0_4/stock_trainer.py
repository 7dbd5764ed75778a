"""MindNLP 0.4.1's own Trainer."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Iterator
from typing import Any

from mindnlp_dp.launch.launchers import detect_launch
from mindnlp_dp.patches.import_hook import around


# Versions: MindNLP 0.4.1. Cause: its own Trainer exchanges no gradients, so that each of several processes
# trains a model of its own, and says nothing.
# Goes when: MindNLP's Trainer is data parallel itself.
@around("mindnlp.engine.trainer.base")
def _refuse_the_stock_trainer_in_several_processes(module: types.ModuleType) -> Iterator[None]:
    yield
    stock_train = module.Trainer.train

    @functools.wraps(stock_train)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        launch = detect_launch(os.environ)
        if launch.num_known > 1 and not getattr(self, "is_data_parallel", False):
            raise RuntimeError(
                f"{launch.by} started {launch.num_known} processes, and MindNLP's own Trainer would train "
                f"{launch.num_known} separate models; call mindnlp_dp.init_process_group() and use "
                "mindnlp_dp.DataParallelTrainer (for a Trainer of your own: mindnlp_dp.DataParallelTrainerMixin)"
            )
        return stock_train(self, *args, **kwargs)

    module.Trainer.train = train
