"""What commands that measure something share: a job that writes numbers, and the files that are made of them.

Goes in: a module to run under mpirun, with ``--write FILE`` behind its flags. Comes out: what it wrote.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.launch.run import run_job
from mindnlp_dp.runtime.atomic_files import in_place_of


def run_measurement(module: str, world_size: int, flags: Sequence[str]) -> Any:
    """Run ``module`` on so many ranks and return the JSON that it wrote.

    Raises:
        RuntimeError: the job failed; it has said why.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "measured.json")
        command = ["-m", module, *flags, "--write", str(file)]
        if run_job(world_size, command, backend="mpi", log_dir=Path(folder, "logs")) != 0:
            raise RuntimeError(f"the job with {world_size} ranks failed; its message stands above")
        return json.loads(file.read_text())


def write_outputs(
    numbers: Any, json_file: Optional[Path], draw: Callable[[Path], None], plot_file: Optional[Path]
) -> bool:
    """Write the numbers and the plot that were asked for; False when there could be no plot."""
    if json_file is not None:
        with in_place_of(json_file) as temporary:
            temporary.write_text(json.dumps(numbers, indent=2) + "\n")
        print(f"written to {json_file}")
    if plot_file is not None:
        try:
            with in_place_of(plot_file) as temporary:
                draw(temporary)
        except ImportError:
            print('no plot was drawn, for matplotlib is missing; pip install "mindnlp-dp[quickstart]"', file=sys.stderr)
            return False
        print(f"drawn in {plot_file}")
    return True
