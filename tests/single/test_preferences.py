"""Test the losses of pairs of answers, and the rows that they are read from."""

from __future__ import annotations

import json

import numpy as np
import pytest
from mindspore import Tensor

import mindnlp_dp as dp  # noqa: F401  (its patches come before MindNLP)
from mindnlp_dp.finetuning.settings import InputError
from mindnlp_dp.language_modeling.conversations import read_preferences
from mindnlp_dp.language_modeling.language_modeling_config import LanguageModelingConfig
from mindnlp_dp.language_modeling.preferences import log_probabilities, preference_loss
from mindnlp_dp.language_modeling.rows import PairCollator, TokenRows

SUMS = np.array([[-3.0, -8.0, -2.5], [-4.0, -6.0, -9.0]], np.float32)
REFERENCE = np.array([[-3.5, -7.0, -2.5], [-3.0, -6.5, -8.0]], np.float32)
LENGTHS = np.array([[2, 5, 1], [4, 3, 9]], np.float32)


def expected(objective, beta, gamma):
    def minus_log_sigmoid(x):
        return np.log1p(np.exp(-x))

    gain, mean = SUMS - REFERENCE, SUMS / LENGTHS
    if objective == "dpo":
        return minus_log_sigmoid(beta * (gain[0] - gain[1])), beta * gain
    if objective == "ipo":
        gain = gain / LENGTHS
        return (gain[0] - gain[1] - 0.5 / beta) ** 2, beta * gain
    if objective == "simpo":
        return minus_log_sigmoid(beta * (mean[0] - mean[1]) - gamma), beta * mean
    odds = np.exp(mean) / (1 - np.exp(mean))
    return -mean[0] + beta * minus_log_sigmoid(np.log(odds[0] / odds[1])), beta * mean


@pytest.mark.core
@pytest.mark.parametrize("objective", ["dpo", "ipo", "simpo", "orpo"])
def test_preference_losses_match_the_formulas_of_the_papers(objective):
    losses, rewards = preference_loss(objective, *map(Tensor, (SUMS, LENGTHS, REFERENCE)), beta=0.3, gamma=0.7)
    wanted = expected(objective, 0.3, 0.7)
    np.testing.assert_allclose(losses.asnumpy(), wanted[0], rtol=1e-5)
    np.testing.assert_allclose(rewards.asnumpy(), wanted[1], rtol=1e-5)


def test_log_probabilities_count_only_the_tokens_of_the_answer():
    rng = np.random.default_rng(0)
    logits, ids = rng.normal(size=(2, 5, 7)).astype(np.float32), rng.integers(0, 7, (2, 5))
    labels = ids.copy()
    labels[0, :2], labels[1, :3], labels[1, 4:] = -100, -100, -100

    class Output:
        pass

    def model(**_):
        output = Output()
        output.logits = Tensor(logits)
        return output

    sums, lengths = log_probabilities(model, Tensor(ids), Tensor(labels), None)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = [sum(logs[0, at - 1, ids[0, at]] for at in (2, 3, 4)), logs[1, 2, ids[1, 3]]]
    np.testing.assert_allclose(sums.asnumpy(), wanted, rtol=1e-5)
    assert lengths.asnumpy().tolist() == [3, 1]


def test_a_batch_has_both_answers_of_each_pair():
    def text(*ids):
        return np.array(ids), np.array([-100, *ids[1:]])

    rows = TokenRows.of([[text(5, 6), text(5, 7, 8)], [text(9, 1, 2, 3), text(9, 4)]])
    batch = PairCollator(0)([rows[0], rows[1]])
    assert batch["chosen_ids"].tolist() == [[5, 6, 0, 0], [9, 1, 2, 3]]
    assert batch["rejected_labels"].tolist() == [[-100, 7, 8, -100], [-100, 4, -100, -100]]
    assert batch["rejected_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def write(tmp_path, *rows):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 2?", "chosen": " 4", "rejected": " 5"},
        {"chosen": "2 + 2? 4", "rejected": "2 + 2? 5"},
        {"instruction": "2 + 2?", "input": "", "chosen": " 4", "rejected": " 5"},
        {"prompt": [user("2 + 2?")], "chosen": [assistant(" 4")], "rejected": [assistant(" 5")]},
        {"chosen": [user("2 + 2?"), assistant(" 4")], "rejected": [user("2 + 2?"), assistant(" 5")]},
    ],
)
def test_every_form_of_a_preference_row_gives_the_same_pair(tmp_path, row):
    (pair,) = read_preferences(write(tmp_path, row))
    assert [message.content for message in pair] == ["2 + 2?", " 4"]
    assert [message.content for message in pair.rejected] == ["2 + 2?", " 5"]


def test_the_history_of_a_preference_is_before_its_prompt(tmp_path):
    row = {"history": [["a", "b"]], "instruction": "c", "input": "d", "chosen": "e", "rejected": "f"}
    (pair,) = read_preferences(write(tmp_path, row))
    assert [message.content for message in pair] == ["a", "b", "c\nd", "e"]
    assert [message.is_counted for message in pair.rejected] == [False, False, False, True]


@pytest.mark.core
def test_assistant_messages_in_the_prompt_have_no_labels(tmp_path):
    prompt = [user("a"), assistant("b"), user("c")]
    row = {"prompt": prompt, "chosen": [assistant("d")], "rejected": [assistant("e")]}
    (pair,) = read_preferences(write(tmp_path, row))
    assert [message.is_counted for message in pair.rejected] == [False, False, False, True]


@pytest.mark.core
def test_equal_answers_are_left_out_with_a_warning(tmp_path, capsys):
    rows = [{"prompt": "a", "chosen": "b", "rejected": end} for end in ("b", "c")]
    assert len(read_preferences(write(tmp_path, *rows))) == 1
    assert "rows left out, whose chosen equals rejected: 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "line 2: rejected is missing"),
        ({"prompt": "a", "chosen": " ", "rejected": "b"}, "line 2: chosen is empty"),
        ({"prompt": "a", "chosen": [assistant("b")], "rejected": "c"}, "line 2: .* must be all texts"),
        ({"chosen": "a", "rejected": "b"}, "line 2: there is no prompt"),
        ({"chosen": "a", "rejected": "ab"}, "line 2: .* the beginning of the other"),
    ],
)
def test_invalid_preferences_are_refused_with_their_line(tmp_path, row, message):
    with pytest.raises(InputError, match=message):
        read_preferences(write(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c"}, row))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "ppo"}, "objective must be one of"),
        ({"train_file": ""}, "needs --train-file"),
        ({"packing": True}, "packing is for the objective sft"),
        ({"mesh": "pp=2"}, "--mesh has pp"),
        ({"beta": 0.0}, "beta must be positive"),
    ],
)
def test_unsupported_settings_of_preference_training_are_refused(settings, message):
    given = {"train_file": "a.jsonl", "test_fraction": 0.5, "objective": "dpo", **settings}
    if not given["train_file"]:
        given["test_fraction"] = 0.0
    with pytest.raises(InputError, match=message):
        LanguageModelingConfig(**given).validate()
