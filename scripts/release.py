#!/usr/bin/env python3
"""Check that this tree can be released, build its packages into dist/, and check them; print what is left to do.

    python scripts/release.py        needs build and twine, which the extra "dev" installs

Nothing is tagged, pushed or uploaded. docs/releasing.md has all steps of a release.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"


def run(*command: str) -> str:
    """Run a command in the repository and return its output; end this program with its message if it fails."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout.strip()


def problems(version: str, repository: str) -> Iterator[str]:
    """Yield what keeps this tree from being released as ``version``."""
    if changed := run("git", "status", "--porcelain"):
        yield f"these files are not committed:\n{changed}"
    if run("git", "tag", "--list", f"v{version}"):
        yield f"v{version} is tagged already; change __version__ in mindnlp_dp/runtime/versions.py"
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## {re.escape(version)}, \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE):
        yield f'CHANGELOG.md has no section "## {version}, YEAR-MONTH-DAY"'
    remotes = run("git", "remote", "--verbose")
    address = repository.partition("://")[2]
    if not re.search(rf"{re.escape(address).replace('/', '[/:]', 1)}(\.git)?\s", remotes):
        yield f"the package's links point to {repository} (REPOSITORY in setup.py), which is not a remote of this clone"


def main() -> None:
    """Check, build, check the packages, and print the remaining commands."""
    version = runpy.run_path(str(ROOT / "mindnlp_dp" / "runtime" / "versions.py"))["__version__"]
    [repository] = re.findall(r'^REPOSITORY = "(.*)"$', (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE)
    if found := list(problems(version, repository)):
        sys.exit("\n".join(f"error: {problem}" for problem in found))
    for folder in (DIST, ROOT / "build"):
        # Files of an earlier build would get into the wheel.
        shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", str(DIST))
    packages = sorted(map(str, DIST.iterdir()))
    print(run(sys.executable, "-m", "twine", "check", "--strict", *packages))
    print(f"{repository} {version}: {', '.join(Path(package).name for package in packages)}; now:")
    print(f"  bash scripts/test_wheel.sh\n  git tag -a v{version} -m {version} && git push origin v{version}")
    print("  python -m twine upload dist/*")


if __name__ == "__main__":
    main()
