"""Test losses that are means over labels or positions, whose number differs by row, micro-batch and rank.

By default, N ranks with several micro-batches train like one process with the full batch, for every kind of head.
An evaluation gives the same result for any number of ranks and any batch size.
"""

from __future__ import annotations

import warnings

import mindspore
import numpy as np
import pytest
from library import autograd, is_0_5, nn, optim, set_seed
from small_models import IGNORED, build, find, samples
from token_losses import HEADS, distance, settings, together_and_alone, whole_batch

import mindnlp_dp as dp
from mindnlp_dp.data.batches import as_tensors
from mindnlp_dp.parallel.device_mesh import get_device_mesh
from mindnlp_dp.runtime.mesh_spec import parse_mesh
from models import alone, train, weights

if not is_0_5:
    # The first name is an autouse fixture for every test here.
    from sharded_models import one_mesh_at_a_time, whole_weights  # noqa: F401

CORE_HEADS = (
    "LlamaForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration", "BertForQuestionAnswering",
    "RobertaForMultipleChoice", "BertForSequenceClassification",
)  # fmt: skip
only_0_4 = pytest.mark.skipif(is_0_5, reason="of MindNLP 0.4's arguments, models and loss")
# The limit covers float32 rounding. Weighting by rows, or a forgotten shift, gives errors of 1e-2 and more.
MOST = 1e-5


@pytest.mark.parametrize("accumulation_steps", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.core] * (name in CORE_HEADS)) for name in HEADS]
)
def test_every_model_head_trains_like_one_process(group, tmp_path, name, accumulation_steps):
    far, mine, one = together_and_alone(group, tmp_path, name, accumulation_steps)
    assert far < MOST
    for ours, theirs in zip(mine.state.log_history, one.state.log_history):
        assert ours.get("loss") == pytest.approx(theirs.get("loss"), abs=1.1e-4)


CUT = {
    2: [("pp=2", "GPT2LMHeadModel"), ("pp=2", "T5ForConditionalGeneration"), ("tp=2", "BertForMaskedLM"),
        ("pp=2", "BertForQuestionAnswering"), ("ep=2", "MixtralForCausalLM")],
    4: [("dp=2,pp=2", "GPT2LMHeadModel"), ("pp=2,tp=2", "T5ForConditionalGeneration"),
        ("pp=2,dp=2|1,tp=1|2", "BertForMaskedLM"), ("dp=2,ep=2", "MixtralForCausalLM")],
}  # fmt: skip


@pytest.mark.core
@only_0_4
@pytest.mark.skipif(dp.get_process_group().backend != "mpi", reason="MindSpore's CPU library has no messages")
@pytest.mark.parametrize(("mesh", "name"), CUT.get(dp.get_process_group().world_size, []))
def test_parallelized_models_with_resized_embeddings_train_like_one_process(group, tmp_path, mesh, name):
    """The embeddings were resized before, which replaces their parameters."""
    model_class = find(name)
    rows = samples(model_class, build(model_class), 40)
    dp.init_device_mesh(parse_mesh(mesh))
    model = dp.parallelize(resized(model_class))
    more = settings(group, 4, num_train_epochs=1)
    more["per_device_train_batch_size"] = 4 // get_device_mesh().dp_group.world_size
    mine = train(model, rows, tmp_path, **more)
    with alone():
        dp.init_device_mesh({"dp": 1})
        more.update(per_device_train_batch_size=16, gradient_accumulation_steps=1)
        one = train(resized(model_class), rows, tmp_path / "1", **more)
    assert mine.state.global_step == one.state.global_step == 3
    assert distance(whole_weights(mine.model), weights(one.model), weights(resized(model_class))) < MOST


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BartForConditionalGeneration", "BertForMaskedLM"])
def test_adamw_trains_token_losses_like_one_process(group, tmp_path, name):
    # With a small epsilon, gradients that are only rounding noise (a key's bias) would become steps of the rate's size.
    far, *_ = together_and_alone(group, tmp_path, name, 2, optim="adamw", learning_rate=1e-3, adam_epsilon=1e-4)
    assert far < MOST


