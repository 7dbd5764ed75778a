"""This module lists the parameters and buffers of a MindNLP module or a cell, and compares them between ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mindnlp_dp.communication.collectives import ProcessGroup
from mindnlp_dp.runtime.arrays import dtype_name


class ReplicaMismatchError(RuntimeError):
    """Raised if the models on the ranks differ."""


def check_same_structure(weights: Iterable[tuple[str, Any]], group: ProcessGroup) -> None:
    """Raise ReplicaMismatchError on every rank unless all ranks list the same names, shapes and types in order."""
    mine = [(name, tuple(weight.shape), dtype_name(weight)) for name, weight in weights]
    structures = group.all_gather_object(mine)
    for rank, theirs in enumerate(structures):
        for ours, other in zip(structures[0], theirs):
            if ours != other:
                raise ReplicaMismatchError(
                    f"models differ by construction: rank 0 has {_show(ours)} where rank {rank} has {_show(other)}; "
                    "build the same model on every rank"
                )
        if len(theirs) != len(structures[0]):
            longer, shorter = (0, rank) if len(structures[0]) > len(theirs) else (rank, 0)
            extra = structures[longer][len(structures[shorter])]
            raise ReplicaMismatchError(
                f"models differ by construction: rank {longer} has {_show(extra)}, which rank {shorter} lacks; "
                "build the same model on every rank"
            )


def _show(entry: tuple[str, tuple[int, ...], str]) -> str:
    name, shape, dtype = entry
    return f"{name!r} of shape {shape} ({dtype})"
