"""Test loss weights: how many labels the mean loss of each model class and task counts."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import mindnlp_dp as dp
from mindnlp_dp.data.loss_weight import (
    LossMean,
    LossWeigher,
    Task,
    checked_weight,
    has_ignored_labels,
    loss_mean,
    span_counts,
)
from mindnlp_dp.runtime.versions import mindnlp_series
from mindnlp_dp.training.find_model import BatchWeigher, model_of

needs_0_4 = pytest.mark.skipif(mindnlp_series() != "0.4", reason="the classes of MindNLP 0.4")
IGNORED = -100
LABELS = np.array([[7, IGNORED, 8, 9], [IGNORED, IGNORED, IGNORED, 3], [1, 2, IGNORED, IGNORED]])
IDS = np.ones((3, 4), np.int64)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 6), ({"shifted": True}, 4), ({"mask": np.array([[1, 1, 1, 0]] * 3)}, 4), ({"ignore_index": None}, 12),
     ({"ignore_index": 3}, 11), ({"shifted": True, "mask": np.array([[1, 1, 1, 0]] * 3)}, 2)],
)  # fmt: skip
def test_count_labels_leaves_out_ignored_shifted_and_masked_labels(options, expected):
    assert dp.count_labels(LABELS, **options) == expected
    assert dp.count_labels({"labels": LABELS}, **options) == expected


def test_count_labels_accepts_lists_tensors_and_multiple_choice():
    import mindspore

    assert dp.count_labels(LABELS.tolist()) == 6
    assert dp.count_labels(mindspore.Tensor(LABELS), shifted=True) == 4
    assert dp.count_labels(np.stack([LABELS, LABELS], 1), shifted=True) == 8
    with pytest.raises(ValueError, match="has no column 'labels', only input_ids"):
        dp.count_labels({"input_ids": IDS})


@pytest.mark.parametrize(
    ("mean", "labels", "expected"),
    [
        (LossMean(Task.CLASSIFICATION), np.array([0, 1, 2]), 3),
        # Cross-entropy ignores a row of this class.
        (LossMean(Task.CLASSIFICATION), np.array([0, IGNORED, 2]), 2),
        # Regression labels, and several classes per row, are numbers, none of which is ignored.
        (LossMean(Task.CLASSIFICATION), np.array([0.5, -100.0, 2.0], np.float32), 3),
        (LossMean(Task.CLASSIFICATION), np.ones((3, 5), np.float32), 3),
        (LossMean(Task.TOKEN_CLASSIFICATION), LABELS, 6),
        (LossMean(Task.CAUSAL_LM, is_shifted=True), LABELS, 4),
        (LossMean(Task.MASKED_LM), LABELS, 6),
        # One class per row, in its own column; then regression labels that happen to be integers.
        (LossMean(Task.CLASSIFICATION), np.array([[0], [IGNORED], [2]]), 2),
        (LossMean(Task.CLASSIFICATION, ignored=None), np.array([0, IGNORED, 2]), 3),
        (LossMean(Task.CLASSIFICATION), None, 3),
        (LossMean(Task.MASKED_LM), None, None),
    ],
)
def test_the_loss_weight_of_each_task_counts_its_labels(mean, labels, expected):
    batch = {"input_ids": IDS} if labels is None else {"input_ids": IDS, "labels": labels}
    assert mean.weight(batch) == expected


def test_the_loss_weight_of_question_answering_counts_positions_in_the_text():
    batch = {"input_ids": IDS, "start_positions": np.array([0, 4, 9]), "end_positions": np.array([3, 3, 4])}
    assert span_counts(batch).tolist() == [1, 2]
    assert LossMean(Task.QUESTION_ANSWERING).weight(batch) == 1.5
    assert LossMean(Task.QUESTION_ANSWERING).weight({"input_ids": IDS}) is None
    assert has_ignored_labels(batch)
    assert not has_ignored_labels({**batch, "start_positions": np.zeros(3), "end_positions": np.zeros(3)})


CLASSES = {
    "BertForSequenceClassification": (Task.CLASSIFICATION, False),
    "RobertaForMultipleChoice": (Task.CLASSIFICATION, False),
    "BertForTokenClassification": (Task.TOKEN_CLASSIFICATION, False),
    "BertForMaskedLM": (Task.MASKED_LM, False),
    "GPT2LMHeadModel": (Task.CAUSAL_LM, True),
    "GPT2DoubleHeadsModel": (Task.CAUSAL_LM, True),
    "LlamaForCausalLM": (Task.CAUSAL_LM, True),
    # The caller shifts the labels of these decoders.
    "BartForCausalLM": (Task.CAUSAL_LM, False),
    "XLNetLMHeadModel": (Task.CAUSAL_LM, False),
    "T5ForConditionalGeneration": (Task.SEQ2SEQ_LM, False),
    "MarianMTModel": (Task.SEQ2SEQ_LM, False),
    "BertForQuestionAnswering": (Task.QUESTION_ANSWERING, False),
}


@needs_0_4
@pytest.mark.parametrize("name", CLASSES)
def test_the_task_of_each_model_class_is_known(name):
    import mindnlp.transformers

    # Only the class of the model is examined.
    model = object.__new__(getattr(mindnlp.transformers, name))
    found = loss_mean(model)
    assert (found.task, found.is_shifted) == CLASSES[name]


@needs_0_4
def test_integer_labels_of_a_regression_are_never_ignored():
    from small_models import build, find

    model = build(find("BertForSequenceClassification"))
    assert loss_mean(model).ignored == IGNORED
    model.config.num_labels = 1
    assert loss_mean(model).ignored is None


@needs_0_4
def test_subclasses_are_known_unless_they_override_forward():
    from mindnlp.transformers import BertForMaskedLM, BertForPreTraining, BertModel

    class Renamed(BertForMaskedLM):
        pass

    class OwnForward(BertForMaskedLM):
        def forward(self, **inputs):
            return super().forward(**inputs)

    assert loss_mean(object.__new__(Renamed)).task is Task.MASKED_LM
    # These have their own forward, a sum of two means as the loss, or no head; the last object has no library class.
    for unknown in (OwnForward, BertForPreTraining, BertModel):
        assert loss_mean(object.__new__(unknown)) is None
    assert loss_mean(object()) is None


@needs_0_4
@pytest.mark.parametrize(("peft", "is_shifted"), [("LORA", True), ("PROMPT_TUNING", False), ("P_TUNING", False)])
def test_the_loss_of_prompt_tuning_is_not_shifted(peft, is_shifted):
    """Check that the first label of a row is then compared with the output at the last virtual token."""
    from mindnlp.peft import LoraConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
    from small_models import build, find

    config = {
        "LORA": lambda: LoraConfig(task_type="CAUSAL_LM", r=2),
        "PROMPT_TUNING": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        "P_TUNING": lambda: PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, encoder_hidden_size=8),
    }[peft]()
    model = get_peft_model(build(find("LlamaForCausalLM")), config)
    assert loss_mean(model) == LossMean(Task.CAUSAL_LM, is_shifted=is_shifted)


def test_an_unknown_loss_is_weighted_by_rows_with_one_warning():
    weigher = LossWeigher(None, "the loss of MyModel")
    assert weigher({"input_ids": IDS, "labels": np.array([1, 2, 3])}) == 3
    with pytest.warns(RuntimeWarning, match="the loss of MyModel.*loss_weight.*loss_weight_of=.*count_labels"):
        assert weigher({"labels": LABELS}) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert weigher({"labels": LABELS}) == 3
    assert not has_ignored_labels({"labels": np.array(IGNORED)})
    assert not has_ignored_labels((LABELS,))


@pytest.mark.parametrize("batch", [(IDS, LABELS), {"ids": IDS, "target": LABELS}, IDS])
def test_labels_under_another_name_give_a_warning(batch):
    weigher = LossWeigher(LossMean(Task.CAUSAL_LM, is_shifted=True), "the loss of GPT2LMHeadModel")
    with pytest.warns(
        RuntimeWarning, match="GPT2LMHeadModel is a mean over labels.*has no column with.*loss_weight_of="
    ):
        assert weigher(batch) == 3


def test_rows_are_counted_from_the_labels():
    batch = {"position_ids": np.zeros((1, 4)), "labels": np.ones(3, np.float32)}
    assert LossMean(Task.CLASSIFICATION).weight(batch) == LossWeigher(None, "")(batch) == 3


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_negative_and_non_finite_loss_weights_are_refused(weight):
    with pytest.raises(ValueError, match="the loss weight is .* on rank 1: loss_weight"):
        checked_weight(weight, "1")


class Network:
    """The part of a network that ``model_of`` requires."""

    def __init__(self, *parameters):
        self._parameters = parameters

    def parameters(self):
        return list(self._parameters)

    def named_parameters(self):
        return list(enumerate(self._parameters))


ONE, OTHER = object(), object()
GLOBAL = Network(ONE)


class Loop:
    def __init__(self, network):
        self.network = network

    def forward(self, ids):
        return self.network, ids


def test_the_model_is_found_in_closures_globals_and_bound_methods():
    import functools

    inner, outer, stranger = Network(ONE), Network(ONE, OTHER), Network(object())

    def closure(ids):
        return inner, stranger, ids

    def both(ids):
        return inner, outer, ids

    def of_globals(ids):
        return GLOBAL, ids

    def with_argument(network, ids):
        return network, ids

    assert model_of(closure, [ONE]) is inner
    assert model_of(both, [ONE]) is outer
    assert model_of(of_globals, [ONE]) is GLOBAL
    assert model_of(functools.partial(with_argument, outer), [OTHER]) is outer
    assert model_of(Loop(inner).forward, [ONE]) is inner
    assert model_of(closure, [object()]) is None
    assert model_of(len, [ONE]) is None

    def not_yet(ids):
        return later, ids

    assert model_of(not_yet, [ONE]) is None
    later = inner


def test_a_tuple_batch_takes_its_names_from_the_function_signature():
    def forward(input_ids, labels):
        raise AssertionError("only its signature is looked at")

    with pytest.warns(
        RuntimeWarning, match="it is not known whether this function's loss is a mean over rows or over labels"
    ):
        assert BatchWeigher(forward, None)((IDS, LABELS)) == 3


def test_question_answering_batches_of_different_lengths_give_one_warning():
    """Its softmax is over the padding, too, so the loss depends on the padded length."""
    weigh = LossWeigher(LossMean(Task.QUESTION_ANSWERING), "the loss of M")

    def batch(length):
        positions = np.array([0, 1])
        return {"input_ids": np.ones((2, length)), "start_positions": positions, "end_positions": positions}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert weigh(batch(5)) == weigh(batch(5)) == 2
    with pytest.warns(RuntimeWarning, match="padded to 5 and to 7 tokens.*Pad all rows to one length"):
        weigh(batch(7))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weigh(batch(6))
