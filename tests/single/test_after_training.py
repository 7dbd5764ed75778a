"""Test what is done with a trained language model: export, generate, and training that continues."""

from __future__ import annotations

import json

import chat_models
import numpy as np
import pytest
from library import is_0_5

from mindnlp_dp.commands.main import main
from mindnlp_dp.finetuning.early_checks import check_files
from mindnlp_dp.finetuning.saved_model import load_saved
from mindnlp_dp.finetuning.settings import InputError
from mindnlp_dp.finetuning.tokenizers import pretrained_tokenizer
from mindnlp_dp.language_modeling.language_modeling_config import LanguageModelingConfig

IDS = np.arange(4, 24).reshape(2, 10)


def logits(model):
    from mindspore import Tensor

    model.set_train(False)
    return model(input_ids=Tensor(IDS)).logits.asnumpy()


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        pytest.param("qwen base", [], marks=pytest.mark.core),
        pytest.param("qwen base", ["--use-rslora"], marks=pytest.mark.slow),
        pytest.param("qwen base", ["--use-dora"], marks=pytest.mark.slow),
        ("gpt2", ["--use-dora", "--use-rslora"]),
    ],
    ids=str,
)
def test_export_merges_lora_adapters_into_one_model_with_the_same_logits(monkeypatch, tmp_path, kind, flags):
    folder = chat_models.train_adapters(monkeypatch, tmp_path, kind, *flags, "--max-steps", 20)
    # Adapters that name no folder of their own are found from anywhere.
    monkeypatch.chdir("/")
    with_adapters = load_saved(str(folder))
    expected, untrained = logits(with_adapters), logits(load_saved(str(tmp_path / "base")))
    assert np.abs(expected - untrained).max() > 0.1
    assert main(["export", str(tmp_path / "out"), str(tmp_path / "merged"), "--merge-lora"]) == 0
    merged = load_saved(str(tmp_path / "merged"))
    np.testing.assert_allclose(logits(merged), expected, atol=2e-5)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert merged.generation_config.eos_token_id == ends
    saved, given = (pretrained_tokenizer(str(path))[0] for path in (tmp_path / "merged", folder))
    assert saved.chat_template == given.chat_template
    assert saved("say red<|im_end|>")["input_ids"] == given("say red<|im_end|>")["input_ids"]


@pytest.mark.core
def test_generate_answers_and_an_exported_model_has_the_same_eval_loss(monkeypatch, tmp_path, capsys):
    report, _ = chat_models.train(monkeypatch, tmp_path, "qwen base")
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "out"), "say red"]) == 0
    assert capsys.readouterr().out.strip() == "red it is"
    assert main(["export", str(tmp_path / "out"), str(tmp_path / "copy")]) == 0
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "copy"), "say blue", "--temperature", "0.01"]) == 0
    assert capsys.readouterr().out.strip() == "blue it is"
    prompt = "<|im_start|>user\nsay red<|im_end|>\n<|im_start|>assistant\n"
    assert main(["generate", str(tmp_path / "copy"), prompt, "--raw", "--max-new-tokens", "1"]) == 0
    assert capsys.readouterr().out.strip() == "re"
    again = chat_models.run(
        monkeypatch, tmp_path, "--model", tmp_path / "copy", "--template", "chatml", "--max-steps", 1,
        "--learning-rate", 0,
    )  # fmt: skip
    assert again["eval_loss"] == pytest.approx(report["eval_loss"], rel=1e-5)


@pytest.mark.core
def test_lora_adapters_are_trained_further(monkeypatch, tmp_path):
    folder = chat_models.train_adapters(monkeypatch, tmp_path, "qwen base", "--max-steps", 20)
    first = json.loads((tmp_path / "out/report.json").read_text())
    folder.rename(tmp_path / "given")
    flags = ["--model", tmp_path / "given", "--template", "chatml"]
    same = chat_models.run(monkeypatch, tmp_path, *flags, "--max-steps", 1, "--learning-rate", 0)
    assert same["eval_loss"] == pytest.approx(first["eval_loss"], rel=1e-5)
    longer = chat_models.run(monkeypatch, tmp_path, *flags, "--lora-rank", 4, "--max-steps", 20)
    assert longer["eval_loss"] < first["eval_loss"] - 0.05
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tmp_path / "base")
    with pytest.raises(SystemExit, match="has adapters of rank 4, which are trained further; leave out --lora-rank"):
        chat_models.run(monkeypatch, tmp_path, *flags, "--lora-rank", 8)


