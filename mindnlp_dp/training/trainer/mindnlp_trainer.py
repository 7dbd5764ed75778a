"""This module imports the Trainer's classes from the library that the installed MindNLP uses, for this package.

That library is MindNLP's own ``engine`` in MindNLP 0.4, and Hugging Face's Transformers in MindNLP 0.5.
"""

from __future__ import annotations

from typing import Any

from mindnlp_dp.runtime.versions import mindnlp_series

__all__ = [
    "EVAL_STRATEGY",
    "TRAINER_STATE_NAME",
    "EarlyStoppingCallback",
    "EvalLoopOutput",
    "EvalPrediction",
    "PreTrainedModel",
    "PrinterCallback",
    "ProgressCallback",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerState",
    "TrainingArguments",
    "denumpify_detensorize",
    "has_length",
    "is_causal",
    "set_seed",
]

if mindnlp_series() == "0.5":
    import mindnlp  # noqa: F401 -- puts mindtorch in PyTorch's place
    from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments, set_seed
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_callback import EarlyStoppingCallback, PrinterCallback, ProgressCallback, TrainerState
    from transformers.trainer_utils import (
        EvalLoopOutput,
        EvalPrediction,
        TrainOutput,
        denumpify_detensorize,
        has_length,
    )

    # The name of the argument that says when to evaluate.
    EVAL_STRATEGY = "eval_strategy"
else:
    from mindnlp.engine import Trainer, TrainerCallback, TrainingArguments
    from mindnlp.engine.callbacks import EarlyStoppingCallback, PrinterCallback, ProgressCallback, TrainerState
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
    from mindnlp.transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    EVAL_STRATEGY = "evaluation_strategy"


def is_causal(model: Any) -> bool:
    """Tell whether the library's Trainer treats ``model`` as a causal language model."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
