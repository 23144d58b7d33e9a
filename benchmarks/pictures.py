# SPDX-License-Identifier: Apache-2.0
"""Draw the picture of README.md from docs/results: speed-up by prompt length, and answers by speed-up and setting.

    python -m benchmarks.pictures [--results docs/results] [--out docs/ttft.png]

Reads figures named ``widened 8B, N tokens: TTFT, stock's ÷ ours`` of limit.jsonl. Of evidence.jsonl, it reads
``code-lm, 65,536 tokens, SETTING: answers`` and ``widened 8B, 65,536 tokens, SETTING: TTFT, stock's ÷ ours``.
"""

import io
from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.figures import Figure, read_figures

LENGTHS_TOKENS = (8192, 16_384, 32_768, 65_536, 131_000)
STOCK_COLOR, OUR_COLOR, PAPER_COLOR = "#6e7781", "#0969da", "#bc4c00"
"""Colours that contrast with white and black, because GitHub shows pictures on either."""

OURS = {
    "default": ("default", (-2, 7)),
    "p = 0.8, without the cap": ("p = 0.8", (-14, 7)),
    "p = 0.95, without the cap": ("p = 0.95", (-30, 7)),
}
PAPERS = {
    "a_shape": ("A-shape", (-50, 5)),
    "sparge_attn": ("SpargeAttn", (-20, -15)),
    "sparge_attn kept_mass=0.998": ("SpargeAttn, τ 0.998", (-62, 24)),
    "sale": ("SALE", (-4, 8)),
    "sale tau=0.05,channels=half": ("SALE, τ 0.05", (-18, -15)),
    "vertical_slash": ("vertical-slash", (8, -6)),
}
"""Settings as figures name them, their labels, and the offsets of labels in points."""


def two_decimals(value: float) -> str:
    """Round as tables do: 1.095, which has no exact binary float, becomes 1.10."""
    return str(Decimal(str(value)).quantize(Decimal("0.01"), ROUND_HALF_UP))


def draw(figures: Mapping[str, Figure], path: Path) -> None:
    """Draw both panels with 64 colours, which take a quarter of the bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    figure, (by_length, by_setting) = pyplot.subplots(1, 2, figsize=(11.4, 3.6), layout="constrained")
    for axis in (by_length, by_setting):
        axis.grid(alpha=0.25, axis="y")
        axis.spines[["top", "right"]].set_visible(False)
    draw_lengths(by_length, figures)
    draw_settings(by_setting, figures)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, facecolor="white")
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)


def draw_lengths(axis: Any, figures: Mapping[str, Figure]) -> None:
    """Draw a bar of the speed-up for each prompt length."""
    of_lengths = [figures[f"widened 8B, {tokens:,} tokens: TTFT, stock's ÷ ours"] for tokens in LENGTHS_TOKENS]
    speed_ups = [row.value or 0 for row in of_lengths]
    bars = axis.bar([f"{round(tokens / 1024)}K" for tokens in LENGTHS_TOKENS], speed_ups, width=0.6, color=OUR_COLOR)
    axis.bar_label(bars, [f"{two_decimals(speed_up)}×" for speed_up in speed_ups], padding=2, fontsize=12)
    axis.axhline(1, color=STOCK_COLOR, linewidth=2, label="stock vLLM")
    axis.legend(loc="upper left", frameon=False)
    axis.set_ylim(0, 1.15 * max(speed_ups))
    axis.set(xlabel="prompt, tokens", ylabel="stock's TTFT ÷ sparse-prefill's")
    axis.set_title(f"Time to first token, 8B shape with trained attention, {of_lengths[0].device}", fontsize=10)


def draw_settings(axis: Any, figures: Mapping[str, Figure]) -> None:
    """Draw a point for each setting, with the standard error of its answers."""
    for settings, color, legend in ((OURS, OUR_COLOR, "sparse-prefill's"), (PAPERS, PAPER_COLOR, "papers'")):
        abouts = [f"65,536 tokens, {setting}: " for setting in settings]
        speed_ups = [figures[f"widened 8B, {about}TTFT, stock's ÷ ours"].value for about in abouts]
        answers = [figures[f"code-lm, {about}answers"].value for about in abouts]
        errors = [figures[f"code-lm, {about}answers, standard error"].value for about in abouts]
        axis.errorbar(speed_ups, answers, errors, fmt="o", color=color, capsize=3, label=legend)
        for (label, offset), *at in zip(settings.values(), speed_ups, answers):
            axis.annotate(label, at, offset, textcoords="offset points", color=color, fontsize=9)
    axis.plot(1, 1, "s", color=STOCK_COLOR, label="stock vLLM")
    axis.legend(loc="lower left", frameon=False)
    axis.set(xlim=(0.95, 2.25), ylim=(0, 1.2), xlabel="stock's TTFT ÷ setting's", ylabel="right answers ÷ stock's")
    axis.set_title("Answers inside prompts of 65,536 tokens, by setting (code-lm)", fontsize=10)


def main(
    results: Annotated[Path, typer.Option(help="Folder of figures.")] = Path("docs/results"),
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("docs/ttft.png"),
) -> None:
    rows = [row for name in ("limit", "evidence") for row in read_figures(results / f"{name}.jsonl")]
    draw({row.name: row for row in rows}, out)


if __name__ == "__main__":
    typer.run(main)
