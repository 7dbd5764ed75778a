"""Measures this machine and fits a cluster to it: the speed of products, memory, calls, updates and links.

``mindnlp-dp plan --measure`` calls it. It fits the times of training steps of small models, and of collectives. An
update of a model takes

    FLOPs / rate + values moved / bandwidth + attention scores / rate + random numbers / rate
    + calls x seconds per call + gradients / rate + parameters / rate,

each counted by the planner's own graph of the model. The seven coefficients, none below 0, minimize the sum of squared
relative errors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mindnlp_dp.launch.run import run_measurement
from mindnlp_dp.planner.cost_model.stage_costs import StageCosts, StageParallelism
from mindnlp_dp.planner.profiles.cluster_profile import Cluster, Link
from mindnlp_dp.planner.profiles.model_profiles import load_model
from mindnlp_dp.runtime.atomic_write import atomic_write

# Terms of the fit, in the order of the formula above.
TERMS = ("flops", "values", "scores", "draws", "calls", "gradients", "parameters")


def measure_cluster(num_ranks: int) -> dict[str, Any]:
    """Measure this machine with ``num_ranks`` ranks, in a minute or two; return the keys of a cluster that fit it.

    Raises:
        LaunchError: The job could not be started.
        RuntimeError: The job failed.
    """
    measured = run_measurement(["-m", "mindnlp_dp.commands.calibrate.rates_job"], num_ranks)
    return fit_cluster(measured, memory=_memory() / num_ranks)


def measure_to(path: Path, num_ranks: int) -> dict[str, Any]:
    """Measure this machine, write its keys to a YAML file for ``--cluster``, and return them."""
    print(f"measuring this machine with {num_ranks} ranks, which takes a minute or two ...", flush=True)
    keys = measure_cluster(num_ranks)
    with atomic_write(path) as temporary:
        temporary.write_text(yaml.safe_dump(keys, sort_keys=False), encoding="utf-8")
    print(f"written to {path}\n")
    return keys


def fit_cluster(measured: Mapping[str, Any], memory: float) -> dict[str, Any]:
    """Return the keys of a cluster, as ``load_cluster`` reads them, that fit the job's measurements.

    Args:
        memory: memory of a rank in bytes.
    """
    from mindnlp_dp.commands.calibrate.rates_job import SHAPES

    steps = measured["steps"]
    counts = {name: step_terms(model_keys(shape), rows=shape[5]) for name, shape in SHAPES.items()}
    rows = np.array([_times(counts[s["name"]], s["micro_batches"]) for s in steps])
    seconds = np.array([s["seconds"] for s in steps])
    each = fit_terms(rows, seconds)
    errors = {f"{s['name']} x{s['micro_batches']}": round(float(e), 3)
              for s, e in zip(steps, rows @ each / seconds - 1)}  # fmt: skip
    flop, value, score, draw, call, gradient, parameter = (max(float(x), 1e-15) for x in each)
    alpha, beta = fit_link(measured["all_reduces"], measured["world_size"])
    keys: dict[str, Any] = {
        "name": f"this machine, {measured['world_size']} ranks", "hosts": 1,
        "devices_per_host": measured["world_size"], "memory_gib": memory / 2**30, "tflops": 1e-12 / flop,
        "efficiency": 1.0, "memory_bandwidth_gbs": 4e-9 / value, "gscores": 1e-9 / score, "gdraws": 1e-9 / draw,
        "call_us": 1e6 * call, "gradient_gparams": 1e-9 / gradient, "update_gparams": 1e-9 / parameter,
        "precision": "float32", "device": measured.get("device", "CPU"),
        "inside": {"latency_us": 1e6 * alpha, "bandwidth_gbs": 1e-9 / beta},
    }  # fmt: skip
    keys = _rounded(keys)
    keys["source"] = f"measured; relative errors of the fit from {min(errors.values())} to {max(errors.values())}"
    return keys


def model_keys(shape: Sequence[Any]) -> dict[str, Any]:
    """Return the configuration of one of the job's models."""
    from mindnlp_dp.commands.calibrate.rates_job import HEADS

    hidden, layers, inner, words, length, _, guesses, dropout = shape
    return {
        "model_type": "bert", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "intermediate_size": inner, "vocab_size": words, "max_position_embeddings": length, "num_labels": 2,
        "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout,
        "architectures": ["BertForMaskedLM" if guesses else "BertForSequenceClassification"],
    }  # fmt: skip


def step_terms(keys: Mapping[str, Any], rows: int) -> np.ndarray:
    """Return (7,) :data:`TERMS` of a micro-batch, as the planner counts them; the last is the model's parameters."""
    model = load_model(keys)
    terms = []
    for term in TERMS[:-1]:
        unit = _unit_cluster(term)
        times = StageCosts(model, unit, StageParallelism(), [0]).times(0, 0, rows)
        terms.append(float(times.total))
    return np.array([*terms, model.parameters])


def fit_terms(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return (7,) seconds per unit of each term, none below 0, by relative least squares."""
    from scipy.optimize import nnls

    scale = rows.max(axis=0)
    fitted, _ = nnls(rows / scale / seconds[:, None], np.ones(len(seconds)))
    return fitted / scale


def fit_link(measured: Sequence[Mapping[str, float]], num_ranks: int) -> tuple[float, float]:
    """Return (alpha, beta) of all-reduces: seconds = alpha + 2 beta (n - 1) / n bytes, by relative least squares."""
    from scipy.optimize import nnls

    if not measured:
        return 0.0, 1e-12
    seconds = np.array([m["seconds"] for m in measured])
    sent = 2 * (num_ranks - 1) / num_ranks * np.array([m["bytes"] for m in measured])
    rows = np.stack([np.ones(len(sent)), sent], axis=1)
    scale = rows.max(axis=0)
    alpha, beta = nnls(rows / scale / seconds[:, None], np.ones(len(seconds)))[0] / scale
    return float(alpha), max(float(beta), 1e-15)


def _times(terms: np.ndarray, num_micro_batches: int) -> np.ndarray:
    return terms * np.array([num_micro_batches] * 6 + [1])


def _unit_cluster(term: str) -> Cluster:
    """Return a cluster on which one unit of this term takes a second, and all other terms take no time."""
    link = Link(0.0, 0.0)
    rate = {name: 1.0 if name == term else np.inf for name in TERMS}
    return Cluster(
        "unit", 1, 1, np.inf, rate["flops"], 1.0, 4 * rate["values"], link, link, 1 / rate["calls"], rate["scores"],
        rate["draws"],
        rate["gradients"],
        precision="float32",
    )  # fmt: skip


def _memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
