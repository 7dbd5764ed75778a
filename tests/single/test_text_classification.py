"""Test the recipe for text classification: files, labels, settings, scores and results."""

from __future__ import annotations

import bz2
import csv
import dataclasses
import gzip
import json
import lzma
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mindnlp_dp.finetuning.files import read_rows
from mindnlp_dp.finetuning.progress import log_line
from mindnlp_dp.finetuning.recipe_arguments import chosen, held_out
from mindnlp_dp.finetuning.settings import InputError, parse_config
from mindnlp_dp.language_modeling.language_modeling_config import LanguageModelingConfig
from mindnlp_dp.runtime.atomic_write import atomic_write
from mindnlp_dp.text_classification.classification_config import FinetuneConfig
from mindnlp_dp.text_classification.classification_recorder import class_scores
from mindnlp_dp.text_classification.classification_results import summary, write_results
from mindnlp_dp.text_classification.classification_task import prepare_task, read_splits
from mindnlp_dp.text_classification.classification_trainer import balanced_weights, trimmed
from mindnlp_dp.text_classification.cldr import LANGUAGES, cldr_phrases
from mindnlp_dp.text_classification.examples import Columns, Examples, label_ids, read_examples, texts_of
from mindnlp_dp.text_classification.hub import load_examples
from mindnlp_dp.text_classification.predictions import write_predictions
from mindnlp_dp.text_classification.tokenize_texts import BOS, EOS, PAD, encode, train_tokenizer


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_a_csv_with_commas_quotes_and_line_breaks_is_read(tmp_path):
    path = write(tmp_path / "a.csv", 'text,category\n"one, ""two""\nthree",x\n\nfour,y\n')
    assert read_examples(path) == Examples(['one, "two"\nthree', "four"], ["x", "y"])


def test_quotes_in_a_tsv_are_text(tmp_path):
    path = write(tmp_path / "a.tsv", b'label\ttext\n1\t"not closed\n0\t"said ""so"""\n1\ta "b" c\n')
    assert read_examples(str(path)).texts == ['"not closed', 'said "so"', 'a "b" c']


