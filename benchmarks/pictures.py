# SPDX-License-Identifier: Apache-2.0
"""Draw two pictures from docs/results: TTFT by prompt length (README.md); accuracy by speed-up (docs/performance.md).

    python -m benchmarks.pictures [--ttft docs/results/floor.json] [--curves docs/results/real.json] [--folder docs]

Reads rows named ``default, widened, TTFT, N tokens`` (stock's time ÷ ours) and ``stock, widened, TTFT, N tokens`` (s)
from one file, and ``curve, SETTING: speed-up`` (of TTFT at the longest prompt) and ``curve, SETTING, MODEL, N tokens:
QUANTITY``, answers and perplexity (÷ stock's), from the other. If a picture lacks a row, it is not drawn, the program
names the row, and the exit code is 1.
"""

import io
import re
from collections.abc import Callable, Mapping
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.figures import read_figures
from vllm_sparse_kernels.methods import METHODS

TTFT_RESULTS, CURVE_RESULTS = Path("docs/results/floor.json"), Path("docs/results/real.json")
OURS, STOCK = "default, widened, TTFT, {} tokens", "stock, widened, TTFT, {} tokens"
SPEED_UP, CURVE = "curve, {}: speed-up", "curve, {}, {}, {} tokens: {}"
QUANTITIES = ("answers", "perplexity")
LENGTHS_RATIO = 1.9
"""Smallest ratio of neighbouring prompt lengths in the picture of TTFT, so that labels do not overlap."""
COLORS = {"stock": "#6e7781", "ours": "#0969da"}
LINES = ("#0969da", "#cf222e", "#1a7f37", "#9a6700")
"""Colours that contrast with white and black, because GitHub shows pictures on either."""


class MissingRowsError(ValueError):
    """The figures lack rows that a picture needs."""


class Point(NamedTuple):
    """Results of one setting relative to stock."""

    setting: str
    speed_up: float
    answers: float
    perplexity: float


class Ttft(NamedTuple):
    """Seconds by prompt length in tokens."""

    stock: dict[int, float]
    ours: dict[int, float]
    speed_ups: dict[int, float]
    device: str


Curves = dict[tuple[str, int], list[Point]]
"""Points sorted by speed-up, by model and its longest prompt length."""


def _values(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {row["name"]: row["value"] for row in rows}


def _needs(names: Mapping[str, bool]) -> None:
    if missing := [name for name, is_present in names.items() if not is_present]:
        raise MissingRowsError("missing: " + "; ".join(missing))


def ttft_of(rows: list[dict[str, Any]]) -> Ttft:
    values = _values(rows)
    matches = (re.fullmatch(r"(?:default|stock), widened, TTFT, ([\d,]+) tokens", name) for name in values)
    lengths = _spaced(sorted({match[1] for match in matches if match}, key=_number))
    pairs = [(STOCK.format(length), OURS.format(length)) for length in lengths or ("N",)]
    _needs({name: name in values for pair in pairs for name in pair})
    stock = {_number(length): values[name] for length, (name, _) in zip(lengths, pairs, strict=True)}
    ratios = {_number(length): values[name] for length, (_, name) in zip(lengths, pairs, strict=True)}
    device = next(row["device"] for row in rows if row["name"] == pairs[0][0])
    ours = {tokens: stock[tokens] / ratio for tokens, ratio in ratios.items()}
    return Ttft(stock, ours, ratios, device)


def _spaced(lengths: list[str]) -> list[str]:
    """Return the longest length, and each shorter one that is far enough from the next."""
    spaced: list[str] = []
    for length in reversed(lengths):
        if not spaced or _number(spaced[-1]) >= LENGTHS_RATIO * _number(length):
            spaced.append(length)
    return spaced[::-1]


def curves_of(rows: list[dict[str, Any]]) -> Curves:
    values = _values(rows)
    settings = [match[1] for name in values if (match := re.fullmatch(r"curve, ([^,:]+): speed-up", name))]
    longest: dict[str, str] = {}
    for name in values:
        if match := re.fullmatch(r"curve, [^,]+, ([^,]+), ([\d,]+) tokens: \w+", name):
            longest[match[1]] = max(longest.get(match[1], "0"), match[2], key=_number)
    if not settings or not longest:
        raise MissingRowsError(
            f"missing: {SPEED_UP.format('SETTING')}; {CURVE.format('SETTING', 'MODEL', 'N', 'answers')}"
        )
    settings.sort(key=lambda setting: values[SPEED_UP.format(setting)])
    curves: Curves = {}
    for model, tokens in sorted(longest.items()):
        names = [[CURVE.format(setting, model, tokens, quantity) for quantity in QUANTITIES] for setting in settings]
        _needs({name: name in values for row_names in names for name in row_names})
        curves[model, _number(tokens)] = [
            Point(setting, values[SPEED_UP.format(setting)], *(values[name] for name in row_names))
            for setting, row_names in zip(settings, names, strict=True)
        ]
    return curves


def two_decimals(value: float) -> str:
    """Round as tables do: 1.095, which has no exact binary float, becomes 1.10."""
    return str(Decimal(str(value)).quantize(Decimal("0.01"), ROUND_HALF_UP))


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _figure(panels: int) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(7.6, 3.6), squeeze=False, layout="constrained")
    for axis in axes[0]:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def draw_ttft(ttft: Ttft, path: Path) -> None:
    figure, (axis,) = _figure(1)
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


