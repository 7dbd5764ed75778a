"""Runs the examples in the docstrings of the package, and of the course's theory."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(folder.parent).with_suffix("").parts)
    for folder in (ROOT / "mindnlp_dp", ROOT / "homework" / "theory")
    for path in folder.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_docstring_examples_give_the_documented_output(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_package_has_docstring_examples():
    assert len(WITH_EXAMPLES) > 20
