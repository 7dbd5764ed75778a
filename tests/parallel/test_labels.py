"""Test labels and token ids: every integer type trains the same model, and invalid values are refused."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from library import is_0_5, nn, optim
from small_models import NUM_LABELS, VOCAB_SIZE, build, find, samples

import mindnlp_dp as dp
from mindnlp_dp.kernels import dispatch
from models import train

SETTINGS = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "optim": "sgd", "num_train_epochs": 1}


def trainer_of(name, group, tmp_path, change=lambda row, number: None, *, is_trained=True, num_rows=4, **settings):
    """Train on ``num_rows`` rows per rank that ``change`` has changed."""
    model_class = find(name)
    model = build(model_class, **settings)
    rows = samples(model_class, model, num_rows * group.world_size)
    for number, row in enumerate(rows):
        change(row, number)
    if is_trained:
        return train(model, rows, tmp_path, **SETTINGS, eval_dataset=rows)
    from library import settings_here

    args = dp.DataParallelArguments(str(tmp_path), disable_tqdm=True, **settings_here(**SETTINGS))
    return dp.DataParallelTrainer(model, args, eval_dataset=rows)


@pytest.mark.core
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.uint64, bool])
def test_labels_of_any_integer_type_train_the_same_model(group, tmp_path, dtype):
    def first_two_classes(row, number):
        row["labels"] = np.int64(number % 2)

    def of_type(row, number):
        row["labels"] = dtype(number % 2)
        row["input_ids"] = row["input_ids"].astype(np.uint16)

    name = "BertForSequenceClassification"
    expected, mine = (trainer_of(name, group, tmp_path, each) for each in (first_two_classes, of_type))
    assert mine.replica_digest == expected.replica_digest
    assert mine.evaluate()["eval_loss"] == expected.evaluate()["eval_loss"]


@pytest.mark.skipif(is_0_5, reason="MindNLP 0.5 takes floats only, as PyTorch does")
def test_multi_label_columns_may_have_any_type(group, tmp_path):
    """The last batch is not full: MindSpore's gradient for integers was that of another batch size."""
    digests = set()
    for dtype in (np.float32, bool, np.int64, np.int8):

        def several(row, number):
            row["labels"] = (np.arange(NUM_LABELS) <= number % 3).astype(dtype)  # noqa: B023

        problem_type = {} if dtype is np.float32 else {"problem_type": "multi_label_classification"}
        trainer = trainer_of("BertForSequenceClassification", group, tmp_path, several, num_rows=3, **problem_type)
        assert trainer.model.config.problem_type == "multi_label_classification"
        digests.add(trainer.replica_digest)
    assert len(digests) == 1


def put(column, value, at=None):
    """Return a change that puts a value into a column of sample 3."""

    def change(row, number):
        if number == 3 and at is None:
            row[column] = value
        elif number == 3:
            row[column] = row[column].copy()
            row[column][at] = value

    return change


def floats(row, number):
    row["labels"] = np.float32(number % 3)


def vectors(row, number):
    row["labels"] = np.arange(3)


