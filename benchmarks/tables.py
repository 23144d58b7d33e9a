# SPDX-License-Identifier: Apache-2.0
"""Prints a list of figures of docs/results as a Markdown table, and marks figures that miss their targets.

    python -m benchmarks.tables docs/results/performance.jsonl [--only 'vllm serve']

Exit code 1 if a bar is missed.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.figures import Figure, read_figures


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, ["---"] * len(columns), *rows))


def list_of(figures: Sequence[Figure]) -> str:
    """Return a table with a row for each figure."""
    rows = []
    for figure in figures:
        target = "" if figure.bar is None else f"{figure.bar:g}"
        value = "" if figure.value is None else f"{figure.value:.4g}"
        rows.append([figure.name, value, figure.unit, target, "" if figure.is_met else "missed"])
    return markdown_table(("figure", "value", "unit", "target", ""), rows)


def main(
    results: Annotated[Path, typer.Argument(help="Of docs/results.")],
    only: Annotated[str, typer.Option(help="Regular expression for the names of figures.")] = "",
) -> None:
    figures = [figure for figure in read_figures(results) if re.search(only, figure.name)]
    print(list_of(figures))
    missed = [figure for figure in figures if not figure.is_met]
    print(f"\n{len(figures)} figures, {len(missed)} miss their targets")
    raise typer.Exit(bool(missed))


if __name__ == "__main__":
    typer.run(main)
