"""The library of the installed MindNLP's Trainer: its own ``engine`` in 0.4, Hugging Face's Transformers in 0.5.

Goes in: nothing. Comes out: the classes and names that both have, from where they are.
"""

from __future__ import annotations

from mindnlp_dp.versions import mindnlp_series

__all__ = [
    "EVAL_STRATEGY",
    "TRAINER_STATE_NAME",
    "EvalLoopOutput",
    "EvalPrediction",
    "PreTrainedModel",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerState",
    "TrainingArguments",
    "denumpify_detensorize",
    "has_length",
    "set_seed",
]

if mindnlp_series() == "0.5":
    import mindnlp  # noqa: F401 -- puts mindtorch in PyTorch's place
    from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments, set_seed
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_callback import TrainerState
    from transformers.trainer_utils import (
        EvalLoopOutput,
        EvalPrediction,
        TrainOutput,
        denumpify_detensorize,
        has_length,
    )

    # The argument that says when to evaluate.
    EVAL_STRATEGY = "eval_strategy"
else:
    from mindnlp.engine import Trainer, TrainerCallback, TrainingArguments
    from mindnlp.engine.callbacks import TrainerState
    from mindnlp.engine.trainer.base import TRAINER_STATE_NAME
    from mindnlp.engine.utils import (
        EvalLoopOutput,
        EvalPrediction,
        TrainOutput,
        denumpify_detensorize,
        has_length,
        set_seed,
    )
    from mindnlp.transformers import PreTrainedModel

    EVAL_STRATEGY = "evaluation_strategy"
