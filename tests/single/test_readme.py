"""What the READMEs name exists: files, public names, flags, settings. And the two languages agree."""

from __future__ import annotations

import re

import pytest

import mindnlp_dp as dp
from mindnlp_dp.text_classification.config import FinetuneConfig

READMES = ["README.md", "README.zh.md"]


@pytest.fixture(params=READMES)
def text(request, pytestconfig):
    return (pytestconfig.rootpath / request.param).read_text(encoding="utf-8")


def test_links_and_paths_exist(text, pytestconfig):
    paths = set(re.findall(r"\]\(((?!https?:)[^)#]+)\)", text)) | set(
        re.findall(r"\b(?:scripts|configs)/[\w.]+\w", text)
    )
    assert len(paths) > 10
    for path in paths:
        assert (pytestconfig.rootpath / path).exists(), path


def test_public_names_exist(text):
    names = set(re.findall(r"\bdp\.(\w+)", text))
    assert len(names) >= 4
    for name in names:
        assert hasattr(dp, name), name


def test_every_public_name_resolves():
    assert all(getattr(dp, name) is not None for name in dp.__all__)


def test_flags_of_the_training_script_exist(text):
    for line in re.findall(r"scripts/finetune\.py (.*)", text):
        for flag in re.findall(r"--([a-z-]+)", line):
            assert flag in ("config", "help") or flag.replace("-", "_") in FinetuneConfig.__dataclass_fields__, flag


@pytest.mark.parametrize("folder", ["", "homework"])
def test_the_languages_agree(pytestconfig, folder):
    """The same headings, code (comments aside) and numbers, in the same order."""
    english, chinese = ((pytestconfig.rootpath / folder / name).read_text(encoding="utf-8") for name in READMES)

    def outline(text):
        # A block without a language is a picture in letters, with words in it.
        code = "\n".join(re.findall(r"^```\w+\n.*?^```", text, re.DOTALL | re.MULTILINE))
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        return {
            "headings": re.findall(r"^#+ ", text, re.MULTILINE),
            "code": [re.sub(r"\s*#.*", "", line) for line in code.splitlines()],
            "table rows": len(re.findall(r"^\|", prose, re.MULTILINE)),
            "names": sorted(set(re.findall(r"`([\w./()=-]+)`", prose))),
            "decimals": re.findall(r"\d+\.\d+", prose),
        }

    assert outline(english) == outline(chinese)
