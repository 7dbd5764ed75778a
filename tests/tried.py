#!/usr/bin/env python3
"""What was tried on which versions: notes of the test scripts, and the table of docs/versions.md that is made of them.

    python tests/tried.py note SUITES RESULTS      what scripts/test.sh does when all has passed; into outputs/tried
    python tests/tried.py table [NOTE...]          notes, by default those in outputs/tried, into docs/versions.md

``SUITES`` is one of those below, ``RESULTS`` the script's table of steps. A note is of one MindNLP, MindSpore and
Python, and replaces an older one of the same, unless that was of more suites. Cells that nobody noted were not tried.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mindnlp_dp.versions import UnsupportedVersionsError, check_versions

ROOT = Path(__file__).resolve().parent.parent
NOTES, PAGE, FOLDER = ROOT / "docs" / "tried.json", ROOT / "docs" / "versions.md", ROOT / "outputs" / "tried"
BEGIN, END = "<!-- tried: docs/tried.json -->", "<!-- /tried -->"
# From the most to the least, and what the table calls them. Quick suites are what the core tests have replaced.
SUITES = {
    "all": "all suites",
    "core": "core tests",
    "quick": "quick suites",
    "trainer": "Trainer's suites",
    "quickstart": "quickstart",
}
LAUNCHERS = {
    "mpi": "`mindnlp-dp run`, MPI",
    "mindspore": "`mindnlp-dp run --backend mindspore`",
    "msrun": "`msrun`",
}
# Neighbours of what was tried, of which users ask.
ASKED_FOR = {
    "0.4.1": ("2.4.1", "2.5.0", "2.6.0", "2.7.0", "2.8.0", "2.9.0", "2.10.0", "2.11.0"),
    "0.5.1": ("2.7.0", "2.8.0", "2.9.0", "2.10.0"),
}


def note(suites: str, results: Path) -> dict[str, Any]:
    """What has just passed here, by the steps that the script noted: ``VERDICT <tab> SECONDS <tab> NAME`` a line.

    Raises:
        ValueError: a step failed, or there is none.
    """
    steps = [line.split("\t") for line in results.read_text().splitlines()]
    failed = [name for verdict, _, name in steps if verdict != "passed"]
    if failed or not steps:
        raise ValueError(f"failed: {', '.join(failed)}" if failed else f"{results} names no steps")
    # Behind a colon stands what part of the parallel suite a step was.
    whole: dict[str, set[int]] = {}
    part: dict[str, set[int]] = {}
    for _, _, name in steps:
        kind, *rest = name.split(", ")
        if kind == "parallel":
            found = part if ":" in name and suites == "all" else whole
            found.setdefault(rest[0], set()).add(int(rest[1].split(":")[0]))
    return {
        **{name: importlib.metadata.version(name) for name in ("mindnlp", "mindspore")},
        "python": ".".join(platform.python_version_tuple()[:2]),
        "suites": suites,
        "ranks": {launcher: sorted(whole.get(launcher, ())) for launcher in LAUNCHERS if launcher in {**whole, **part}},
        "in_part": {launcher: sorted(numbers - whole.get(launcher, set())) for launcher, numbers in part.items()},
        "on": datetime.date.today().isoformat(),
    }


def _pair(one: dict[str, Any]) -> tuple[Any, ...]:
    return (one["mindnlp"], tuple(map(int, one["mindspore"].split("."))), tuple(map(int, one["python"].split("."))))


def merged(old: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Both, one for each MindNLP, MindSpore and Python, in that order."""
    order = list(SUITES)
    found: dict[Any, dict[str, Any]] = {}
    for one in [*old, *new]:
        before = found.get(_pair(one))
        if before is None or order.index(one["suites"]) <= order.index(before["suites"]):
            found[_pair(one)] = one
    return [found[pair] for pair in sorted(found)]


def table(notes: Iterable[dict[str, Any]]) -> str:
    """Markdown: a row for each MindNLP, MindSpore and Python, a column for each launcher."""
    notes = list(notes)
    rows = [(_pair(one), one) for one in notes]
    known = {(one["mindnlp"], one["mindspore"]) for one in notes}
    for mindnlp, others in ASKED_FOR.items():
        for mindspore in others:
            if (mindnlp, mindspore) not in known:
                empty = {"mindnlp": mindnlp, "mindspore": mindspore, "python": "0"}
                rows.append((_pair(empty), empty))
    lines = [
        "| MindNLP | MindSpore | Python | " + " | ".join(LAUNCHERS.values()) + " | on |",
        "|---" * (len(LAUNCHERS) + 4) + "|",
    ]
    for _, one in sorted(rows, key=lambda row: row[0]):
        if "suites" in one:
            cells = [_cell(one, launcher) for launcher in LAUNCHERS]
            lines.append(
                f"| {one['mindnlp']} | {one['mindspore']} | {one['python']} | {' | '.join(cells)} | {one['on']} |"
            )
        else:
            cell = "not tried" if _is_accepted(one["mindnlp"], one["mindspore"]) else "refused"
            lines.append(f"| {one['mindnlp']} | {one['mindspore']} | any | " + f"{cell} | " * len(LAUNCHERS) + " |")
    return "\n".join(lines)


def _cell(one: dict[str, Any], launcher: str) -> str:
    if launcher not in one["ranks"]:
        return "not tried"
    whole, part = one["ranks"][launcher], one.get("in_part", {}).get(launcher, [])
    said = [f"{SUITES[one['suites']]}: {_listed(whole)}"] if whole else []
    return "; ".join([*said, *([f"some of it: {_listed(part)}"] if part else [])])


def _listed(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last} ranks" if most else f"{last} rank{'s' if last != '1' else ''}"


def _is_accepted(mindnlp: str, mindspore: str) -> bool:
    try:
        check_versions(mindnlp, mindspore)
    except UnsupportedVersionsError:
        return False
    return True


def with_table(page: str, notes: Iterable[dict[str, Any]]) -> str:
    """The page, with the table between its two marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table(notes)}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    noting = actions.add_parser("note")
    noting.add_argument("suites", choices=SUITES)
    noting.add_argument("results", type=Path)
    making = actions.add_parser("table")
    making.add_argument("notes", nargs="*", type=Path, default=sorted(FOLDER.glob("*.json")))
    args = parser.parse_args()
    if args.action == "note":
        try:
            one = note(args.suites, args.results)
        except ValueError as error:
            sys.exit(f"nothing is noted: {error}")
        FOLDER.mkdir(parents=True, exist_ok=True)
        file = FOLDER / f"mindnlp-{one['mindnlp']}-mindspore-{one['mindspore']}-python-{one['python']}.json"
        file.write_text(json.dumps(one) + "\n")
        print(f"noted in {file.relative_to(ROOT)}")
        return
    old = json.loads(NOTES.read_text()) if NOTES.exists() else []
    notes = merged(old, [json.loads(path.read_text()) for path in args.notes])
    NOTES.write_text("[\n" + ",\n".join(json.dumps(one) for one in notes) + "\n]\n")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), notes), encoding="utf-8")


if __name__ == "__main__":
    main()
