"""MindNLP 0.4.1's own Trainer."""

from __future__ import annotations

from mindnlp_dp.patches.import_hook import around
from mindnlp_dp.patches.stock_trainers import refused_in_several_processes

# Versions: MindNLP 0.4.1. Cause: its own Trainer exchanges no gradients, so that each of several processes
# trains a model of its own, and says nothing.
# Goes when: MindNLP's Trainer is data parallel itself.
around("mindnlp.engine.trainer.base")(refused_in_several_processes("MindNLP's"))
