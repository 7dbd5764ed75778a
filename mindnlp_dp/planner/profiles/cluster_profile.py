"""Describes the hardware that a plan is for, and prices collectives on it.

:func:`load_cluster` reads a preset or a YAML file; the planner and the calibration use its :class:`Cluster`, in bytes
and seconds.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Union

import numpy as np
import yaml

_GIB = 2.0**30


@dataclass(frozen=True)
class Link:
    """Describes a link between devices: ``alpha`` seconds per message, ``beta`` seconds per byte."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class Cluster:
    """Describes a cluster of identical hosts.

    Attributes:
        memory: memory of a device in bytes.
        flops: peak FLOP/s of a device.
        efficiency: fraction of the peak that matrix products reach.
        memory_bandwidth: bytes per second between a device and its memory.
        inside: the link of a device to other devices of its host.
        between: the link of a host to other hosts, which its devices share.
        call: seconds of overhead per operator call in the forward pass.
        score_rate: attention scores per second, softmax included.
        draw_rate: random numbers per second that dropout draws.
        gradient_rate: parameter gradients per second that are computed and accumulated.
        update_rate: parameters per second that an optimizer updates.
        precision: "mixed" (layers compute with 2 bytes for a value) or "float32".
        device: "Ascend", "GPU" or "CPU": what messages and collectives its library has.
        source: where the numbers come from.
    """

    name: str
    num_hosts: int
    devices_per_host: int
    memory: float
    flops: float
    efficiency: float
    memory_bandwidth: float
    inside: Link
    between: Link
    call: float = 0.0
    score_rate: float = math.inf
    draw_rate: float = math.inf
    gradient_rate: float = math.inf
    update_rate: float = math.inf
    precision: str = "mixed"
    device: str = "CPU"
    source: str = ""

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

    @property
    def bytes_per_value(self) -> int:
        return VALUE_BYTES[self.precision]

    def link(self, size: int, stride: int) -> Link:
        """Return the link for groups of ``size`` devices at distance ``stride`` that all communicate at the same time.

        Groups are consecutive, so some span two hosts unless a host's devices are a multiple of ``size * stride``.
        If groups span hosts, all groups on a host share the bandwidth of its link.
        """
        if size == 1 or self.devices_per_host % (size * stride) == 0:
            return self.inside
        groups = min(stride, self.devices_per_host)
        return Link(self.between.alpha, self.between.beta * groups)

    def resized(self, num_devices: int) -> Cluster:
        """Return this cluster with ``num_devices`` devices: several full hosts, or a part of one host."""
        per_host = min(num_devices, self.devices_per_host)
        if num_devices < 1 or num_devices % per_host:
            raise ValueError(
                f"{num_devices} devices do not fill the hosts of {self.name}, which has {self.devices_per_host} in each"
            )
        return replace(self, num_hosts=num_devices // per_host, devices_per_host=per_host)


# Times of ring collectives among n devices for b bytes in total, as in Zheng et al., Alpa (2022).


def all_reduce(n: int, b: float, link: Link) -> float:
    """Return the seconds of a ring all-reduce of ``b`` bytes among ``n`` devices."""
    return link.alpha + 2 * link.beta * (n - 1) / n * b if n > 1 and b else 0.0


def all_gather(n: int, b: float, link: Link) -> float:
    """Return the seconds of a ring all-gather of ``b`` bytes in total among ``n`` devices."""
    return link.alpha + link.beta * (n - 1) / n * b if n > 1 and b else 0.0


reduce_scatter = all_gather


def all_to_all(n: int, b: float, link: Link) -> float:
    """Return the seconds of an all-to-all of b bytes in total; a message takes n / 2 hops of the ring."""
    return link.alpha + link.beta * (n - 1) / n / n * b * (n / 2) if n > 1 and b else 0.0


# Numbers from vendors' data sheets. The efficiency is what training of large transformers is reported to reach, and the
# call time is what frameworks need to start an operator. None of these was measured here.
_PRESETS: dict[str, dict[str, Any]] = {
    "ascend-910b-8": {
        "hosts": 1, "devices_per_host": 8, "memory_gib": 64, "tflops": 376, "efficiency": 0.4,
        "memory_bandwidth_gbs": 1600, "inside": {"latency_us": 20, "bandwidth_gbs": 196},
        "between": {"latency_us": 40, "bandwidth_gbs": 200}, "call_us": 5, "precision": "mixed", "device": "Ascend",
    },
    "a100-80gb-8": {
        "hosts": 1, "devices_per_host": 8, "memory_gib": 80, "tflops": 312, "efficiency": 0.5,
        "memory_bandwidth_gbs": 2039, "inside": {"latency_us": 10, "bandwidth_gbs": 300},
        "between": {"latency_us": 20, "bandwidth_gbs": 200}, "call_us": 4, "precision": "mixed", "device": "GPU",
    },
    "v100-16gb-8": {
        "hosts": 1, "devices_per_host": 8, "memory_gib": 16, "tflops": 125, "efficiency": 0.35,
        "memory_bandwidth_gbs": 900, "inside": {"latency_us": 10, "bandwidth_gbs": 150},
        "between": {"latency_us": 25, "bandwidth_gbs": 3}, "call_us": 5, "precision": "mixed", "device": "GPU",
    },
}  # fmt: skip

_KEYS = {
    "hosts", "devices_per_host", "memory_gib", "tflops", "efficiency", "memory_bandwidth_gbs", "inside", "between",
    "call_us", "gscores", "gdraws", "gradient_gparams", "update_gparams", "precision", "device", "preset", "name",
    "source",
}  # fmt: skip

# Bytes of a value in a forward or backward pass. With mixed precision parameters and gradients remain float32.
VALUE_BYTES = {"mixed": 2, "float32": 4}

# No property of a machine is above this number or below its reciprocal.
_HUGE = 1e15

_LINK_KEYS = {"latency_us", "bandwidth_gbs"}


def load_cluster(given: Union[str, Path, Mapping[str, Any]]) -> Cluster:
    """Load a cluster from the name of a preset, a YAML file or its content; a file may override keys of a preset.

    Raises:
        ValueError: A key is unknown or missing, or its value is invalid; the message is one sentence with the key.
    """
    if isinstance(given, Mapping):
        return _from_keys(dict(given), str(given.get("name", "cluster")))
    if str(given) in _PRESETS:
        return _from_keys({"preset": str(given)}, str(given))
    if str(given) == "this-machine":
        return _from_keys(this_machine(), str(given))
    path = Path(given)
    if not path.is_file():
        raise ValueError(f"cluster {str(given)!r} is neither a file nor one of {', '.join(_PRESETS)}, this-machine")
    return _from_keys(read_yaml(path, "cluster"), path.stem)


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """Return the mapping in a YAML file; raise ValueError if the file holds anything else."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{what} {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{what} {path} must have keys and values, got {type(content).__name__}")
    return content


def _from_keys(keys: dict[str, Any], name: str) -> Cluster:
    preset = keys.pop("preset", None)
    if preset is not None:
        if not isinstance(preset, str) or preset not in _PRESETS:
            raise ValueError(f"cluster key preset must be one of {', '.join(_PRESETS)}, got {preset!r}")
        keys = {**_PRESETS[preset], "source": "data sheets; not measured here", **keys}
    unknown = sorted(set(keys) - _KEYS)
    if unknown:
        raise ValueError(f"cluster key {unknown[0]!r} is unknown; there are {', '.join(sorted(_KEYS))}")

    def number(key: str, default: Any = None, *, is_integer: bool = False, most: float = math.inf) -> float:
        return _number(keys, key, default, is_integer=is_integer, most=most)

    hosts = int(number("hosts", 1, is_integer=True))
    memory_bandwidth = 1e9 * number("memory_bandwidth_gbs")
    precision = keys.get("precision", "mixed")
    if precision not in VALUE_BYTES:
        raise ValueError(f"cluster key precision must be mixed or float32, got {precision!r}")
    device = keys.get("device", "CPU")
    if device not in ("Ascend", "GPU", "CPU"):
        raise ValueError(f"cluster key device must be Ascend, GPU or CPU, got {device!r}")
    inside = _link(keys, "inside", required=True)
    bytes_per_value = VALUE_BYTES[precision]
    # Adam reads and writes weights, gradients and two moments in float32: 28 bytes per parameter.
    update_rate = 1e9 * number("update_gparams", memory_bandwidth / 28e9)
    # A gradient is written, read and added: three memory accesses.
    gradient_rate = 1e9 * number("gradient_gparams", memory_bandwidth / (3e9 * bytes_per_value))
    # A dropout mask is drawn and stored: two memory accesses.
    draw_rate = 1e9 * number("gdraws", memory_bandwidth / (2e9 * bytes_per_value))
    # Scores pass through memory ten times: product, scale, mask, softmax, dropout.
    score_rate = 1e9 * number("gscores", memory_bandwidth / (10e9 * bytes_per_value))
    return Cluster(
        name=str(keys.get("name", name)), num_hosts=hosts,
        devices_per_host=int(number("devices_per_host", is_integer=True)), memory=_GIB * number("memory_gib"),
        flops=1e12 * number("tflops"), efficiency=number("efficiency", most=1.0), memory_bandwidth=memory_bandwidth,
        inside=inside, between=_link(keys, "between", required=hosts > 1) or inside,
        call=1e-6 * _number(keys, "call_us", 0.0, least=0.0), score_rate=score_rate, draw_rate=draw_rate,
        gradient_rate=gradient_rate, update_rate=update_rate, precision=precision,
        device=device, source=str(keys.get("source", "")),
    )  # fmt: skip


def _link(keys: Mapping[str, Any], key: str, *, required: bool) -> Any:
    found = keys.get(key)
    if found is None and not required:
        return None
    if not isinstance(found, Mapping) or set(found) != _LINK_KEYS:
        raise ValueError(f"cluster key {key} must have the keys latency_us and bandwidth_gbs, got {found!r}")
    alpha = 1e-6 * _number(found, "latency_us", least=0.0, within=f"{key}.")
    return Link(alpha, 1 / (1e9 * _number(found, "bandwidth_gbs", within=f"{key}.")))


def _number(
    keys: Mapping[str, Any], key: str, default: Any = None, *, is_integer: bool = False, most: float = math.inf,
    least: float = -math.inf, within: str = "",
) -> float:  # fmt: skip
    value = keys.get(key, default)
    if value is None:
        raise ValueError(f"cluster key {within}{key} is missing")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _HUGE
    in_range = is_number and (value > 1 / _HUGE or value >= least > -math.inf) and value <= most
    if not in_range or (is_integer and value != int(value)):
        kind = "a whole number" if is_integer else "a number"
        bounds = f"{'from' if least == 0 else 'above'} 0" + (f" and at most {most:g}" if most < math.inf else "")
        raise ValueError(f"cluster key {within}{key} must be {kind} {bounds}, got {value!r}")
    return float(value)


_SIZE = 768

_VALUES = 1 << 23

# Microseconds per operator call, and billions per second of attention scores and of dropout's random numbers, with
# MindSpore 2.8 on one core of an AMD EPYC.
_CALL_US, _GSCORES, _GDRAWS = 90, 0.085, 0.5


# For a first plan without MindSpore: this machine as a cluster with one device per core, estimated by timing NumPy
# for a second. Products and memory are timed with all cores busy; the overhead of MindSpore's operators is taken from
# the machine of docs/benchmarks.md. mindnlp-dp plan --measure measures all of it.


def this_machine() -> dict[str, Any]:
    """Return the keys of a cluster (:func:`~mindnlp_dp.planner.profiles.cluster_profile.load_cluster`)."""
    from threadpoolctl import threadpool_limits

    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with threadpool_limits(1), ThreadPoolExecutor(num_cores) as pool:
        products = _slowest(pool, num_cores, _product)
        copies = _slowest(pool, num_cores, _copy)
    bandwidth = 8 * _VALUES / copies
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / num_cores
    return {
        "name": "this machine, one device per core", "hosts": 1, "devices_per_host": num_cores,
        "memory_gib": memory / 2**30, "tflops": 2e-12 * _SIZE**3 / products, "efficiency": 0.8,
        "memory_bandwidth_gbs": 1e-9 * bandwidth, "gscores": _GSCORES, "gdraws": _GDRAWS, "call_us": _CALL_US,
        "precision": "float32",
        # A message is written by one rank and read by another.
        "inside": {"latency_us": 25, "bandwidth_gbs": 0.5e-9 * bandwidth},
        "source": "timed for a second with NumPy; --measure FILE measures with MindSpore",
    }  # fmt: skip


def _slowest(pool: ThreadPoolExecutor, num: int, function: Callable[[], float]) -> float:
    """Return the slowest core's time with all cores busy, the best of three rounds."""
    return min(max(pool.map(lambda _: function(), range(num))) for _ in range(3))


def _product() -> float:
    a = np.ones((_SIZE, _SIZE), np.float32)
    a @ a
    began = time.perf_counter()
    a @ a
    return time.perf_counter() - began


def _copy() -> float:
    a = np.ones(_VALUES, np.float32)
    b = a.copy()
    began = time.perf_counter()
    np.copyto(b, a)
    return time.perf_counter() - began
