"""Test that scripts/finetune.py trains the classifier of one process with every setting of its loss and evaluation."""

from __future__ import annotations

import csv
import json
import random
import shutil

import pytest

from conftest import ROOT, run_job, slow
from mindnlp_dp.commands.main import main
from mindnlp_dp.runtime.mindnlp_api import transformers_api
from mindnlp_dp.text_classification.tokenize_texts import BOS, EOS, PAD

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


@pytest.fixture(scope="module")
def adapters(files, model):
    flags = ["--model", model, "--lora-rank", "4", "--test-file", "../test.csv", "--max-steps", "20"]
    return files / "adapters/out/model", report_of(files, "adapters", 1, *flags)[1]


@pytest.fixture(scope="module")
def language_model(files):
    rows = "".join(f"{word},is {other}\n" for word, other in zip(WORDS, WORDS.values()))
    (files / "pairs.csv").write_text("prompt,completion\n" + rows)
    sizes = "--train-file pairs.csv --test-file pairs.csv --hidden-size 32 --num-layers 1 --intermediate-size 64"
    steps = "--vocab-size 300 --max-steps 2 --max-length 20 --global-batch-size 4 --num-samples 0 --cache-dir cache"
    for name, more in (("lm", []), ("lm-adapters", ["--model", "lm/model", "--lora-rank", "4"])):
        flags = [*sizes.split(), *steps.split(), *more, "--output-dir", name]
        job = run_job(files, ROOT / "scripts/finetune_llm.py", *flags, nproc=1)
        assert job.exit_code == 0, job.output
    return files / "lm/model"


SETTINGS = {
    "class weights": "--class-weights balanced --eval-steps 4 --save-best macro_f1 --dropout 0.1 --lr-scheduler cosine",
    "label smoothing": "--label-smoothing 0.1 --early-stopping 1 --lr-scheduler reduce_lr_on_plateau",
    "group by length": "--group-by-length --dropout 0.1 --lr-scheduler inverse_sqrt",
    "muon": "--optimizer muon --micro-batch-size 2 --zero-stage 2",
    "LoRA": "--model MODEL --lora-rank 4 --lora-targets query,value",
    "continued LoRA": "--model MODEL",
    "decoder": "--model MODEL",
    "encoder and decoder": "--model MODEL --dropout 0.0",
}


def same_losses(files, model, name):
    flags = [*SETTINGS[name].replace("MODEL", str(model)).split(), "--test-file", "../test.csv"]
    name = name.replace(" ", "-")
    (_, one), (output, two) = (
        report_of(files, f"{name}-{n}", n, *flags, "--predict-file", "../new.csv") for n in (1, 2)
    )
    assert numbers(two) == pytest.approx(numbers(one), rel=1e-5)
    assert two["replicas_in_sync"]
    assert len(two["replica_digests"]) == 2
    assert two["backend"] == "mpi"
    assert one["steps"] == two["steps"]
    tables = [(files / f"{name}-{n}/out/predictions.csv").read_text().splitlines() for n in (1, 2)]
    predictions = [list(csv.DictReader(table)) for table in tables]
    assert len(predictions[0]) == 13
    assert [row["label"] for row in predictions[0]] == [row["label"] for row in predictions[1]]
    return output, two


@pytest.mark.core
def test_class_weights_and_the_best_model_equal_one_process(files, model):
    output, report = same_losses(files, model, "class weights")
    best = max((row for row in report["history"] if "eval_macro_f1" in row), key=lambda row: row["eval_macro_f1"])
    assert report["eval_macro_f1"] == pytest.approx(best["eval_macro_f1"])
    assert {row["label"]: row["samples"] for row in report["classes"]}.keys() == set(WORDS)
    # The log is in lines of one width.
    lines = [line[line.index("update") :] for line in output.replace("\r", "\n").split("\n") if "  loss   " in line]
    assert len({len(line) for line in lines}) == 1
    assert lines[0].startswith("update  2/12  epoch   0.33  loss ")


@pytest.mark.parametrize("name", ["label smoothing", "group by length", "muon", "LoRA"])
def test_finetune_losses_equal_one_process(files, model, name):
    same_losses(files, model, name)


