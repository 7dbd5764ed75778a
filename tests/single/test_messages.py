"""Test chat messages with tools, reasoning and weights, and the chat templates of well-known models."""

from __future__ import annotations

import copy
import json

import chat_models
import pytest
import tokenizer_kinds

from mindnlp_dp.finetuning.settings import InputError
from mindnlp_dp.language_modeling import templates
from mindnlp_dp.language_modeling.conversations import Conversation, Message, read_conversations
from mindnlp_dp.language_modeling.tokenize_conversations import encode, train_tokenizer


def counted(conversation, template):
    """Return the text that a template writes, and the parts that count."""
    parts = list(template(conversation))
    return "".join(text for text, _ in parts), [text for text, is_counted in parts if is_counted]


def read(tmp_path, messages, **more):
    (tmp_path / "a.jsonl").write_text("\n" + json.dumps({"messages": messages, **more}))
    return read_conversations(str(tmp_path / "a.jsonl"))[0]


def user(content):
    return {"role": "user", "content": content}


def said(content, **more):
    return {"role": "assistant", "content": content, **more}


def of(kind):
    """Return a tokenizer's own template."""
    tokenizer = tokenizer_kinds.pretrained("byte-level")
    return templates.of_tokenizer(copied(tokenizer, chat_models.TEMPLATES.get(kind, kind)))


def copied(tokenizer, template):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.bos_token, tokenizer.chat_template = "<s>", template
    return tokenizer


def call(name, arguments):
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


TURNS = [user("a"), said(" b "), user("c"), said("d")]


@pytest.mark.core
@pytest.mark.parametrize(
    ("kind", "text", "labels"),
    [
        ("qwen2", "<|im_start|>system\n\nBe kind.<|im_end|>\n<|im_start|>user\na<|im_end|>\n", [" b <|im_end|>\n"]),
        ("llama3", "<s><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|><|start_header_id|>", ["b<|eot_id|>"]),
        ("gemma", "<s><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n", ["b<end_of_turn>\n"]),
        ("mistral", "<s>[INST] a [/INST] b</s>[INST] c [/INST]", [" b</s>"]),
    ],
)
def test_chat_templates_of_tokenizers_label_only_assistant_messages(tmp_path, kind, text, labels):
    found, parts = counted(read(tmp_path, TURNS), of(kind))
    assert found.startswith(text)
    assert parts == [*labels, labels[0].replace(" b ", "d").replace("b", "d")]
    masked = read(tmp_path, TURNS, mask_history=True)
    assert counted(masked, of(kind)) == (found, parts[1:])
    skipped = read(tmp_path, [*TURNS[:3], said("d", weight=0)])
    assert counted(skipped, of(kind)) == (found, parts[:1])
    assert templates.prompt_of(skipped, of(kind)) == found.removesuffix(parts[1])


@pytest.mark.parametrize(
    ("kind", "messages", "message"),
    [
        ("gemma", [{"role": "system", "content": "s"}, *TURNS], "template refuses it: System role not supported"),
        ("gemma", [user("a"), user("b"), said("c")], "template refuses it: Conversation roles must alternate"),
        ("gemma", [said("b"), user("c"), said("d")], "the first message is the assistant's; expected the user's"),
        ("qwen3", [user("a"), said("b", reasoning_content="r"), *TURNS], "rewrites earlier messages"),
        ("llama3", [user("a"), said("b", reasoning_content="why")], r"not write reasoning_content \('why'\)"),
        ("llama3", [{**user("a"), "name": "Ada"}, said("b")], r"does not write name \('Ada'\)"),
        ("mistral", [user("a"), said("", tool_calls=[call("look", {})])], r"does not write tool_calls \('look'\)"),
        ("{% for", TURNS, "template refuses it: unexpected 'end of template'"),
        ("{{ messages[9].role.x }}", TURNS, "template refuses it: .* has no (element|attribute)"),
    ],
)
def test_messages_refused_by_a_chat_template_are_reported_with_their_line(tmp_path, kind, messages, message):
    conversation = read(tmp_path, messages)
    with pytest.raises(InputError, match=f"a.jsonl, line 2: (this tokenizer's chat .*)?{message}"):
        list(of(kind)(conversation))


@pytest.mark.core
def test_tools_and_reasoning_are_written_by_chat_templates_that_support_them(tmp_path):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    asked = [user("weather?"), said(None, tool_calls=[call("look", '{"at": "here"}')])]
    messages = [*asked, {"role": "tool", "content": "rain", "tool_call_id": "1"}, said("It rains.")]
    text, parts = counted(read(tmp_path, messages, tools=json.dumps(tools)), of("qwen2.5"))
    assert parts == ['<tool_call>look{"at": "here"}</tool_call><|im_end|>\n', "It rains.<|im_end|>\n"]
    assert text.startswith('<|im_start|>system\nTools:\n{"type": "function"')
    assert "<|im_start|>user\nrain<|im_end|>\n" in text
    with pytest.raises(InputError, match=r"line 2: this tokenizer's chat template does not write tools \('look'\)"):
        counted(read(tmp_path, TURNS, tools=tools), of("qwen2"))
    _, parts = counted(read(tmp_path, [*TURNS, user("e"), said("f", reasoning_content="g")]), of("qwen3"))
    assert parts[-1] == "<think>\ng\n</think>\n\nf<|im_end|>\n"


