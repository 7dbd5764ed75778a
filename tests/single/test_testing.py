"""Tests that docs/testing.md names an existing test for each promise, and that the marker `core` runs it by default."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PROMISES = re.findall(r"^\| (.+) \| `(tests/\S+\.py)::(\w+)` \|$", (ROOT / "docs/testing.md").read_text(), re.MULTILINE)


def decorators_of(source: str, test: str) -> str:
    """Return the decorators of a test."""
    blocks = re.findall(rf"((?:^[^\n]+\n)*?)^(?:    )?def {test}\(", source, re.MULTILINE)
    assert len(blocks) == 1, f"{len(blocks)} tests {test}"
    return blocks[0]


@pytest.mark.parametrize(("promise", "path", "test"), PROMISES, ids=[test for *_, test in PROMISES])
def test_a_promise_has_a_core_test(promise, path, test):
    source = (ROOT / path).read_text()
    is_whole_file = re.search(r"^pytestmark = pytest\.mark\.core$", source, re.MULTILINE)
    assert is_whole_file or re.search(r"\b(core|CORE_UNDER_MPI)\b", decorators_of(source, test)), promise


def test_each_test_is_listed_for_one_promise():
    tests = [(path, test) for _, path, test in PROMISES]
    assert len(tests) > 80
    assert len(set(tests)) == len(tests)


def test_decorators_of_finds_those_of_the_test():
    source = "@core\ndef test_a():\n    pass\n\n\n@other(\n    1\n)\ndef test_b():\n    pass\n"
    assert decorators_of(source, "test_a") == "@core\n"
    assert decorators_of(source, "test_b") == "@other(\n    1\n)\n"


def test_what_pytorchs_python_imports_of_the_benchmarks_needs_no_package_of_this_project():
    """It is another environment, which --torch-python names."""
    imported = set(re.findall(r"^    +from (\w+) import", (ROOT / "benchmarks" / "gloo.py").read_text(), re.M))
    files = sorted(name for name in imported if (ROOT / "benchmarks" / f"{name}.py").exists() and name != "torch_llama")
    assert "bench_memory" in files
    code = f"import sys; sys.path.insert(0, 'benchmarks'); sys.modules['mindnlp_dp'] = None; import {', '.join(files)}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
