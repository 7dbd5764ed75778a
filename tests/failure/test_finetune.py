"""Test that scripts/finetune.py trains the classifier of one process with every setting of its loss and evaluation."""

from __future__ import annotations

import csv
import json
import random

import pytest

from conftest import ROOT, run_job

WORDS = {"good": "fine great lovely", "bad": "poor awful dull", "so": "mean middle normal"}
SIZES = (
    "--train-file ../train.csv --hidden-size 32 --num-layers 1 --intermediate-size 64 --vocab-size 300 --max-length 20 "
    "--global-batch-size 16 --logging-steps 2 --num-epochs 2 --learning-rate 5e-3"
).split()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a folder with files whose texts have different lengths, and whose labels are not equally frequent."""
    folder, rng = tmp_path_factory.mktemp("files"), random.Random(0)
    every = " ".join(WORDS.values()).split()
    for name, number in (("train.csv", 90), ("test.csv", 31), ("new.csv", 13)):
        with open(folder / name, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            for _ in range(number):
                label = rng.choices(list(WORDS), [6, 3, 1])[0]
                words = rng.choices(WORDS[label].split() * 3 + every, k=rng.randint(2, 15))
                writer.writerow([" ".join(words), label])
    return folder


def report_of(files, name, num_ranks, *flags):
    folder = files / name
    folder.mkdir()
    job = run_job(folder, ROOT / "scripts/finetune.py", *SIZES, "--output-dir", "out", *flags, nproc=num_ranks)
    assert job.exit_code == 0, job.output
    return job.output, json.loads((folder / "out/report.json").read_text())


def numbers(report):
    keys = ("loss", "eval_loss", "eval_accuracy", "eval_macro_f1")
    return [row[key] for row in [*report["history"], report] for key in keys if key in row]


@pytest.fixture(scope="module")
def model(files):
    report_of(files, "model", 1, "--test-file", "../test.csv", "--max-steps", "2")
    return str(files / "model/out/model")


SETTINGS = {
    "class weights": "--class-weights balanced --eval-steps 4 --save-best macro_f1 --dropout 0.1 --lr-scheduler cosine",
    "smoothing": "--label-smoothing 0.1 --early-stopping 1 --lr-scheduler reduce_lr_on_plateau",
    "by length": "--group-by-length --dropout 0.1 --lr-scheduler inverse_sqrt",
    "muon": "--optimizer muon --micro-batch-size 2 --zero-stage 2",
    "LoRA": "--model MODEL --lora-rank 4 --lora-targets query,value",
}


def same_losses(files, model, name):
    flags = [*SETTINGS[name].replace("MODEL", model).split(), "--test-file", "../test.csv"]
    name = name.replace(" ", "-")
    (_, one), (output, two) = (
        report_of(files, f"{name}-{n}", n, *flags, "--predict-file", "../new.csv") for n in (1, 2)
    )
    assert numbers(two) == pytest.approx(numbers(one), rel=1e-5)
    assert two["replicas_in_sync"]
    assert one["steps"] == two["steps"]
    tables = [(files / f"{name}-{n}/out/predictions.csv").read_text().splitlines() for n in (1, 2)]
    predictions = [list(csv.DictReader(table)) for table in tables]
    assert len(predictions[0]) == 13
    assert [row["label"] for row in predictions[0]] == [row["label"] for row in predictions[1]]
    return output, two


@pytest.mark.core
def test_class_weights_and_the_best_model_are_those_of_one_process(files, model):
    output, report = same_losses(files, model, "class weights")
    best = max((row for row in report["history"] if "eval_macro_f1" in row), key=lambda row: row["eval_macro_f1"])
    assert report["eval_macro_f1"] == pytest.approx(best["eval_macro_f1"])
    assert {row["label"]: row["samples"] for row in report["classes"]}.keys() == set(WORDS)
    # The log is in lines of one width.
    lines = [line[line.index("update") :] for line in output.replace("\r", "\n").split("\n") if "  loss   " in line]
    assert len({len(line) for line in lines}) == 1
    assert lines[0].startswith("update  2/12  epoch   0.33  loss ")


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "class weights"])
def test_losses_are_those_of_one_process(files, model, name):
    same_losses(files, model, name)


def test_a_part_of_the_file_is_held_out_and_a_part_of_the_rest_trains(files):
    flags = "--test-fraction 0.2 --max-train-samples 50 --max-steps 2".split()
    _, report = report_of(files, "fraction", 2, *flags)
    assert report["train_samples"] == 50
    assert 14 <= report["eval_samples"] <= 18
