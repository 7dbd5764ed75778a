"""This module prints the messages of an algorithm, step by step, for ``algorithms.py --explain``.

The text comes from an actual run, in which rank r contributes 2 to the power of r, so that every sum shows which ranks
it contains.
"""

from __future__ import annotations

import numpy as np

from theory.all_reduce import ALGORITHMS
from theory.costs import traffic
from theory.endpoint import Message, run_ranks

_INTRODUCTIONS = {
    "reduce_broadcast": "Every rank sends its array to rank 0, which adds them up and sends everyone the sum.",
    "data_parallel": "Rank 0 owns the model: it adds up all gradients, updates, and sends everyone the new parameters.",
    "parameter_server": "Workers push their gradients to the server, rank 0, and pull the new parameters from it.",
    "ring": "The array is split into {n} chunks. Every rank sends to its right neighbor only, all of them at once.",
}
_FORMULAS = {"reduce_broadcast": "N-1", "data_parallel": "N-1", "parameter_server": "N-1", "ring": "2(N-1)/N"}


def explain(algorithm: str, world_size: int) -> str:
    """Return every message of one all-reduce over ``world_size`` ranks, 2 or more, as text."""

    def run(endpoint):  # type: ignore[no-untyped-def]
        return ALGORITHMS[algorithm](endpoint, np.full(world_size, 1 << endpoint.rank, np.int64))

    results, endpoints = run_ranks(world_size, run)
    lines = [f"{algorithm}, {world_size} ranks. {_INTRODUCTIONS[algorithm].format(n=world_size)}"]
    lines.append("In brackets: the ranks whose arrays are summed in the message.")
    messages = [message for endpoint in endpoints for message in endpoint.sent]
    for phase in _in_order(messages):
        lines += ["", phase]
        lines += [_line(message) for message in messages if message.phase == phase]
    whole = {_contents(result) for result in results}
    lines += ["", f"Now every rank holds the sum of {' '.join(sorted(whole))}."]
    array_bytes = results[0].nbytes
    lines += [
        f"rank {endpoint.rank} sent {_messages(endpoint.messages_sent)}, {endpoint.bytes_sent / array_bytes:.2f} times "
        f"the array, and received {endpoint.bytes_received / array_bytes:.2f} times the array"
        for endpoint in endpoints
    ]
    name, times = _FORMULAS[algorithm], traffic(algorithm, 0, world_size, world_size, 1).num_bytes / world_size
    lines.append(f"formula: rank 0 sends {name} = {times:.2f} times the array, with N = {world_size}")
    return "\n".join(lines)


def _messages(count: int) -> str:
    return f"{count} message{'' if count == 1 else 's'}"


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
