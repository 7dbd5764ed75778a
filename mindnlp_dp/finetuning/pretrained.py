"""This module loads pretrained models and tokenizers by name or from a folder, for all fine-tuning jobs.

Weights are read from safetensors files only. Other formats are pickles, or name pickles in an index, and unpickling a
file runs the code that its author put there. The flag ``--trust-pickle`` allows it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, Optional

from mindnlp_dp.finetuning.settings import InputError, first_line
from mindnlp_dp.runtime.mindnlp_api import transformers_api
from mindnlp_dp.runtime.versions import mindnlp_series

_SUFFIX = ".safetensors"
_WEIGHTS, _INDEX, _ADAPTERS = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"

# Files of weights in other formats, the likeliest first, and files of a Trainer that have the same suffixes.
_OTHER_WEIGHTS = ("pytorch_model*", "mindspore_model*", "adapter_model*", "*.ckpt", "*.pt", "*.pth", "*.bin")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.*", "scheduler.*", "rng_state*")

# The functions that unpickle weights, by the series of MindNLP. In 0.5, torch is MindNLP's own.
_UNPICKLES = {"0.4": ("mindnlp.transformers.modeling_utils", "load"), "0.5": ("torch", "load")}


def check_weights(name: str, *, trust_pickle: bool) -> None:
    """Raise InputError if ``name`` is a file or folder whose weights are not safetensors; it imports no MindSpore.

    Hub names are not checked here: :func:`load_pretrained` asks the hub for safetensors only.
    """
    path = Path(name)
    if trust_pickle:
        return
    if path.is_file() and path.suffix != _SUFFIX:
        _refuse(name, path)
    if not path.is_dir():
        return
    is_adapter = (path / "adapter_config.json").is_file()
    if (path / (_ADAPTERS if is_adapter else _WEIGHTS)).is_file():
        return
    if (path / _INDEX).is_file() and not is_adapter:
        for shard in _files_of_index(path / _INDEX):
            if not shard.endswith(_SUFFIX):
                _refuse(name, f"{path / shard}, which {_INDEX} names,")
        return
    ignored = {file for pattern in _NOT_WEIGHTS for file in path.glob(pattern)}
    for pattern in _OTHER_WEIGHTS:
        for file in sorted(path.glob(pattern)):
            if file.suffix != _SUFFIX and file not in ignored:
                _refuse(name, file)


def _files_of_index(path: Path) -> list[str]:
    try:
        return sorted({str(file) for file in json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            f'{path} is not the index of a model: expected JSON with {{"weight_map": {{WEIGHT: FILE}}}}'
        ) from None


def _refuse(name: str, file: Any) -> NoReturn:
    raise InputError(
        f"the model {name} is not loaded: {file} is not a safetensors file; other formats are unpickled, which runs "
        f"the code that their author put there. Pass a model that has {_WEIGHTS}, convert this one elsewhere "
        "(from_pretrained, then save_pretrained(safe_serialization=True)), or pass --trust-pickle if you trust its "
        "author"
    )


def load_pretrained(auto_class: Any, name: str, what: str, *, trust_pickle: bool = False, **options: Any) -> Any:
    """Return ``auto_class.from_pretrained(name)``: a "model" or a "tokenizer", as ``what`` says.

    Code that a model's folder or hub page contains is not run.

    Raises:
        InputError: it cannot be loaded, or only by unpickling a file.
    """
    if what == "model" and not trust_pickle:
        check_weights(name, trust_pickle=False)
        options["use_safetensors"] = True
    guard: contextlib.AbstractContextManager[list[Any]] = (
        contextlib.nullcontext([]) if trust_pickle else _no_unpickling(name)
    )
    with guard as refused:
        try:
            return auto_class.from_pretrained(name, trust_remote_code=False, **options)
        except Exception as error:  # noqa: BLE001
            # The library tokenizers raises bare Exceptions; hub, network, cache and file formats raise other kinds.
            if refused:
                # The library reports it as a damaged file.
                _refuse(name, refused[0])
            hint = "; --trust-pickle loads other formats, which may run code" if "use_safetensors" in str(error) else ""
            raise InputError(
                f"the {what} {name} cannot be loaded: {first_line(error)}{hint}; without a network pass a folder that "
                "has it, or --model tiny"
            ) from None


def max_tokens_of(config: Any) -> Optional[int]:
    """Return how many tokens a model with this configuration takes; None if it has no limit, such as XLNet (-1)."""
    positions = int(getattr(config, "max_position_embeddings", None) or -1)
    # RoBERTa's first position is the padding token's id plus 1.
    if "roberta" in config.model_type:
        positions -= config.pad_token_id + 1
    return positions if positions > 0 else None


def check_max_length(config: Any, max_length: int, name: str) -> None:
    """Raise InputError if rows of ``max_length`` tokens are too long for the model ``name``."""
    positions = max_tokens_of(config)
    if positions is not None and max_length > positions:
        raise InputError(f"max_length ({max_length}) is more than the {positions} tokens that {name} takes")


@contextlib.contextmanager
def _no_unpickling(name: str) -> Iterator[list[Any]]:
    """Refuse, and yield, the files that the library would unpickle, such as one that an index from a hub names."""
    transformers_api()
    where, function = _UNPICKLES[mindnlp_series()]
    module = importlib.import_module(where)
    stock = getattr(module, function)
    refused: list[Any] = []

    def load(file: Any, *args: Any, **kwargs: Any) -> NoReturn:
        refused.append(file)
        _refuse(name, file)

    setattr(module, function, load)
    try:
        yield refused
    finally:
        setattr(module, function, stock)