# Label smoothing does not change question answering.
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForQuestionAnswering"])
def test_label_smoothing_trains_like_one_process(group, tmp_path, name):
    far, *_ = together_and_alone(group, tmp_path, name, 1, label_smoothing_factor=0.2)
    assert far < MOST


CALLS = {
    "keywords": lambda model: lambda **inputs: model(**inputs).loss,
    "a bound method": lambda model: Holder(model).forward,
}


class Holder:
    def __init__(self, model):
        self.model = model

    def forward(self, **inputs):
        return self.model(**inputs)[0]


@pytest.mark.core
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForTokenClassification", "BertForQuestionAnswering"])
def test_make_train_step_finds_the_model_and_trains_like_one_process(group, name, call):
    model_class = find(name)

    def run(group, num_rows):
        model = build(model_class)
        parameters = list(model.parameters())
        step = dp.make_train_step(call(model), optim.SGD(parameters, lr=0.1), parameters)
        for micro_batches in dp.make_loader(
            samples(model_class, model, 4 * together.world_size + 3), num_rows
        ).updates():
            step(micro_batches[0])
        return weights(model)

    together = group
    mine = run(group, 2)
    with alone() as single:
        expected = run(single, 2 * together.world_size)
    assert distance(mine, expected, weights(build(model_class))) < MOST


def test_a_tuple_batch_is_weighted_by_its_number_of_labels(group):
    model_class = find("GPT2LMHeadModel")
    model = build(model_class)
    columns = samples(model_class, model, 4)
    ids, labels = (np.stack([row[name] for row in columns]) for name in ("input_ids", "labels"))

    def forward(input_ids, labels):
        return model(input_ids, labels=labels)[0]

    parameters = list(model.parameters())
    step = dp.make_train_step(forward, optim.SGD(parameters, lr=0.1), parameters)
    step((mindspore.Tensor(ids), mindspore.Tensor(labels)))
    assert step.synchronizer.total_loss_weight == group.world_size * np.count_nonzero(labels[:, 1:] != IGNORED)


@pytest.mark.core
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "T5ForConditionalGeneration", "BertForQuestionAnswering"])
def test_the_evaluation_loss_does_not_depend_on_the_batch_size(group, tmp_path, name):
    model_class = find(name)
    model = build(model_class)
    rows = samples(model_class, model, 13)
    columns = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
    model.eval()
    exact = float(model(**{key: mindspore.Tensor(x) for key, x in columns.items()}).loss.asnumpy())
    for batch_size in (1, 3, 8):
        args = dp.DataParallelArguments(str(tmp_path), per_device_eval_batch_size=batch_size, disable_tqdm=True)
        trainer = dp.DataParallelTrainer(model, args, eval_dataset=rows)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(exact, rel=2e-6)
        evaluation = dp.evaluate(
            lambda **inputs: model(**inputs)[:2], dp.make_loader(rows, batch_size), model=model, has_loss=True
        )
        assert evaluation.loss == pytest.approx(exact, rel=2e-6)


class NothingCounts:
    """Rows for three updates; those of the second update have only ignored labels."""

    def __init__(self, model_class, num_an_update):
        self._rows = samples(model_class, build(model_class), 3 * num_an_update)
        for row in self._rows[num_an_update : 2 * num_an_update]:
            row["labels"][:] = IGNORED

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return self._rows[index]


@only_0_4
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_an_update_with_ignored_labels_only_is_skipped(group, tmp_path, zero_stage):
    model_class = find("GPT2LMHeadModel")
    rows = NothingCounts(model_class, 2 * group.world_size)
    more = {"num_train_epochs": 1, "dataset_shuffle": False, "zero_stage": zero_stage}
    with pytest.warns(RuntimeWarning, match="the losses of update 1 have a total weight of 0 on all ranks"):
        mine = train(build(model_class), rows, tmp_path, **settings(group, 1, **more))
    assert mine.state.global_step == 3
    kept = [row for index, row in enumerate(rows) if not 2 * group.world_size <= index < 4 * group.world_size]
    # The rate must be constant, because a decaying one would also count the updates that are left out.
    more = {**more, "lr_scheduler_type": "constant"}
    mine = train(build(model_class), rows, tmp_path, **settings(group, 1, **more))
    with alone():
        one = train(build(model_class), kept, tmp_path / "1", **whole_batch(group, 1, **more))
    assert distance(weights(mine.model), weights(one.model), weights(build(model_class))) < MOST


