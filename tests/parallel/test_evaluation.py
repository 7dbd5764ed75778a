"""Test evaluation: outputs as tuples, rows of different lengths, more ranks than samples, gathering in chunks."""

from __future__ import annotations

import json

import mindspore
import numpy as np
import pytest
import tiny_transformers
from library import TrainerCallback, is_0_5, set_seed, settings_here
from mindnlp.transformers import RobertaForSequenceClassification, RobertaForTokenClassification

import mindnlp_dp as dp
from mindnlp_dp.training.evaluation_gather import OrderedGatherer
from models import NUM_LABELS, Rows, alone, tiny_config, tiny_roberta, train

pytestmark = pytest.mark.core


def evaluated(model, rows, folder, trainer_class=dp.DataParallelTrainer, **settings):
    extra = {name: settings.pop(name) for name in ("compute_metrics", "data_collator") if name in settings}
    args = dp.DataParallelArguments(str(folder), disable_tqdm=True, **settings_here(**settings))
    return trainer_class(model, args, eval_dataset=rows, **extra)


class Sentences:
    """Samples of different lengths with a label for every token."""

    def __init__(self, n):
        rng = np.random.default_rng(1)
        self.rows = []
        for _ in range(n):
            length = int(rng.integers(1, 9))
            self.rows.append((rng.integers(5, 50, length), rng.integers(0, NUM_LABELS, length)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        ids, labels = self.rows[index]
        return {"input_ids": ids, "labels": labels}


def pad(rows):
    width = max(len(row["input_ids"]) for row in rows)

    def padded(name, value):
        return np.stack([np.pad(row[name], (0, width - len(row[name])), constant_values=value) for row in rows])

    return {
        "input_ids": padded("input_ids", 1),
        "attention_mask": (padded("input_ids", 1) != 1).astype(np.int64),
        "labels": padded("labels", -100),
    }


class ByTokens(dp.DataParallelTrainer):
    def loss_weight(self, inputs):
        return float((inputs["labels"] != -100).sum())


@pytest.mark.parametrize("n", [1, 5, 23])
def test_predict_gathers_rows_of_different_lengths(group, tmp_path, n):
    """Every micro-batch is padded to its own longest row; the gathered rows are padded to the longest of all."""
    set_seed(1)
    model, sentences = RobertaForTokenClassification(tiny_config()), Sentences(n)
    settings = {"per_device_eval_batch_size": 2, "data_collator": pad, "eval_accumulation_steps": 2}
    output = evaluated(model, sentences, tmp_path, ByTokens, **settings).predict(sentences)
    longest = max(len(ids) for ids, _ in sentences.rows)
    assert output.predictions.shape == (n, longest, NUM_LABELS)
    with alone():
        expected = evaluated(model, sentences, tmp_path, ByTokens, **settings).predict(sentences)
    for row, (ids, labels) in enumerate(sentences.rows):
        size = len(ids)
        np.testing.assert_array_equal(output.label_ids[row, :size], labels)
        assert (output.label_ids[row, size:] == -100).all()
        np.testing.assert_allclose(output.predictions[row, :size], expected.predictions[row, :size], atol=1e-5)
    assert output.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], abs=1e-5)


@pytest.mark.parametrize("n", [1, 7])
def test_predict_gathers_nested_tuples_of_outputs(group, tmp_path, n):
    config = tiny_config(num_layers=2)
    config.output_hidden_states = True
    set_seed(2)
    model, rows = RobertaForSequenceClassification(config), Rows(n)
    output = evaluated(model, rows, tmp_path, per_device_eval_batch_size=2).predict(rows)
    with alone():
        expected = evaluated(model, rows, tmp_path, per_device_eval_batch_size=8).predict(rows)
    logits, hidden = output.predictions
    assert logits.shape == (n, NUM_LABELS)
    assert [layer.shape for layer in hidden] == [(n, 8, 16)] * 3
    np.testing.assert_allclose(logits, expected.predictions[0], atol=1e-5)
    for mine, theirs in zip(hidden, expected.predictions[1]):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_predict_works_without_labels(group, tmp_path):
    class Unlabelled(Rows):
        def __getitem__(self, index):
            return {"input_ids": self.input_ids[index]}

    rows = Unlabelled(7)
    output = evaluated(tiny_roberta(), rows, tmp_path, per_device_eval_batch_size=2).predict(rows)
    assert output.predictions.shape == (7, NUM_LABELS)
    assert output.label_ids is None
    assert "test_loss" not in output.metrics


def test_outputs_are_gathered_in_chunks_of_eval_accumulation_steps(group, tmp_path, monkeypatch):
    """The data in one exchange does not grow with the data set, and a chunk consists of full global batches."""
    chunks = []
    gather = OrderedGatherer._gather

    def counting(self):
        chunks.append(len(self._steps))
        gather(self)

    monkeypatch.setattr(OrderedGatherer, "_gather", counting)
    rows = Rows(20 * group.world_size)
    trainer = evaluated(tiny_roberta(), rows, tmp_path, per_device_eval_batch_size=2, eval_accumulation_steps=3)
    assert len(trainer.predict(rows).label_ids) == len(rows)
    assert chunks == [3, 3, 3, 1]