def test_a_tsv_with_the_label_first_is_read(tmp_path):
    path = write(tmp_path / "a.tsv", b"\xef\xbb\xbflabel\ttext_a\n0\tgood day\n")
    assert read_examples(path) == Examples(["good day"], ["0"])


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t")])
def test_a_text_longer_than_the_csv_field_limit_is_read(tmp_path, name, delimiter):
    limit = csv.field_size_limit()
    text = "word " * limit
    path = write(tmp_path / name, f"text{delimiter}label\n{text}{delimiter}x\n")
    assert read_examples(path) == Examples([text], ["x"])
    # Other readers in this process keep their limit, even if a file is refused.
    with pytest.raises(InputError, match="line 1: the header is missing"):
        read_examples(write(tmp_path / name, ""))
    assert csv.field_size_limit() == limit


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,label\na,b,c\n", r"a.csv, line 2: expected 2 fields, as in the header, got 3"),
        ("a.csv", 'text,label\n"a\nb",x\nc\n', r"a.csv, line 4: expected 2 fields, as in the header, got 1"),
        (
            "a.tsv", 'label\ttext\n1\t"one\ntwo"\n',
            "a.tsv, line 3: expected 2 fields, as in the header, got 1; quotes are text in TSV, so that no field can "
            "hold a line break: if one does, save the file as CSV or JSON lines",
        ),
        ("a.tsv", "label\ttext\n1\ttwo\tthree\n", "a.tsv, line 2: expected 2 fields, as in the header, got 3$"),
        ("a.csv", "text,label\n ,x\n", "a.csv, line 2: the text is empty"),
        ("a.csv", "text,label\na,\n", "a.csv, line 2: the label is empty"),
        ("a.csv", "text,label\n", "a.csv: it has no rows below the header"),
        ("a.csv", "", "a.csv, line 1: the header is missing"),
        ("a.tsv", "text_a\ttext_b\tlabel\na\tb\tc\n", "it has pairs, text_a and text_b, and the recipe classifies one"),
        ("a.csv", "topic,label\na,b\n", "no text column; expected one named text or text_a or sentence, found topic"),
        ("a.csv", "text,topic\na,b\n", "no label column; .* found text, topic; name it with --label-column"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": \n', "a.jsonl, line 2: .* expected one JSON object per line"),
        ("a.jsonl", '["a", 1]\n', 'a.jsonl, line 1: expected a JSON object, got "a"'),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "b"}\n', "a.jsonl, line 2: the label is empty"),
        ("a.csv", 'text,label\na,"b\n', "a.csv, line 2: unexpected end of data"),
        ("a.csv", b"text,label\n\xff,x\n", "a.csv, line 2: not UTF-8; as "),
        ("a.txt", "text,label\n", "a.txt: expected a file that ends in .csv, .tsv, .jsonl, .json"),
        ("a.csv", "text,label,text\na,b,c\n", "a.csv, line 1: two columns have the name 'text'; rename or remove one"),
        ("a.csv", "label,text,label\na,b,c\n", "a.csv, line 1: two columns have the name 'label'"),
        ("a.tsv", "Text\ttext\tlabel\na\tb\tc\n", "the text may be in Text or text; name it with --text-column"),
        ("a.tsv", "text,label\na,b\n", "a.tsv, line 1: there is no tab, but ','; name the file .csv"),
        ("a.jsonl", '{"text": "a", "text": "b", "label": 1}', "line 1: the key 'text' occurs twice"),
        ("a.jsonl", '{"text": "a", "label": [0, 1]}', r"line 1: the label must be one text or number, got \[0, 1\]"),
        ("a.jsonl", '{"text": {"en": "a"}, "label": 1}', "line 1: the text must be one text or number, got {"),
        ("a.jsonl", '{"text": "a", "label": NaN}', "line 1: the label is empty"),
        ("a.jsonl", '{"text": "a", "label": null}', "line 1: the label is empty"),
        ("a.jsonl", '{"text": "a", "label": "\u200b"}', "line 1: the label is empty"),
        ("a.jsonl", '\n{"text": "a \\ud83d b", "label": 0}', r"line 2: .ud83d is half of a character; remove it"),
        ("a.jsonl", '{"text": ' + "[" * 100_000 + "]" * 100_000, "line 1: the JSON has too many levels"),
        ("a.jsonl", '{"label": ' + "9" * 5000 + "}", "line 1: Exceeds the limit"),
        ("a.jsonl", '{"text": "a", "label": 1} {}', "line 1: \" {}\" after the object; expected one"),
        ("a.json", '[\n{"text": "a", "label": 1}\n{"text": "b"}]', "line 3: expected a comma, and another object"),
        ("a.json", '[\n{"text": "a", "label": 1},\n\n{"text": ]', "a.json, line 4: Expecting value"),
        ("a.json", '[{"text": "a", "label": 1}', "line 1: expected a comma, and .*, or ] at the end"),
        ("a.json", '[{"text": "a", "label": 1}] x', "line 1: expected a comma, and .*, or ] at the end"),
        ("a.json", "[ ]", "a.json: it has no rows"),
        ("a.json", '{"data":\n [{"text": "a", "label": 1}]}', "line 1: .* one JSON object per line, or a list"),
        ("a.json", '[{"text": "a", "label": 1},\n]', "line 2: a comma before the ] at the end; remove it"),
        ("a.jsonl", '{"text": "a", "label": 1},\n', 'line 1: "," after the object; expected one JSON object per line'),
        ("a.csv", '{"text": "a", "label": 1}\n', "a.csv, line 1: this is JSON; name the file .jsonl or .json"),
        ("a.tsv", '[\n{"text": "a", "label": 1}\n', "a.tsv, line 1: this is JSON; name the file .jsonl or .json"),
        ("a.parquet", "text,label\n", "a.parquet is not a Parquet file"),
        ("a.csv", gzip.compress(b"text,label\na,b\n"), "a.csv is compressed by gzip; unpack it"),
        ("a.jsonl", bz2.compress(b"{}"), "a.jsonl is compressed by bzip2; unpack it"),
        ("a.csv", lzma.compress(b"text,label\na,b\n"), "a.csv is compressed by xz; unpack it"),
        ("a.csv", b"PK\x03\x04\x14\x00", "a.csv is a zip archive, such as an Excel workbook; unpack it, or save the"),
        ("a.tsv", b"PAR1\x15\x04", "a.tsv is a Parquet file; name it .parquet"),
    ],
)  # fmt: skip
def test_invalid_files_are_refused_with_their_line(tmp_path, name, content, message):
    with pytest.raises(InputError, match=message):
        read_examples(write(tmp_path / name, content))


