"""Tests what lint-imports cannot see: parts of MindSpore, names in strings, import cycles."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import re

import grimp
import pytest

TRANSPORTS = "mindnlp_dp/communication/transports/"
LIBRARIES = ("mindspore.communication", "mindspore.mint.distributed", "mpi4py")
# These operators of MindSpore are collectives.
OPERATORS = {"AllReduce", "AllGather", "AlltoAll", "Broadcast", "ReduceScatter", "Send", "Receive"}
# Modules that start processes name the modules that run in them, and check which ones a script has imported.
NAMED_FROM_BELOW = {
    "mindnlp_dp.communication.default_group",
    "mindnlp_dp.communication.transports.mindspore.collective_calls",
    "mindnlp_dp.communication.transports.mindspore.scheduler",
    "mindnlp_dp.launch.rendezvous.remote_shell",
    "mindnlp_dp.launch.processes.worker",
    "mindnlp_dp.text_classification.finetune_classifier",
}


@pytest.fixture(scope="module")
def sources(pytestconfig):
    """Return the package's source text by path relative to the root."""
    root = pytestconfig.rootpath
    found = {str(path.relative_to(root)): path.read_text() for path in (root / "mindnlp_dp").rglob("*.py")}
    assert len(found) > 90
    return found


@pytest.fixture(scope="module")
def trees(sources):
    return {path: ast.parse(text) for path, text in sources.items()}


def library_uses(tree):
    """Return the communication libraries that the code imports or reaches through an import, in any spelling."""
    used = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            used |= {alias.name for alias in node.names if node.module == "mindspore.ops" and alias.name in OPERATORS}
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
            used |= {node.attr} & OPERATORS if names[0].split(".")[-2] in ("ops", "_ops") else set()
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        used |= {name for name in names for library in LIBRARIES if name == library or name.startswith(f"{library}.")}
    return used


@pytest.mark.parametrize(
    "line",
    [
        "from mindspore import communication",
        "import mpi4py.MPI as m",
        "import mindspore; mindspore.communication.init()",
        "from mindspore.mint import distributed",
        "from mindspore.ops import AllReduce",
        "ops.AllGather()(x)",
        "importlib.import_module('mpi4py.MPI')",
    ],
)
def test_every_form_of_using_a_communication_library_is_found(line):
    assert library_uses(ast.parse(f"def f():\n    {line}\n"))


@pytest.mark.core
def test_communication_libraries_are_used_only_by_transports(trees):
    users = {path for path, tree in trees.items() if library_uses(tree)}
    assert len(users) > 3
    assert not [path for path in users if not path.startswith(TRANSPORTS)]


def test_only_the_communication_package_reads_a_groups_transport(trees):
    readers = {
        path
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr == "_transport")
        or (isinstance(node, ast.Constant) and node.value == "_transport")
    }
    assert readers
    assert not [path for path in readers if not path.startswith("mindnlp_dp/communication/")]


def test_modules_named_in_strings_exist_and_are_listed(trees):
    """Check module names in strings: the layers do not cover them, and they may be stale after a module has moved."""
    named = {
        node.value
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"mindnlp_dp(\.\w+)+", node.value)
    }
    for name in named:
        assert importlib.util.find_spec(name) is not None, name
    # A module that runs in its own process is its own layer.
    jobs = {name for name in named if name.endswith(("_job", ".probe"))}
    assert named - jobs == NAMED_FROM_BELOW


def test_there_are_no_import_cycles():
    graph = grimp.build_graph("mindnlp_dp", exclude_type_checking_imports=True)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    # The sorter raises CycleError, which names a cycle. Every module imports the package itself, so that is left out.
    imports["mindnlp_dp"] = set()
    order = list(graphlib.TopologicalSorter(imports).static_order())
    assert sorted(order) == sorted(graph.modules)
