"""Tests that pages that state the same promise or limit state it in the same words, in English and in Chinese."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from mindnlp_dp.runtime import versions

ROOT = Path(__file__).resolve().parents[2]

STATEMENTS = yaml.safe_load((ROOT / "tests/single/statements.yaml").read_text(encoding="utf-8"))


def words(text: str) -> str:
    """Return a page's text in one case, without links, bold type, white space and forms of "be"."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("**", "")
    return re.sub(r"\s+", "", re.sub(r"\bare\b", "", text)).lower()


def pages_with(statement: str, ending: str) -> Counter[str]:
    """Return how often the English or Chinese pages have a statement, by their names without the ending."""
    found = Counter()
    for folder in (ROOT, ROOT / "homework", ROOT / "docs", ROOT / "docs/tutorials"):
        for path in folder.glob(f"*{ending}"):
            is_chinese = path.name.endswith(".zh.md")
            if is_chinese == (ending == ".zh.md"):
                times = words(path.read_text(encoding="utf-8")).count(words(statement))
                found[path.relative_to(ROOT).as_posix().removesuffix(ending)] = times
    return +found


@pytest.mark.core
@pytest.mark.parametrize("subject", STATEMENTS)
def test_pages_state_a_promise_or_a_limit_in_the_same_words(subject):
    """The pages that have a statement, and how often, are exactly those of statements.yaml, in either language."""
    statement = STATEMENTS[subject]
    pages = Counter(statement["pages"])
    twins = Counter(page for page in pages.elements() if (ROOT / f"{page}.zh.md").exists())
    assert len(pages) > 1
    assert twins
    assert pages_with(statement["english"], ".md") == pages
    assert pages_with(statement["chinese"], ".zh.md") == twins


def test_the_largest_difference_in_the_table_is_within_the_stated_size():
    """Compare the table of docs/equivalence.md with the number that the glossary and the landing page give."""
    for name in ("equivalence.md", "equivalence.zh.md"):
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        measured = [float(number) for number in re.findall(r"(?<=\| )\d\.\de-0\d(?= \|)", text)]
        stated = float(re.search(r"(?:are less than|全部小于) (\de-\d)", text)[1])
        assert len(measured) > 100
        assert stated / 3 < max(measured) < stated
        for language in ("english", "chinese"):
            assert float(re.search(r"\de-\d", STATEMENTS["size of rounding"][language])[0]) == stated


@pytest.mark.parametrize("language", ["", ".zh"])
def test_the_readme_names_the_tested_versions(language):
    """Take them from mindnlp_dp/runtime/versions.py, and compare the table of docs/versions.md with them, too."""
    readme = (ROOT / f"README{language}.md").read_text(encoding="utf-8")
    table = (ROOT / "docs/versions.md").read_text(encoding="utf-8")
    first, end = re.findall(r"\d+\.\d+", versions.TESTED_MINDSPORE)
    last = f"2.{int(end.partition('.')[2]) - 1}"
    other, with_other = versions.TESTED_OTHER_MINDNLP[2:], re.findall(r"\d+\.\d+", versions.TESTED_OTHER_MINDSPORE)[0]
    row = next(line for line in readme.splitlines() if line.startswith("| MindNLP 0.4.1"))
    assert re.findall(r"\d+\.\d+(?:\.\d+)?", row.partition(" | ")[0]) == [
        versions.BEST_MINDNLP, first, last, other, with_other
    ]  # fmt: skip
    tested = {(mindnlp, ".".join(mindspore.split(".")[:2])) for mindnlp, mindspore, _ in _tested_rows(table)}
    assert {mindspore for mindnlp, mindspore in tested if mindnlp == versions.BEST_MINDNLP} == {
        f"2.{minor}" for minor in range(int(first.split(".")[1]), int(last.split(".")[1]) + 1)
    }
    assert {mindspore for mindnlp, mindspore in tested if mindnlp == other} == {with_other}


def test_the_readme_says_how_many_ranks_the_suites_ran_on():
    """The row of the newest MindSpore in docs/versions.md has the same numbers."""
    table = (ROOT / "docs/versions.md").read_text(encoding="utf-8")
    suites = {
        tuple(re.findall(r"\d+", part))
        for mindnlp, mindspore, part in _tested_rows(table)
        if mindnlp == versions.BEST_MINDNLP and mindspore == versions.BEST_MINDSPORE
    }
    for name in ("README.md", "README.zh.md"):
        readme = (ROOT / name).read_text(encoding="utf-8")
        row = next(line for line in readme.splitlines() if line.startswith("| `dp.DataParallelTrainer`"))
        assert {tuple(re.findall(r"\d+", row.split("|")[2]))} == suites


def _tested_rows(table: str) -> list[tuple[str, str, str]]:
    """Return MindNLP, MindSpore and what ran under MPI, of the rows of docs/versions.md that have a date."""
    return re.findall(r"^\| ([\d.]+) \| ([\d.]+) \| [\d.]+ \| ([^|]+) \|.*\| \d{4}-\d\d-\d\d \|$", table, re.MULTILINE)