@pytest.mark.core
@pytest.mark.parametrize("encoding", ["gbk", "utf-16-le", "big5", "cp1252"])
@pytest.mark.parametrize("name", ["train data.csv", "a.jsonl"])
def test_the_command_for_another_encoding_converts_the_file(tmp_path, encoding, name):
    texts = (
        ["Grüße", "größer"] if encoding == "cp1252" else ["今天天氣好" if encoding == "big5" else "今天天气好", "坏"]
    )
    rows = [f"{text},{label}" for text, label in zip(texts, "ab")]
    if name.endswith("jsonl"):
        rows = [json.dumps({"text": text, "label": label}, ensure_ascii=False) for text, label in zip(texts, "ab")]
    else:
        rows.insert(0, "text,label")
    path = write(tmp_path / name, "\n".join([*rows, ""]).encode(encoding))
    with pytest.raises(InputError, match="line .: not UTF-8; as .* it reads ") as error:
        read_examples(path)
    assert encoding == "utf-16-le" or texts[0] in str(error.value)
    subprocess.run(str(error.value).partition("convert it: ")[2], shell=True, check=True)
    assert read_examples(str(tmp_path / name.replace(".", ".utf8."))) == Examples(texts, ["a", "b"])


def test_forms_of_files_that_are_read(tmp_path):
    expected = Examples(["one, two", "three"], ["x", "y"])
    rows = [{"text": "one, two", "label": "x"}, {"text": "three", "label": "y"}]
    from datasets import Dataset

    Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    files = {
        "semicolons.csv": "text;label\r\none, two;x\r\nthree;y\r\n",
        "excel.csv": "sep=;\r\ntext;label\r\none, two;x\r\nthree;y\r\n",
        "excel.tsv": '\ufeff"sep=\t"\r\ntext\tlabel\r\none, two\tx\r\nthree\ty\r\n',
        "utf16.tsv": "text\tlabel\none, two\tx\nthree\ty\n".encode("utf-16"),
        "utf16.json": json.dumps(rows).encode("utf-16"),
        "unnamed.csv": ',text,label,\n0,"one, two",x,\n1,three,y,\n',
        "list.json": json.dumps(rows),
        "pretty.json": "\n" + json.dumps(rows, indent=2) + "\n",
        "lines.json": "\n".join(map(json.dumps, rows)),
    }
    for name, content in files.items():
        assert read_examples(write(tmp_path / name, content)) == expected, name
    assert read_examples(str(tmp_path / "a.parquet")) == expected


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "content", "columns"),
    [
        ("a.csv", '"text, from a mail";label\none, two;x\nthree;y\n', "text, from a mail|label"),
        ("a.csv", '"text; from a mail",label\n"one, two",x\nthree,y\n', "text; from a mail|label"),
        ("a.csv", "text, from a mail;label\none, two;x\nthree;y\n", None),
        ("a.csv", "text, from a mail;label\nthree;y\none, two;x\n", "text, from a mail|label"),
        ("a.csv", "text\tlabel\none, two\tx\nthree\ty\n", "text|label"),
        ("a.csv", '"text\nof a mail"|label\n"one\n""two"""|x\nthree|y\n', "text\nof a mail|label"),
        ("a.csv", '"text\nof a mail",label\n"one\n""two"";",x\nthree,y\n', "text\nof a mail|label"),
        ("a.csv", "text;id;label\n\none, two;1,5;x\nthree;2;y\n", "text|label"),
        ("a.tsv", "text, of a mail\tlabel\none, two\tx\nthree\ty\n", "text, of a mail|label"),
    ],
)  # fmt: skip
def test_the_separator_is_found_beside_other_marks(tmp_path, name, content, columns):
    path = write(tmp_path / name, content)
    if columns is None:
        # Both marks divide header and row in two: the error shows what the comma has made of the header.
        with pytest.raises(InputError, match="no label column; .* found text, from a mail;label"):
            read_examples(path)
        return
    found = read_examples(path, Columns(*columns.split("|")))
    assert sorted(found.labels) == ["x", "y"]
    assert sorted(found.texts) in [["one, two", "three"], ['one\n"two"', "three"], ['one\n"two";', "three"]]


