# SPDX-License-Identifier: Apache-2.0
"""Prints a list of figures of docs/results as a Markdown table, and marks figures that miss their targets.

    python -m benchmarks.tables docs/results/performance.json [--only 'vllm serve']

Exit code 1 if a bar is missed.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.figures import read_figures

Figure = Mapping[str, Any]


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, ["---"] * len(columns), *rows))


def met(figure: Figure) -> bool:
    """Return whether a figure reaches its bar. A figure without a bar does."""
    bar, value = figure["bar"], figure["value"]
    return bar is None or bool(value >= bar if figure["better"] == "higher" else value <= bar)


def cell(figure: Figure) -> str:
    return f"{figure['value']:.4g}" + ("" if met(figure) else f" (target: {figure['bar']:g})")


def list_of(figures: Sequence[Figure]) -> str:
    """Return a table with a row for each figure."""
    rows = [[f["name"], cell(f), f["unit"], "" if f["bar"] is None else f"{f['bar']:g}"] for f in figures]
    return markdown_table(("figure", "value", "unit", "target"), rows)


def main(
    results: Annotated[Path, typer.Argument(help="Of docs/results.")],
    only: Annotated[str, typer.Option(help="Regular expression for the names of figures.")] = "",
) -> None:
    figures = [figure for figure in read_figures(results) if re.search(only, figure["name"])]
    print(list_of(figures))
    missed = [figure for figure in figures if not met(figure)]
    print(f"\n{len(figures)} figures, {len(missed)} miss their targets")
    raise typer.Exit(bool(missed))


if __name__ == "__main__":
    typer.run(main)