@pytest.mark.parametrize("name", templates.BY_NAME)
def test_built_in_templates_refuse_unsupported_keys_of_messages(tmp_path, name):
    tool = {"role": "tool", "content": "t"}
    for messages, more, key in [
        ([user("a"), said("b", reasoning_content="r")], {}, "reasoning_content"),
        ([user("a"), said("b", tool_calls=[call("f", {})])], {}, "tool_calls"),
        ([user("a"), said(None, tool_calls=[call("f", {})])], {}, "tool_calls"),
        ([{**user("a"), "name": "Ada"}, said("b")], {}, "name"),
        ([user("a"), tool, said("b")], {}, "the role tool"),
        (TURNS, {"tools": ["f"]}, "tools"),
    ]:
        with pytest.raises(InputError, match=f"line 2: {key} can be written by a tokenizer's own template only"):
            list(templates.BY_NAME[name](read(tmp_path, messages, **more)))


@pytest.mark.core
@pytest.mark.parametrize("name", templates.BY_NAME)
def test_messages_of_weight_0_have_no_labels(tmp_path, name):
    tokenizer = train_tokenizer(["abcd " * 9], 262)
    turns = [user("u"), said("aa", weight=0), user("v"), said("bb")]
    ids, labels, _ = encode(read(tmp_path, turns), templates.BY_NAME[name], tokenizer, 2, 99)
    assert tokenizer.decode(labels[labels > 4].tolist()) == "bb"
    assert labels[-1] == ids[-1] == 2
    turns = [user("u"), said("aa"), user("v"), said("bb", weight=0)]
    again, labels, _ = encode(read(tmp_path, turns), templates.BY_NAME[name], tokenizer, 2, 99)
    assert again.tolist() == ids.tolist()
    assert tokenizer.decode(labels[labels > 4].tolist()) == "aa"
    assert labels[-1] == -100
    assert read(tmp_path, turns, mask_history=True)[1].is_counted is False


@pytest.mark.parametrize("name", templates.CHAT_TEMPLATES)
def test_the_saved_chat_template_writes_the_text_of_training(tmp_path, name):
    messages = [{"role": "system", "content": "Be brief."}, *TURNS]
    text, _ = counted(read(tmp_path, messages), templates.BY_NAME[name])
    assert counted(read(tmp_path, messages), of(templates.CHAT_TEMPLATES[name]))[0] == text
    tokenizer = copied(tokenizer_kinds.pretrained("byte-level"), templates.CHAT_TEMPLATES[name])
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    assert prompt == templates.prompt_of(read(tmp_path, messages), templates.BY_NAME[name])


def test_unused_keys_of_a_row_are_recorded(tmp_path):
    assert read(tmp_path, TURNS, id=1, mask_history=False).ignored == {"id"}


def test_null_keys_of_parquet_files_are_like_missing_ones(tmp_path):
    turns = [{**turn, "weight": 1 if turn["role"] == "assistant" else None} for turn in TURNS]
    assert read(tmp_path, turns, mask_history=None) == read(tmp_path, TURNS)


def test_arguments_and_tools_of_parquet_files_have_no_keys_of_others(tmp_path):
    import pyarrow
    from pyarrow import parquet

    def call(name, **arguments):
        return {"type": "function", "function": {"name": name, "arguments": arguments}}

    def tool(name, key):
        return {"type": "function", "function": {"name": name, "parameters": {"properties": {key: {"type": "string"}}}}}

    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [each]}],
         "tools": [tool("one", "city"), tool("two", "x")]}
        for each in (call("one", city="Paris"), call("two", x="1"))
    ]  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, second = read_conversations(str(tmp_path / "a.parquet"))
    assert [each[-1].more["tool_calls"][0]["function"]["arguments"] for each in (first, second)] == [
        {"city": "Paris"}, {"x": "1"}
    ]  # fmt: skip
    assert [list(each["function"]["parameters"]["properties"]) for each in first.tools] == [["city"], ["x"]]


@pytest.mark.parametrize("answer", ["n", "end", "<|im_end|>", "|>"])
def test_the_end_of_a_turn_is_found_after_any_answer(answer):
    asked = Conversation([Message("user", "ok?"), Message("assistant", answer)])
    assert templates.text_after_content(asked, templates.chatml) == "<|im_end|>"


def test_prompts_and_completions_keep_their_system_message(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"system": "Be brief.", "prompt": "a", "completion": "b"}\n')
    [found] = read_conversations(str(tmp_path / "a.jsonl"))
    assert [(each.role, each.content) for each in found] == [
        ("system", "Be brief."), ("user", "a"), ("assistant", "b")
    ]  # fmt: skip