def test_a_file_of_texts_alone(tmp_path):
    for name, content in (("a.csv", 'text\n"one, two"\nthree; four\n'), ("a.tsv", "text\none, two\nthree; four\n")):
        rows = read_rows(write(tmp_path / name, content))
        assert texts_of(rows, Columns(), name) == ["one, two", "three; four"]
    with pytest.raises(InputError, match="a.csv, line 3: expected 1 fields, as in the header, got 2"):
        list(read_rows(write(tmp_path / "a.csv", "text\none\ntwo, three\n")))


@pytest.mark.core
def test_equal_labels_of_different_spelling_are_one_class(tmp_path):
    labels = [1, 1.0, "1", "caf\u00e9", "cafe\u0301", "caf\u00e9\u200b "]
    lines = "".join(json.dumps({"text": "a", "Text": "b", "label": label}) + "\n" for label in labels)
    path = write(tmp_path / "a.jsonl", lines)
    assert read_examples(path, Columns("text")).labels == ["1"] * 3 + ["caf\u00e9"] * 3
    assert set(read_examples(path, Columns("Text")).texts) == {"b"}


def test_json_lines_are_read_with_columns_chosen_by_name(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"Question": "why?", "answer": 3}\n\n{"Question": "how?", "answer": 0}\n')
    assert read_examples(path, Columns("question", "answer")) == Examples(["why?", "how?"], ["3", "0"])
    with pytest.raises(InputError, match="no text column; there is none named text_b, found Question, answer"):
        read_examples(path, Columns("text_b", "answer"))


def saved_dataset(folder):
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

    features = Features({"sentence": Value("string"), "label": ClassLabel(names=["bad", "good"])})
    rows = {"sentence": ["poor", "fine"], "label": [0, 1]}
    dataset = Dataset.from_dict(rows, features=features)
    DatasetDict(train=dataset, validation=dataset).save_to_disk(str(folder))
    return str(folder)


def test_a_saved_data_set_with_named_labels_is_read(tmp_path):
    folder = saved_dataset(tmp_path / "saved")
    assert load_examples(folder, "validation") == Examples(["poor", "fine"], ["bad", "good"])
    with pytest.raises(InputError, match="has no split test; it has train, validation"):
        load_examples(folder, "test")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, None], "row.*the label is empty"),
        ([0, -1], "the label is empty"),
        ([[0], [1]], "must be one text or number"),
    ],
)
def test_invalid_labels_of_a_data_set_are_refused(tmp_path, labels, message):
    from datasets import ClassLabel, Dataset, Features, Sequence, Value

    names = ClassLabel(names=["bad", "good"])
    features = Features({"text": Value("string"), "label": Sequence(names) if labels[0] == [0] else names})
    Dataset.from_dict({"text": ["a", "b"], "label": labels}, features=features).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(InputError, match=message.replace("row.*", "line 2: ")):
        load_examples(str(tmp_path / "saved"), "train")


def test_a_folder_of_csv_files_is_read_as_a_data_set(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        write(tmp_path / "data" / f"{split}.csv", f"text,label\n{split} text,x\nother,y\n")
    assert load_examples(str(tmp_path / "data"), "test") == Examples(["test text", "other"], ["x", "y"])


def test_a_hub_name_without_network_is_refused_in_one_sentence(monkeypatch):
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"^the data set nobody/nothing \(train\) cannot .* without a network"):
        load_examples("nobody/nothing", "train")


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(InputError, match="none.csv: the file does not exist"):
        read_examples(str(tmp_path / "none.csv"))
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(InputError, match="is a folder, expected a file"):
        read_examples(str(tmp_path / "folder.csv"))


def test_an_unknown_label_is_refused_with_its_row():
    assert label_ids(["b", "a"], ["a", "b"], "test.csv") == [1, 0]
    with pytest.raises(InputError, match=r"test.csv, row 2: the label 'c' does not occur in the training split"):
        label_ids(["a", "c"], ["a", "b"], "test.csv")


def test_cldr_phrases_are_split_without_overlap():
    train, test = cldr_phrases()
    assert (train, test) == cldr_phrases()
    assert set(train.labels) == set(test.labels) == set(LANGUAGES)
    assert len(LANGUAGES) == 29
    assert not set(train.texts) & set(test.texts)
    assert len(set(train.texts)) == len(train.texts) == len(train.labels)
    assert 0.08 < len(test) / (len(train) + len(test)) < 0.12
    assert dict(zip(train.texts + test.texts, train.labels + test.labels))["Deutschland"] == "de"


