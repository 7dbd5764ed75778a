"""This module parses and prints the sizes of a device mesh, such as ``dp=2,tp=4``.

The command line, :func:`mindnlp_dp.init_device_mesh` and the planner use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Union

# The size of a mesh axis, or a size for each stage where stages differ.
Size = Union[int, tuple[int, ...]]


def parse_mesh(text: str) -> dict[str, Size]:
    """Parse the sizes of a mesh, such as ``"dp=2,tp=2"``; sizes by stage are separated by ``|``.

    Raises ValueError if the text does not have this form.

    >>> parse_mesh("dp=2,tp=2"), parse_mesh("pp=2,dp=2|1,tp=1|2")
    ({'dp': 2, 'tp': 2}, {'pp': 2, 'dp': (2, 1), 'tp': (1, 2)})
    """
    sizes: dict[str, Size] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        axis, _, size = part.partition("=")
        by_stage = size.split("|")
        if axis in sizes or not all(_is_number(number) for number in by_stage):
            raise ValueError(f"a mesh is written as dp=2,tp=2, or by stage as pp=2,dp=2|1,tp=1|2; got {text!r}")
        sizes[axis] = tuple(map(int, by_stage)) if len(by_stage) > 1 else int(size)
    return sizes


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def size_text(size: Any) -> str:
    """Return an axis' size as a mesh is written: one number, or one for each stage."""
    return "|".join(map(str, size)) if isinstance(size, tuple) else str(size)


def mesh_name(mesh: Mapping[str, Size]) -> str:
    """Return a mesh in the syntax of ``--mesh``.

    >>> mesh_name({"pp": 2, "dp": (2, 1), "tp": (1, 2)})
    'pp=2,dp=2|1,tp=1|2'
    """
    return ",".join(f"{axis}={size_text(size)}" for axis, size in mesh.items())