@pytest.mark.skipif(is_0_5, reason="MindNLP 0.4 writes adapter_model.ckpt")
def test_adapters_that_pytorch_has_written_replace_older_ones(monkeypatch, tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = chat_models.train_adapters(monkeypatch, tmp_path, "qwen base", "--max-steps", 20)
    assert (folder / "adapter_model.ckpt").is_file()
    zeros = {name: np.zeros_like(array) for name, array in load_file(folder / "adapter_model.safetensors").items()}
    save_file(zeros, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    np.testing.assert_array_equal(logits(load_saved(str(folder))), logits(load_saved(str(tmp_path / "base"))))


def test_adapters_are_not_written_over_the_model_that_they_belong_to(monkeypatch, tmp_path):
    folder = chat_models.train_adapters(monkeypatch, tmp_path, "qwen base", "--max-steps", 2)
    (tmp_path / "run").mkdir()
    (tmp_path / "base").rename(tmp_path / "run" / "model")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "run" / "model")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    for model, rank in ((tmp_path / "run" / "model", 2), (folder, 0)):
        settings = LanguageModelingConfig(model=str(model), lora_rank=rank, output_dir=str(tmp_path / "run"))
        with pytest.raises(
            InputError, match=r"run/model, over the model that they belong to; give another --output-dir"
        ):
            check_files(settings, str(model), lambda: pytest.fail("the data is read"))


def test_a_model_whose_generation_settings_need_sampling_can_be_saved(monkeypatch, tmp_path):
    chat_models.train_adapters(monkeypatch, tmp_path, "qwen base", "--max-steps", 2)
    (tmp_path / "base" / "generation_config.json").write_text('{"temperature": 0.9, "top_p": 0.6}')
    model = load_saved(str(tmp_path / "base"))
    model.save_pretrained(str(tmp_path / "saved"))
    assert json.loads((tmp_path / "saved" / "generation_config.json").read_text())["do_sample"] is True
    (tmp_path / "base" / "generation_config.json").write_text('{"length_penalty": 2.0}')
    assert load_saved(str(tmp_path / "base")).generation_config.do_sample is False
    with pytest.raises(InputError, match="base cannot be saved with a model; mend it: .*length_penalty"):
        load_saved(str(tmp_path / "base"), is_trainable=True)


def test_lora_with_new_special_tokens_is_refused(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match=r"has no token <\|im_start\|>, and LoRA does not train the embeddings of new"):
        chat_models.save_untrained("gpt2", tmp_path / "base")
        flags = ["--model", tmp_path / "base", "--lora-rank", 4, "--template", "chatml"]
        chat_models.run(monkeypatch, tmp_path, *flags)


def test_export_and_generate_report_invalid_arguments_and_folders(monkeypatch, tmp_path, capsys):
    chat_models.save_untrained("qwen base", tmp_path / "base")

    def error(*words):
        assert main([str(word) for word in words]) == 2
        return capsys.readouterr().err

    assert "nowhere has no model: expected config.json or adapter_config.json" in error("generate", "nowhere", "a")
    merges = ["export", tmp_path / "base", tmp_path / "new", "--merge-lora"]
    assert "has no adapters to merge: it is a full model already; leave out --merge-lora" in error(*merges)
    assert "exists and is not an empty folder" in error("export", tmp_path / "base", tmp_path / "base")
    assert "is within the folder of the model" in error("export", tmp_path / "base", tmp_path / "base/a/new")
    assert "the prompt has 200 tokens; expected at least 1, and less than 128" in error(
        "generate", tmp_path / "base", "<|im_end|>" * 200, "--raw"
    )
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(tmp_path / "gone")}
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora/adapter_config.json").write_text(json.dumps(settings))
    assert "has adapters, which belong to another model: pass --merge-lora" in error(
        "export", tmp_path / "lora", tmp_path / "new"
    )
    with pytest.raises(InputError, match="gone cannot be loaded: .*/lora has adapters for it, and names it in"):
        load_saved(str(tmp_path / "lora"))
    (tmp_path / "lora/adapter_config.json").write_text(json.dumps({**settings, "task_type": "SEQ_CLS"}))
    with pytest.raises(InputError, match="has adapters of the kind LORA for SEQ_CLS; expected LORA for CAUSAL_LM"):
        load_saved(str(tmp_path / "lora"))
    (tmp_path / "base/config.json").write_text('{"architectures": ["BertForSequenceClassification"]}')
    with pytest.raises(InputError, match="is a text classifier; expected a causal language model; train it with"):
        load_saved(str(tmp_path / "base"))
    with pytest.raises(SystemExit):
        main(["generate", "a", "b", "--temperature", "nan"])
    assert "--temperature" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
