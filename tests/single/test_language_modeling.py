"""Test the recipe for language models: conversations, templates, labels, packing, and a whole small job."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from library import is_0_5
from safetensors.numpy import load_file
from tokenizers.processors import TemplateProcessing

import mindnlp_dp as dp
from mindnlp_dp.finetuning.settings import InputError, parse_config
from mindnlp_dp.finetuning.tokenizers import encoded_text
from mindnlp_dp.language_modeling import templates
from mindnlp_dp.language_modeling.conversations import Conversation, Message, read_conversations, topics_of_python
from mindnlp_dp.language_modeling.language_modeling_config import LanguageModelingConfig
from mindnlp_dp.language_modeling.language_modeling_task import build_model, prepare_task, read_splits
from mindnlp_dp.language_modeling.rows import Collator, TokenRows, pack
from mindnlp_dp.language_modeling.tokenize_conversations import encode, encode_documents, train_tokenizer

CHAT = Conversation((
    Message("system", "Be brief."), Message("user", "2 + 2?"), Message("assistant", "4"),
    Message("user", "And 3 + 3?"), Message("assistant", "6"),
))  # fmt: skip
needs_0_4 = pytest.mark.skipif(is_0_5, reason="the recipe is for MindNLP 0.4")


def write_lines(path, rows):
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def test_prompt_completion_and_messages_rows_are_read(tmp_path):
    messages = [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "Hello"}]
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}, "", {"messages": messages}])
    assert read_conversations(file) == [
        (Message("user", "a"), Message("assistant", "b")), (Message("user", "你好"), Message("assistant", "Hello"))
    ]  # fmt: skip


def said(content, role="assistant", **more):
    return {"role": role, "content": content, **more}


def call(name, arguments):
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2: Expecting property name .*; expected one JSON object per line"),
        (
            {"prompt": "a"},
            "line 2: expected prompt and completion, messages, instruction and output, conversations, or text; got",
        ),
        ({"prompt": "a", "completion": ""}, "line 2: expected prompt and completion"),
        ({"prompt": 1, "completion": "b"}, "line 2: expected prompt and completion"),
        ([1], r"line 2: expected a JSON object, got \[1\]"),
        ({"messages": []}, "line 2: messages must be a list of messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "line 2: the last message must be the assistant's"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "line 2: a role is one of system, user, assistant, tool"),
        ('{"prompt": "\\ud83d", "completion": "b"}', "line 2: .ud83d is half of a character; remove it"),
        ({"messages": [{"role": "user"}]}, "line 2: a message has role and content"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "line 2: content must be a text, or null beside tool"),
        ({"messages": [{"role": "assistant", "content": None}]}, "line 2: content must be a text, or null beside"),
        ({"messages": [{"role": "user", "content": "a", "weight": 1}]}, "line 2: weight is 0 or 1, and 1 for the as"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}, "line 2: weight is 0 or 1"),
        ({"messages": [{"role": "user", "content": "a", "loss": 1}]}, "line 2: a message has the key 'loss'; known"),
        ({"messages": [said("a", tool_calls=[{"function": "f"}])]}, "line 2: a call in tool_calls has a function"),
        ({"messages": [said("a", tool_calls="f()")]}, 'line 2: tool_calls must be a list of calls; got "f'),
        ({"messages": [said("a", tool_calls=[call("f", "x=1")])]}, 'line 2: arguments must be an object; got "x=1"'),
        ({"messages": [said("a")], "tools": {"name": "f"}}, "line 2: tools must be a list of functions; got"),
        ({"messages": [said("a")], "mask_history": "yes"}, 'line 2: mask_history must be true or false, got "yes"'),
    ],
)
def test_invalid_conversations_are_refused_with_their_line(tmp_path, row, message):
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}, row])
    with pytest.raises(InputError, match=message):
        read_conversations(file)


def test_missing_empty_and_non_utf8_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read_conversations(str(tmp_path / "nowhere.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes("é".encode("latin-1"))
    with pytest.raises(InputError, match="latin.jsonl, line 1: not UTF-8; as "):
        read_conversations(str(tmp_path / "latin.jsonl"))
    with pytest.raises(InputError, match="has no lines"):
        read_conversations(write_lines(tmp_path / "empty.jsonl", [""]))


ALPACA = {"instruction": "Add", "input": "2 + 2", "output": "4", "system": "Be brief.", "history": [["1 + 1", "2"]]}
SHAREGPT = {
    "system": "Be brief.",
    "conversations": [
        {"from": "human", "value": "1 + 1"}, {"from": "gpt", "value": "2"},
        {"from": "human", "value": "Add\n2 + 2"}, {"from": "gpt", "value": "4"},
    ],
}  # fmt: skip


@pytest.mark.core
def test_alpaca_sharegpt_and_messages_rows_give_the_same_conversation(tmp_path):
    roles = "system user assistant user assistant".split()
    contents = ["Be brief.", "1 + 1", "2", "Add\n2 + 2", "4"]
    messages = {"messages": [{"role": role, "content": content} for role, content in zip(roles, contents)]}
    rows = [ALPACA, SHAREGPT, messages]
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    from datasets import Dataset

    Dataset.from_list([SHAREGPT]).to_parquet(str(tmp_path / "a.parquet"))
    found = [
        *read_conversations(write_lines(tmp_path / "a.jsonl", rows)), *read_conversations(str(tmp_path / "list.json")),
        *read_conversations(str(tmp_path / "a.parquet")),
    ]  # fmt: skip
    assert len(found) == 7
    assert all(each == found[0] and not each.ignored for each in found)
    assert [message.content for message in found[0]] == contents
    assert [message.role for message in found[0]] == roles
    (tmp_path / "a.csv").write_text("instruction,input,output\nAdd,2 + 2,4\nStop,,now\n")
    assert [each[0].content for each in read_conversations(str(tmp_path / "a.csv"))] == ["Add\n2 + 2", "Stop"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**ALPACA, "output": ""}, "line 1: expected instruction, input and output, three texts; got"),
        ({**ALPACA, "input": 3}, "line 1: expected instruction, input and output, three texts; got"),
        ({**ALPACA, "history": [["a"]]}, "line 1: history must be a list of pairs"),
        ({**ALPACA, "system": 3}, "line 1: system must be a text, got 3"),
        ({"conversations": []}, "line 1: conversations must be a list of messages"),
        ({"conversations": [{"from": "bot", "value": "a"}]}, "line 1: a role is one of .*; got 'bot'"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "line 1: the last message must be the assistant's"),
        ({"text": " "}, "line 1: expected prompt and completion, messages, .*, or text; got"),
    ],
)
def test_invalid_alpaca_sharegpt_and_text_rows_are_refused_with_their_line(tmp_path, row, message):
    with pytest.raises(InputError, match=message):
        read_conversations(write_lines(tmp_path / "a.jsonl", [row]))


@pytest.mark.core
def test_every_token_of_a_long_text_is_predicted_once(tmp_path):
    text = "a long text about nothing, " * 9
    [document] = read_conversations(write_lines(tmp_path / "a.jsonl", [{"text": text}]))
    assert document.is_document
    tokenizer = train_tokenizer([text] * 3, 270)
    whole, _, _ = encode(document, templates.plain, tokenizer, 2, 10**6)
    rows = list(encode_documents([document], tokenizer, 2, 16))
    assert len(rows) > 3
    assert max(len(ids) for ids, _, _ in rows) == 16
    assert [token for _, labels, _ in rows for token in labels if token >= 0] == whole[1:].tolist()
    for ids, labels, truncated in rows:
        assert labels[0] == -100
        assert (labels[1:] == ids[1:]).all()
        assert not truncated
    [(ids, labels, _)] = encode_documents([document], tokenizer, 2, len(whole))
    assert ids.tolist() == whole.tolist()
    assert labels[1:].tolist() == whole[1:].tolist()


@pytest.mark.core
def test_several_files_are_mixed_by_their_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write_lines(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{n}", "completion": "x"} for n in range(10)])

    def prompts(**settings):
        splits = read_splits(LanguageModelingConfig(**settings))
        return [[each[0].content for each in split] for split in (splits.train, splits.test)]

    train, test = prompts(train_file="a.jsonl:0.5,b.jsonl:2", test_file="a.jsonl")
    assert len({each for each in train if each[0] == "a"}) == len([each for each in train if each[0] == "a"]) == 5
    assert sorted(each for each in train if each[0] == "b") == sorted([f"b{n}" for n in range(10)] * 2)
    assert len(test) == 10
    train, test = prompts(train_file="a.jsonl:3,b.jsonl", test_fraction=0.2)
    assert not set(train) & set(test)
    assert (len(train), len(test)) == (32, 4)
    assert len(prompts(train_file="a.jsonl", test_file="b.jsonl", max_train_samples=3)[0]) == 3
    for wrong in ("a.jsonl:0,b.jsonl", "a.jsonl:-1", "a.jsonl:nan"):
        with pytest.raises(InputError, match="the weight of a file is above 0 and at most 100"):
            prompts(train_file=wrong, test_file="b.jsonl")


def test_templates_put_labels_only_on_assistant_messages():
    def written(template):
        parts = list(template(CHAT))
        return "".join(text for text, _ in parts), [text for text, is_counted in parts if is_counted]

    assert written(templates.plain) == ("Be brief.2 + 2?4And 3 + 3?6", ["4", "6"])
    text, counted = written(templates.chatml)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n")
    assert text.endswith("<|im_start|>assistant\n6<|im_end|>\n")
    assert counted == ["4<|im_end|>", "6<|im_end|>"]
    text, counted = written(templates.alpaca)
    assert text.endswith("### Instruction:\nAnd 3 + 3?\n\n### Response:\n6")
    assert counted == ["4", "6"]
    assert templates.prompt_of(CHAT, templates.alpaca).endswith("### Response:\n")

    class Tokenizer:
        chat_template = "its own"

        def apply_chat_template(self, messages, tokenize, tools=None, add_generation_prompt=False):
            said = "".join(f"[{message['role'][0]}] {message['content']};" for message in messages)
            return said + "[a] " * add_generation_prompt

    text, counted = written(templates.of_tokenizer(Tokenizer()))
    assert text == "[s] Be brief.;[u] 2 + 2?;[a] 4;[u] And 3 + 3?;[a] 6;"
    assert counted == ["4;", "6;"]
    with pytest.raises(InputError, match="has no chat template"):
        templates.of_tokenizer(object())


@pytest.mark.core
@pytest.mark.parametrize("name", ["plain", "chatml", "alpaca"])
def test_labels_are_the_tokens_of_the_completions(name):
    tokenizer = train_tokenizer(["2 + 2? 4 and 3 + 3? 6 is brief. Be brief é 你"] * 3, 270)
    ids, labels, truncated = encode(CHAT, templates.BY_NAME[name], tokenizer, 2, 500)
    assert not truncated
    assert ids[-1] == labels[-1] == 2
    assert ((labels == ids) | (labels == -100)).all()
    counted = tokenizer.decode(ids[labels >= 0].tolist(), skip_special_tokens=False)
    expected = "".join(text for text, is_counted in templates.BY_NAME[name](CHAT) if is_counted)
    assert counted.replace(" ", "").removesuffix("</s>") == expected.replace(" ", "")
    short, _, truncated = encode(CHAT, templates.BY_NAME[name], tokenizer, 2, 5)
    assert truncated
    assert short.tolist() == ids[:5].tolist()


def test_special_tokens_of_the_tokenizer_are_added_once():
    tokenizer = train_tokenizer(["2 + 2? 4"] * 3, 270)
    conversation = Conversation((Message("user", "2 + 2?"), Message("assistant", " 4")))
    plain, labels, _ = encode(conversation, templates.plain, tokenizer, 2, 500)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    ids, with_labels, _ = encode(conversation, templates.plain, tokenizer, 2, 500)
    assert ids.tolist() == [1, *plain.tolist()]
    assert with_labels.tolist() == [-100, *labels.tolist()]
    assert ids[-1] == labels[-1] == 2
    encoding, length = encoded_text("2 + 2?", tokenizer, adds_special_tokens=True)
    assert encoding.ids[:length] == ids[:length].tolist()
    # Where the template's end is the tokenizer's, there is no second one.
    end = tokenizer.token_to_id("<|im_end|>")
    ids, labels, _ = encode(conversation, templates.chatml, tokenizer, end, 500)
    assert np.count_nonzero(labels == end) == 1


def test_the_first_token_of_a_text_has_no_label():
    tokenizer = train_tokenizer(["abc"] * 3, 270)
    ids, labels, _ = encode(
        Conversation([Message("user", ""), Message("assistant", "abc")]), templates.plain, tokenizer, 2, 9
    )
    assert labels[0] == -100
    assert labels[1:].tolist() == ids[1:].tolist()


@pytest.mark.parametrize("seed", range(3))
def test_packing_needs_few_rows_and_keeps_every_text(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 33, 200).tolist()
    rows = pack(lengths, 32)
    assert sorted(text for row in rows for text in row) == list(range(200))
    filled = [sum(lengths[text] for text in row) for row in rows]
    assert max(filled) <= 32
    # Best-fit decreasing needs at most 11/9 of the best number of rows, and 6/9 of one.
    assert len(rows) <= 11 / 9 * np.ceil(sum(lengths) / 32) + 1
    assert pack([], 4) == []


def test_packed_and_padded_batches_have_masks_and_positions():
    row = [(np.array([5, 6, 7]), np.array([-100, 6, 7])), (np.array([8, 9]), np.array([-100, 9]))]
    rows = TokenRows.of([row, row[:1]])
    assert len(rows) == 2
    assert rows.num_labels == 5
    batch = Collator(pad=0, is_packed=True)([rows[0], rows[1]])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 0, 1]]
    sees = (batch["attention_mask"][0, 0] == 0).astype(int).tolist()
    assert sees == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    padded = Collator(pad=0, is_packed=False)([rows[0], rows[1]])
    assert padded["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert padded["labels"].tolist() == [[-100, 6, 7, -100, 9], [-100, 6, 7, -100, -100]]


@needs_0_4
@pytest.mark.core
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma", "phi", "mixtral"])
def test_packed_and_padded_batches_have_the_same_loss(kind):
    from mindspore import Tensor
    from tiny_transformers import VOCAB, build

    dp.init_process_group()
    rng = np.random.default_rng(1)
    texts = []
    for length in (3, 7, 5, 2, 9, 4):
        ids = rng.integers(3, VOCAB, length)
        texts.append((ids, np.where(np.arange(length) < length // 3 + 1, -100, ids)))
    model = build(kind)
    model.set_train(False)

    def sum_of_losses(rows, is_packed):
        batch = Collator(0, is_packed)([rows[number] for number in range(len(rows))])
        loss = model(**{name: Tensor(column) for name, column in batch.items()}, return_dict=True).loss
        return float(loss.asnumpy()) * np.count_nonzero(batch["labels"] >= 0)

    packed = TokenRows.of([[texts[number] for number in row] for row in pack([len(ids) for ids, _ in texts], 12)])
    assert len(packed) < len(texts)
    expected = sum_of_losses(TokenRows.of([[text] for text in texts]), False)
    assert sum_of_losses(packed, True) == pytest.approx(expected, rel=1e-5)


def test_the_topics_of_the_python_manual_are_split_into_train_and_test():
    train, test = topics_of_python()
    assert len(train) > 500
    assert len(train) > 5 * len(test) > 100
    assert not {text for _, text in train} & {text for _, text in test}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train-file", "a"], "must be given together"),
        (["--template", "vicuna"], "template must be one of plain, chatml, alpaca, tokenizer"),
        (["--hidden-size", "36"], "must be an even multiple of num_heads"),
        (["--vocab-size", "100"], "vocab_size must be at least 261"),
        (["--max-length", "1"], "max_length must be at least 2"),
        (["--lora-rank", "2"], "lora_rank is for a trained model"),
        (["--fused-cross-entropy", "yes"], "fused_cross_entropy must be auto, true or false"),
        (["--lora-rank", "-1"], "lora_rank must be at least 0"),
        (["--model", "x", "--lora-targets", "q_proj"], "lora_targets changes LoRA's adapters, and lora_rank is 0"),
        (["--model", "x", "--use-dora"], "use_dora changes LoRA's adapters, and lora_rank is 0"),
        (["--lora-dropout", "1"], "lora_dropout must be from 0 to 1"),
        (["--mesh", "tp=2", "--zero-stage", "3"], "mesh=tp=2: name the ranks that have shards, as in fsdp=2,tp=2"),
        (["--mesh", "fsdp=2,pp=2"], "with mesh=fsdp=2,pp=2: leave pp out"),
        (["--mesh", "fsdp=2", "--zero-stage", "2"], "with zero_stage=2: fsdp is stage 3"),
        (["--zero-stage", "3", "--optimizer", "lamb"], "with optimizer=lamb: ranks have shards"),
        (["--zero-stage", "3", "--compression", "powersgd"], "with compression=powersgd: leave it out"),
        (["--mesh", "dp=2,fsdp=2", "--check-plan"], "with check_plan=True: it is not supported with shards"),
        (["--zero-stage", "4"], "zero_stage must be one of"),
    ],
)
def test_invalid_settings_are_refused(flags, message):
    with pytest.raises(InputError, match=message):
        parse_config(LanguageModelingConfig, flags)


@needs_0_4
def test_short_max_length_unknown_lora_targets_and_missing_models_are_refused(tmp_path):
    rows = [{"prompt": "0123456789 abcdefghij", "completion": "b"}]
    files = [write_lines(tmp_path / name, rows) for name in ("train.jsonl", "test.jsonl")]
    given = ["--train-file", files[0], "--test-file", files[1], "--cache-dir", ""]
    with pytest.raises(InputError, match="no text of the training split has a completion within max_length"):
        prepare_task(parse_config(LanguageModelingConfig, [*given, "--max-length", "5"]))
    config = parse_config(LanguageModelingConfig, given)
    config.lora_rank, config.lora_targets = 2, "q_proj,nothing"
    with pytest.raises(InputError, match="lora_targets names 'nothing'; the linear layers are down_proj, gate_proj"):
        build_model(config, prepare_task(config))
    with pytest.raises(InputError, match="the tokenizer nowhere cannot be loaded"):
        prepare_task(parse_config(LanguageModelingConfig, [*given, "--model", "nowhere"]))


@needs_0_4
def test_a_language_model_is_trained_and_lora_continues_from_it(tmp_path, monkeypatch, capsys):
    from mindnlp_dp.language_modeling.finetune_language_model import main

    def run(*flags):
        sizes = ["--max-length", "48", "--hidden-size", "32", "--num-layers", "2", "--intermediate-size", "64"]
        more = ["--max-steps", "6", "--logging-steps", "2", "--max-new-tokens", "5", "--num-samples", "2"]
        cache = ["--cache-dir", str(tmp_path / "cache")]
        monkeypatch.setattr(sys, "argv", ["finetune_llm.py", *sizes, *more, *map(str, flags), *cache])
        main()
        return capsys.readouterr().out

    text = run("--output-dir", tmp_path / "full", "--packing")
    assert "perplexity" in text
    report = json.loads((tmp_path / "full" / "report.json").read_text())
    assert report["perplexity"] == pytest.approx(np.exp(report["eval_loss"]))
    assert len(report["samples"]) == 2
    losses = [row["loss"] for row in report["history"] if "loss" in row]
    assert losses[-1] < losses[0]
    run(
        "--output-dir",
        tmp_path / "lora",
        "--model",
        tmp_path / "full" / "model",
        "--lora-rank",
        2,
        "--template",
        "chatml",
    )
    saved = tmp_path / "lora" / "model"
    assert (saved / "adapter_model.ckpt").is_file()
    # The file that PEFT on PyTorch reads.
    assert len(load_file(saved / "adapter_model.safetensors")) == 2 * 2 * 7
    assert (saved / "tokenizer.json").is_file()
