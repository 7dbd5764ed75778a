"""Test the tutorials: run every shell and Python block of a page in order, in one folder, as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, TIMEOUT_SECONDS
from mindnlp_dp.runtime.versions import mindnlp_series

TUTORIALS = ROOT / "docs" / "tutorials"
BLOCK = re.compile(r'^```(bash|python)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
# The environment of these tests is installed, and test_wheel.sh installs another. The page on two hosts needs two;
# tests/two_hosts.sh, its last block, is a step of its own in scripts/test.sh.
# vLLM and the hub are not here.
NOT_RUN = ("git clone", "vllm serve")
# The blocks of Transformers on PyTorch, whose Python this variable names.
TORCH, TORCH_BLOCKS = "TORCH_PYTHON_4", "from transformers"
PAGES = {
    # The losses and the accuracy of one process and of two; one digest for both ranks of two.
    "first_run": r"(?s)(?=.*(?P<said>losses \[0[^]]+\]\n)(?P<accuracy>accuracy 0\.[89]\d*\n)rank 0 of 1)"
    r"(?=.*\[0\] (?P=said))(?=.*\[0\] (?P=accuracy))"
    r".*of 2: digest of the weights (?P<digest>\w{16}).*of 2: digest of the weights (?P=digest)",
    "your_data": r"(?s)accuracy (0\.9|1\.0).*replicas in sync  yes.*written to outputs/mine/report\.html",
    "resuming": r"(?s)in sync  yes, digest (?P<digest>\w{16}).*in sync  yes, digest (?P=digest).*digest (?P=digest)",
    "llm_lora": r"(?s)perplexity .*written to .*perplexity .*report\.html",
    # The same perplexity with one process and with two ranks that share each row.
    "long_rows": r"(?s)evaluation +(?P<found>perplexity \d+\.\d).*evaluation +(?P=found)",
    # After the export, the answer is what was taught, and its end is the turn's.
    "../after_training": r"(?s)perplexity .*perplexity .*written to outputs/merged.*method of a file\.\n.*perplexity",
}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(mindnlp_series() != "0.4", reason="the recipes are for MindNLP 0.4")
@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_of_every_tutorial_run_and_print_the_expected_results(tmp_path, page):
    for name in ("scripts", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    bin_folder = Path(sys.executable).parent
    environ = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    # Where the language recipe keeps its tokens.
    environ["HOME"] = str(tmp_path)
    said = ""
    for language, file, text in BLOCK.findall((TUTORIALS / f"{page}.md").read_text(encoding="utf-8")):
        if file:
            (tmp_path / file).write_text(text)
            continue
        if text.startswith(NOT_RUN) or (text.startswith(TORCH_BLOCKS) and TORCH not in os.environ):
            continue
        python = os.environ[TORCH] if text.startswith(TORCH_BLOCKS) else sys.executable
        command = ["bash", "-ec", text] if language == "bash" else [python, "-c", text]
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
        # `wait` returns the exit code of the job that the tutorial kills.
        assert done.returncode == (137 if "kill -9" in text else 0), f"{text}\n{done.stdout}"
        said += done.stdout
    assert re.search(PAGES[page], said), said
