"""This module reads conversations from JSON lines: prompt and completion, or a list of messages.

Without files, the conversations are topics of Python's manual, which every CPython brings: the data needs no download.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.finetuning.settings import InputError

ROLES = ("system", "user", "assistant", "tool")
# Keys of a message beside its role and content. Only a tokenizer's own template can write those but "weight".
MESSAGE_KEYS = ("weight", "reasoning_content", "tool_calls", "tool_call_id", "name")
ROW_KEYS = ("prompt", "completion", "messages", "tools", "mask_history")
HELD_OUT_PERCENT = 8
LONGEST_SHOWN = 60


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
    """

    tools: Sequence[Any] = ()
    where: str = "a conversation"
    ignored: frozenset[str] = frozenset()


def read_conversations(path: str) -> list[Conversation]:
    """Read one conversation per line: ``{"prompt": ..., "completion": ...}``, or ``{"messages": [...]}``.

    The messages have ``role`` and ``content``, as for the chat templates of Transformers, and ``MESSAGE_KEYS``; the
    last one is the assistant's. Beside them, ``tools`` are functions that it may call, and with ``mask_history`` the
    loss counts its last message only.

    Raises:
        InputError: the file is missing, not UTF-8 or empty, or a line has another form; the message has its number.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise InputError(f"{path}: the file does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as UTF-8: {error}") from None
    found = [_conversation(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise InputError(f"{path} has no lines")
    return found


def _conversation(line: str, where: str) -> Conversation:
    try:
        row = json.loads(line)
        # JSON may have halves of a character, which no tokenizer takes.
        json.dumps(row, ensure_ascii=False).encode()
    except ValueError as error:
        raise InputError(f"{where}: not JSON: {error}") from None
    if isinstance(row, Mapping) and "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or not messages:
            raise InputError(f"{where}: messages must be a list of messages, got {_shown(messages)}")
        found = [_message(message, where) for message in messages]
        if found[-1].role != "assistant":
            raise InputError(f"{where}: the last message must be the assistant's, got {found[-1].role!r}")
    else:
        prompt, completion = [row.get(key) if isinstance(row, Mapping) else None for key in ("prompt", "completion")]
        if not isinstance(prompt, str) or not isinstance(completion, str) or not completion:
            raise InputError(f"{where}: expected prompt and completion, two texts, or messages; got {_shown(row)}")
        found = [Message("user", prompt), Message("assistant", completion)]
    masks = row.get("mask_history", False)
    if not isinstance(masks, bool):
        raise InputError(f"{where}: mask_history must be true or false, got {_shown(masks)}")
    conversation = Conversation(only_last_counted(found) if masks else found)
    conversation.where, conversation.ignored = where, frozenset(row).difference(ROW_KEYS)
    conversation.tools = _from_json(row.get("tools") or [], list, f"{where}: tools must be a list of functions")
    return conversation


def only_last_counted(messages: Sequence[Message]) -> list[Message]:
    """Return the messages, of which the loss counts the last one alone."""
    return [*(replace(message, is_counted=False) for message in messages[:-1]), messages[-1]]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
        raise InputError(f"{where}: a message has role and content, two texts; got {_shown(message)}")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise InputError(f"{where}: a role is one of {', '.join(ROLES)}; got {role!r}")
    more = {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}
    unknown = [key for key in more if key not in MESSAGE_KEYS]
    if unknown:
        known = ", ".join(("role", "content", *MESSAGE_KEYS))
        raise InputError(f"{where}: a message has the key {unknown[0]!r}; known are {known}; remove it from the file")
    weight = more.pop("weight", 1)
    if weight not in (0, 1) or (weight == 1 and role != "assistant" and "weight" in message):
        raise InputError(f"{where}: weight is 0 or 1, and 1 for the assistant only; got {_shown(message)}")
    if "tool_calls" in more:
        calls = f"{where}: tool_calls must be a list of calls"
        more["tool_calls"] = [_call(call, where) for call in _from_json(more["tool_calls"], list, calls)]
    if not isinstance(content, str) and not (content is None and role == "assistant" and more.get("tool_calls")):
        raise InputError(f"{where}: content must be a text, or null beside tool_calls; got {_shown(message)}")
    return Message(role, content, weight == 1, more)


def _call(call: Any, where: str) -> Any:
    """Return a call of a tool with its arguments as an object, as chat templates expect them."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(f"{where}: a call in tool_calls has a function with a name; got {_shown(call)}")
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
        raise InputError(f"{expected}; got {_shown(value)}")
    return parsed


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


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
