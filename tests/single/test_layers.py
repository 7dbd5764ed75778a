"""What lint-imports cannot see: imports of parts of MindSpore, names that are nobody else's, the length of files."""

from __future__ import annotations

import ast

import pytest

TRANSPORTS = "mindnlp_dp/communication/transports/"
COLLECTIVES = ("mindspore.communication", "mindspore.mint.distributed", "mpi4py")
MOST_LINES = 300


@pytest.fixture(scope="module")
def sources(pytestconfig):
    """The package's files by their path from the root, as text."""
    root = pytestconfig.rootpath
    found = {str(path.relative_to(root)): path.read_text() for path in (root / "mindnlp_dp").rglob("*.py")}
    assert len(found) > 90
    return found


def imported(text):
    """Every module that is imported, and every name that may be one."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_what_an_import_is():
    text = "def f():\n    from mindspore import communication, ops\n    import mpi4py.MPI as m\n"
    assert set(imported(text)) == {"mindspore", "mindspore.communication", "mindspore.ops", "mpi4py.MPI"}


def test_communication_libraries_are_imported_by_transports_only(sources):
    users = {
        path
        for path, text in sources.items()
        for module in imported(text)
        if any(module == library or module.startswith(f"{library}.") for library in COLLECTIVES)
    }
    assert len(users) > 3
    assert not [path for path in users if not path.startswith(TRANSPORTS)]


def test_nobody_else_reads_a_groups_transport(sources):
    readers = {
        path
        for path, text in sources.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr == "_transport"
    }
    assert readers
    assert not [path for path in readers if not path.startswith("mindnlp_dp/communication/")]


def test_no_file_is_long(sources):
    assert not {path: count for path, text in sources.items() if (count := text.count("\n")) > MOST_LINES}
