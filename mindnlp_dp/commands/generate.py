"""This module is ``mindnlp-dp generate``: it lets a model that a run has saved complete a prompt, on one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import mindnlp_dp as dp
from mindnlp_dp.finetuning.pretrained import max_tokens_of
from mindnlp_dp.finetuning.saved_model import find_model, load_saved
from mindnlp_dp.finetuning.settings import InputError
from mindnlp_dp.finetuning.tokenizers import encoded_text, pretrained_tokenizer
from mindnlp_dp.report.runs import REPORT_FILE


def run_generate(
    output_dir: Path,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    raw: bool,
    base: str,
    trust_pickle: bool = False,
) -> int:
    """Print what the model answers to a prompt; return the exit code.

    Raises:
        InputError: there is no model, or the prompt is too long for it.
    """
    found = find_model(output_dir)
    folder = str(found)
    tokenizer, fast = pretrained_tokenizer(folder, base)
    if not raw and tokenizer.chat_template and _template_of(found.resolve().parent) != "plain":
        chat = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = fast.encode(text, add_special_tokens=False).ids
    else:
        encoding, length = encoded_text(prompt, fast, adds_special_tokens=True)
        ids = encoding.ids[:length]
    dp.init_process_group()
    from mindspore import Tensor

    model = load_saved(folder, base=base, trust_pickle=trust_pickle)
    positions = max_tokens_of(model.config) or len(ids) + max_new_tokens
    if not 0 < len(ids) < positions:
        raise InputError(f"the prompt has {len(ids)} tokens; expected at least 1, and less than {positions}")
    model.set_train(False)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    output = model.generate(
        input_ids=Tensor(np.array([ids], np.int64)), attention_mask=Tensor(np.ones((1, len(ids)), np.int64)),
        max_new_tokens=min(max_new_tokens, positions - len(ids)), pad_token_id=tokenizer.pad_token_id or 0, **sampling,
    )  # fmt: skip
    print(tokenizer.decode(output.asnumpy()[0, len(ids) :].tolist(), skip_special_tokens=True))
    return 0


def _template_of(output_dir: Path) -> str:
    """Return the template that a run was trained with; "" if the folder is not a run's."""
    report = output_dir / REPORT_FILE
    found = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}
    config = found.get("config") if isinstance(found, dict) else None
    return str(config.get("template", "")) if isinstance(config, dict) else ""