def test_errors_in_compute_metrics_are_raised_on_all_ranks(group, tmp_path):
    def metrics(prediction):
        raise KeyError("no such class")

    trainer = evaluated(tiny_roberta(), Rows(4), tmp_path, compute_metrics=metrics)
    with pytest.raises(KeyError, match="no such class"):
        trainer.evaluate()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "compute_metrics returned None, expected a dict of names and numbers"),
        (0.5, "compute_metrics returned a value of type float, expected a dict"),
        ({"kind": {1, 2}}, "compute_metrics returned 'kind' with a value of type set, which the log"),
        ({"ok": 1.0, 3: 0.5}, "compute_metrics returned 3 with a value of type float, .*names are texts"),
    ],
)
def test_metrics_of_unsupported_types_raise_on_all_ranks(group, tmp_path, returned, message):
    with pytest.raises(TypeError, match=message):
        evaluated(tiny_roberta(), Rows(4), tmp_path, compute_metrics=lambda prediction: returned).evaluate()


def test_array_metrics_are_saved_as_lists(group, shared_tmp_path):
    def metrics(prediction):
        tensors = {"many": mindspore.Tensor([1, 2]), "one": mindspore.Tensor([3])}
        return {"confusion": np.array([[1, 2], [3, 4]]), "score": np.float32(0.5), "of": tensors}

    trainer = train(
        tiny_roberta(), Rows(4), shared_tmp_path, eval_dataset=Rows(4), compute_metrics=metrics,
        evaluation_strategy="epoch", save_strategy="epoch",
    )  # fmt: skip
    (saved,) = shared_tmp_path.glob("checkpoint-*/trainer_state.json")
    (logged,) = (row for row in json.loads(saved.read_text())["log_history"] if "eval_score" in row)
    assert (logged["eval_confusion"], logged["eval_of"]) == ([[1, 2], [3, 4]], {"many": [1, 2], "one": 3})
    assert trainer.evaluate()["eval_score"] == 0.5


def test_evaluation_strategy_without_eval_dataset_is_refused_before_training(group, tmp_path):
    settings = {"evaluation_strategy": "epoch"}
    with pytest.raises(ValueError, match=r"eval(uation)?_strategy.*eval_dataset"):
        train(tiny_roberta(), Rows(4), tmp_path, callbacks=[NeverBegins()], **settings)

    class Own(dp.DataParallelTrainer):
        def evaluate(self, *args, **kwargs):
            return {"eval_own": 1.0}

    if not is_0_5:
        assert train(tiny_roberta(), Rows(4), tmp_path, trainer_class=Own, **settings).state.global_step


class NeverBegins(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        raise AssertionError


class Texts:
    """Texts of 2 to 9 tokens, and shorter ones as labels."""

    def __init__(self, number):
        rng = np.random.default_rng(0)
        self.rows = [rng.integers(3, tiny_transformers.VOCAB, 2 + i % 8).tolist() for i in range(number)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index][: 1 + index % 3]}


@pytest.mark.skipif(is_0_5, reason="Transformers has a Seq2SeqTrainer for MindNLP 0.5")
@pytest.mark.parametrize(("beams", "length"), [(None, 20), (2, 6)])
def test_generated_rows_do_not_depend_on_the_number_of_ranks(group, tmp_path, beams, length):
    def evaluated(ranks):
        model = tiny_transformers.build("t5", eos_token_id=7, pad_token_id=0, tie_word_embeddings=False)
        for name, parameter in model.named_parameters():
            if "EncDecAttention" in name:
                # Untrained models would generate the same for every text.
                parameter.assign_value(parameter * 10)
        args = dp.DataParallelArguments(
            str(tmp_path), predict_with_generate=True, generation_max_length=length, generation_num_beams=beams,
            per_device_eval_batch_size=8 // ranks,
        )  # fmt: skip
        seen = []
        trainer = dp.DataParallelTrainer(
            model, args, data_collator=dp.PaddingCollator(pad_token_id=0),
            compute_metrics=lambda found: seen.append(found) or {"length": found.predictions.shape[1]},
        )  # fmt: skip
        metrics = trainer.evaluate(Texts(11))
        return trainer.predict(Texts(11)).predictions, metrics

    rows, metrics = evaluated(group.world_size)
    with alone():
        expected, expected_metrics = evaluated(1)
    assert rows.shape == (11, length)
    assert rows.dtype == np.int64
    assert not (rows == -100).any()
    np.testing.assert_array_equal(rows, expected)
    assert len(np.unique(rows, axis=0)) > 1
    assert metrics["eval_length"] == length
    assert metrics["eval_loss"] == pytest.approx(expected_metrics["eval_loss"], rel=1e-6)


@pytest.mark.skipif(is_0_5, reason="Transformers has a Seq2SeqTrainer for MindNLP 0.5")
def test_predict_with_generate_is_refused_without_an_encoder_decoder_model(group, tmp_path):
    args = dp.DataParallelArguments(str(tmp_path), predict_with_generate=True)
    with pytest.raises(ValueError, match="for encoder-decoder models, and RobertaForSequenceClassification is not one"):
        dp.DataParallelTrainer(tiny_roberta(), args)
