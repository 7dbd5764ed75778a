"""Tests that this package calls nothing that the installed MindSpore calls deprecated, except for what is listed."""

from __future__ import annotations

import inspect
import re

import mindspore
import pytest

SPACES = {
    "ops": mindspore.ops,
    "mint": mindspore.mint,
    "mindspore": mindspore,
    "communication": mindspore.communication,
    "runtime": mindspore.runtime,
    "distributed": mindspore.mint.distributed,
}

# "changed" and "renamed" are about parameters that this package does not pass by name.
_IS_DEPRECATED = re.compile(r"deprecated|removed after|will be removed", re.IGNORECASE)
_IS_OF_AN_ARGUMENT = re.compile(r"(argument|input|parameter) .*(removed|deprecated)|The value `")

# Each deprecated call, and why it stays; when MindSpore 2.7 and 2.8 are no longer supported, look again.
REASONS = {
    "mindspore.get_context": "its replacement, get_current_device, reads another setting than set_context sets",
    "mindspore.dtype_to_nptype": "not a call: compat/mindspore_api.py replaces it",
    "ops.deepcopy": "on a CPU only: Clone, which mint.clone calls, has no kernel there in 2.8 and 2.10",
    "Tensor.astype": "announced for a version after 2.9; the replacement, Tensor.to, has other arguments until then",
    "Tensor.assign_value": "its replacement, Tensor.copy_, is documented for Ascend only",
}


def deprecated_calls(root):
    found = set()
    for path in root.rglob("*.py"):
        text = path.read_text()
        for space, owner in SPACES.items():
            for name in re.findall(rf"(?<!\.)\b(?:mindspore\.)?{space}\.(\w+)\b", text):
                found |= {f"{space}.{name}"} if _says_so(getattr(owner, name, None)) else set()
        for name in re.findall(r"\b(?:Tensor|tensor|weight|out)\.(\w+)\(", text):
            found |= {f"Tensor.{name}"} if _says_so(vars(mindspore.Tensor).get(name)) else set()
    return found


def _says_so(function):
    if function is None or inspect.ismodule(function):
        return False
    lines = (inspect.getdoc(function) or "").splitlines()
    return any(_IS_DEPRECATED.search(line) and not _IS_OF_AN_ARGUMENT.search(line) for line in lines)


def test_no_deprecated_function_of_mindspore_is_called_without_a_reason(pytestconfig):
    found = deprecated_calls(pytestconfig.rootpath / "mindnlp_dp")
    assert found - set(REASONS) == set()


@pytest.mark.parametrize("name", ["mint.clone", "runtime.synchronize"])
def test_replacements_of_deprecated_functions_are_not_deprecated(name):
    space, _, function = name.partition(".")
    assert not _says_so(getattr(SPACES[space], function))
