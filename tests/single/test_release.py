"""Test packages, container files and the release script, which refuses a tree that is not ready."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from mindnlp_dp.runtime.versions import __version__

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "mindnlp_dp", "scripts/release.py")
REPOSITORY = re.findall(r'^REPOSITORY = "(.*)"$', (ROOT / "setup.py").read_text(), re.MULTILINE)[0]
_LINK = re.compile(r"\]\(([^)\s]+)")


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path):
    """Return a repository with this tree, whose changelog has the date of a release."""
    (tmp_path / "scripts").mkdir()
    for name in PACKAGED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    date_changelog(tmp_path, "2027-01-31")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "remote", "add", "origin", f"git@{REPOSITORY.partition('://')[2].replace('/', ':', 1)}.git")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "a release")
    return tmp_path


def date_changelog(tree, date):
    changes = tree / "CHANGELOG.md"
    found, number = re.subn(rf"(?m)^## {re.escape(__version__)}, .*$", f"## {__version__}, {date}", changes.read_text())
    assert number == 1
    changes.write_text(found)


def release(tree):
    command = [sys.executable, str(tree / "scripts/release.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_release_builds_packages_with_valid_metadata_and_links(tree):
    done = release(tree)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2
    assert f"git tag -a v{__version__}" in done.stdout
    [wheel], [source] = (list((tree / "dist").glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    # PEP 625.
    assert source.name == f"mindnlp_dp-{__version__}.tar.gz"
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        about = Parser().parsestr(packed.read(next(n for n in names if n.endswith("METADATA"))).decode())
    assert {"mindnlp_dp/py.typed", "mindnlp_dp/report/page.html"} <= set(names)
    with tarfile.open(source) as packed:
        assert any(name.endswith("mindnlp_dp/runtime/versions.py") for name in packed.getnames())
    assert "Operating System :: POSIX :: Linux" in about.get_all("Classifier")
    assert {"cpu", "mpi", "trackers"} <= set(about.get_all("Provides-Extra"))
    # MindSpore and MindNLP come with the extra "cpu" only: on Ascend, MindSpore's own wheel is there first.
    mine = [text for text in about.get_all("Requires-Dist") if text.startswith("mind")]
    assert len(mine) == 2
    assert all('extra == "cpu"' in text for text in mine)
    links = _LINK.findall(about.get_payload())
    assert len(links) > 30
    for link in links:
        assert link.startswith(("https://", "#")), link
        # What the links point to is in this tree.
        path = re.match(rf"{re.escape(REPOSITORY)}/(?:blob|raw)/v[^/]+/([^#]+)", link)
        assert path is None or (ROOT / path[1]).exists(), link


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: (tree / "new.py").touch(), "these files are not committed:\n?? new.py"),
        (lambda tree: git(tree, "tag", f"v{__version__}"), f"v{__version__} is tagged already"),
        (
            lambda tree: git(tree, "remote", "set-url", "origin", "git@example.org:a/b.git"),
            "is not a remote of this clone",
        ),
    ],
)
def test_release_refuses_uncommitted_files_used_tags_and_wrong_remotes(tree, change, message):
    change(tree)
    done = release(tree)
    assert done.returncode == 1
    assert message in done.stderr
    assert not (tree / "dist").exists()


def test_release_refuses_a_changelog_without_the_version(tree):
    date_changelog(tree, "unreleased")
    git(tree, "commit", "--quiet", "--all", "--message", "not yet")
    assert f'CHANGELOG.md has no section "## {__version__}, YEAR-MONTH-DAY"' in release(tree).stderr


def test_the_citation_has_the_version_and_the_repository():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in citation
    assert f"\nrepository-code: {REPOSITORY}\n" in citation


CONTAINERS = sorted((ROOT / "scripts" / "containers").glob("*.Dockerfile"))


@pytest.mark.parametrize("dockerfile", CONTAINERS, ids=lambda path: path.stem)
def test_dockerfiles_copy_what_the_wheel_needs_and_name_existing_files_and_extras(dockerfile):
    text = dockerfile.read_text(encoding="utf-8").replace("\\\n", " ")
    copied = {
        source
        for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE)
        for source in [word for word in line.split() if not word.startswith("--")][:-1]
    }
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "mindnlp_dp"} <= copied
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for name in copied:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in allowed
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', text)
    assert set(extras.split(",")) <= set(re.findall(r'^    "(\w+)": \[', (ROOT / "setup.py").read_text(), re.MULTILINE))
    for name in re.findall(r"(?:scripts|configs)/[\w/.]+\.(?:py|yaml|Dockerfile)", text):
        assert (ROOT / name).exists(), name
