"""Finds the weight of a micro-batch's loss: the number of items of which the loss is the mean.

N processes train the same model as one process only if their losses are averaged with these weights. The loss of a
classifier is a mean over rows. The loss of a language model is a mean over the labels that are not -100, and their
number differs between rows, micro-batches and ranks. :func:`loss_mean` decides by the model's class, for MindNLP and
Transformers; the Trainers, :func:`~mindnlp_dp.make_train_step`, pipelines and the evaluation call it.
"""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Optional

import numpy as np

from mindnlp_dp.data.batches import Batch, num_rows_of
from mindnlp_dp.runtime.arrays import to_host

# The label that the losses of MindNLP and Transformers leave out, as PyTorch's cross-entropy does.
IGNORED = -100


class Task(enum.Enum):
    """The task that a model's head is made for; the names are those of PEFT's ``TaskType``."""

    CLASSIFICATION = "sequence classification, regression or multiple choice"
    TOKEN_CLASSIFICATION = "token classification"
    CAUSAL_LM = "causal language modeling"
    MASKED_LM = "masked language modeling"
    SEQ2SEQ_LM = "sequence to sequence language modeling"
    QUESTION_ANSWERING = "extractive question answering"


@dataclass(frozen=True)
class LossMean:
    """Describes of which rows, labels or positions a model's loss is the mean.

    Attributes:
        task: the task, which decides how labels are read.
        is_shifted: whether the output at a token is compared with the next token's label, so that the first column of
            labels is not used.
        mask: name of a mask column; a label counts only where the mask is 1. All count if the batch lacks the column.
        ignored: the label that never counts; None if all labels count.
    """

    task: Task
    is_shifted: bool = False
    mask: str = ""
    ignored: Optional[int] = IGNORED

    def weight(self, batch: Mapping[str, Any]) -> Optional[float]:
        """Return the number of rows, labels or positions of which the loss of ``batch`` is the mean.

        Returns None if the batch lacks the columns that are needed to count them.
        """
        if self.task is Task.QUESTION_ANSWERING:
            counts = span_counts(batch)
            return None if counts is None else float(counts.mean())
        labels = batch.get("labels")
        if labels is None:
            return _num_rows(batch) if self.task is Task.CLASSIFICATION else None
        labels = to_host(labels) if hasattr(labels, "dtype") else np.asarray(labels)
        if self.task is Task.CLASSIFICATION and not _are_classes(labels):
            return _num_rows(batch)
        mask = batch.get(self.mask) if self.mask else None
        return count_labels(labels, shifted=self.is_shifted, mask=mask, ignore_index=self.ignored)


def count_labels(
    labels: Any, *, shifted: bool = False, mask: Any = None, ignore_index: Optional[int] = IGNORED, weight: Any = None
) -> float:
    """Return the number of labels that count: the weight of a mean over labels.

    It is for ``loss_weight`` of a Trainer, and ``loss_weight_of`` of a train step::

        def loss_weight(self, inputs):
            return dp.count_labels(inputs, shifted=True)

    Args:
        labels: a tensor or an array of any shape, or a batch, whose column ``labels`` is used.
        shifted: leave out the first column, as the loss of a causal language model does: it compares the output at
            each token with the label of the next token.
        mask: mask of the same shape; a label counts only where the mask is 1.
        ignore_index: the label that does not count; None counts all labels.
        weight: the weight of each class, of shape (classes,), as in ``cross_entropy(..., weight=weight)``; the result
            is then the sum of the labels' weights, by which that loss is divided.

    Raises:
        ValueError: ``labels`` is a batch without the column ``labels``, or a label has no weight.
    """
    if isinstance(labels, Mapping):
        if "labels" not in labels:
            raise ValueError(f"count_labels: the batch has no column 'labels', only {', '.join(map(str, labels))}")
        labels = labels["labels"]
    array = to_host(labels) if hasattr(labels, "dtype") else np.asarray(labels)
    counts = np.ones(array.shape, bool) if ignore_index is None else array != ignore_index
    if mask is not None:
        counts = counts & (to_host(mask).reshape(array.shape) == 1)
    if shifted:
        array, counts = array[..., 1:], counts[..., 1:]
    if weight is None:
        return float(np.count_nonzero(counts))
    weights, classes = np.asarray(to_host(weight) if hasattr(weight, "dtype") else weight), array[counts]
    if classes.size and not 0 <= classes.min() <= classes.max() < len(weights):
        raise ValueError(
            f"count_labels: the labels are {classes.min()} to {classes.max()}, and there are {len(weights)} weights"
        )
    return float(weights[classes].sum(dtype=np.float64))


def span_counts(batch: Mapping[str, Any]) -> Optional[np.ndarray]:
    """Return an array of two counts: how many start positions, and how many end positions, are within the text.

    The loss of question answering is half the mean over the start positions plus half the mean over the end positions.
    Returns None if the batch has no positions.
    """
    positions = [batch.get(name) for name in ("start_positions", "end_positions")]
    text = next((batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None), None)
    if text is None or any(position is None for position in positions):
        return None
    return np.array([np.count_nonzero(to_host(position) < text.shape[1]) for position in positions], np.float64)


