"""This module writes a conversation as one text, and says which parts of it the loss counts: the assistant's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mindnlp_dp.finetuning.settings import InputError
from mindnlp_dp.language_modeling.conversations import Conversation

# A part of a text, and whether its tokens have labels.
Part = tuple[str, bool]

Template = Callable[[Conversation], Iterator[Part]]


def plain(conversation: Conversation) -> Iterator[Part]:
    """Write messages one after another, with nothing between them."""
    for message in conversation:
        yield message.content, message.role == "assistant"


def chatml(conversation: Conversation) -> Iterator[Part]:
    """Write messages between <|im_start|>role and <|im_end|>, as OpenAI's ChatML and Qwen do."""
    for message in conversation:
        is_counted = message.role == "assistant"
        yield f"<|im_start|>{message.role}\n", False
        yield f"{message.content}<|im_end|>", is_counted
        yield "\n", False


def alpaca(conversation: Conversation) -> Iterator[Part]:
    """Write messages below headings, as Stanford Alpaca does."""
    headings = {"system": "", "user": "### Instruction:\n", "assistant": "### Response:\n"}
    for number, message in enumerate(conversation):
        yield ("\n\n" if number else "") + headings[message.role], False
        yield message.content, message.role == "assistant"


def of_tokenizer(tokenizer: Any) -> Template:
    """Return the template that a tokenizer brings; raise InputError if it has none."""
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("template is 'tokenizer', and this model's tokenizer has no chat template; choose another one")

    def template(conversation: Conversation) -> Iterator[Part]:
        messages = [{"role": message.role, "content": message.content} for message in conversation]
        written = ""
        for number, message in enumerate(conversation):
            if message.role == "assistant":
                before = _applied(tokenizer, messages[:number], add_generation_prompt=True)
                after = _applied(tokenizer, messages[: number + 1])
                if not (before.startswith(written) and after.startswith(before)):
                    raise InputError(
                        "this tokenizer's chat template rewrites earlier messages; choose another template"
                    )
                yield before[len(written) :], False
                yield after[len(before) :], True
                written = after

    return template


def _applied(tokenizer: Any, messages: list[dict[str, str]], *, add_generation_prompt: bool = False) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    return str(text)


BY_NAME: dict[str, Template] = {"plain": plain, "chatml": chatml, "alpaca": alpaca}


def prompt_of(conversation: Conversation, template: Template) -> str:
    """Return the text before the last part that counts: what the model is asked to complete."""
    parts = list(template(conversation))
    last = max(number for number, (_, is_counted) in enumerate(parts) if is_counted)
    return "".join(text for text, _ in parts[:last])
