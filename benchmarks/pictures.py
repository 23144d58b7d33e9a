# SPDX-License-Identifier: Apache-2.0
"""Draw the picture of README.md from docs/results: speed-up by prompt length, and answers by speed-up and setting.

    python -m benchmarks.pictures [--results docs/results] [--out docs/ttft.png]

Speed-ups by length are in limit.jsonl, and answers and speed-ups by setting in evidence.jsonl.
"""

import io
from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.figures import read_figures

TTFT_BY_LENGTH = "widened 8B, {:,} tokens: TTFT, stock's ÷ ours"
LENGTHS_TOKENS = (8192, 16_384, 32_768, 65_536, 131_000)
STOCK_COLOR, OUR_COLOR, PAPER_COLOR = "#6e7781", "#0969da", "#bc4c00"
"""Colours that contrast with white and black, because GitHub shows pictures on either."""


class Setting(NamedTuple):
    name: str
    """As figures have it."""
    label: str
    offset: tuple[int, int]
    """Of the label from its point, in points."""


OURS = (
    Setting("default", "an earlier default", (-38, 7)),
    Setting("p = 0.8, without the cap", "level 0.8", (-16, 7)),
    Setting("p = 0.95, without the cap", "level 0.95", (-34, 7)),
)
PAPERS = (
    Setting("a_shape", "A-shape", (-50, 5)),
    Setting("sparge_attn", "SpargeAttn", (-20, -15)),
    Setting("sparge_attn kept_mass=0.998", "SpargeAttn 0.998", (-64, -20)),
    Setting("sale", "SALE", (-12, 8)),
    Setting("vertical_slash", "vertical-slash", (8, -12)),
)


def two_decimals(value: float) -> str:
    """Round as tables do: 1.095, which has no exact binary float, becomes 1.10."""
    return str(Decimal(str(value)).quantize(Decimal("0.01"), ROUND_HALF_UP))


def draw(values: Mapping[str, float], device: str, path: Path) -> None:
    """Draw both panels with 64 colours, which take a quarter of the bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    figure, (by_length, by_setting) = pyplot.subplots(1, 2, figsize=(11.4, 3.6), layout="constrained")
    for axis in (by_length, by_setting):
        axis.grid(alpha=0.25, axis="y")
        axis.spines[["top", "right"]].set_visible(False)
    draw_lengths(by_length, values, device)
    draw_settings(by_setting, values)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, facecolor="white")
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)


def draw_lengths(axis: Any, values: Mapping[str, float], device: str) -> None:
    """Draw a bar of the speed-up for each prompt length."""
    speed_ups = [values[TTFT_BY_LENGTH.format(tokens)] for tokens in LENGTHS_TOKENS]
    bars = axis.bar([f"{round(tokens / 1024)}K" for tokens in LENGTHS_TOKENS], speed_ups, width=0.6, color=OUR_COLOR)
    axis.bar_label(bars, [f"{two_decimals(speed_up)}×" for speed_up in speed_ups], padding=2, fontsize=12)
    axis.axhline(1, color=STOCK_COLOR, linewidth=2, label="stock vLLM")
    axis.legend(loc="upper left", frameon=False)
    axis.set_ylim(0, 1.15 * max(speed_ups))
    axis.set(xlabel="prompt, tokens", ylabel="stock's TTFT ÷ sparse-prefill's")
    axis.set_title(f"Time to first token, 8B shape with trained attention, {device}", fontsize=10)


def draw_settings(axis: Any, values: Mapping[str, float]) -> None:
    """Draw a point for each setting, with the standard error of its answers."""
    for settings, color, legend in ((OURS, OUR_COLOR, "sparse-prefill"), (PAPERS, PAPER_COLOR, "papers' methods")):
        prefixes = [f"65,536 tokens, {setting.name}: " for setting in settings]
        speed_ups = [values[f"widened 8B, {prefix}TTFT, stock's ÷ ours"] for prefix in prefixes]
        answers = [values[f"code-lm, {prefix}answers"] for prefix in prefixes]
        errors = [values[f"code-lm, {prefix}answers, standard error"] for prefix in prefixes]
        axis.errorbar(speed_ups, answers, errors, fmt="o", color=color, capsize=3, label=legend)
        for setting, *point in zip(settings, speed_ups, answers, strict=True):
            axis.annotate(setting.label, point, setting.offset, textcoords="offset points", color=color, fontsize=9)
    axis.plot(1, 1, "s", color=STOCK_COLOR, label="stock vLLM")
    axis.legend(loc="lower left", frameon=False)
    axis.set(xlim=(0.95, 2.25), ylim=(0, 1.15), xlabel="stock's TTFT ÷ the setting's", ylabel="right answers ÷ stock's")
    axis.set_title("Answers (code-lm) and TTFT (8B shape), 65,536 tokens", fontsize=10)


def main(
    results: Annotated[Path, typer.Option(help="Folder of figures.")] = Path("docs/results"),
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("docs/ttft.png"),
) -> None:
    rows = [row for name in ("limit", "evidence") for row in read_figures(results / f"{name}.jsonl")]
    values = {row.name: row.value for row in rows if row.value is not None}
    (device,) = {row.device for row in rows if row.name == TTFT_BY_LENGTH.format(LENGTHS_TOKENS[-1])}
    draw(values, device, out)


if __name__ == "__main__":
    typer.run(main)
