"""How training scales: the laws of speed-up, a measurement on this machine, and the resulting predictions."""

from mindnlp_dp.commands.scaling.prediction import amdahl_speedup, gustafson_speedup, parallel_fraction, throughput

__all__ = ["amdahl_speedup", "gustafson_speedup", "parallel_fraction", "throughput"]
