"""This module reads labeled texts from a data hub, or from a folder that ``datasets`` can read.

A data set that cannot be loaded, such as an uncached one without a network, gives a message of one sentence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mindnlp_dp.finetuning.settings import InputError, first_line
from mindnlp_dp.text_classification.examples import USUAL_COLUMNS, Columns, Examples, collect


def load_examples(name: str, split: str, columns: Columns = USUAL_COLUMNS) -> Examples:
    """Return a split of the data set ``name``: a hub name, a folder of files, or one that ``save_to_disk`` wrote.

    Raises:
        InputError: the data set cannot be loaded or lacks the split, or no column fits.
    """
    dataset = _load(name, split)
    features = dataset.features

    def rows() -> Iterator[tuple[int, Mapping[str, Any]]]:
        for number, row in enumerate(dataset, 1):
            # A ClassLabel is stored as a number; the label is its name. -1 is that of a text without a label.
            yield (
                number,
                {
                    key: (None if value is None or value < 0 else features[key].int2str(value))
                    if hasattr(features[key], "int2str")
                    else value
                    for key, value in row.items()
                },
            )

    return collect(rows(), columns, f"{name} ({split})")


def _load(name: str, split: str) -> Any:
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    # The library logs every attempt to reach the hub; the InputError below reports the last one.
    huggingface_hub.utils.logging.set_verbosity_error()
    try:
        if Path(name, "dataset_dict.json").exists() or Path(name, "state.json").exists():
            saved = datasets.load_from_disk(name)
            splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
            if split not in splits:
                raise InputError(f"{name} has no split {split}; it has {', '.join(splits)}")
            return splits[split]
        # A data set's own script is not run. Since datasets 4 there are none, and the argument is gone.
        accepted = inspect.signature(datasets.load_dataset).parameters
        options = {"trust_remote_code": False} if "trust_remote_code" in accepted else {}
        return datasets.load_dataset(name, split=split, **options)
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001
        # Hub, network, cache and file format raise different exceptions; the user needs the first line.
        raise InputError(
            f"the data set {name} ({split}) cannot be loaded: {first_line(error)}; without a network pass "
            "a folder that has it, or --train-file and --test-file"
        ) from None
