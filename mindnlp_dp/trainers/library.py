"""The library of the installed MindNLP's Trainer: its own ``engine`` in 0.4, Hugging Face's Transformers in 0.5.

Goes in: nothing. Comes out: the classes and names that both have, from where they are.
"""

from __future__ import annotations

from mindnlp_dp.versions import mindnlp_series

__all__ = [
    "TRAINER_STATE_NAME",
    "EvalLoopOutput",
    "EvalPrediction",
    "PreTrainedModel",
    "TrainOutput",
    "Trainer",
    "TrainerState",
    "TrainingArguments",
    "denumpify_detensorize",
    "has_length",
]

if mindnlp_series() == "0.5":
    import mindnlp  # noqa: F401 -- puts mindtorch in PyTorch's place
    from transformers import PreTrainedModel, Trainer, TrainingArguments
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_callback import TrainerState
    from transformers.trainer_utils import (
        EvalLoopOutput,
        EvalPrediction,
        TrainOutput,
        denumpify_detensorize,
        has_length,
    )
else:
    from mindnlp.engine import Trainer, TrainingArguments
    from mindnlp.engine.callbacks import TrainerState
    from mindnlp.engine.trainer.base import TRAINER_STATE_NAME
    from mindnlp.engine.utils import EvalLoopOutput, EvalPrediction, TrainOutput, denumpify_detensorize, has_length
    from mindnlp.transformers import PreTrainedModel
