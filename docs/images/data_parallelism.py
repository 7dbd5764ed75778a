#!/usr/bin/env python3
"""Draw an update of data-parallel training in four frames: docs/images/data_parallelism.svg, and .zh.svg in Chinese.

python docs/images/data_parallelism.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

INK, LINE = "#333333", "#888888"
OLD_WEIGHTS, NEW_WEIGHTS, MEAN = "#9ecae1", "#2171b5", "#c59d00"
# The samples and gradients of each rank.
RANKS = ("#d55e00", "#009e73")
FRAME_WIDTH, FRAME_HEIGHT = 440, 262
CELL, NUM_CELLS = 22, 5
WIDTH = CELL * NUM_CELLS
# The left edge of a rank's strips within its frame, and the rows of strips.
LEFTS = (100, 304)
BATCH, SAMPLES, WEIGHTS, GRADIENTS = 52, 104, 158, 212

TEXTS: dict[str, dict[str, Any]] = {
    "": {
        "titles": (
            "1  Each rank takes its half of the batch",
            "2  Forward and backward, on its half",
            "3  All-reduce: the mean of all gradients",
            "4  The same step, the same weights again",
        ),
        "rank": "rank {}",
        "batch": "batch",
        "rows": ("samples", "weights", "gradients"),
        "all-reduce": "mean",
    },
    ".zh": {
        "titles": (
            "1  每个 rank 取批次的一半",
            "2  各自对这一半做前向和反向计算",
            "3  All-reduce 求所有梯度的平均",
            "4  更新相同且权重再次相同",
        ),
        "rank": "rank {}",
        "batch": "批次",
        "rows": ("样本", "权重", "梯度"),
        "all-reduce": "平均",
    },
}


def text(x: float, y: float, content: str, size: int = 14, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{INK}">{content}</text>'


def strip(left: float, top: float, colors: list[str]) -> str:
    """Draw cells side by side; "none" is an empty one."""
    return "".join(
        f'<rect x="{left + place * CELL}" y="{top}" width="{CELL}" height="{CELL}" fill="{color}" stroke="{LINE}"/>'
        for place, color in enumerate(colors)
    )


def arrow(x1: float, y1: float, x2: float, y2: float, both: bool = False) -> str:
    start = ' marker-start="url(#head)"' if both else ""
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="1.6" '
        f'marker-end="url(#head)"{start}/>'
    )


def frame(number: int, words: dict[str, Any]) -> str:
    """Draw one frame, from its own origin: the state of both ranks, and arrows for what happens in it."""
    size = f'width="{FRAME_WIDTH - 12}" height="{FRAME_HEIGHT - 12}"'
    parts = [
        f'<rect x="6" y="6" {size} rx="6" fill="white" stroke="#cccccc"/>',
        f'<g font-weight="bold">{text(20, 32, words["titles"][number - 1], 16, "start")}</g>',
    ]
    gap = (LEFTS[0] + WIDTH + LEFTS[1]) / 2
    for name, top in zip(words["rows"], (SAMPLES, WEIGHTS, GRADIENTS)):
        parts.append(text(LEFTS[0] - 10, top + 16, name, anchor="end"))
    for rank, (left, color) in enumerate(zip(LEFTS, RANKS)):
        middle = left + WIDTH / 2
        weights = NEW_WEIGHTS if number == 4 else OLD_WEIGHTS
        gradients = {1: "none", 2: color, 3: MEAN, 4: MEAN}[number]
        parts.append(strip(left, SAMPLES, [color] * NUM_CELLS))
        parts.append(strip(left, WEIGHTS, [weights] * NUM_CELLS))
        parts.append(strip(left, GRADIENTS, [gradients] * NUM_CELLS))
        if number == 1:
            half = gap + (rank - 0.5) * WIDTH
            parts.append(strip(half - WIDTH / 2, BATCH, [color] * NUM_CELLS))
            parts.append(arrow(half, BATCH + CELL + 2, middle, SAMPLES - 6))
            parts.append(text(middle + (2 * rank - 1) * 34, SAMPLES - 8, words["rank"].format(rank)))
        else:
            parts.append(text(middle, BATCH + 34, words["rank"].format(rank)))
        if number == 2:
            parts.append(arrow(middle, SAMPLES + CELL + 3, middle, WEIGHTS - 5))
            parts.append(arrow(middle, WEIGHTS + CELL + 3, middle, GRADIENTS - 5))
        if number == 4:
            parts.append(arrow(middle, GRADIENTS - 3, middle, WEIGHTS + CELL + 6))
    if number == 1:
        parts.append(text(gap - WIDTH - 10, BATCH + 16, words["batch"], anchor="end"))
    if number == 3:
        parts.append(arrow(gap - 40, GRADIENTS + CELL / 2, gap + 40, GRADIENTS + CELL / 2, both=True))
        parts.append(text(gap, GRADIENTS - 4, words["all-reduce"]))
    if number in (1, 4):
        parts.append(text(gap, WEIGHTS + 18, "=", 20))
    return "".join(f"{part}\n" for part in parts)


def drawing(words: dict[str, Any]) -> str:
    frames = ""
    for place in range(4):
        corner = f"{place % 2 * FRAME_WIDTH} {place // 2 * FRAME_HEIGHT}"
        frames += f'<g transform="translate({corner})">\n{frame(place + 1, words)}</g>\n'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * FRAME_WIDTH} {2 * FRAME_HEIGHT}" '
        f'width="{2 * FRAME_WIDTH}" height="{2 * FRAME_HEIGHT}" '
        f'font-family="DejaVu Sans, Noto Sans CJK SC, sans-serif">\n'
        f'<defs><marker id="head" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0 10 5 0 10z" fill="{INK}"/></marker></defs>\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{frames}</svg>\n'
    )


def main() -> None:
    for suffix, words in TEXTS.items():
        Path(__file__).with_suffix(f"{suffix}.svg").write_text(drawing(words), encoding="utf-8")


if __name__ == "__main__":
    main()
