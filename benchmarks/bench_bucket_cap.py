"""How large buckets should be: measured once for a machine and a model, and remembered.

Goes in: the shapes of a model's gradients. Comes out: a ``bucket_cap_mb``, the same on every rank: the smallest
candidate that is nearly as fast as the fastest. (A smaller bucket is full sooner, and overlaps more.) It is kept in
``~/.cache/mindnlp_dp/bucket_caps.json``, or under ``XDG_CACHE_HOME``.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np

from .bucket import BucketLayout, pack_buckets
from .files import in_place_of
from .process_group import ProcessGroup

CANDIDATES_MB = (1.0, 2.0, 4.0, 8.0, 16.0, 25.0)
# So much of the model is exchanged in the trial: a slow wire takes a fraction of a second for it.
_TRIAL_BYTES = 16 << 20
_REPEATS = 3
_NEARLY = 1.05


def choose_bucket_cap_mb(
    shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], group: ProcessGroup, compression: Optional[str] = None
) -> float:
    """The remembered cap, or that of a trial of about a second, which is then remembered. A collective."""
    model = hashlib.sha256(repr((list(shapes), list(dtypes))).encode()).hexdigest()[:16]
    ranks = f"{group.world_size} ranks, {group.local_world_size} on a host"
    key = ", ".join([_machine(), group.backend, ranks, compression or "float32", model])
    known = group.call_on_main(lambda: _remembered().get(key), "reading remembered bucket sizes")
    if isinstance(known, (int, float)) and known > 0:
        return float(known)
    seconds = {cap: _trial(pack_buckets(shapes, dtypes, cap), group, compression) for cap in CANDIDATES_MB}
    fastest = min(seconds.values())
    chosen = min(cap for cap, taken in seconds.items() if taken <= _NEARLY * fastest)
    if group.is_main:
        _remember(key, chosen)
    return chosen


def _machine() -> str:
    model = platform.processor() or platform.machine()
    return f"{platform.node()}, {model}, {os.cpu_count()} cores"


def _trial(layouts: Sequence[BucketLayout], group: ProcessGroup, compression: Optional[str]) -> float:
    """Seconds a MiB that buckets of these layouts take, on the slowest rank."""
    import mindspore

    chosen: list[BucketLayout] = []
    for layout in layouts:
        if not chosen or sum(one.num_bytes for one in chosen) + layout.num_bytes <= _TRIAL_BYTES:
            chosen.append(layout)
    buckets = group.make_buckets(chosen, compression)
    rng = np.random.default_rng(0)
    gradients: dict[int, Any] = {
        slot.index: mindspore.Tensor(rng.standard_normal(slot.shape).astype(np.float32))
        for layout in chosen
        for slot in layout.slots
    }
    times = []
    for _ in range(_REPEATS + 1):
        group.barrier()
        began = time.perf_counter()
        for bucket in buckets:
            for slot in bucket.layout.slots:
                bucket.put(slot.index, gradients[slot.index], 1.0)
            bucket.start(1.0)
            bucket.wait()
            for slot in bucket.layout.slots:
                bucket.get(slot.index)
            bucket.release()
            bucket.clear()
        times.append(time.perf_counter() - began)
    # The first only warms up.
    slowest = group.all_reduce(np.array(times[1:]), op="max").tolist()
    return statistics.median(slowest) / sum(layout.num_bytes for layout in chosen)


def _file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mindnlp_dp" / "bucket_caps.json"


def _remembered() -> dict[str, Any]:
    """What is remembered; nothing when the file is missing or damaged."""
    try:
        content = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _remember(key: str, cap: float) -> None:
    """Or not, where nothing can be written: it is measured again, then."""
    try:
        with in_place_of(_file()) as temporary:
            temporary.write_text(json.dumps({**_remembered(), key: cap}, indent=1, sort_keys=True))
    except OSError:
        pass
