"""Run scripts one after another in one job, so that MindSpore and MindNLP are imported once for all of them.

    mindnlp-dp run --nproc 2 tests/failure/one_after_another.py RUNS.json

RUNS.json is {name: [script, arguments ...]}. Each rank R writes the output of each script, and the exit code that it
would have had, to RUNS_R.json in the same folder. Use it only for scripts that all ranks leave together: if one rank
fails alone, the others wait for it, and the launcher must end them.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
import traceback
from pathlib import Path

import mindnlp_dp as dp


def run(script: str, *arguments: str) -> dict:
    said, code = io.StringIO(), 0
    sys.argv = [script, *arguments]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as leave:
            code = leave.code or 0
            if isinstance(code, str):
                code = print(code, file=sys.stderr) or 1
        except BaseException:  # noqa: BLE001
            code = traceback.print_exc() or 1
    return {"exit_code": code, "output": said.getvalue()}


if __name__ == "__main__":
    group = dp.init_process_group()
    path = Path(sys.argv[1])
    ends = {name: run(*map(str, command)) for name, command in json.loads(path.read_text()).items()}
    path.with_name(f"{path.stem}_{group.rank}.json").write_text(json.dumps(ends))