class OwnLoss(dp.DataParallelTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        return super().compute_loss(model, inputs, return_outputs)


class OwnLossByRows(OwnLoss):
    def loss_weight(self, inputs):
        return float(len(inputs["labels"]))


class OwnLossByLabels(OwnLoss):
    def loss_weight(self, inputs):
        return dp.count_labels(inputs, shifted=True)


@only_0_4
def test_a_custom_loss_without_loss_weight_gives_one_warning(group, tmp_path):
    model_class = find("GPT2LMHeadModel")
    rows = samples(model_class, build(model_class), 8 * group.world_size)
    cures = "whether the loss of OwnLoss's own compute_loss is a mean.*loss_weight.*loss_weight_of=.*count_labels"
    with pytest.warns(RuntimeWarning, match=cures) as caught:
        train(build(model_class), rows, tmp_path, OwnLoss, **settings(group, 1))
    assert sum("weighted by rows" in str(each.message) for each in caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        train(build(model_class), rows, tmp_path, OwnLossByRows, **settings(group, 1))
    far, *_ = together_and_alone(group, tmp_path, "GPT2LMHeadModel", 1, OwnLossByLabels)
    assert far < MOST


# Losses of the user's own for a classifier of three classes, and whether they are means over rows.
CLASS_WEIGHTS = np.array([1, 10, 0.1], np.float32)


def cross_entropy(logits, labels, **options):
    return nn.functional.cross_entropy(logits, labels, **options)


def focal_loss(logits, labels):
    losses = cross_entropy(logits, labels, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def loss_over_norm(logits, labels):
    return cross_entropy(logits, labels) / (logits**2).mean()


def noisy_loss(logits, labels):
    return cross_entropy(logits, labels) * float(1 + np.random.rand())


def weighted_loss(logits, labels):
    return cross_entropy(logits, labels, weight=mindspore.Tensor(CLASS_WEIGHTS))


LOSSES = {focal_loss: True, noisy_loss: True, loss_over_norm: False, weighted_loss: False}


class OwnClassifierLoss(dp.DataParallelTrainer):
    loss_function = staticmethod(weighted_loss)

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = self.loss_function(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.core
def test_the_check_of_a_custom_loss_logs_nothing_and_allows_a_loss_that_changes(group, tmp_path, recwarn):
    """The log has a record per update; a loss that changes from call to call is not taken for a wrong mean."""

    class Counts(dp.DataParallelTrainer):
        calls = 0

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            self.calls += 1
            self.log({"mine": self.calls})
            outputs = model(**inputs)
            loss = outputs.loss * (0.5 if self.calls <= 3 else 1.0)
            return (loss, outputs) if return_outputs else loss

    model_class = find("BertForSequenceClassification")
    rows = samples(model_class, build(model_class), 8 * group.world_size)
    trainer = train(build(model_class), rows, tmp_path, Counts, **settings(group, 2))
    assert sum("mine" in row for row in trainer.state.log_history) == trainer.state.global_step * 2
    assert not [each for each in recwarn if "is not a mean with its loss weights" in str(each.message)]


class OwnClassifierLossByWeight(OwnClassifierLoss):
    def loss_weight(self, inputs):
        return dp.count_labels(inputs, weight=CLASS_WEIGHTS)


@pytest.mark.core
@pytest.mark.parametrize("in_trainer", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_is_not_a_mean_over_rows_gives_one_warning(group, tmp_path, loss, in_trainer, recwarn):
    """Both numbers of the warning are those of the first micro-batch of a rank; a single micro-batch needs none."""
    model_class = find("BertForSequenceClassification")
    model = build(model_class, dropout=0.1)
    rows = samples(model_class, model, 16 * group.world_size)
    accumulation_steps = 2 if group.world_size == 1 else 1
    for number in (accumulation_steps, 1):
        if in_trainer:
            trainer_class = type("Own", (OwnClassifierLoss,), {"loss_function": staticmethod(loss)})
            train(model, rows, tmp_path, trainer_class, **settings(group, number, per_device_train_batch_size=8))
        else:
            parameters = list(model.parameters())

            def forward(labels, **inputs):
                return loss(model(**inputs).logits, labels)

            step = dp.make_train_step(
                forward, optim.SGD(parameters, lr=0.1), parameters, model=model, accumulation_steps=number
            )
            model.train()
            for micro_batches in dp.make_loader(rows, 8, number).updates():
                step(micro_batches if number > 1 else micro_batches[0])
            assert all(module.training for module in model.modules())
        if group.world_size > 1:
            break
    found = [str(each.message) for each in recwarn if "is not a mean with its loss weights" in str(each.message)]
    assert len(found) == int(group.is_main and not LOSSES[loss])
    assert all("for a micro-batch of 8 rows it is" in each and "weight=class_weights" in each for each in found)


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_a_loss_of_micro_batches_of_one_row_is_compared_or_said_not_to_be(group, tmp_path, accumulation_steps, recwarn):
    model_class = find("BertForSequenceClassification")
    model = build(model_class)
    rows = samples(model_class, model, 16 * group.world_size)
    # Rows of one length, so that two micro-batches can be joined.
    rows = [{**row, "input_ids": row["input_ids"][:4], "attention_mask": row["attention_mask"][:4]} for row in rows]
    rows = [{name: row[name] for name in ("input_ids", "attention_mask", "labels") if name in row} for row in rows]
    train(
        model, rows, tmp_path, OwnClassifierLoss, **settings(group, accumulation_steps, per_device_train_batch_size=1)
    )
    said = [str(each.message) for each in recwarn if "OwnClassifierLoss" in str(each.message)]
    if group.world_size == 1 and accumulation_steps == 1:
        assert not said
        return
    expected = "could not be compared" if accumulation_steps == 1 else "is not a mean with its loss weights"
    assert [expected in each for each in said] == [True] * group.is_main


@pytest.mark.core
def test_class_weights_train_like_one_process(group, tmp_path):
    """The weight of a loss is the sum of its labels' weights; with the number of rows it is another model."""
    name = "BertForSequenceClassification"
    far, *_ = together_and_alone(group, tmp_path, name, 3, OwnClassifierLossByWeight, p=0.1)
    assert far < MOST
    far, *_ = together_and_alone(group, tmp_path, name, 3, OwnClassifierLoss, p=0.1)
    assert far > 100 * MOST


@only_0_4
def test_question_answering_with_tuple_outputs_trains_like_one_process(group, tmp_path):
    model_class = find("BertForQuestionAnswering")
    before = weights(build(model_class))
    rows = samples(model_class, build(model_class), 12 * group.world_size + 3)
    mine = train(build(model_class, return_dict=False), rows, tmp_path, **settings(group, 3))
    with alone():
        one = train(build(model_class), rows, tmp_path / "1", **whole_batch(group, 3))
    assert distance(weights(mine.model), weights(one.model), before) < MOST


RESIZED = [("GPT2LMHeadModel", True), ("GPT2LMHeadModel", False), ("LlamaForCausalLM", False),
           ("BertForMaskedLM", True), ("T5ForConditionalGeneration", False),
           ("BartForConditionalGeneration", True)]  # fmt: skip


def resized(model_class, seed=1, **more):
    model = build(model_class, seed, **more)
    set_seed(seed)
    model.resize_token_embeddings(80)
    return model


@pytest.mark.core
@pytest.mark.parametrize(("name", "is_tied"), RESIZED)
def test_models_with_resized_embeddings_train_like_one_process(group, tmp_path, name, is_tied):
    """The rows have tokens that were added, and heads stay tied to the embeddings, or are resized beside them."""
    model_class, tied = find(name), {"tie_word_embeddings": is_tied}
    rows = samples(model_class, build(model_class), 4 * group.world_size + 3)
    for number, row in enumerate(rows):
        row["input_ids"][number % 3] = 79
    mine = train(resized(model_class, **tied), rows, tmp_path, **settings(group, 2))
    with alone():
        one = train(resized(model_class, **tied), rows, tmp_path / "1", **whole_batch(group, 2))
    before = weights(resized(model_class, **tied))
    assert distance(weights(mine.model), weights(one.model), before) < MOST
    embeddings = mine.model.get_input_embeddings().weight
    assert (mine.model.get_output_embeddings().weight is embeddings) == is_tied
    assert embeddings.shape[0] == 80
    name = next(name for name, parameter in mine.model.named_parameters() if parameter is embeddings)
    assert (embeddings.asnumpy()[79] != before[name][79]).any()


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_custom_loop_trains_a_model_with_resized_embeddings(group, is_plain):
    model_class = find("LlamaForCausalLM")
    model = build(model_class)
    rows = samples(model_class, model, 4)
    model.resize_token_embeddings(80)
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    parameters = list(model.parameters())
    if is_plain:
        gradients = autograd.value_and_grad(
            lambda: model(**as_tensors(batch)).loss, tuple(parameters), attach_grads=False
        )()[1]
        assert gradients[0].shape == parameters[0].shape == (80, 32)
        return
    step = dp.make_train_step(lambda **inputs: model(**inputs).loss, optim.SGD(parameters, lr=0.5), parameters)
    assert step(batch) > step(batch)


def test_optimizer_parameters_outside_the_model_are_refused(group, tmp_path):
    """Weights that a loss learns are exchanged and saved only as a part of the model."""
    model_class = find("BertForSequenceClassification")
    model, rows = build(model_class), samples(model_class, build(model_class), 4 * group.world_size)
    scale = nn.Parameter(mindspore.Tensor([2.0], mindspore.float32))
    parameters = list(model.parameters())
    optimizer = optim.SGD([*parameters, scale], lr=0.1)
    refused = r"the optimizer has 1 trainable parameters that are not the model's, of shape \(1,\)"
    with pytest.raises(ValueError, match=refused):
        train(model, rows, tmp_path, optimizers=(optimizer, None), **settings(group, 1))
    with pytest.raises(ValueError, match=refused):
        dp.make_train_step(lambda **inputs: model(**inputs).loss * scale, optimizer, parameters)
    frozen = nn.Parameter(mindspore.Tensor([2.0], mindspore.float32), requires_grad=False)
    optimizer = optim.SGD([*parameters, frozen], lr=0.1)
    dp.make_train_step(lambda **inputs: model(**inputs).loss * frozen, optimizer, parameters)


def test_a_failed_update_removes_its_hooks_from_the_model(group):
    """Question answering has a hook during an update; the traceback, which a notebook keeps, must not keep it.

    The next update is that of a model whose first update did not fail.
    """
    model_class = find("BertForQuestionAnswering")

    def make():
        model = build(model_class)
        parameters = list(model.parameters())
        return model, dp.make_train_step(
            lambda **inputs: model(**inputs)[0], optim.SGD(parameters, lr=0.1), parameters, model=model
        )

    (model, step), (other, expected) = make(), make()
    micro_batches = {key: np.stack([row[key] for row in samples(model_class, model, 8)]) for key in ("input_ids",)}
    # More end positions than start positions lie within the text, so the model's own loss is not used.
    micro_batches.update(start_positions=np.array([0, 99] * 4), end_positions=np.arange(8))
    accumulate = step.synchronizer.accumulate

    def fail(*args, **options):
        accumulate(*args, **options)
        raise KeyboardInterrupt

    step.synchronizer.accumulate = fail
    with pytest.raises(KeyboardInterrupt) as caught:
        step(micro_batches)
    assert caught.traceback
    assert not model._forward_hooks
    step.synchronizer.accumulate = accumulate
    assert step(micro_batches) == expected(micro_batches)
    for name, weight in weights(other).items():
        np.testing.assert_array_equal(weights(model)[name], weight, err_msg=name)