def test_tokens_have_the_layout_of_roberta():
    texts = ["the red house", "the green house", "the red tree", "the green tree"] * 5
    tokenizer = train_tokenizer(texts, vocab_size=300, max_length=6)
    columns, truncated = encode(tokenizer, ["the red house", "the unseen words of a long text"])
    assert columns["input_ids"].shape == columns["attention_mask"].shape == (2, 6)
    assert columns["input_ids"].dtype == np.int64
    short, mask = columns["input_ids"][0], columns["attention_mask"][0]
    assert short[0] == BOS
    assert short[mask.sum() - 1] == EOS
    assert (short[mask == 0] == PAD).all()
    assert truncated == 1


def test_tokenizer_and_splits_are_deterministic():
    first, second = prepare_task(FinetuneConfig()), prepare_task(FinetuneConfig())
    assert first.tokenizer_json == second.tokenizer_json
    for name in ("input_ids", "attention_mask", "labels"):
        np.testing.assert_array_equal(first.train[name], second.train[name])
        np.testing.assert_array_equal(first.test[name], second.test[name])


def test_flags_override_the_config_file_and_the_file_the_defaults(tmp_path):
    path = write(tmp_path / "c.yaml", "num_epochs: 7\nlearning_rate: 3e-4\ntune_runtime: false\noverlap: false\n")
    config = parse_config(FinetuneConfig, ["--config", path, "--num-epochs", "1.5"])
    assert (config.num_epochs, config.learning_rate, config.tune_runtime, config.seed) == (1.5, 3e-4, False, 42)
    assert config.overlap == parse_config(FinetuneConfig, ["--overlap", "false"]).overlap
    assert (
        parse_config(FinetuneConfig, ["--config", path, "--num-epochs", "2"]).num_epochs == 2.0
    )  # a flag with the value of a default
    assert parse_config(FinetuneConfig, []) == FinetuneConfig()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("epochs: 3\n", "unknown key 'epochs'; known are async_save, bucket_cap_mb, check, check_plan"),
        ("num_epochs: many\n", "num_epochs must be a float, got 'many'"),
        ("seed: true\n", "seed must be a int, got True"),
        ("- a\n", "expected lines of the form `key: value`"),
        ("a: [\n", "is not YAML"),
        ("hidden_size: 10\nnum_heads: 4\n", r"hidden_size \(10\) must be divisible by num_heads \(4\)"),
        ("num_epochs: 0\n", "max_steps or num_epochs must be positive"),
        ("global_batch_size: 0\n", "global_batch_size must be at least 1, got 0"),
        ("output_dir: ''\n", "output_dir must name a folder, got ''"),
        ("train_file: a.csv\n", "must be given together"),
        ("train_file: a.csv\ntest_file: b.csv\ndataset: c\n", "are two sources of data; choose one"),
    ],
)
def test_invalid_config_files_are_refused(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        parse_config(FinetuneConfig, ["--config", write(tmp_path / "c.yaml", content)])


@pytest.mark.parametrize(
    ("kind", "flags", "expected"),
    [
        (FinetuneConfig, "", 2e-3),
        (FinetuneConfig, "--hidden-size 1024 --num-heads 16", 2.5e-4),
        (FinetuneConfig, "--model roberta-large", 5e-5),
        (FinetuneConfig, "--model roberta-large --learning-rate 1e-5", 1e-5),
        (FinetuneConfig, "--model roberta-large --learning-rate 0", 5e-5),
        (LanguageModelingConfig, "", 3e-3),
        (LanguageModelingConfig, "--model a/folder", 2e-5),
        (LanguageModelingConfig, "--model a/folder --lora-rank 8", 2e-4),
    ],
)
def test_the_default_learning_rate_depends_on_the_model(kind, flags, expected):
    assert parse_config(kind, flags.split()).learning_rate == expected
    with pytest.raises(InputError, match="learning_rate must be positive, or 0 for the usual one, got -1.0"):
        parse_config(kind, [*flags.split(), "--learning-rate=-1"])


def test_every_shipped_config_is_valid(pytestconfig):
    configs = sorted((pytestconfig.rootpath / "configs").glob("*.yaml"))
    assert configs
    for path in configs:
        parse_config(FinetuneConfig, ["--config", str(path)])
        head = path.read_text()
        assert all(word in head for word in ("# command", "# hardware", "# time", "# result", "# run")), path


def test_atomic_write_leaves_complete_files_or_none(tmp_path):
    target = tmp_path / "out" / "report.json"
    with pytest.raises(RuntimeError, match="the writer fails"), atomic_write(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError("the writer fails")
    assert list(target.parent.iterdir()) == []
    for text in ("first", "second"):
        with atomic_write(target) as temporary:
            temporary.write_text(text)
    assert target.read_text() == "second"
    for name in ("old", "new"):
        with atomic_write(tmp_path / "model") as temporary:
            temporary.mkdir()
            (temporary / name).write_text(name)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_the_summary_shows_memory_synchronization_and_digest(tmp_path):
    report = {
        "world_size": 2, "backend": "mpi", "train_samples_per_second": 800.4, "steps": 20, "global_batch_size": 8,
        "train_seconds": 1.0, "gradient_sync_share": 0.031, "peak_memory_bytes": 3 << 29,
        "eval_accuracy": 0.5, "eval_macro_f1": 0.4, "eval_loss": 1.5, "eval_samples": 9,
        "num_labels": 3, "replicas_in_sync": True, "replica_digest": "0123456789abcdef",
        "config": {"learning_rate": 5e-5},
    }  # fmt: skip
    text = summary(json.loads(json.dumps(report)), tmp_path)
    assert "learning rate     5e-05 at its peak" in text
    assert "gradient sync     3.1 % of the training time" in text
    assert "peak memory       1.50 GiB on the rank that needs most" in text
    assert "replicas in sync  yes, digest 0123456789abcdef" in text


def test_results_without_matplotlib_are_written_without_a_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    write_results(tmp_path / "out", {"history": [], "num_labels": 2}, lambda folder: Path(folder).mkdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model", "report.json"]
    assert "no plot was drawn" in capsys.readouterr().out


def test_every_setting_has_a_help_text():
    assert all(setting.metadata["help"] for setting in dataclasses.fields(FinetuneConfig))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lr-scheduler cosin", "lr_scheduler must be one of linear, cosine, "),
        ("--save-best f1", "save_best must be one of nothing, loss, accuracy, macro_f1, got 'f1'"),
        ("--save-best loss --save-steps 10", r"save_steps \(10\) must be a multiple of eval_steps"),
        ("--early-stopping 2 --save-steps 10 --eval-steps 4", r"save_steps \(10\) must be a multiple of eval_steps"),
        ("--early-stopping=-1", "early_stopping must be at least 0, got -1"),
        ("--class-weights rare", "class_weights must be balanced or empty, got 'rare'"),
        ("--class-weights balanced --label-smoothing 0.1", "are two losses; choose one"),
        ("--label-smoothing 1", "label_smoothing must be from 0 to 1, got 1.0"),
        ("--class-weights balanced --mesh pp=2", r"a pipeline \(pp\) computes the model's own loss"),
        ("--train-file a --test-fraction 1", "test_fraction must be from 0 to 1, got 1.0"),
        ("--train-file a --test-file b --test-fraction 0.1", "two held-out splits; choose one"),
        (
            "--test-fraction 0.1 --test-file b",
            "--train-file and --test-file .or --test-fraction. must be given together",
        ),
        ("--max-train-samples=-1", "max_train_samples must be at least 0, got -1"),
        ("--lora-rank 4", "lora_rank is for a pretrained model; pass --model FOLDER"),
        ("--seed=-1", "seed must be from 0 to 4294967295, got -1"),
        ("--dropout 1.5", "^dropout must be from 0 to 1, got 1.5"),
        ("--lora-dropout=-0.1", "lora_dropout must be from 0 to 1, got -0.1"),
    ],
)
def test_invalid_and_contradicting_flags_are_refused(flags, message):
    with pytest.raises(InputError, match=message):
        parse_config(FinetuneConfig, flags.split())


def test_class_scores_match_the_closed_form():
    """The class c is neither a label nor predicted; d is predicted only."""
    predictions = np.eye(4)[[0, 0, 1, 3, 1]]
    scores = class_scores(predictions, np.array([0, 0, 0, 1, 1]), "abcd")
    assert scores == [
        {"label": "a", "precision": 1.0, "recall": 2 / 3, "f1": 0.8, "samples": 3},
        {"label": "b", "precision": 0.5, "recall": 0.5, "f1": 0.5, "samples": 2},
        {"label": "d", "precision": 0.0, "recall": 0.0, "f1": 0.0, "samples": 0},
    ]


@pytest.mark.core
def test_samples_are_chosen_by_the_seed_and_held_out_by_label():
    assert chosen(100, 10, 1).tolist() == sorted(set(chosen(100, 10, 1).tolist())) != chosen(100, 10, 2).tolist()
    labels = np.repeat(["a", "b", "c"], [50, 10, 1])
    is_held_out = held_out(labels, 0.2, 3)
    assert [int(is_held_out[labels == label].sum()) for label in "abc"] == [10, 2, 0]
    with pytest.raises(InputError, match=r"^a.csv: .* of its most frequent label \(1\) .*\(at least 5\)"):
        held_out(np.array(["a", "b"]), 0.2, 3, "a.csv")
    with pytest.raises(InputError, match=r"^a.jsonl: test_fraction 0.1 of its rows \(1\) is less than one row"):
        held_out(np.zeros(1, int), 0.1, 3, "a.jsonl")


def test_test_fraction_splits_the_training_file(tmp_path):
    rows = [f"text {number},{'ab'[number % 2]}" for number in range(40)]
    path = write(tmp_path / "a.csv", "\n".join(["text,label", *rows, ""]))
    splits = read_splits(FinetuneConfig(train_file=path, test_fraction=0.25, max_train_samples=7))
    assert (len(splits.train), len(splits.test)) == (7, 10)
    assert not set(splits.train.texts) & set(splits.test.texts)
    assert splits.labels[1].tolist().count(0) == 5


def test_labels_of_samples_that_are_left_out_are_known(tmp_path):
    path = write(tmp_path / "a.csv", "\n".join(["text,label", *(f"text {n},label {n % 20}" for n in range(40)), ""]))
    splits = read_splits(FinetuneConfig(train_file=path, test_fraction=0.5, max_train_samples=3))
    assert (len(splits.train), len(splits.test), len(splits.label_names)) == (3, 20, 20)
    weights = balanced_weights(splits.labels[0], 20)
    assert np.isfinite(weights).all()


@pytest.mark.core
def test_predictions_are_written_in_the_order_of_the_file(tmp_path):
    write_predictions(tmp_path, ["one, two", "three"], np.log([[0.2, 0.8], [0.5, 0.5]]), ["x", "y"])
    expected = 'text,label,probability\r\n"one, two",y,0.800000\r\nthree,x,0.500000\r\n'
    assert (tmp_path / "predictions.csv").read_bytes().decode() == expected


@pytest.mark.core
def test_dynamic_padding_trims_to_the_longest_text_of_a_micro_batch():
    rows = [{"input_ids": np.array([0, 0, 5, 6, 0]), "attention_mask": np.array(mask), "labels": 1} for mask in (
        [0, 0, 1, 1, 0], [0, 1, 1, 0, 0])]  # fmt: skip
    batch = trimmed(rows)
    assert batch["input_ids"].tolist() == [[0, 5, 6]] * 2
    assert batch["attention_mask"].tolist() == [[0, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [1, 1]


def test_log_lines_show_loss_norm_rate_and_speed():
    row = {"loss": 0.51234, "grad_norm": 1, "learning_rate": 2e-3, "epoch": 0.5, "samples_per_second": 431.4}
    line = "update   7/100  epoch   0.50  loss   0.5123  norm    1.000  rate 2.00e-03      431 samples/s"
    assert log_line(row, 7, 100) == line
    evaluation = {
        "eval_loss": 0.5,
        "eval_macro_f1": 0.25,
        "eval_runtime": 3.0,
        "epoch": 1.0,
    }
    assert log_line(evaluation, 7, 100) == "update   7/100  epoch   1.00  eval  loss 0.5000  macro f1 0.2500"
    assert log_line({"train_runtime": 1.0}, 7, 100) is None
    # A line without a loss, which was NaN.
    assert log_line({"learning_rate": 2e-3}, 7, 100) == "update   7/100  epoch   0.00  rate 2.00e-03"
