"""This patch makes MindNLP 0.4.1's own Trainer raise in a job of several processes."""

from __future__ import annotations

from mindnlp_dp.compat.import_hook import around
from mindnlp_dp.compat.stock_trainers import refused_in_several_processes

# Versions: MindNLP 0.4.1. Cause: its own Trainer exchanges no gradients, so each of several processes silently
# trains a separate model.
# Remove when: MindNLP's Trainer is data parallel itself.
around("mindnlp.engine.trainer.base")(refused_in_several_processes("MindNLP's"))
