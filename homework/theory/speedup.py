"""The laws of speed-up of Amdahl and Gustafson; ``scaling.py`` fits them to a measurement."""

from __future__ import annotations

# The laws of Amdahl and Gustafson say what N devices gain when a fraction p of the work can be divided among them.
# Amdahl keeps the work fixed: the global batch is constant, and each device gets less of it. Gustafson lets the work
# grow: the batch of each device is constant.
#
# Amdahl, "Validity of the single processor approach to achieving large scale computing capabilities", AFIPS 1967.
# Gustafson, "Reevaluating Amdahl's law", Communications of the ACM 31(5), 1988.


def amdahl_speedup(num_devices: float, fraction: float) -> float:
    """Return how many times faster the same work is done: ``1 / ((1 - p) + p / N)``.

    >>> amdahl_speedup(4, 1.0), amdahl_speedup(4, 0.0), round(amdahl_speedup(1_000_000, 0.9), 2)
    (4.0, 1.0, 10.0)
    """
    _check(num_devices, fraction)
    return 1 / ((1 - fraction) + fraction / num_devices)


def gustafson_speedup(num_devices: float, fraction: float) -> float:
    """Return how many times more work is done in the same time: ``(1 - p) + p N``.

    >>> gustafson_speedup(4, 1.0), gustafson_speedup(4, 0.0), gustafson_speedup(10, 0.5)
    (4.0, 1.0, 5.5)
    """
    _check(num_devices, fraction)
    return (1 - fraction) + fraction * num_devices


def parallel_fraction(num_devices: float, speedup: float, law: str = "amdahl") -> float:
    """Return the fraction for which a law gives this speed-up; above 1 if the speed-up exceeds the number of devices.

    >>> parallel_fraction(2, amdahl_speedup(2, 0.8)), parallel_fraction(8, gustafson_speedup(8, 0.75), "gustafson")
    (0.8, 0.75)
    """
    if num_devices <= 1 or speedup <= 0:
        raise ValueError(f"a fraction needs 2 devices or more and a speed-up, got {num_devices} and {speedup}")
    if law == "amdahl":
        return (1 - 1 / speedup) / (1 - 1 / num_devices)
    if law == "gustafson":
        return (speedup - 1) / (num_devices - 1)
    raise ValueError(f'law must be "amdahl" or "gustafson", got {law!r}')


def throughput(rate_of_one: float, num_devices: float, efficiency: float) -> float:
    """Return samples per second: the rate of one device, times the number of devices, times the efficiency.

    >>> throughput(400, 2, 0.95)
    760.0
    """
    return rate_of_one * num_devices * efficiency


def _check(num_devices: float, fraction: float) -> None:
    if num_devices < 1 or not 0 <= fraction <= 1:
        raise ValueError(f"expected 1 device or more and a fraction from 0 to 1, got {num_devices} and {fraction}")
