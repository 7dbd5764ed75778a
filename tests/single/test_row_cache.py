"""Test the cache of tokenized rows: when it is read, when it is rebuilt, and where rows stay in memory."""

import pickle

import numpy as np
import pytest

from mindnlp_dp.language_modeling.conversations import Conversation
from mindnlp_dp.language_modeling.row_cache import cached, key_of
from mindnlp_dp.language_modeling.rows import TokenRows


def made():
    text = (np.array([5, 6, 7]), np.array([-100, 6, 7]))
    return TokenRows.of([[text, text], [text]]), 1, 2


def refuse():
    raise AssertionError("made again")


@pytest.mark.core
@pytest.mark.parametrize("broken", [b"", b"x" * 600, None])
def test_a_damaged_row_cache_is_rebuilt_and_a_valid_one_is_read(tmp_path, broken):
    cached(str(tmp_path), "a", made)
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"\1" if broken is None else broken)
    with pytest.raises(AssertionError, match="made again"):
        cached(str(tmp_path), "a", refuse)
    cached(str(tmp_path), "a", made)
    rows, *counts = cached(str(tmp_path), "a", refuse)
    assert counts == [1, 2]
    data = pickle.dumps(rows)
    for each in (rows, pickle.loads(data)):
        assert isinstance(each.codes, np.memmap)
        assert each[0]["labels"].tolist() == [-100, 6, 7, -100, 6, 7]
        assert each[0]["texts"].tolist() == [0, 0, 0, 1, 1, 1]
        assert each[1]["input_ids"].tolist() == [5, 6, 7]


def test_rows_sent_to_other_hosts_do_not_need_the_cache_file(tmp_path):
    cached(str(tmp_path), "a", made)
    rows, *_ = cached(str(tmp_path), "a", refuse)
    sent = pickle.dumps(rows.in_memory())
    [path] = tmp_path.iterdir()
    path.unlink()
    assert pickle.loads(sent)[0]["input_ids"].tolist() == [5, 6, 7, 5, 6, 7]


@pytest.mark.core
def test_the_cache_key_changes_with_texts_order_and_settings():
    one, other = (Conversation([{"role": "user", "content": text}]) for text in ("a", "b"))
    settings = ["tokenizer", 64]
    keys = [
        key_of(*arguments)
        for arguments in (
            ([one, other], settings), ([other, one], settings), ([one], settings), ([one, other], ["tokenizer", 65]),
        )
    ]  # fmt: skip
    assert len(set(keys)) == 4
    assert key_of([one, other], settings) == keys[0]


def test_rows_stay_in_memory_without_a_writable_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(cached("", "a", made)[0]) == 2
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    rows, *_ = cached(str(tmp_path / "file"), "a", made)
    assert len(rows) == 2
