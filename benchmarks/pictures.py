# SPDX-License-Identifier: Apache-2.0
"""Draw the picture of README.md from docs/results: the TTFT speed-up over stock vLLM by prompt length.

    python -m benchmarks.pictures [--results docs/results/limit.jsonl] [--out docs/ttft.png]

Reads figures named ``widened 8B, N tokens: TTFT, stock's ÷ ours``.
"""

import io
from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.figures import Figure, read_figures

LENGTHS_TOKENS = (8192, 16_384, 32_768, 65_536, 131_000)
STOCK_COLOR, OUR_COLOR = "#6e7781", "#0969da"
"""Colours that contrast with white and black, because GitHub shows pictures on either."""


def two_decimals(value: float) -> str:
    """Round as tables do: 1.095, which has no exact binary float, becomes 1.10."""
    return str(Decimal(str(value)).quantize(Decimal("0.01"), ROUND_HALF_UP))


def draw(figures: Mapping[int, Figure], path: Path) -> None:
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
    by_name = {figure.name: figure for figure in read_figures(results)}
    draw({tokens: by_name[f"widened 8B, {tokens:,} tokens: TTFT, stock's ÷ ours"] for tokens in LENGTHS_TOKENS}, out)


if __name__ == "__main__":
    typer.run(main)
