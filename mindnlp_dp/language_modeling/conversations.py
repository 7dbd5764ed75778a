"""This module reads conversations from rows of a file: prompt and completion, a list of messages, or a text.

Without files, the conversations are topics of Python's manual, which every CPython brings: the data needs no download.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Optional

from mindnlp_dp.finetuning.files import read_rows, shown
from mindnlp_dp.finetuning.settings import InputError
from mindnlp_dp.language_modeling.forms import KEYS, answers_of, messages_of

ROLES = ("system", "user", "assistant", "tool")
# Keys of a message beside its role and content. Only a tokenizer's own template can write those but "weight".
MESSAGE_KEYS = ("weight", "reasoning_content", "tool_calls", "tool_call_id", "name")
ROW_KEYS = (*KEYS, "tools", "mask_history", "text")
HELD_OUT_PERCENT = 8


@dataclass(frozen=True)
class Message:
    """What one side says in a conversation.

    Attributes:
        role: "system", "user", "assistant" or "tool".
        content: None only beside tool calls.
        is_counted: False if the loss leaves out this message of the assistant.
        more: what else the message has for a chat template, such as ``tool_calls``.
    """

    role: str
    content: Optional[str]
    is_counted: bool = True
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)


class Conversation(tuple[Message, ...]):
    """The messages of a conversation, in order.

    Attributes:
        tools: the functions that the assistant may call, as JSON schemas.
        where: the file and line, for errors.
        ignored: keys of the line that are not used.
        is_document: whether it is a text without roles, which is the content of its only message.
        rejected: the same prompt with the answer that is not preferred, for training with preferences.
    """

    tools: Sequence[Any] = ()
    where: str = "a conversation"
    ignored: frozenset[str] = frozenset()
    is_document: bool = False
    rejected: Optional[Conversation] = None


def read_conversations(path: str) -> list[Conversation]:
    """Read a conversation from each row of a file: JSON (lines or a list), CSV, TSV or Parquet.

    A row is ``{"prompt": ..., "completion": ...}`` or ``{"messages": [...]}``, has Alpaca's or ShareGPT's keys, or is
    ``{"text": ...}``, a text without roles, all of which counts.

    The messages have ``role`` and ``content``, as for the chat templates of Transformers, and ``MESSAGE_KEYS``; the
    last one is the assistant's. Beside them, ``tools`` are functions that it may call, and with ``mask_history`` the
    loss counts its last message only.

    Raises:
        InputError: the file cannot be read or is empty, or a row has another form; the message has its line.
    """
    found = [_conversation(row, f"{path}, line {line}") for line, row in read_rows(path)]
    if not found:
        raise InputError(f"{path} has no lines")
    return found


def _conversation(row: Mapping[str, Any], where: str) -> Conversation:
    messages = messages_of(row, where)
    is_document = messages is None and isinstance(row.get("text"), str) and bool(row["text"].strip())
    if is_document:
        messages = [{"role": "assistant", "content": row["text"]}]
    if messages is None:
        raise InputError(
            f"{where}: expected prompt and completion, messages, instruction and output, conversations, or text; "
            f"got {shown(row)}"
        )
    found = [_message(message, where) for message in messages]
    if found[-1].role != "assistant":
        raise InputError(f"{where}: the last message must be the assistant's, got {found[-1].role!r}")
    # Parquet gives every row all keys, with null for those that it does not have.
    masks = False if row.get("mask_history") is None else row["mask_history"]
    if not isinstance(masks, bool):
        raise InputError(f"{where}: mask_history must be true or false, got {shown(masks)}")
    conversation = Conversation(only_last_counted(found) if masks else found)
    conversation.where, conversation.ignored = where, frozenset(row).difference(ROW_KEYS)
    conversation.is_document = is_document
    conversation.tools = _from_json(row.get("tools") or [], list, f"{where}: tools must be a list of functions")
    return conversation


def read_preferences(path: str) -> list[Conversation]:
    """Read a conversation, with its ``rejected`` twin, from each row: ``prompt``, ``chosen`` and ``rejected``.

    They are texts, or lists of messages; without ``prompt``, it is what both answers begin with, as in TRL. Pairs of
    equal answers are left out with a warning.

    Raises:
        InputError: as for :func:`read_conversations`.
    """
    found, num_equal = [], 0
    for line, row in read_rows(path):
        where = f"{path}, line {line}"
        prompt, *answers = answers_of(row, where)
        if answers[0] == answers[1]:
            num_equal += 1
            continue
        pair = []
        others = {key: value for key, value in row.items() if key not in ("prompt", "chosen", "rejected")}
        for answer in answers:
            each = _conversation({**others, "messages": [*prompt, *answer]}, where)
            # What the assistant says in the prompt is not an answer.
            messages = [replace(one, is_counted=one.is_counted and at >= len(prompt)) for at, one in enumerate(each)]
            pair.append(Conversation(messages))
            pair[-1].where, pair[-1].tools, pair[-1].ignored = where, each.tools, each.ignored
        pair[0].rejected = pair[1]
        found.append(pair[0])
    if num_equal:
        print(f"warning: {path}: rows left out, whose chosen equals rejected: {num_equal}", file=sys.stderr)
    if not found:
        raise InputError(f"{path} has no rows with two different answers")
    return found


def only_last_counted(messages: Sequence[Message]) -> list[Message]:
    """Return the messages, of which the loss counts the last one alone."""
    return [*(replace(message, is_counted=False) for message in messages[:-1]), messages[-1]]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
        raise InputError(f"{where}: a message has role and content, two texts; got {shown(message)}")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise InputError(f"{where}: a role is one of {', '.join(ROLES)}; got {role!r}")
    more = {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}
    unknown = [key for key in more if key not in MESSAGE_KEYS]
    if unknown:
        known = ", ".join(("role", "content", *MESSAGE_KEYS))
        raise InputError(f"{where}: a message has the key {unknown[0]!r}; known are {known}; remove it from the file")
    weight = more.pop("weight", 1)
    if weight not in (0, 1) or (weight == 1 and role != "assistant" and message.get("weight") is not None):
        raise InputError(f"{where}: weight is 0 or 1, and 1 for the assistant only; got {shown(message)}")
    if "tool_calls" in more:
        calls = f"{where}: tool_calls must be a list of calls"
        more["tool_calls"] = [_call(call, where) for call in _from_json(more["tool_calls"], list, calls)]
    if not isinstance(content, str) and not (content is None and role == "assistant" and more.get("tool_calls")):
        raise InputError(f"{where}: content must be a text, or null beside tool_calls; got {shown(message)}")
    return Message(role, content, weight == 1, more)


def _call(call: Any, where: str) -> Any:
    """Return a call of a tool with its arguments as an object, as chat templates expect them."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(f"{where}: a call in tool_calls has a function with a name; got {shown(call)}")
    arguments = _from_json(function.get("arguments") or {}, Mapping, f"{where}: arguments must be an object")
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _from_json(value: Any, kind: type, expected: str) -> Any:
    """Return a list or an object, which OpenAI's format and others write as a text with JSON."""
    parsed = value
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            pass
    if not isinstance(parsed, kind):
        raise InputError(f"{expected}; got {shown(value)}")
    return parsed


def topics_of_python() -> tuple[list[Conversation], list[Conversation]]:
    """Return a training and a held-out split of paragraphs of Python's manual, each after the name of its topic.

    The manual is that of the running Python (``pydoc_data.topics``), so other versions give slightly other splits. A
    hash of the paragraph decides its split.
    """
    from pydoc_data.topics import topics

    splits: dict[bool, list[Conversation]] = {True: [], False: []}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            text = " ".join(paragraph.split())
            # Headings, tables and listings are left out.
            if len(text) >= 40 and text[0].isupper() and text.endswith("."):
                held_out = int(hashlib.blake2b(text.encode(), digest_size=4).hexdigest(), 16) % 100 < HELD_OUT_PERCENT
                # A space belongs to the word after it, for a tokenizer of bytes.
                splits[held_out].append(Conversation([Message("user", f"{name}:"), Message("assistant", f" {text}")]))
    return splits[False], splits[True]
