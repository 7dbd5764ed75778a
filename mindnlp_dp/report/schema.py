"""What a run leaves in its report.json: written by whoever trains, read by ``mindnlp-dp report``."""

from __future__ import annotations

from typing import Any, TypedDict

REPORT_FILE = "report.json"


class _Needed(TypedDict):
    """Without these there is nothing to show."""

    world_size: int
    backend: str
    train_samples_per_second: float
    eval_accuracy: float
    eval_loss: float
    replica_digest: str
    steps: int
    history: list[dict[str, Any]]


class RunReport(_Needed, total=False):
    """One run. What is not needed may be missing, in a run of another version.

    ``gradient_sync_share`` is the share of the training time that went into the exchange of gradients, ``history`` the
    lines of the log, each with its ``step``, ``confusions`` the classes that were most often taken for each other,
    ``config`` the settings, ``pipeline`` the passes of an update through stages, where they were traced, and ``plan``
    the seconds of an update that were predicted and measured, where the run followed a plan.
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