WRONG = {
    "a negative class": ("BertForSequenceClassification", put("labels", -1),
                         r"column 'labels' has -1 in sample 3 \(rank .*expected a class from 0 to 2, or -100 for"),
    "a class beyond the last": ("BertForSequenceClassification", put("labels", 3), "'labels' has 3 in sample 3 "),
    "classes as floats": ("BertForSequenceClassification", floats,
                          r"'labels' has float32 numbers, \[.*takes classes, which are int32 or int64"),
    "vectors of integers": ("BertForSequenceClassification", vectors, "has 3 integers for sample .*takes one class"),
    "a negative token class": ("BertForTokenClassification", put("labels", -2, 1), "'labels' has -2 in sample 3 "),
    "a negative token label": ("GPT2LMHeadModel", put("labels", -1, 1), "'labels' has -1 in sample 3 "),
    "a choice too many": ("RobertaForMultipleChoice", put("labels", 2), "has 2 in sample 3 .*a class from 0 to 1"),
    "a negative token": ("T5ForConditionalGeneration", put("input_ids", -100, 2),
                         "column 'input_ids' has -100 in sample 3 .*expected a token id from 0 to 63"),
    "a token beyond the last": ("LlamaForCausalLM", put("input_ids", VOCAB_SIZE, 2), "'input_ids' has 64 in sample 3 "),
}  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize("kernels", ["auto", "mindspore"])
@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_labels_and_token_ids_are_refused(group, tmp_path, wrong, kernels):
    """The rank that reads the sample raises it before it computes, in evaluation, prediction and training."""
    if is_0_5 and kernels == "mindspore":
        pytest.skip("the same code")
    name, change, message = WRONG[wrong]
    reads_it = group.rank == 3 // 2 % group.world_size or wrong in ("classes as floats", "vectors of integers")
    trainer = trainer_of(name, group, tmp_path, change, is_trained=False)
    dispatch.choose(kernels, 1)
    try:
        batches = [batch for (batch,) in trainer._evaluation_loader(trainer.eval_dataset).updates()]
        check = trainer.trainer_loss.column_checks()
        errors = [error for batch in batches if (error := error_of(check, batch)) is not None]
        assert bool(errors) == reads_it
        if group.world_size == 1:
            for run in (trainer.evaluate, lambda: trainer.predict(trainer.eval_dataset)):
                with pytest.raises(ValueError, match=message):
                    run()
            with pytest.raises(ValueError, match=message):
                trainer_of(name, group, tmp_path, change)
        for error in errors:
            with pytest.raises(ValueError, match=message):
                raise error
    finally:
        dispatch.choose("auto", 1)


def error_of(check, batch):
    try:
        check(batch)
    except ValueError as error:
        return error
    return None


def test_custom_compute_loss_accepts_any_labels_and_token_ids_are_checked(group, tmp_path):
    """A Trainer with its own compute_loss takes soft labels, and its token ids are still checked."""

    class Distance(dp.DataParallelTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = ((outputs.logits - labels) ** 2).mean()
            return (loss, outputs) if return_outputs else loss

    model_class = find("BertForSequenceClassification")
    model = build(model_class)
    rows = samples(model_class, model, 4 * group.world_size)
    for row in rows:
        row["labels"] = np.array([0.2, -1, 7], np.float32)
    trainer = train(model, rows, tmp_path, Distance, **SETTINGS)
    with pytest.raises(ValueError, match="'input_ids' has -1 in sample 0"):
        trainer.trainer_loss.column_checks()({"input_ids": np.array([[-1]])})


@pytest.mark.parametrize("kernels", ["auto", "mindspore"])
def test_loss_and_embedding_functions_refuse_invalid_indices(group, kernels):
    """Models of the user's own, and custom loops, have no columns that are known."""
    functional = nn.functional
    logits, table = mindspore.Tensor(np.eye(3, dtype=np.float32)), mindspore.Tensor(np.ones((5, 2), np.float32))
    if is_0_5:
        import mindtorch

        logits, table, tensor = mindtorch.eye(3), mindtorch.ones(5, 2), mindtorch.tensor
    else:
        tensor = mindspore.Tensor
    dispatch.choose(kernels, 1)
    try:
        with pytest.raises(IndexError, match="-1 is not a class, expected 0 to 2, or -100 for one that does not count"):
            functional.cross_entropy(logits, tensor([0, -100, -1]))
        for ids in ([[0, -1]], [[5, 0]]):
            with pytest.raises(IndexError, match="the ids of an embedding are .*, and it has rows 0 to 4"):
                functional.embedding(tensor(ids), table)
        with pytest.raises(ValueError, match=r"the targets are \(3,\), expected the shape of the logits, \(3, 3\)"):
            functional.binary_cross_entropy_with_logits(logits, tensor([0.0, 1.0, 2.0]))
        assert functional.cross_entropy(logits, tensor([0, -100, 2])).item() > 0
    finally:
        dispatch.choose("auto", 1)


def test_custom_loop_accepts_labels_of_any_integer_type(group):
    model_class = find("BertForSequenceClassification")
    losses = set()
    for dtype in (np.int64, np.int8):
        model = build(model_class)
        rows = samples(model_class, model, 4)
        batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        batch["labels"] = batch["labels"].astype(dtype)
        parameters = list(model.parameters())
        step = dp.make_train_step(lambda **inputs: model(**inputs).loss, optim.SGD(parameters, lr=0.1), parameters)  # noqa: B023
        losses.add(step(batch))
    assert len(losses) == 1
