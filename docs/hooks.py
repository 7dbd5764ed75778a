"""Adds tables of arguments to pages when MkDocs builds them, and tidies docstrings.

A line such as ``<!-- arguments: FILE CLASS -->`` becomes a table with a row for each field of that dataclass. Source is
read, not imported: a build needs neither MindSpore nor MindNLP. ``python docs/hooks.py`` writes the list of all files
into architecture.md, from the first sentences of their docstrings.
"""

from __future__ import annotations

import ast
import html
import re
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parent.parent
_MARK = re.compile(r"^<!-- (arguments|flags): (\S+) (\w+) -->$", re.MULTILINE)
# Sphinx's :class:`~package.module.Name`, as Markdown has made HTML of it: the name alone.
_ROLE = re.compile(r":\w+:<code>~?\.*([\w.]+)</code>")
# A cell with a number: 3.9e-07, or 22.8 ms.
_NUMBER = re.compile(r"<td>(?=(?:<strong>)?[\d.,]+(?:e-\d+| [\w/%]+)?(?:</strong>)?</td>)")
# Code blocks have <span></span> before <code>.
_INLINE_CODE = re.compile(r"(?<!</span>)<code>([^<>\n]+)</code>")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks in a page by tables; MkDocs calls it for every page, before it is HTML."""
    return _MARK.sub(lambda mark: table(ROOT / mark[2], mark[3], as_flags=mark[1] == "flags"), markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Replace Sphinx's roles by names, and set line breaks; MkDocs calls it for every page, once it is HTML."""
    content = _ROLE.sub(lambda role: f"<code>{role[1].rpartition('.')[2]}</code>", content).replace("::</p>", ":</p>")
    content = _NUMBER.sub('<td class="number">', content)
    content = _INLINE_CODE.sub(lambda code: with_line_breaks(code[1]), content)
    # Browsers do not break a line between a Chinese comma and the hyphen of a flag.
    return content.replace("\u3001<code", "\u3001<wbr><code")


def with_line_breaks(code: str) -> str:
    """Return inline code as HTML that may be broken between words, as after _ / ::, and short names only on phones."""
    # A table's | is \\| in Markdown, also within code.
    code = code.replace("\\|", "|")
    is_name = len(html.unescape(code)) <= 30 and not re.search(r" |[a-z][A-Z]", code)
    code = re.sub(r"(?<=[\w\]])(_|/|::|\[)(?=\w)|(?<=[a-z])(?=[A-Z])", r"\1<wbr>", code)
    return f'<code class="name">{code}</code>' if is_name else f"<code>{code}</code>"


def table(file: Path, class_name: str, as_flags: bool = False) -> str:
    """Return a Markdown table of a dataclass's own fields: name, type, default, meaning."""
    lines = [f"| {'flag' if as_flags else 'argument'} | type | default | meaning |", "|---|---|---|---|"]
    for name, kind, default, meaning in settings(file, class_name):
        shown = f"--{name.replace('_', '-')}" if as_flags else name
        cells = [f"`{shown}`", f"`{kind}`", f"`{default!r}`", html.escape(meaning, quote=False)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def settings(file: Path, class_name: str) -> list[tuple[str, str, Any, str]]:
    """Return a dataclass's fields in order: name, type, default, help. Raise ValueError for one that has no help."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name]
    if not found:
        raise ValueError(f"{file} has no class {class_name}")
    return [
        _setting(file, field)
        for field in found[0].body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]


def _setting(file: Path, field: ast.AnnAssign) -> tuple[str, str, Any, str]:
    """Parse ``name: type = field(default=..., metadata={"help": ...})`` or ``name: type = function(default, help)``."""
    assert isinstance(field.target, ast.Name)
    name, call = field.target.id, field.value
    if not isinstance(call, ast.Call):
        raise ValueError(f"{file}: {name} has no help; write field(default=..., metadata={{'help': ...}})")
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    default = given.get("default", call.args[0] if call.args else None)
    if "metadata" in given:
        meaning: Optional[str] = ast.literal_eval(given["metadata"]).get("help")
    else:
        meaning = ast.literal_eval(call.args[1]) if len(call.args) > 1 else None
    if default is None or not meaning:
        raise ValueError(f"{file}: {name} has no default, or no help")
    return name, ast.unparse(field.annotation), _value(file, default), meaning


def _value(file: Path, node: ast.expr) -> Any:
    """A literal, or a constant of this file or of one that it imports from."""
    if not isinstance(node, ast.Name):
        return ast.literal_eval(node)
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == [node.id]:
            return _value(file, statement.value)
        if isinstance(statement, ast.AnnAssign) and statement.value and ast.unparse(statement.target) == node.id:
            return _value(file, statement.value)
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == node.id:
                    return _value(_file_of(file, statement), ast.Name(id=alias.name))
    raise ValueError(f"{file}: where {node.id} comes from is not to be seen")


def _file_of(file: Path, statement: ast.ImportFrom) -> Path:
    parts = (statement.module or "").split(".") if statement.module else []
    module = (file.parents[statement.level - 1] if statement.level else ROOT).joinpath(*parts)
    return module / "__init__.py" if module.is_dir() else module.with_suffix(".py")


def file_list(package: Path) -> str:
    """Return the files of a package as an indented list, each with the first sentence of its docstring."""
    lines = [f"{package.name}/"]

    def add(name: str, file: Path, depth: int) -> None:
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        first = re.split(r"[.:;](?:\s|$)|\n\n", docstring)[0]
        sentence = re.sub(r":\w+:`~?([^`]+)`|``([^`]+)``", r"\1\2", " ".join(first.split()))
        sentence = re.sub(r"^(This|These) \w+ ", "", sentence)
        lines.append(f"{'  ' * depth + name:<34}{sentence[:1].upper()}{sentence[1:]}")

    def walk(folder: Path, depth: int) -> None:
        entries = [entry for entry in folder.iterdir() if entry.suffix == ".py" or (entry / "__init__.py").exists()]
        for entry in sorted(entries, key=lambda entry: (entry.is_dir(), entry.name)):
            if entry.is_dir():
                add(f"{entry.name}/", entry / "__init__.py", depth)
                walk(entry, depth + 1)
            elif entry.name != "__init__.py" or depth == 1:
                add(entry.name, entry, depth)

    walk(package, 1)
    return "\n".join(lines)


def write_file_list(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    files = file_list(ROOT / "mindnlp_dp")
    page.write_text(re.sub(r"(?ms)^mindnlp_dp/\n.*?(?=\n```$)", lambda _: files, text), encoding="utf-8")


if __name__ == "__main__":
    write_file_list(ROOT / "docs" / "architecture.md")
