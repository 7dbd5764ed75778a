"""This module checks settings and files before MindSpore is imported, which takes seconds; the recipes call it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Optional, Protocol, TypeVar

from mindnlp_dp.data.sampler import check_every_rank_has_a_sample
from mindnlp_dp.finetuning.saved_model import MODEL_FOLDER, adapters_of, base_of
from mindnlp_dp.finetuning.settings import FROM_SCRATCH, InputError, ParallelConfig, as_input_error
from mindnlp_dp.runtime.launch_env import detect_launch, launched_rank


class Splits(Protocol):
    """The data of a job, as its files have it: both splits, and what --check prints."""

    @property
    def train(self) -> Sized: ...

    def __str__(self) -> str: ...


Read = TypeVar("Read", bound=Splits)


def check_output_dir(folder: Path) -> None:
    """Raise InputError unless files can be written to this folder, or a folder of this name can be made."""
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not existing.is_dir():
        raise InputError(f"output_dir must name a folder, and {existing} is a file")
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise InputError(f"output_dir is {folder}, and {existing} cannot be written to: {error.strerror}") from None


def check_files(config: ParallelConfig, model: str, read: Callable[[], Read]) -> Optional[Read]:
    """Return the data on rank 0, which alone needs the files, and None on other ranks; with --check, exit after it.

    Args:
        model: ``FROM_SCRATCH``, or a pretrained model's folder or hub name.
        read: reads the data; it is not called for a data set of a hub, whose download would keep the others waiting.

    Raises:
        InputError: a file or a folder is missing or wrong, or there are fewer samples than ranks.
    """
    launch = detect_launch(os.environ)
    # Not every launcher gives ranks to its processes; then the data is read after the processes have joined.
    is_first = launched_rank(os.environ, 0 if config.check else int(launch.by != "none")) == 0
    if not is_first:
        if config.check:
            sys.exit()
        return None
    check_output_dir(Path(config.output_dir))
    folder = Path(model)
    if model.startswith((".", "/", "~")) and not folder.exists():
        raise InputError(f"the model {model} cannot be loaded: there is no such folder")
    files = [folder / name for name in ("config.json", "adapter_config.json")]
    if model != FROM_SCRATCH and folder.is_dir() and not any(file.is_file() for file in files):
        raise InputError(f"the model {model} cannot be loaded: the folder has no config.json")
    target = (Path(config.output_dir) / MODEL_FOLDER).resolve()
    if (config.lora_rank or adapters_of(model)) and Path(base_of(model)).resolve() == target:
        raise InputError(
            f"the adapters would be written to {config.output_dir}/{MODEL_FOLDER}, over the model that they belong to; "
            "give another --output-dir"
        )
    dataset = getattr(config, "dataset", "")
    if dataset and not Path(dataset).is_dir() and not config.check:
        return None
    splits = read()
    if not config.mesh:
        with as_input_error():
            check_every_rank_has_a_sample(len(splits.train), launch.num_known)
    if config.check:
        print(f"the settings and the files are right: {splits}")
        sys.exit()
    return splits