def label_of(setting: str) -> str:
    """Return a setting as the picture shows it: `p 0.9 most 0.2` has a cap of 0.2, `p 0.9 most 1` has no cap."""
    return setting.removesuffix(" most 1").replace(" most ", ", cap ")


def draw_curves(curves: Curves, path: Path) -> None:
    """Draw answers and perplexity in a panel each. The large mark is the default, which the legend names."""
    from matplotlib.lines import Line2D

    figure, panels = _figure(2)
    top_p = METHODS["top_p"].parameters()
    default = f"p {top_p.kept_mass:g} most {top_p.most_share:g}"  # type: ignore[attr-defined]
    for color, rise, ((model, tokens), points) in zip(LINES, (-10, 4) * 2, curves.items()):
        for panel, quantity in zip(panels, QUANTITIES, strict=True):
            speed_ups = [point.speed_up for point in points]
            changes = [100 * (getattr(point, quantity) - 1) for point in points]
            panel.plot(speed_ups, changes, "o", color=color, markersize=4, label=f"{model}, {tokens:,} tokens")
            for index, (point, x, y) in enumerate(zip(points, speed_ups, changes, strict=True)):
                if point.setting == default:
                    panel.plot([x], [y], "o", color=color, markersize=10)
                elif quantity == "perplexity":
                    offset, alignment = ((-3, rise), "right") if index % 2 else ((3, rise), "left")
                    panel.annotate(
                        label_of(point.setting), (x, y), offset,
                        textcoords="offset points", ha=alignment, fontsize=7, color=color,
                    )  # fmt: skip
    for panel, title in zip(panels, ("answers against stock, %", "perplexity against stock, %"), strict=True):
        panel.axhline(0, color=COLORS["stock"], linewidth=1)
        panel.margins(x=0.25, y=0.15)
        panel.set(xlabel="TTFT speed-up, 8B shape, 131,000 tokens")
        panel.set_title(title, fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    handles.append(Line2D([], [], marker="o", linestyle="", color=COLORS["stock"], markersize=10))
    labels.append(f"the default: {label_of(default)}")
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
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
    ttft: Annotated[Path, typer.Option(help="List of figures with rows of TTFT.")] = TTFT_RESULTS,
    curves: Annotated[Path, typer.Option(help="List of figures with rows of curves.")] = CURVE_RESULTS,
    folder: Annotated[Path, typer.Option(help="Folder of ttft.png and curve.png.")] = Path("docs"),
) -> None:
    failed = False
    drawings: dict[str, tuple[Path, Callable[[list[dict[str, Any]], Path], None]]] = {
        "ttft.png": (ttft, lambda rows, path: draw_ttft(ttft_of(rows), path)),
        "curve.png": (curves, lambda rows, path: draw_curves(curves_of(rows), path)),
    }
    for name, (results, draw) in drawings.items():
        try:
            draw(read_figures(results), folder / name)
            print(f"{folder / name} written")
        except MissingRowsError as error:
            print(f"{folder / name} not drawn; {results}: {error}")
            failed = True
    raise typer.Exit(failed)


if __name__ == "__main__":
    typer.run(main)
