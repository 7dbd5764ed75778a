"""Test the tutorials: run every shell and Python block of a page in order, in one folder, as a reader would.

A block of text shows what the block before it prints. A block of differences changes the file in its title.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, TIMEOUT_SECONDS
from mindnlp_dp.runtime.versions import mindnlp_series

TUTORIALS = ROOT / "docs" / "tutorials"
BLOCK = re.compile(r'^```(bash|python|diff|text)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
# Numbers and digests in the output that a page shows; those with these units depend on the machine.
NUMBER = re.compile(r"(?<![\w.])(?:[0-9a-f]{16}|\d+(?:\.\d+)?)(?!\w)")
MEASURED = re.compile(r" (?:s|ms|us|samples/s|tokens/s|GiB|GB/s|x)\b| %")
# For losses also absolute, because they may be close to zero. A perplexity is the exponential of a loss.
TOLERANCE = 0.05
# The environment of these tests is installed, and test_wheel.sh installs another. Commands for a second host need one.
# vLLM and the hub are not here.
NOT_RUN = ("git clone", "vllm serve", "mindnlp-dp run --nnodes")
# The blocks of Transformers on PyTorch, whose Python this variable names.
TORCH, TORCH_BLOCKS = "TORCH_PYTHON_4", "from transformers"
PAGES = {
    # Once in one process, and on two ranks with one digest; the losses are compared below.
    "first_run": r"(?s)\A(?=.*\[0\] (?P<accuracy>accuracy 0\.9\d*\n))(?=.*\[1\] (?P=accuracy))(?=.*\n(?P=accuracy))"
    r"(?=.*\[0\] digest (?P<digest>\w{16})\n)(?=.*\[1\] digest (?P=digest))",
    "your_data": r"(?s)accuracy (0\.9|1\.0).*replicas in sync  yes.*written to outputs/mine/report\.html",
    # The third run is longer.
    "resuming": r"(?s)in sync  yes, digest (?P<digest>\w{16}).*in sync  yes, digest (?P=digest).*in sync  yes, digest ",
    "llm_lora": r"(?s)perplexity .*written to .*perplexity .*report\.html",
    # The same perplexity with one process and with two ranks that share each row.
    "long_rows": r"(?s)evaluation +(?P<found>perplexity \d+\.\d).*evaluation +(?P=found)",
    # In network namespaces of this machine.
    "two_hosts": r"equal digests: the two hosts trained one model, under both launchers",
    # The chapters of the course: every formula equals what was counted, and both laws are fitted.
    "../all_reduce": r"(?s)\A(?!.*DIFFERS)(?=.*ring .* equal)",
    "../scaling": r"(?s)Amdahl: .*Gustafson: ",
    # After the export, the answer is what was taught, and its end is the turn's.
    "../after_training": r"(?s)perplexity .*perplexity .*written to outputs/merged.*method of a file\.\n.*perplexity",
}


def changed(source, difference):
    """Return the source after a difference, whose hunks are separated by lines with "..."."""
    for hunk in difference.split("...\n"):
        old, new = (
            "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in kept) for kept in (" -", " +")
        )
        assert source.count(old) == 1, f"{old}is there {source.count(old)} times"
        source = source.replace(old, new)
    return source


def assert_shown(page, printed):
    """Assert that the lines that a page shows were printed in this order, with nearly the same numbers.

    A digest may differ from the page's, if it does so everywhere. A line that ends with "..." is the beginning of one.
    """
    # The lines of --tee all, which begin with a rank, come in any order of the ranks.
    ordered = sorted(printed.replace("\r", "\n").splitlines(), key=lambda line: (re.match(r"\[\d+\]", line) or [""])[0])
    digests, lines = {}, iter(ordered)
    for expected in page.splitlines():
        if not any(is_shown(expected, line, digests) for line in lines):
            raise AssertionError(f"the page shows {expected!r}, which was not printed there:\n{printed}")


def is_shown(expected, line, digests):
    if expected.endswith(" ..."):
        return line.startswith(expected[: -len("...")])
    texts = [NUMBER.sub("#", text).split() for text in (expected, line)]
    if texts[0] != texts[1]:
        return False
    for shown, found in zip(NUMBER.finditer(expected), NUMBER.finditer(line)):
        if len(shown[0]) == len(found[0]) == 16 and not shown[0].isdigit():
            if digests.setdefault(shown[0], found[0]) != found[0]:
                return False
        elif not MEASURED.match(expected, shown.end()) and not is_near(
            float(shown[0]), float(found[0]), expected[: shown.start()].split()[-1:]
        ):
            return False
    return True


def is_near(shown, found, quantity):
    if quantity == ["perplexity"]:
        shown, found = math.log(shown), math.log(found)
    return found == pytest.approx(shown, rel=TOLERANCE, abs=TOLERANCE if quantity in (["perplexity"], ["loss"]) else 0)


def test_shown_output_is_compared_with_a_tolerance_for_numbers_and_digests_by_equality():
    page = "losses [0.69, 0.34]\ntraining  560 samples/s\ndigest 72601fd01fad9f2c\nagain 72601fd01fad9f2c\n"
    printed = "first\nlosses [0.691, 0.338]\ntraining 90 samples/s\ndigest 0000fd01fad9f2ca\nagain 0000fd01fad9f2ca\n"
    assert_shown(page, printed)
    for right, wrong in (("0.338", "0.4"), ("again 0000", "again 0001"), ("training 90", "speed 90")):
        with pytest.raises(AssertionError, match="which was not printed there"):
            assert_shown(page, printed.replace(right, wrong))
    with pytest.raises(AssertionError, match="which was not printed there"):
        assert_shown("second\nfirst\n", "first\nsecond\n")
    assert_shown("[0] a\n[0] b\n[1] a\n", "[1] a\n[0] a\n[0] b\n")
    assert_shown(
        "perplexity 229.62, loss 5.4364\nperplexity 1.07, loss 0.0630\na: The ...\n",
        "perplexity 253.14, loss 5.5339\nperplexity 1.10, loss 0.0970\na: The end\n",
    )
    for shown, printed in (
        ("perplexity 230", "perplexity 310"),
        ("loss 0.06", "loss 0.12"),
        ("accuracy 0.06", "accuracy 0.07"),
    ):
        with pytest.raises(AssertionError, match="which was not printed there"):
            assert_shown(shown, printed)


def test_differences_of_a_page_are_applied_to_the_file():
    assert changed("a\nb\nc\nd\n", "-a\n+A\n b\n...\n-d\n+D\n") == "A\nb\nc\nD\n"
    with pytest.raises(AssertionError, match="is there 0 times"):
        changed("a\n", "-b\n+c\n")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(mindnlp_series() != "0.4", reason="the recipes are for MindNLP 0.4")
@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_of_every_tutorial_run_and_print_the_expected_results(tmp_path, page):
    if page == "two_hosts" and not (os.geteuid() == 0 and shutil.which("ip")):
        pytest.skip("network namespaces need root and iproute2")
    for name in ("scripts", "configs", "homework"):
        (tmp_path / name).symlink_to(ROOT / name)
    bin_folder = Path(sys.executable).parent
    environ = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    # Where the language recipe keeps its tokens.
    environ["HOME"] = str(tmp_path)
    said = printed = ""
    for language, file, text in BLOCK.findall((TUTORIALS / f"{page}.md").read_text(encoding="utf-8")):
        if language == "text":
            assert_shown(text, printed)
            continue
        if file:
            path = tmp_path / file
            path.write_text(changed(path.read_text(), text) if language == "diff" else text)
            continue
        if text.startswith(NOT_RUN) or (text.startswith(TORCH_BLOCKS) and TORCH not in os.environ):
            continue
        python = os.environ[TORCH] if text.startswith(TORCH_BLOCKS) else sys.executable
        command = ["bash", "-ec", text] if language == "bash" else [python, "-c", text]
        folder = ROOT if text.startswith("bash tests/") else tmp_path
        done = subprocess.run(
            command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
        # `wait` returns the exit code of the job that the tutorial kills.
        assert done.returncode == (137 if "kill -9" in text else 0), f"{text}\n{done.stdout}"
        printed = done.stdout
        said += printed
    assert re.search(PAGES[page], said), said
    losses = [[float(loss) for loss in line.split(",")] for line in re.findall(r"losses \[([^]]+)\]", said)]
    assert len(losses) == (3 if page == "first_run" else 0)
    for found in losses:
        # The log has four decimals, of which rounding may change the last.
        assert found == pytest.approx(losses[0], abs=5e-4)