def _are_classes(labels: np.ndarray) -> bool:
    """Return whether the labels are one class per row; cross-entropy then ignores rows with the label -100."""
    return labels.dtype.kind in "iu" and labels.ndim > 0 and math.prod(labels.shape[1:]) == 1


def _num_rows(batch: Any) -> float:
    """Return the number of rows of a batch, as counted by its loader or, for other batches, by its labels."""
    if isinstance(batch, Batch):
        return float(num_rows_of(batch))
    labels: Any = batch.get("labels") if isinstance(batch, Mapping) else None
    return float(labels.shape[0] if getattr(labels, "ndim", 0) else num_rows_of(batch))


# The loss means of model classes, by the end of the class name.
_TASKS = {
    "ForSequenceClassification": LossMean(Task.CLASSIFICATION),
    "ForImageClassification": LossMean(Task.CLASSIFICATION),
    "ForMultipleChoice": LossMean(Task.CLASSIFICATION),
    "ForNextSentencePrediction": LossMean(Task.CLASSIFICATION),
    "ForTokenClassification": LossMean(Task.TOKEN_CLASSIFICATION),
    "ForCausalLM": LossMean(Task.CAUSAL_LM, is_shifted=True),
    "LMHeadModel": LossMean(Task.CAUSAL_LM, is_shifted=True),
    "ModelWithLMHead": LossMean(Task.CAUSAL_LM, is_shifted=True),
    "DoubleHeadsModel": LossMean(Task.CAUSAL_LM, is_shifted=True),
    "ForMaskedLM": LossMean(Task.MASKED_LM),
    "ForConditionalGeneration": LossMean(Task.SEQ2SEQ_LM),
    "MTModel": LossMean(Task.SEQ2SEQ_LM),
    "EncoderDecoderModel": LossMean(Task.SEQ2SEQ_LM),
    "ForQuestionAnswering": LossMean(Task.QUESTION_ANSWERING),
    "ForQuestionAnsweringSimple": LossMean(Task.QUESTION_ANSWERING),
}

# Decoders that compare an output with the label of the same token: the caller has shifted the labels.
_UNSHIFTED = (
    "BartForCausalLM", "BigBirdPegasusForCausalLM", "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM",
    "CpmAntForCausalLM", "CpmBeeForCausalLM", "FlaubertWithLMHeadModel", "MBartForCausalLM", "MarianForCausalLM",
    "MvpForCausalLM", "PLBartForCausalLM", "PegasusForCausalLM", "ProphetNetForCausalLM", "Speech2Text2ForCausalLM",
    "TrOCRForCausalLM", "WhisperForCausalLM", "XLMProphetNetForCausalLM", "XLMWithLMHeadModel", "XLNetLMHeadModel",
)  # fmt: skip

# Decoder-only models that are named like encoder-decoders.
_SHIFTED = (
    "Blip2ForConditionalGeneration", "ChatGLMForConditionalGeneration", "ChatGLM2ForConditionalGeneration",
    "ChatGLM3ForConditionalGeneration", "ChatGLM4ForConditionalGeneration", "InstructBlipForConditionalGeneration",
    "Kosmos2ForConditionalGeneration", "MllamaForConditionalGeneration", "Qwen2VLForConditionalGeneration",
)  # fmt: skip

# The same, but only the labels of attended tokens count.
_SHIFTED_ATTENDED = (
    "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration", "VipLlavaForConditionalGeneration",
)  # fmt: skip

_ATTENDED = LossMean(Task.TOKEN_CLASSIFICATION, mask="attention_mask")

_EXCEPTIONS: dict[str, Optional[LossMean]] = {
    **dict.fromkeys(_UNSHIFTED, LossMean(Task.CAUSAL_LM)),
    **dict.fromkeys(_SHIFTED, LossMean(Task.CAUSAL_LM, is_shifted=True)),
    **dict.fromkeys(_SHIFTED_ATTENDED, LossMean(Task.CAUSAL_LM, is_shifted=True, mask="attention_mask")),
    "BioGptForTokenClassification": _ATTENDED,
    "XLMRobertaXLForTokenClassification": _ATTENDED,
    "BrosForTokenClassification": replace(_ATTENDED, mask="bbox_first_token_mask"),
    # Each token is labeled as original or replaced, so every label counts.
    "ElectraForPreTraining": replace(_ATTENDED, ignored=None),
    "FunnelForPreTraining": replace(_ATTENDED, ignored=None),
    # Unknown: these losses are sums of several means, or count rows that are not tokens of the text.
    **dict.fromkeys(("BlipForConditionalGeneration", "BrosSpadeEEForTokenClassification",
                     "BrosSpadeELForTokenClassification", "ClvpModelForConditionalGeneration",
                     "MusicgenForCausalLM", "MusicgenMelodyForCausalLM", "MusicgenForConditionalGeneration",
                     "MusicgenMelodyForConditionalGeneration")),
}  # fmt: skip

_LIBRARIES = ("mindnlp", "transformers")


