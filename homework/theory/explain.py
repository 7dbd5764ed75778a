"""This module prints the messages of an algorithm, step by step, for ``algorithms.py --explain``.

The text comes from an actual run, in which rank r contributes 2 to the power of r, so that every sum shows which ranks
it contains.
"""

from __future__ import annotations

import numpy as np

from theory.all_reduce import ALGORITHMS
from theory.endpoint import Message, run_ranks

_INTRODUCTIONS = {
    "reduce_broadcast": "Every rank sends its array to rank 0, which adds them up and sends everyone the sum.",
    "data_parallel": "Rank 0 owns the model: it adds up all gradients, updates, and sends everyone the new parameters.",
    "parameter_server": "Workers push their gradients to the server, rank 0, and pull the new parameters from it.",
    "ring": "The array is split into {n} chunks. Every rank sends to its right neighbor only, all of them at once.",
}


def explain(algorithm: str, world_size: int) -> str:
    """Return every message of one all-reduce over ``world_size`` ranks, 2 or more, as text."""

    def run(endpoint):  # type: ignore[no-untyped-def]
        return ALGORITHMS[algorithm](endpoint, np.full(world_size, 1 << endpoint.rank, np.int64))

    results, endpoints = run_ranks(world_size, run)
    lines = [f"{algorithm}, {world_size} ranks. {_INTRODUCTIONS[algorithm].format(n=world_size)}"]
    lines.append("In brackets: the ranks whose numbers a message holds the sum of.")
    messages = [message for endpoint in endpoints for message in endpoint.sent]
    for phase in _in_order(messages):
        lines += ["", phase]
        lines += [_line(message) for message in messages if message.phase == phase]
    whole = {_contents(result) for result in results}
    lines += ["", f"Now every rank holds the sum of {' '.join(sorted(whole))}."]
    sent = [(endpoint.messages_sent, endpoint.bytes_sent // 8) for endpoint in endpoints]
    lines += [
        f"rank {rank} sent {count} messages, {items / world_size:.2f} times the array"
        for rank, (count, items) in enumerate(sent)
    ]
    return "\n".join(lines)


def _in_order(messages: list[Message]) -> list[str]:
    """Return the phases in the order in which they happen."""
    return list(dict.fromkeys(message.phase for message in messages if message.src != 0)) + [
        phase
        for phase in dict.fromkeys(message.phase for message in messages if message.src == 0)
        if not any(message.phase == phase for message in messages if message.src != 0)
    ]


def _line(message: Message) -> str:
    return f"  rank {message.src} ── {message.part} {_contents(message.payload)} ──▶ rank {message.dst}"


def _contents(array: np.ndarray) -> str:
    """Return the ranks whose contributions are in the sum, such as ``[0+2]``."""
    (bits,) = {int(value) for value in array}
    return f"[{'+'.join(str(rank) for rank in range(bits.bit_length()) if bits >> rank & 1)}]"
