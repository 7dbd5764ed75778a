#!/usr/bin/env python3
"""Draw what each rank holds after each step of a ring all-reduce: docs/images/ring_all_reduce.svg, and .zh.svg.

python docs/images/ring_all_reduce.py

The messages are those of an actual run of homework/theory/all_reduce.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "homework"))

from theory.all_reduce import ring_all_reduce
from theory.endpoint import run_ranks

INK, LINE, SUM = "#333333", "#888888", "#000000"
COLORS = ("#d55e00", "#009e73", "#56b4e9", "#e69f00")
RANKS = len(COLORS)
CELL, GAP, LEFT, TOP = 27, 17, 62, 58
FRAME = RANKS * CELL + GAP

TEXTS = {
    "": {"phases": ("start", "scatter-reduce", "all-gather"), "rank": "rank {}", "chunk": "chunk"},
    ".zh": {"phases": ("开始", "归约散播", "全收集"), "rank": "rank {}", "chunk": "块"},
}

# Which ranks' values are in each chunk of each rank: States[rank][chunk] has a bit for every rank.
States = list[list[int]]


def states_of_a_run() -> list[States]:
    """Return what each rank holds at the start and after each of the 2(N-1) steps."""

    def run(endpoint):  # type: ignore[no-untyped-def]
        return ring_all_reduce(endpoint, np.full(RANKS, 1 << endpoint.rank, np.int64))

    results, endpoints = run_ranks(RANKS, run)
    states = [[[1 << rank] * RANKS for rank in range(RANKS)]]
    for step in range(2 * (RANKS - 1)):
        after = [list(chunks) for chunks in states[-1]]
        for message in (endpoint.sent[step] for endpoint in endpoints):
            chunk, bits = int(message.part.split()[1]), int(message.payload[0])
            # A scatter-reduce adds what is received; an all-gather keeps it.
            after[message.dst][chunk] = bits | (after[message.dst][chunk] if step < RANKS - 1 else 0)
        states.append(after)
    assert states[-1] == [result.tolist() for result in results], "the messages do not give the result of the run"
    return states


def text(x: float, y: float, content: str, size: int = 13, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{INK}">{content}</text>'


def cell(x: float, y: float, bits: int) -> str:
    """Draw a chunk: a stripe for every rank whose values are in it, and a thick frame around a complete sum."""
    inside = [rank for rank in range(RANKS) if bits >> rank & 1]
    width = CELL / len(inside)
    stripes = "".join(
        f'<rect x="{x + place * width:g}" y="{y:g}" width="{width:g}" height="{CELL}" fill="{COLORS[rank]}"/>'
        for place, rank in enumerate(inside)
    )
    stroke = f'stroke="{SUM}" stroke-width="2.5"' if len(inside) == RANKS else f'stroke="{LINE}"'
    return f'{stripes}<rect x="{x:g}" y="{y:g}" width="{CELL}" height="{CELL}" fill="none" {stroke}/>'


def drawing(words: dict[str, object]) -> str:
    parts = []
    states = states_of_a_run()
    start, scatter, gather = words["phases"]  # type: ignore[misc]
    titles = [(start, "")]
    titles += [(phase, f"{step + 1}") for phase in (scatter, gather) for step in range(RANKS - 1)]
    for number, (state, (phase, step)) in enumerate(zip(states, titles)):
        left = LEFT + number * FRAME
        middle = left + RANKS * CELL / 2
        parts += [text(middle, 20, phase), text(middle, 37, step)]
        for rank, chunks in enumerate(state):
            parts += [cell(left + place * CELL, TOP + rank * CELL, bits) for place, bits in enumerate(chunks)]
        bottom = TOP + RANKS * CELL + 16
        parts += [text(left + (place + 0.5) * CELL, bottom, str(place), 11) for place in range(RANKS)]
    for rank in range(RANKS):
        parts.append(text(LEFT - 8, TOP + (rank + 0.68) * CELL, str(words["rank"]).format(rank), anchor="end"))
    parts.append(text(LEFT - 8, TOP + RANKS * CELL + 16, str(words["chunk"]), 11, "end"))
    width, height = LEFT + len(states) * FRAME, TOP + RANKS * CELL + 28
    body = "".join(f"{part}\n" for part in parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="DejaVu Sans, Noto Sans CJK SC, sans-serif">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}</svg>\n'
    )


def main() -> None:
    for suffix, words in TEXTS.items():
        Path(__file__).with_suffix(f"{suffix}.svg").write_text(drawing(words), encoding="utf-8")


if __name__ == "__main__":
    main()