def loss_mean(model: Any) -> Optional[LossMean]:
    """Return of what the loss of a MindNLP or Transformers model is the mean; None if its class is unknown.

    A subclass that overrides ``forward`` is unknown, because its loss may differ. A PEFT model has the loss of its base
    model, but prompt tuning puts virtual tokens before the text, so that the first label counts, too.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    known = next((each for each in type(base).__mro__ if each.__module__.partition(".")[0] in _LIBRARIES), None)
    if known is None or getattr(type(base), "forward", None) is not getattr(known, "forward", None):
        return None
    mean = _of_class(known.__name__)
    if mean is None:
        return None
    config = getattr(base, "config", None)
    if mean.task is Task.CLASSIFICATION and _is_regression(config):
        return replace(mean, ignored=None)
    if known.__name__ == "GPTPanguForCausalLM":
        return replace(mean, ignored=getattr(config, "pad_token_id", None))
    return replace(mean, is_shifted=False) if base is not model and _puts_prompts_before(model) else mean


def _of_class(name: str) -> Optional[LossMean]:
    if name in _EXCEPTIONS:
        return _EXCEPTIONS[name]
    ends = sorted((end for end in _TASKS if name.endswith(end)), key=len)
    return _TASKS[ends[-1]] if ends else None


def _is_regression(config: Any) -> bool:
    """Return whether a classifier predicts numbers: then every label counts, including -100."""
    kind = getattr(config, "problem_type", None)
    return kind == "regression" or (kind is None and getattr(config, "num_labels", None) == 1)


def _puts_prompts_before(model: Any) -> bool:
    """Return whether a PEFT model puts virtual tokens before the text; prefix tuning adds keys and values instead."""
    config = getattr(model, "active_peft_config", None)
    kind = str(getattr(config, "peft_type", "")).upper()
    return bool(getattr(config, "is_prompt_learning", False)) and "PREFIX" not in kind


def has_ignored_labels(batch: Any) -> bool:
    """Return whether some labels are -100 or some positions are beyond the text, so that not every row counts alike."""
    if not isinstance(batch, Mapping):
        return False
    labels, counts = batch.get("labels"), span_counts(batch)
    if counts is not None and bool((counts < _num_rows(batch)).any()):
        return True
    return getattr(labels, "ndim", 0) > 0 and bool((to_host(labels) == IGNORED).any())


def checked_weight(weight: Any, rank: str) -> float:
    """Return the loss weight that the user's function computed, as a float.

    Raises:
        ValueError: the weight is negative, infinite or NaN.
    """
    value = float(weight)
    if not 0 <= value < math.inf:
        raise ValueError(
            f"the loss weight is {value} on rank {rank}: loss_weight (loss_weight_of) must return a "
            "finite number that is "
            "not negative, such as the number of labels that count"
        )
    return value


class LossWeigher:
    """Computes the loss weights of micro-batches from ``mean``, or from the number of rows if ``mean`` is unknown.

    Args:
        mean: description of what the loss is the mean of; None if unknown.
        whose: name of the loss in messages, such as "the loss of MyModel".
    """

    def __init__(self, mean: Optional[LossMean], whose: str) -> None:
        self.mean = mean
        self._whose = whose
        self._has_warned = False
        # The length of the texts in question answering; None before the first batch.
        self._length: Optional[int] = None

    def __call__(self, batch: Any) -> float:
        """Return the weight of a batch's loss in the mean over ranks and micro-batches."""
        columns = batch if isinstance(batch, Mapping) else {}
        weight = None if self.mean is None else self.mean.weight(columns)
        if self.mean is not None and self.mean.task is Task.CLASSIFICATION and not columns:
            weight = _num_rows(batch)
        if weight is not None:
            self._check_length(columns)
            return weight
        if not self._has_warned and (self.mean is not None or has_ignored_labels(batch)):
            self._has_warned = True
            why = (
                f"labels hold {IGNORED}, or positions are beyond the text, and it is not known whether {self._whose} "
                "is a mean over rows or over labels"
                if self.mean is None
                else f"{self._whose} is a mean over labels or positions, and the batch has no column with the model's "
                f"names for them (it has {', '.join(map(str, columns)) or 'no columns with names'})"
            )
            warnings.warn(
                f"{why}: it is weighted by rows. If it is a mean over labels, training on several ranks or "
                "micro-batches differs from training on one: override loss_weight(inputs) of the Trainer, or pass "
                "loss_weight_of= to make_train_step, for example with mindnlp_dp.count_labels. If it is a mean over "
                "rows, return the number of rows there to end this warning",
                RuntimeWarning,
                stacklevel=3,
            )
        return _num_rows(batch)

    def _check_length(self, columns: Mapping[str, Any]) -> None:
        """Warn once if texts of question answering are padded to different lengths."""
        if self.mean is None or self.mean.task is not Task.QUESTION_ANSWERING or "input_ids" not in columns:
            return
        length = int(columns["input_ids"].shape[1])
        if self._length is not None and length != self._length and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._whose} is a softmax over all positions of a row, padding included, and rows are "
                f"padded to {self._length} and to {length} tokens: training on several ranks or micro-batches "
                "differs from training on one. Pad all rows to one length",
                RuntimeWarning,
                stacklevel=4,
            )
        self._length = length
