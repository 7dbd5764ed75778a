"""Describes the machine of a run for its report."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine() -> str:
    """Return the processor, its number of cores and the Python version, in one line."""
    model, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{named[0] if named else model}, {os.cpu_count()} cores, Python {platform.python_version()}"
