"""This module brings rows of other formats (Alpaca, ShareGPT) to a list of messages; conversations.py calls it.

LLaMA-Factory, ms-swift and TRL read these formats, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from mindnlp_dp.finetuning.files import shown
from mindnlp_dp.finetuning.settings import InputError

KEYS = ("prompt", "completion", "messages", "conversations", "instruction", "input", "output", "system", "history")
# ShareGPT's names of roles.
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}


def messages_of(row: Mapping[str, Any], where: str) -> Optional[list[Any]]:
    """Return a row's messages, each with ``role`` and ``content``; None if the row has none of the known forms.

    Raises:
        InputError: the row has a known form, and its values are wrong.
    """
    for key in ("messages", "conversations"):
        if row.get(key) is not None:
            given = row[key]
            if not isinstance(given, list) or not given:
                raise InputError(f"{where}: {key} must be a list of messages, got {shown(given)}")
            return [*_system(row, where), *map(_message, given)]
    if row.get("instruction") is not None:
        return [*_system(row, where), *_history(row.get("history"), where), *_alpaca(row, where)]
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str) and completion:
        both = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return [*_system(row, where), *_history(row.get("history"), where), *both]
    return None


def answers_of(row: Mapping[str, Any], where: str) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the messages of a pair's prompt, of its chosen and of its rejected answer.

    Raises:
        InputError: a key is missing, an answer is empty, or texts and lists of messages are mixed.
    """
    given: dict[str, Any] = {key: row.get(key) for key in ("prompt", "chosen", "rejected")}
    if given["prompt"] is None and row.get("instruction") is not None:
        given["prompt"] = _instruction(row, where)
    for key in ("chosen", "rejected"):
        if not given[key] or (isinstance(given[key], str) and not given[key].strip()):
            state = "is missing" if given[key] is None else "is empty"
            raise InputError(f"{where}: {key} {state}; a preference has prompt, chosen and rejected; got {shown(row)}")
    kinds = {type(value) for value in given.values() if value is not None}
    if kinds not in ({str}, {list}):
        raise InputError(
            f"{where}: prompt, chosen and rejected must be all texts, or all lists of messages; got {shown(row)}"
        )
    prompt, chosen, rejected = given.values()
    if prompt is None:
        if chosen == rejected:
            return [], chosen, rejected
        prompt, chosen, rejected = _without_prompt(chosen, rejected, where)
    if kinds == {str}:
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
        prompt = [{"role": "user", "content": prompt}]
    prompt = [*_history(row.get("history"), where), *prompt]
    return [*map(_message, prompt)], [*map(_message, chosen)], [*map(_message, rejected)]


def _without_prompt(chosen: Any, rejected: Any, where: str) -> tuple[Any, Any, Any]:
    """Divide two texts, or lists of messages, into what both begin with and the rest of each."""
    at = next((at for at, (one, other) in enumerate(zip(chosen, rejected)) if one != other), None)
    if at is None:
        raise InputError(f"{where}: one of chosen and rejected is the beginning of the other; add the key prompt")
    if at and isinstance(chosen, str) and chosen[at - 1] == " ":
        # A space belongs to the word after it, for many tokenizers.
        at -= 1
    if not at:
        raise InputError(
            f"{where}: there is no prompt, and chosen and rejected have no common beginning; add the key prompt"
        )
    return chosen[:at], chosen[at:], rejected[at:]


def _message(message: Any) -> Any:
    """Return a message of ShareGPT with the keys of the others; another one as it is."""
    if not isinstance(message, Mapping) or "from" not in message or "value" not in message:
        return message
    more = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": _ROLES.get(message["from"], message["from"]), "content": message["value"], **more}


def _system(row: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    text = row.get("system") or ""
    if not isinstance(text, str):
        raise InputError(f"{where}: system must be a text, got {shown(text)}")
    return [{"role": "system", "content": text}] if text else []


def _alpaca(row: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    output = row.get("output")
    if not isinstance(output, str) or not output:
        raise InputError(f"{where}: expected instruction, input and output, three texts; got {shown(row)}")
    return [{"role": "user", "content": _instruction(row, where)}, {"role": "assistant", "content": output}]


def _instruction(row: Mapping[str, Any], where: str) -> str:
    texts = [row.get(key) or "" for key in ("instruction", "input")]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"{where}: expected instruction, input and output, three texts; got {shown(row)}")
    return "\n".join(filter(None, texts))


def _history(turns: Any, where: str) -> list[dict[str, str]]:
    found = []
    for turn in turns or []:
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise InputError(f"{where}: history must be a list of pairs, a question and an answer; got {shown(turn)}")
        found += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    return found
