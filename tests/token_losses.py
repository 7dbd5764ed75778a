"""Train models whose loss is a mean over labels, with all ranks, and in one process with the full batch."""

from __future__ import annotations

from small_models import build, find, samples

from mindnlp_dp.runtime.versions import mindnlp_series
from models import alone, train, weights

# A decoder whose labels the caller has already shifted.
UNSHIFTED = "XLNetLMHeadModel" if mindnlp_series() == "0.4" else "BartForCausalLM"
HEADS = [
    "GPT2LMHeadModel", "LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM", UNSHIFTED,
    "BertForTokenClassification", "RobertaForTokenClassification", "BertForMaskedLM", "T5ForConditionalGeneration",
    "BartForConditionalGeneration", "BertForQuestionAnswering", "RobertaForMultipleChoice",
    "BertForSequenceClassification",
]  # fmt: skip


def settings(group, accumulation_steps, **more):
    """Return training settings with two rows per rank in a micro-batch."""
    return {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation_steps, "optim": "sgd",
        "learning_rate": 0.1, "num_train_epochs": 2, "max_grad_norm": 1.0, "logging_steps": 1, **more,
    }  # fmt: skip


def distance(mine, expected, before):
    """Return the norm of the difference of two sets of weights, divided by the norm of the training's change."""
    difference = sum(float(((mine[name] - expected[name]) ** 2).sum()) for name in expected) ** 0.5
    change = sum(float(((expected[name] - before[name]) ** 2).sum()) for name in expected) ** 0.5
    assert change > 1e-3
    return difference / change


def whole_batch(group, accumulation_steps, **more):
    """Return settings for one process that has all rows of an update in one micro-batch."""
    one = settings(group, accumulation_steps, **more)
    one["per_device_train_batch_size"] *= group.world_size * accumulation_steps
    return {**one, "gradient_accumulation_steps": 1}


def together_and_alone(group, folder, name, accumulation_steps, trainer_class=None, *, p=0.0, **more):
    """Train with all ranks, and in one process; ``p`` is the probability of dropout."""
    model_class = find(name)
    before = weights(build(model_class))
    # The last update is incomplete, and so is its last micro-batch.
    rows = samples(model_class, build(model_class), 4 * group.world_size * accumulation_steps + 3)
    model = build(model_class, dropout=p)
    mine = train(model, rows, folder, trainer_class, **settings(group, accumulation_steps, **more))
    with alone():
        one = train(
            build(model_class, dropout=p), rows, folder / "1", trainer_class,
            **whole_batch(group, accumulation_steps, **more),
        )  # fmt: skip
    assert mine.state.global_step == one.state.global_step > 3
    return distance(weights(mine.model), weights(one.model), before), mine, one
