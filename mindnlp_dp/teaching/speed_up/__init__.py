"""How training scales: the laws, a measurement of them here, and what they predict."""

from .laws import amdahl_speedup, gustafson_speedup, parallel_fraction, throughput

__all__ = ["amdahl_speedup", "gustafson_speedup", "parallel_fraction", "throughput"]
