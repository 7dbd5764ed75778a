"""This module reads conversations from JSON lines: prompt and completion, or a list of messages.

Without files, the conversations are topics of Python's manual, which every CPython brings: the data needs no download.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindnlp_dp.finetuning.settings import InputError

ROLES = ("system", "user", "assistant")
HELD_OUT_PERCENT = 8
LONGEST_SHOWN = 60


@dataclass(frozen=True)
class Message:
    """What one side says in a conversation; ``role`` is "system", "user" or "assistant"."""

    role: str
    content: str


Conversation = tuple[Message, ...]


def read_conversations(path: str) -> list[Conversation]:
    """Read one conversation per line: ``{"prompt": ..., "completion": ...}``, or ``{"messages": [...]}``.

    The messages have ``role`` and ``content``, as for the chat templates of Transformers; the last one is the
    assistant's.

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
        conversation = tuple(_message(message, where) for message in messages)
        if conversation[-1].role != "assistant":
            raise InputError(f"{where}: the last message must be the assistant's, got {conversation[-1].role!r}")
        return conversation
    prompt, completion = [row.get(key) if isinstance(row, Mapping) else None for key in ("prompt", "completion")]
    if not isinstance(prompt, str) or not isinstance(completion, str) or not completion:
        raise InputError(f"{where}: expected prompt and completion, two texts, or messages; got {_shown(row)}")
    return Message("user", prompt), Message("assistant", completion)


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
        raise InputError(f"{where}: a message has role and content, two texts; got {_shown(message)}")
    if message["role"] not in ROLES:
        raise InputError(f"{where}: a role is one of {', '.join(ROLES)}; got {message['role']!r}")
    return Message(message["role"], message["content"])


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
                splits[held_out].append((Message("user", f"{name}:"), Message("assistant", f" {text}")))
    return splits[False], splits[True]
