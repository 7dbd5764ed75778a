"""Writes the files of commands that also print their results: the numbers as JSON, and a plot."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

from mindnlp_dp.runtime.atomic_write import atomic_write


def write_outputs(
    numbers: Any,
    json_file: Optional[Path],
    draw: Callable[[Path], None] = lambda path: None,
    plot_file: Optional[Path] = None,
) -> bool:
    """Write the numbers and the plot that were asked for; return False if matplotlib is missing for the plot."""
    if json_file is not None:
        with atomic_write(json_file) as temporary:
            temporary.write_text(json.dumps(numbers, indent=2) + "\n")
        print(f"written to {json_file}")
    if plot_file is not None:
        try:
            with atomic_write(plot_file) as temporary:
                draw(temporary)
        except ImportError:
            print(
                'no plot was drawn, because matplotlib is missing; pip install "mindnlp-dp[quickstart]"',
                file=sys.stderr,
            )
            return False
        print(f"drawn in {plot_file}")
    return True
