# SPDX-License-Identifier: Apache-2.0
"""Draw the picture of README.md from docs/results: the TTFT speed-up over stock vLLM by prompt length.

    python -m benchmarks.pictures [--results docs/results/limit.jsonl] [--out docs/ttft.png]

Reads figures named ``widened 8B, N tokens: TTFT, stock's ÷ ours``.
"""

import io
import re
from collections.abc import Iterable
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.figures import Figure, read_figures

OURS = r"widened 8B, ([\d,]+) tokens: TTFT, stock's ÷ ours"
LEAST_TOKENS = 8192
"""Shortest prompt in the picture. Shorter prompts run dense."""
LENGTHS_RATIO = 1.9
"""Smallest ratio of neighbouring prompt lengths: one bar for each doubling."""
STOCK_COLOR, OUR_COLOR = "#6e7781", "#0969da"
"""Colours that contrast with white and black, because GitHub shows pictures on either."""


def select_figures(figures: Iterable[Figure]) -> dict[int, Figure]:
    """Return the figures to draw by prompt length: the longest, and each shorter one that is far enough from the next.

    Raises BadParameter without any.
    """
    matches = ((re.fullmatch(OURS, figure.name), figure) for figure in figures)
    lengths = {int(match[1].replace(",", "")): figure for match, figure in matches if match}
    chosen: list[int] = []
    for tokens in sorted(lengths, reverse=True):
        if tokens >= LEAST_TOKENS and (not chosen or chosen[-1] >= LENGTHS_RATIO * tokens):
            chosen.append(tokens)
    if not chosen:
        raise typer.BadParameter(f"given no figure {OURS!r}, expected one for each prompt length")
    return {tokens: lengths[tokens] for tokens in reversed(chosen)}


def two_decimals(value: float) -> str:
    """Round as tables do: 1.095, which has no exact binary float, becomes 1.10."""
    return str(Decimal(str(value)).quantize(Decimal("0.01"), ROUND_HALF_UP))


def draw(figures: dict[int, Figure], path: Path) -> None:
    """Draw a bar of the speed-up for each prompt length, with 64 colours, which take a quarter of the bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    figure, axis = pyplot.subplots(figsize=(7.6, 3.6), layout="constrained")
    axis.grid(alpha=0.25, axis="y")
    axis.spines[["top", "right"]].set_visible(False)
    names, speed_ups = [f"{round(tokens / 1024)}K" for tokens in figures], [row.value or 0 for row in figures.values()]
    bars = axis.bar(names, speed_ups, width=0.6, color=OUR_COLOR)
    axis.bar_label(bars, [f"{two_decimals(speed_up)}×" for speed_up in speed_ups], padding=2, fontsize=12)
    axis.axhline(1, color=STOCK_COLOR, linewidth=2, label="stock vLLM")
    axis.legend(loc="upper left", frameon=False)
    axis.set_ylim(0, 1.15 * max(speed_ups))
    axis.set(xlabel="prompt, tokens", ylabel="stock's TTFT ÷ sparse-prefill's")
    device = next(iter(figures.values())).device
    axis.set_title(f"Time to first token, 8B shape with trained attention, {device}", fontsize=10)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, facecolor="white")
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)


def main(
    results: Annotated[Path, typer.Option(help="Figures of TTFT.")] = Path("docs/results/limit.jsonl"),
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("docs/ttft.png"),
) -> None:
    draw(select_figures(read_figures(results)), out)


if __name__ == "__main__":
    typer.run(main)
