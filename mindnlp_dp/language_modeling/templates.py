"""This module writes a conversation as one text, and says which parts of it the loss counts: the assistant's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from mindnlp_dp.finetuning.settings import InputError
from mindnlp_dp.language_modeling.conversations import Conversation, Message

# A part of a text, and whether its tokens have labels.
Part = tuple[str, bool]

Template = Callable[[Conversation], Iterator[Part]]


def plain(conversation: Conversation) -> Iterator[Part]:
    """Write messages one after another, with nothing between them."""
    for message in conversation:
        yield _content(message, conversation), _is_counted(message)


def chatml(conversation: Conversation) -> Iterator[Part]:
    """Write messages between <|im_start|>role and <|im_end|>, as OpenAI's ChatML and Qwen do."""
    for message in conversation:
        yield f"<|im_start|>{message.role}\n", False
        yield f"{_content(message, conversation)}<|im_end|>", _is_counted(message)
        yield "\n", False


def alpaca(conversation: Conversation) -> Iterator[Part]:
    """Write messages below headings, as Stanford Alpaca does."""
    headings = {"system": "", "user": "### Instruction:\n", "assistant": "### Response:\n"}
    for number, message in enumerate(conversation):
        content = _content(message, conversation)
        yield ("\n\n" if number else "") + headings[message.role], False
        yield content, _is_counted(message)


def _is_counted(message: Message) -> bool:
    return message.role == "assistant" and message.is_counted


def _content(message: Message, conversation: Conversation) -> str:
    """Return a message's text; raise InputError if the message has more, which these templates cannot write."""
    more = [*message.more, *["the role tool"] * (message.role == "tool"), *["tools"] * bool(conversation.tools)]
    if more or message.content is None:
        raise InputError(
            f"{conversation.where}: {more[0]} can be written by a tokenizer's own template only; pass --template "
            "tokenizer, or remove it from the file"
        )
    return message.content


def of_tokenizer(tokenizer: Any) -> Template:
    """Return the template that a tokenizer brings; raise InputError if it has none."""
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("template is 'tokenizer', and this model's tokenizer has no chat template; choose another one")

    def template(conversation: Conversation) -> Iterator[Part]:
        messages = [{"role": message.role, "content": message.content, **message.more} for message in conversation]

        def applied(number: int, **options: Any) -> str:
            """Return the text of the first messages."""
            try:
                return str(
                    tokenizer.apply_chat_template(
                        messages[:number], tools=list(conversation.tools) or None, tokenize=False, **options
                    )
                )
            except Exception as error:  # noqa: BLE001
                # Jinja's errors are of many kinds, and a template raises any.
                raise InputError(f"{conversation.where}: this tokenizer's chat template refuses it: {error}") from None

        if conversation[0].role == "assistant":
            raise InputError(f"{conversation.where}: the first message is the assistant's; expected the user's")
        written = ""
        for number, message in enumerate(conversation):
            if message.role == "assistant":
                before, after = applied(number, add_generation_prompt=True), applied(number + 1)
                if not (before.startswith(written) and after.startswith(before)):
                    raise InputError(
                        f"{conversation.where}: this tokenizer's chat template rewrites earlier messages; choose "
                        "another template, or keep the last turn alone"
                    )
                yield before[len(written) :], False
                yield after[len(before) :], message.is_counted
                written = after
        for key, text in _told(conversation):
            if text.strip() not in written:
                raise InputError(
                    f"{conversation.where}: this tokenizer's chat template does not write {key} ({text[:40]!r}); "
                    "remove it from the file, or choose a model whose template does"
                )

    return template


def _told(conversation: Conversation) -> Iterator[tuple[str, str]]:
    """Yield what a template must have written of tools, their calls, and other keys of messages."""
    for tool in conversation.tools:
        yield "tools", str(tool.get("function", tool).get("name", "") if isinstance(tool, dict) else tool)
    for message in conversation:
        for call in message.more.get("tool_calls", ()):
            yield "tool_calls", call.get("function", call)["name"]
        for key in ("reasoning_content", *(["name"] if message.role != "tool" else [])):
            yield key, str(message.more.get(key, ""))


BY_NAME: dict[str, Template] = {"plain": plain, "chatml": chatml, "alpaca": alpaca}

CONTROL_TOKENS = {"chatml": ("<|im_start|>", "<|im_end|>")}

# The same as templates of a tokenizer, for apply_chat_template() after training.
CHAT_TEMPLATES = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "alpaca": (
        "{% set headings = {'system': '', 'user': '### Instruction:\\n', 'assistant': '### Response:\\n'} %}"
        "{% for message in messages %}"
        "{{ ('' if loop.first else '\\n\\n') + headings[message['role']] + message['content'] }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '\\n\\n### Response:\\n' }}{% endif %}"
    ),
}


def prompt_of(conversation: Conversation, template: Template) -> str:
    """Return the text before the last message of the assistant: what the model is asked to complete."""
    counted = _all_counted(conversation)
    parts = list(template(counted))
    last = max(number for number, (_, is_counted) in enumerate(parts) if is_counted)
    return "".join(text for text, _ in parts[:last])


def text_after_content(conversation: Conversation, template: Template) -> str:
    """Return what a template writes after the last message's content: its end of a turn, or nothing."""
    # A content that is no part of the end itself.
    content = "the answer's last words"
    *before, last_message = conversation
    asked = Conversation([*before, replace(last_message, content=content, more={})])
    asked.tools, asked.where = conversation.tools, conversation.where
    *_, last = [text for text, is_counted in template(_all_counted(asked)) if is_counted]
    return last.partition(content)[2]


def _all_counted(conversation: Conversation) -> Conversation:
    counted = Conversation(replace(message, is_counted=True) for message in conversation)
    counted.tools, counted.where = conversation.tools, conversation.where
    return counted
