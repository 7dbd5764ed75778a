"""Defines the content of a run's report.json, which training writes and ``mindnlp-dp report`` reads."""

from __future__ import annotations

from typing import Any, TypedDict

REPORT_FILE = "report.json"


class _Needed(TypedDict):
    """Lists the keys that a report must have."""

    world_size: int
    backend: str
    train_samples_per_second: float
    eval_accuracy: float
    eval_loss: float
    replica_digest: str
    steps: int
    history: list[dict[str, Any]]


class RunReport(_Needed, total=False):
    """Describes the report of one run; the keys below may be missing, for example in a run of another version.

    ``gradient_sync_share`` is the fraction of the training time spent on the gradient exchange, ``history`` the lines
    of the log, each with its ``step``, ``confusions`` the classes most often taken for each other, ``config`` the
    settings, ``pipeline`` the passes of an update through stages if they were traced, and ``plan`` the predicted and
    the measured seconds of an update if the run followed a plan.
    """

    gradient_sync_share: float
    replicas_in_sync: bool
    replica_digests: list[str]
    train_seconds: float
    train_loss: float
    global_batch_size: int
    train_samples: int
    eval_samples: int
    num_labels: int
    confusions: list[dict[str, Any]]
    command: str
    machine: str
    config: dict[str, Any]
    pipeline: dict[str, Any]
    plan: dict[str, float]


NEEDED = tuple(_Needed.__annotations__)