@pytest.mark.core
def test_lora_adapters_of_a_classifier_continue_and_merge_with_the_same_eval_loss(files, adapters):
    folder, first = adapters
    assert main(["export", str(folder.parent), str(files / "merged"), "--merge-lora"]) == 0
    flags = ["--test-file", "../test.csv", "--learning-rate", "1e-20", "--max-steps", "1"]
    for name, given in (("of-adapters", folder), ("of-merged", files / "merged")):
        _, report = report_of(files, name, 1, "--model", str(given), *flags)
        assert report["eval_loss"] == pytest.approx(first["eval_loss"], rel=1e-5)
        assert (files / name / "out/model/adapter_config.json").exists() == (given is folder)


def test_continued_lora_adapters_have_the_losses_of_one_process(files, adapters):
    same_losses(files, adapters[0], "continued LoRA")


def test_a_classifier_made_from_a_language_model_has_the_losses_of_one_process(files, language_model):
    same_losses(files, language_model, "decoder")


def test_models_and_adapters_of_the_other_recipe_are_refused_before_training(files, model, adapters, language_model):
    classifier, pairs = "scripts/finetune.py --train-file train.csv --test-file test.csv", "--train-file pairs.csv"
    language = f"scripts/finetune_llm.py {pairs} --test-file pairs.csv --cache-dir cache"
    (files / "two.csv").write_text("text,label\na,x\nb,y\n")
    for command, message in (
        (
            f"{classifier} --model lm-adapters/model",
            "has adapters of the kind LORA for CAUSAL_LM; expected LORA for SEQ_CLS",
        ),
        (f"{classifier} --model lm-adapters/model", "mindnlp-dp export OUTPUT_DIR NEW_FOLDER --merge-lora"),
        (f"{classifier} --model adapters/out/model --lora-rank 8", "of rank 4, which are trained further; leave out"),
        (
            "scripts/finetune.py --train-file two.csv --test-file two.csv --model adapters/out/model",
            "were trained for the labels bad, good, so, and the data has x, y; pass the model that they belong to",
        ),
        (f"{language} --model adapters/out/model", "of the kind LORA for SEQ_CLS; expected LORA for CAUSAL_LM"),
        (
            f"{language} --model {model}",
            "is a text classifier; expected a causal language model; train it with scripts",
        ),
    ):
        script, *flags = command.split()
        job = run_job(files, ROOT / script, *flags, "--output-dir", "refused", nproc=2)
        assert job.exit_code != 0
        assert message in job.output
        assert "Traceback" not in job.output
    assert not (files / "refused").exists()


def test_test_fraction_is_held_out_and_max_train_samples_are_trained(files):
    flags = "--test-fraction 0.2 --max-train-samples 50 --max-steps 2".split()
    _, report = report_of(files, "fraction", 2, *flags)
    assert report["train_samples"] == 50
    assert 14 <= report["eval_samples"] <= 18


@pytest.mark.parametrize("eval_steps", [pytest.param(2, marks=slow), 100])
def test_the_model_of_the_last_update_is_evaluated_for_any_eval_steps(files, model, eval_steps):
    """The model was trained for numbers, and its configuration says so."""
    folder = files / f"of-numbers-{eval_steps}"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "problem_type": "regression"}))
    flags = ["--model", str(folder), "--test-file", "../test.csv", "--max-steps", "5"]
    _, report = report_of(files, f"every-{eval_steps}", 2, *flags, "--eval-steps", str(eval_steps))
    last = [row for row in report["history"] if "eval_loss" in row][-1]
    assert (last["step"], report["eval_loss"]) == (5, last["eval_loss"])
    assert last["eval_loss"] == pytest.approx(1.0, abs=0.5)
    written = json.loads((files / f"every-{eval_steps}/out/model/config.json").read_text())
    assert written["problem_type"] == "single_label_classification"


@slow
def test_a_classifier_with_encoder_and_decoder_has_the_losses_of_one_process(files, model):
    library = transformers_api()
    config = library.BartConfig(
        vocab_size=300, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, pad_token_id=PAD,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, num_labels=3,
        bos_token_id=BOS, eos_token_id=EOS, decoder_start_token_id=EOS,
    )  # fmt: skip
    folder = files / "bart"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    library.BartForSequenceClassification(config).save_pretrained(str(folder))
    same_losses(files, folder, "encoder and decoder")
