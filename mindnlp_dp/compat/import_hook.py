"""This module registers patches by module name and runs each one around the execution of its module at import.

The patch files register with :func:`around`; ``mindnlp_dp/__init__.py`` calls :func:`install_import_hook`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import sys
import types
from collections.abc import Iterator
from typing import Any, Callable, Optional

Patch = Callable[[types.ModuleType], Iterator[None]]

_PATCHES: dict[str, list[Callable[[types.ModuleType], contextlib.AbstractContextManager[None]]]] = {}


def around(module_name: str) -> Callable[[Patch], Patch]:
    """Register a patch for ``module_name``: a generator whose only ``yield`` is where the module is executed."""

    def register(patch: Patch) -> Patch:
        _PATCHES.setdefault(module_name, []).append(contextlib.contextmanager(patch))
        return patch

    return register


def install_import_hook() -> None:
    """Apply the registered patches when their modules are imported. Safe to call twice.

    Raises:
        ImportError: ``mindnlp`` was imported before, without the patches.
    """
    if any(isinstance(finder, _PatchingFinder) for finder in sys.meta_path):
        return
    if "mindnlp" in sys.modules:
        raise ImportError(
            "mindnlp was imported before mindnlp_dp, too late for its patches; write `import mindnlp_dp` first"
        )
    sys.meta_path.insert(0, _PatchingFinder())


class _PatchingFinder(importlib.abc.MetaPathFinder):
    """Finds modules with the other finders, and wraps the execution of those that have patches."""

    def find_spec(self, fullname: str, path: Any, target: Optional[types.ModuleType] = None) -> Any:
        if fullname not in _PATCHES:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                # The loader keeps its type, so that inspect and pkgutil still know it.
                execute = spec.loader.exec_module
                spec.loader.exec_module = functools.partial(_exec_patched, execute)  # type: ignore[method-assign]
                return spec
        return None


def _exec_patched(execute: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
    with contextlib.ExitStack() as stack:
        for patch in _PATCHES[module.__name__]:
            stack.enter_context(patch(module))
        execute(module)
