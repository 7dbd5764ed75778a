"""Tests that pages name existing files, public names, modules, flags and commands, and that both languages agree."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from unicodedata import east_asian_width

import pytest

import mindnlp_dp as dp
from mindnlp_dp.text_classification.classification_config import FinetuneConfig

ROOT = Path(__file__).resolve().parents[2]
READMES = ["README.md", "README.zh.md"]
PAGES = [*READMES, "CONTRIBUTING.md", "CHANGELOG.md", *sorted(f"docs/{page.name}" for page in ROOT.glob("docs/*.md"))]

_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
_PATH = re.compile(r"(?<![\w./-])(?:mindnlp_dp|docs|scripts|configs|tests|benchmarks|homework)/(?:[\w./-]*\w/?)?")


@pytest.fixture(params=PAGES)
def page(request):
    return ROOT / request.param


def what_is_missing(text: str, folder: Path) -> list[str]:
    """Return links relative to the page's folder, and paths relative to the root, that do not exist."""
    wrong = [link for link in _LINK.findall(text) if not (folder / link).exists()]
    return wrong + [path for path in _PATH.findall(text) if not (ROOT / path).exists()]


def test_links_and_paths_in_pages_exist(page):
    assert what_is_missing(page.read_text(encoding="utf-8"), page.parent) == []


@pytest.mark.parametrize("name", [f"{folder}{name}" for folder in ("", "homework/") for name in READMES])
def test_links_of_a_readme_to_sections_are_those_that_github_makes_of_the_headings(name):
    def section(heading):
        heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.strip())
        return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")

    readme = ROOT / name
    for link, target in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)]+)\)", readme.read_text(encoding="utf-8")):
        text = (readme.parent / link if link else readme).read_text(encoding="utf-8")
        assert target in map(section, re.findall(r"^#+ (.*)$", text, re.MULTILINE)), f"{link}#{target}"


def test_missing_paths_in_a_page_are_found():
    text = "[a](docs/launching.md) [b](docs/none.md#top) `scripts/none.sh` mindnlp_dp/none/, configs/no.yml."
    wrong = ["docs/none.md", "docs/none.md", "scripts/none.sh", "mindnlp_dp/none/", "configs/no.yml"]
    assert what_is_missing(text, ROOT) == wrong


def test_public_names_in_pages_exist(page):
    for name in set(re.findall(r"\bdp\.(\w+)", page.read_text(encoding="utf-8"))):
        assert hasattr(dp, name), name


def test_modules_named_in_pages_exist(page):
    for name in set(re.findall(r"\bmindnlp_dp(?:\.\w+)+", page.read_text(encoding="utf-8"))) - {"mindnlp_dp.NAME"}:
        # A function may have the name of its file, so modules are looked for first.
        module, rest = name, []
        while not is_module(module):
            module, _, attribute = module.rpartition(".")
            rest.insert(0, attribute)
        found = importlib.import_module(module)
        for attribute in rest:
            found = getattr(found, attribute)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_every_public_name_resolves():
    assert all(getattr(dp, name) is not None for name in dp.__all__)


def test_flags_of_finetune_in_pages_exist(page):
    for command in re.findall(r"scripts/finetune\.py ([^`]*?)(?:`|\n\n|\n```|$)", page.read_text(encoding="utf-8")):
        for flag in re.findall(r"--([a-z-]+)", command):
            assert flag in ("config", "help") or flag.replace("-", "_") in FinetuneConfig.__dataclass_fields__, flag


def test_commands_in_pages_exist(page):
    source = (ROOT / "mindnlp_dp" / "commands" / "main.py").read_text(encoding="utf-8")
    known = set(re.findall(r'add_parser\(\s*"(\w+)"', source))
    named = set(re.findall(r"(?:^|`)mindnlp-dp (\w+)", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= known


def test_pages_name_enough_paths_names_and_commands():
    """Check that the pages name enough paths, links, names and commands for the tests above to be meaningful."""
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    assert len(set(_PATH.findall(text))) > 50
    assert len(set(_LINK.findall(text))) > 15
    assert len(set(re.findall(r"\bdp\.(\w+)", text))) > 5
    assert len(re.findall(r"(?:^|`)mindnlp-dp (\w+)", text, re.MULTILINE)) > 10
    assert len(re.findall(r"scripts/finetune\.py .*--", text)) > 3


@pytest.mark.parametrize("name", READMES)
def test_a_readme_has_at_most_150_lines(name):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("name", [f"{folder}{name}" for folder in ("", "homework/") for name in READMES])
def test_code_in_a_readme_fits_the_width_of_github(name):
    """Count 96 columns, which a window of 1300 pixels shows; a Chinese character takes two."""
    blocks = re.findall(r"^```.*?^```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) > 20
    assert [line for line in lines if sum(1 + (east_asian_width(char) in "WF") for char in line) > 96] == []


@pytest.mark.parametrize("folder", ["", "homework"])
def test_english_and_chinese_readmes_have_the_same_outline(folder):
    """Compare the headings, the code without comments, and the numbers, in their order."""
    english, chinese = ((ROOT / folder / name).read_text(encoding="utf-8") for name in READMES)

    def outline(text):
        # A block without a language is an ASCII diagram, which contains words to translate.
        code = "\n".join(re.findall(r"^```\w+\n.*?^```", text, re.DOTALL | re.MULTILINE))
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        return {
            "headings": re.findall(r"^#+ ", text, re.MULTILINE),
            "code": [re.sub(r"\s*#.*", "", line) for line in code.splitlines()],
            "table rows": len(re.findall(r"^\|", prose, re.MULTILINE)),
            "names": sorted(set(re.findall(r"`([\w./()=-]+)`", prose))),
            "decimals": re.findall(r"\d+\.\d+", prose),
            "links": sorted(
                re.sub(r"\.zh\.(md|svg)$", r".\1", link)
                for link in _LINK.findall(prose)
                if not link.startswith(("README", "homework/"))
            ),
        }

    assert outline(english) == outline(chinese)


@pytest.mark.parametrize("name", READMES)
def test_readme_commands_follow_the_activation_of_the_environment(name):
    """The quickstart makes the environment, the page activates it, and then come the commands and the report."""
    text = (ROOT / name).read_text(encoding="utf-8").partition("bash scripts/quickstart.sh")[2]
    activated = text.index("source .venv/bin/activate")
    for command in ("mindnlp-dp report", "python benchmarks/", "mindnlp-dp run --nproc 2 scripts/"):
        assert activated < text.index(command), command
    extras = re.search(r"^ensure_environment (\S+)$", (ROOT / "scripts/quickstart.sh").read_text(), re.MULTILINE)[1]
    assert {"mpi", "quickstart", "report"} <= set(extras.split(","))
    assert '".[cpu,mpi]"' in (ROOT / name.replace("README", "docs/index")).read_text(encoding="utf-8")
