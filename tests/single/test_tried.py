"""The table of what was tried on which versions, and the notes that it is made of."""

from __future__ import annotations

import json

import pytest
import tried

STEPS = "".join(
    f"passed\t12\t{name}\n"
    for name in ("lint", "parallel, mpi, 2", "parallel, mpi, 8: meshes", "parallel, msrun, 4: its transport")
)
NEW = {
    "mindnlp": "0.4.1", "mindspore": "2.10.0", "python": "3.11", "suites": "all", "ranks": {"mpi": [1, 2]},
    "on": "2026-11-23",
}  # fmt: skip


def test_the_page_has_the_table_of_its_notes():
    page = tried.PAGE.read_text(encoding="utf-8")
    assert tried.with_table(page, json.loads(tried.NOTES.read_text())) == page


def test_a_note_says_which_launchers_ran_with_how_many_ranks(tmp_path):
    results = tmp_path / "results"
    results.write_text(STEPS)
    found = tried.note("all", results)
    assert (found["ranks"], found["in_part"]) == ({"mpi": [2], "msrun": []}, {"mpi": [8], "msrun": [4]})
    assert (found["suites"], found["python"].count(".")) == ("all", 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [("passed\t1\tlint\nFAILED\t2\tparallel, mpi, 2\n", "failed: parallel, mpi, 2"), ("", "names no steps")],
)
def test_what_failed_is_not_noted(tmp_path, text, message):
    results = tmp_path / "results"
    results.write_text(text)
    with pytest.raises(ValueError, match=message):
        tried.note("core", results)


def test_a_newer_note_replaces_one_of_as_many_suites():
    old = {**NEW, "on": "2026-01-01", "suites": "core"}
    assert tried.merged([old], [NEW]) == [NEW]
    # All suites say more than a few, however old.
    assert tried.merged([NEW], [old]) == [NEW]
    other = {**NEW, "mindspore": "2.9.0"}
    assert tried.merged([NEW], [other]) == [other, NEW]


def test_a_cell_is_tried_refused_or_not_tried():
    in_part = {**NEW, "ranks": {"mpi": [2], "msrun": []}, "in_part": {"mpi": [8], "msrun": [4]}}
    assert "| all suites: 2 ranks; some of it: 8 ranks | not tried | some of it: 4 ranks |" in tried.table([in_part])
    rows = {tuple(row.split(" | ")[1:3]): row for row in tried.table([NEW]).splitlines()}
    assert rows["2.10.0", "3.11"] == (
        "| 0.4.1 | 2.10.0 | 3.11 | all suites: 1 and 2 ranks | not tried | not tried | 2026-11-23 |"
    )
    assert rows["2.11.0", "any"] == "| 0.4.1 | 2.11.0 | any | refused | refused | refused |  |"
    assert rows["2.5.0", "any"] == "| 0.4.1 | 2.5.0 | any | not tried | not tried | not tried |  |"
