"""Tests what mindnlp-dp report reads, refuses and shows."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest

from mindnlp_dp.commands.main import main
from mindnlp_dp.report.page import render
from mindnlp_dp.report.runs import RecordedRun, read_runs, speed_up
from mindnlp_dp.text_classification.classification_recorder import RunRecorder, most_confused


def report_of(world_size=1, rate=100.0, accuracy=0.5, timed=True, **more):
    """Return the report of a run of two epochs."""
    history = []
    for step in range(10, 50, 10):
        history.append({"loss": 4.0 - step / 20, "step": step, "seconds": step / rate * 64})
    for step in (20, 40):
        history.append(
            {"eval_loss": 3.5 - step / 20, "eval_accuracy": accuracy * step / 40, "step": step, "seconds": step}
        )
    if not timed:
        for row in history:
            del row["seconds"]
    return {
        "world_size": world_size, "backend": "mpi" if world_size > 1 else "single", "train_samples_per_second": rate,
        "gradient_sync_share": 0.05 if world_size > 1 else 0.0, "peak_memory_bytes": 3 << 29,
        "eval_accuracy": accuracy, "eval_loss": 1.5,
        "replicas_in_sync": True, "replica_digest": "0123456789abcdef", "train_seconds": 4000 / rate, "steps": 40,
        "global_batch_size": 64, "train_samples": 1280, "eval_samples": 320, "num_labels": 3,
        "confusions": [{"label": "lost <card>", "predicted": "stolen & gone", "count": 7, "of": 40}],
        "command": "mindnlp-dp run --nproc 2 train.py --train-file 'a b.csv'", "machine": "a machine, 2 cores",
        "config": {"model": "tiny", "seed": 42, "output_dir": "somewhere"}, "history": history, **more,
    }  # fmt: skip


def write(folder, report):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report))
    return folder


@pytest.fixture
def two(tmp_path):
    return write(tmp_path / "one", report_of()), write(tmp_path / "two", report_of(2, 190.0, 0.51))


class Text(HTMLParser):
    """Collects the words of an HTML page and the addresses that it would fetch."""

    def __init__(self, page):
        super().__init__()
        self.words, self.fetched, self.open = "", [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.fetched += [value for name, value in attributes if name in ("src", "href") and not value.startswith("#")]
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


def test_a_report_is_one_html_page_without_external_files(two, capsys):
    assert main(["report", *map(str, two)]) == 0
    page = (two[0] / "report.html").read_text(encoding="utf-8")
    assert capsys.readouterr().out == f"written to {two[0] / 'report.html'} and {two[0] / 'report.png'}\n"
    assert (two[0] / "report.png").read_bytes().startswith(b"\x89PNG")
    text = Text(page)
    assert text.open == []
    assert text.fetched == []
    assert "@import" not in page
    assert "url(http" not in page
    assert page.count("<svg") == 5


def test_a_report_shows_accuracy_speed_up_digest_and_confusions(two):
    words = re.sub(r"\s+", " ", Text(render(read_runs(two))).words)
    for expected in (
        "Training report: 3 classes, 1,280 training samples", "one (one process); two (2 processes, mpi)",
        "0.5100", "two, on 320 held-out samples", "1.90 x", "two than one", "+0.0100", "5.0 %", "agree",
        "0123456789abcdef, on every process", "lost <card>", "stolen & gone", "7 of 40",
        "mindnlp-dp run --nproc 2 train.py --train-file 'a b.csv'", "a machine, 2 cores",
        "1.50 GiB",
    ):  # fmt: skip
        assert expected in words, expected


@pytest.mark.parametrize("more", [{}, {"replica_digests": ["0123456789abcdef", "fedcba9876543210"]}])
def test_a_report_shows_replicas_that_differ(tmp_path, more):
    """Check also a report of an older version, which has the digest of rank 0 only."""
    run = write(tmp_path / "run", report_of(2, replicas_in_sync=False, **more))
    words = Text(render(read_runs([run]))).words
    assert "DIFFER" in words
    assert "not on every process" in words
    assert ("by rank 0123456789abcdef, fedcba9876543210" in words) == bool(more)


def test_a_report_of_an_older_run_leaves_out_missing_sections(tmp_path):
    report = report_of(2, timed=False)
    for key in ("confusions", "peak_memory_bytes", "command", "machine", "config", "train_seconds", "num_labels"):
        del report[key]
    page = render(read_runs([write(tmp_path / "old", report)]))
    assert page.count("<svg") == 3
    assert "Most confused classes" not in page


@pytest.mark.parametrize("name", ["one", "_hidden"])
def test_a_report_of_a_single_run_has_metrics_and_no_legend(tmp_path, two, name):
    metrics = {"train_input_tokens_per_second": 1234.5, "train_mfu": 0.4321, "evaluation_seconds": 2.5}
    single = read_runs([write(tmp_path / "single" / name, report_of(metrics=metrics))])
    page = render(single)
    assert 'id="legend_1"' not in page
    assert name in Text(page).words
    for words in ("tokens per second, without padding1234", "model FLOPs utilization (MFU)0.432", "while training2.5"):
        assert words in "".join(Text(page).words.split("\n"))
    # A run of an older version has none.
    page = render([*single, *read_runs(two)])
    assert 'id="legend_1"' in page


def test_labels_and_folder_names_are_escaped_in_the_page(tmp_path):
    report = report_of(confusions=[{"label": "<script>alert(1)</script>", "predicted": "b", "count": 1, "of": 2}])
    page = render(read_runs([write(tmp_path / "<b>run</b>", report)]))
    assert "<script" not in page
    assert "<b>" not in page


def test_a_report_accepts_a_folder_name_with_dollar_signs(tmp_path):
    folder = write(tmp_path / r"lr $\x$", report_of())
    assert main(["report", str(folder)]) == 0


def test_runs_in_folders_of_the_same_name_get_distinct_names(tmp_path):
    first, second = (write(tmp_path / folder / "run", report_of()) for folder in ("a", "b"))
    assert [run.name for run in read_runs([first, second])] == ["a/run", "b/run"]
    assert [run.name for run in read_runs([first / "report.json"])] == ["run"]


def test_the_speed_up_compares_one_process_with_the_fastest_run():
    runs = [RecordedRun(str(n), report_of(n, rate)) for n, rate in ((2, 150.0), (1, 100.0), (4, 300.0), (1, 50.0))]
    assert speed_up(runs) == (runs[1], runs[2], 3.0)
    assert speed_up(runs[:1]) is None
    assert speed_up(runs[1:2]) is None


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, r"report.json does not exist; it is written by scripts/finetune.py when a run has ended"),
        ("{", r"report.json is not JSON"),
        ("[]", r"is not the report of a run: it does not have world_size, backend"),
        ('{"world_size": 1}', r"is not the report of a run: it does not have backend"),
    ],
)
def test_a_folder_without_a_valid_report_json_is_refused(tmp_path, capsys, content, expected):
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    assert re.search(expected, capsys.readouterr().err)
    assert not (tmp_path / "report.html").exists()


def test_an_output_name_without_html_is_refused(two, capsys):
    assert main(["report", str(two[0]), "--output", "page.pdf"]) == 2
    assert "must name a file that ends in .html" in capsys.readouterr().err


def test_a_report_without_its_libraries_names_the_pip_command(two, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["report", str(two[0])]) == 2
    assert 'pip install "mindnlp-dp[report]"' in capsys.readouterr().err


def test_a_run_without_an_evaluation_has_no_list_of_confusions():
    recorder = RunRecorder(["a", "b"], num_train=4)
    assert recorder.confusions is None
    recorder.metrics(SimpleNamespace(predictions=np.eye(2), label_ids=np.arange(2)))
    assert recorder.confusions == []


def test_confused_classes_are_counted_in_both_directions():
    labels = np.array([0, 0, 0, 1, 1, 2, 2])
    taken_for = np.array([1, 1, 0, 0, 1, 2, 0])
    predictions = np.eye(3)[taken_for]
    assert most_confused(predictions, labels, ["a", "b", "c"]) == [
        {"label": "a", "predicted": "b", "count": 3, "of": 5},
        {"label": "c", "predicted": "a", "count": 1, "of": 5},
    ]
    assert most_confused(np.eye(3), np.arange(3), ["a", "b", "c"]) == []
