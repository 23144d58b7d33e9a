# SPDX-License-Identifier: Apache-2.0
"""Draw the picture of README.md from docs/results: TTFT by prompt length.

    python -m benchmarks.pictures [--results docs/results/performance.jsonl] [--out docs/ttft.png]

Reads figures named ``default, widened, TTFT, N tokens`` (stock's time ÷ ours) and ``stock, widened, TTFT, N tokens``
(s). If a length lacks a figure, nothing is drawn, the program names the figure, and the exit code is 1.
"""

import io
import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.figures import Figure, read_figures

OURS, STOCK = "default, widened, TTFT, {} tokens", "stock, widened, TTFT, {} tokens"
LENGTHS_RATIO = 1.9
"""Smallest ratio of neighbouring prompt lengths in the picture of TTFT, so that labels do not overlap."""
COLORS = {"stock": "#6e7781", "ours": "#0969da"}
"""Colours that contrast with white and black, because GitHub shows pictures on either."""


class MissingFiguresError(ValueError):
    """Figures that the picture needs are missing."""


class Ttft(NamedTuple):
    """Seconds by prompt length in tokens."""

    stock: dict[int, float]
    ours: dict[int, float]
    speed_ups: dict[int, float]
    device: str


def ttft_of(figures: list[Figure]) -> Ttft:
    values = {figure.name: figure.value for figure in figures if figure.value is not None}
    matches = (re.fullmatch(r"(?:default|stock), widened, TTFT, ([\d,]+) tokens", name) for name in values)
    lengths = _spaced(sorted({match[1] for match in matches if match}, key=_number))
    pairs = [(STOCK.format(length), OURS.format(length)) for length in lengths or ("N",)]
    if missing := [name for pair in pairs for name in pair if name not in values]:
        raise MissingFiguresError("missing: " + "; ".join(missing))
    stock = {_number(length): values[name] for length, (name, _) in zip(lengths, pairs, strict=True)}
    ratios = {_number(length): values[name] for length, (_, name) in zip(lengths, pairs, strict=True)}
    device = next(figure.device for figure in figures if figure.name == pairs[0][0])
    ours = {tokens: stock[tokens] / ratio for tokens, ratio in ratios.items()}
    return Ttft(stock, ours, ratios, device)


def _spaced(lengths: list[str]) -> list[str]:
    """Return the longest length, and each shorter one that is far enough from the next."""
    spaced: list[str] = []
    for length in reversed(lengths):
        if not spaced or _number(spaced[-1]) >= LENGTHS_RATIO * _number(length):
            spaced.append(length)
    return spaced[::-1]


def two_decimals(value: float) -> str:
    """Round as tables do: 1.095, which has no exact binary float, becomes 1.10."""
    return str(Decimal(str(value)).quantize(Decimal("0.01"), ROUND_HALF_UP))


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def draw_ttft(ttft: Ttft, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7.6, 3.6), layout="constrained")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    for name, seconds in (("stock", ttft.stock), ("ours", ttft.ours)):
        label = {"stock": "stock vLLM", "ours": "sparse-prefill"}[name]
        axis.plot(list(seconds), list(seconds.values()), "o-", color=COLORS[name], label=label, linewidth=2)
    for tokens, ours_s in ttft.ours.items():
        text = f"{two_decimals(ttft.speed_ups[tokens])}×"
        axis.annotate(text, (tokens, ours_s), (0, -15), textcoords="offset points", ha="center", color=COLORS["ours"])
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_ylim(min(ttft.ours.values()) / 2)
    axis.set_xticks(list(ttft.stock), [f"{tokens:,}" for tokens in ttft.stock], rotation=25)
    axis.set(xlabel="prompt, tokens", ylabel="TTFT, s")
    axis.set_title(f"Time to first token, 8B shape with trained attention, {ttft.device}", fontsize=10)
    axis.legend(frameon=False)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    """Save a figure with 64 colours, which takes a quarter of the bytes."""
    from matplotlib import pyplot
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, facecolor="white")
    pyplot.close(figure)
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)


def main(
    results: Annotated[Path, typer.Option(help="File of figures.")] = Path("docs/results/performance.jsonl"),
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("docs/ttft.png"),
) -> None:
    try:
        ttft = ttft_of(read_figures(results))
    except MissingFiguresError as error:
        raise SystemExit(f"{out} not drawn; {results}: {error}") from None
    draw_ttft(ttft, out)
    print(f"{out} written")


if __name__ == "__main__":
    typer.run(main)
