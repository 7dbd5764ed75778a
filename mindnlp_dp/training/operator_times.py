"""This module records when MindSpore's operators and this package's kernels run, on CPU, for the profile of a run.

On other devices it records nothing: MindSpore's own profiler shows what runs there.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional, TypeVar

import mindspore
from mindspore import profiler as mindspore_profiler

from mindnlp_dp.kernels.timing import Record, timed_passes

# Written by MindSpore's profiler, one line for each kind of operator: "MatMul;HostCpuOps;BEGIN,DURATION,THREAD ...", in
# nanoseconds since 1970 and milliseconds.
_TIMES = "*/FRAMEWORK/cpu_op_execute_timestamp_*.txt"


@contextlib.contextmanager
def recorded_operators(operator: Record, kernel: Record) -> Iterator[None]:
    """Call ``operator`` for MindSpore's operators in this block, and ``kernel`` for this package's kernels.

    If MindSpore's profiler fails, or is already in use, there is a warning and no operator.
    """
    if mindspore.get_context("device_target") != "CPU":
        yield
        return
    started = _attempt(_start)
    try:
        with timed_passes(kernel):
            yield
    finally:
        if started is not None:
            _attempt(lambda: _stop(*started, operator))


def _start() -> tuple[Any, str]:
    """Return MindSpore's profiler, which has started, and the folder that it writes to."""
    folder = tempfile.mkdtemp(prefix="mindnlp-dp-profile-")
    # Without analysis, for which MindSpore would fork this process. Its warnings are about the missing schedule.
    with _no_warnings():
        profile = mindspore_profiler.profile(
            activities=[mindspore_profiler.ProfilerActivity.CPU], start_profile=False,
            on_trace_ready=mindspore_profiler.tensorboard_trace_handler(folder, analyse_flag=False),
        )  # fmt: skip
        profile.start()
    return profile, folder


def _stop(profile: Any, folder: str, operator: Record) -> None:
    try:
        with _no_warnings():
            profile.stop()
        _read(Path(folder), operator)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read(folder: Path, operator: Record) -> None:
    # From the clock of MindSpore's times to that of the spans.
    shift = time.perf_counter() - time.time()
    files = list(folder.glob(_TIMES))
    if not files:
        raise RuntimeError("it has written no times, which is so if another profile is active")
    for line in (line for file in files for line in file.read_text().splitlines()):
        name, _, times = line.split(";", 2)
        for entry in times.split():
            began, milliseconds, _ = entry.split(",")
            begin = 1e-9 * int(began) + shift
            operator(name, begin, begin + 1e-3 * float(milliseconds))


T = TypeVar("T")


def _attempt(action: Callable[[], T]) -> Optional[T]:
    """Return the result of a part of the recording, which must not end a run: None, and a warning, if it fails."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001
        message = f"the profile has no operators of MindSpore: {type(error).__name__}: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return None


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
