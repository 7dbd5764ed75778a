"""This module names the operations that some communication libraries do not have.

Process groups answer whether their library has one; meshes, resharding and the doctor ask.
"""

from __future__ import annotations

import enum


class Operation(enum.Enum):
    """An operation that some libraries do not have; the value is its name in messages."""

    MESSAGES = "messages between two ranks"
    ALL_TO_ALL = "all-to-all"
