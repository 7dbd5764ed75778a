"""This module records when MindSpore's operators and this package's kernels run, on CPU, for the profile of a run.

On other devices it records nothing: MindSpore's own profiler shows what runs there.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import mindspore
from mindspore import profiler as mindspore_profiler

from mindnlp_dp.kernels.timing import Record, timed_passes

# Written by MindSpore's profiler, one line for each kind of operator: "MatMul;HostCpuOps;BEGIN,DURATION,THREAD ...", in
# nanoseconds since 1970 and milliseconds.
_TIMES = "*/FRAMEWORK/cpu_op_execute_timestamp_*.txt"


@contextlib.contextmanager
def recorded_operators(operator: Record, kernel: Record) -> Iterator[None]:
    """Call ``operator`` for MindSpore's operators in this block, and ``kernel`` for this package's kernels."""
    if mindspore.get_context("device_target") != "CPU":
        yield
        return
    # The clock of MindSpore's times to that of the spans.
    shift = time.perf_counter() - time.time()
    with tempfile.TemporaryDirectory(prefix="mindnlp-dp-profile-") as folder:
        with _profiled(folder), timed_passes(kernel):
            yield
        for file in Path(folder).glob(_TIMES):
            for line in file.read_text().splitlines():
                name, _, times = line.split(";", 2)
                for entry in times.split():
                    began, milliseconds, _ = entry.split(",")
                    begin = 1e-9 * int(began) + shift
                    operator(name, begin, begin + 1e-3 * float(milliseconds))


@contextlib.contextmanager
def _profiled(folder: str) -> Iterator[None]:
    # Without analysis, for which MindSpore would fork this process. Its warnings are about the missing schedule.
    with _no_warnings():
        profile = mindspore_profiler.profile(
            activities=[mindspore_profiler.ProfilerActivity.CPU], start_profile=False,
            on_trace_ready=mindspore_profiler.tensorboard_trace_handler(folder, analyse_flag=False),
        )  # fmt: skip
        profile.start()
    try:
        yield
    finally:
        with _no_warnings():
            profile.stop()


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
