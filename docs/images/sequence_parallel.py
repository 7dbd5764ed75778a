#!/usr/bin/env python3
"""Draw how two ranks exchange tokens for attention heads: docs/images/sequence_parallel.png.

python docs/images/sequence_parallel.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

RANKS, TOKENS, HEADS = 2, 6, 4
COLORS = ("#4c72b0", "#dd8452")


CAPTIONS = (
    "queries, keys and values:\nsome tokens, all heads", "attention:\nall tokens, some heads",
    "all other layers:\nsome tokens, all heads",
)  # fmt: skip


def draw_part(axes: Axes, corner: tuple[float, float], owned: tuple[range, range], color: str) -> None:
    """Draw the tokens (columns) and heads (rows) of a row of text; those that a rank has are filled."""
    (left, bottom), (tokens, heads) = corner, owned
    for token in range(TOKENS):
        for head in range(HEADS):
            shown = color if token in tokens and head in heads else "white"
            axes.add_patch(plt.Rectangle((left + token, bottom + head), 1, 1, facecolor=shown, edgecolor="gray"))


def main() -> None:
    figure, axes = plt.subplots(figsize=(9, 4.2))
    places = (0.0, 10.0, 20.0)
    for rank, color in enumerate(COLORS):
        bottom = 6.5 * (RANKS - 1 - rank)
        tokens = range(rank * TOKENS // RANKS, (rank + 1) * TOKENS // RANKS)
        heads = range(HEADS - (rank + 1) * HEADS // RANKS, HEADS - rank * HEADS // RANKS)
        mine, all_tokens = (tokens, range(HEADS)), (range(TOKENS), heads)
        for left, owned in zip(places, (mine, all_tokens, mine)):
            draw_part(axes, (left, bottom), owned, color)
        axes.text(-0.5, bottom + HEADS / 2, f"rank {rank}", ha="right", va="center", fontsize=11)
    for left in places[:2]:
        for begin, end in ((0, 0), (0, 1), (1, 0), (1, 1)):
            start, stop = (6.5 * (RANKS - 1 - rank) + HEADS / 2 for rank in (begin, end))
            axes.annotate(
                "",
                (left + 9.8, stop),
                (left + TOKENS + 0.2, start),
                arrowprops={"arrowstyle": "->", "color": "#555555"},
            )
        axes.text(left + 8, 10.9, "all-to-all", ha="center", fontsize=10)
    for left, caption in zip(places, CAPTIONS):
        axes.text(left + TOKENS / 2, -0.4, caption, ha="center", va="top", fontsize=10)
    axes.text(0, 10.9, "tokens \N{RIGHTWARDS ARROW}", fontsize=9)
    axes.set_xlim(-3.2, 26.5)
    axes.set_ylim(-2.6, 11.8)
    axes.set_aspect("equal")
    axes.axis("off")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=130, bbox_inches="tight")


if __name__ == "__main__":
    main()
