# SPDX-License-Identifier: Apache-2.0
"""Prints a list of figures of docs/results as a Markdown table, and marks figures that miss their targets.

    python -m benchmarks.tables docs/results/performance.jsonl [--only 'vllm serve']

Exit code 1 if a bar is missed.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.figures import Figure, read_figures
from vllm_sparse_backend.evaluation.report import table_of

COLUMNS = {"name": "figure", "value": "value", "unit": "unit", "bar": "target", "missed": ""}


def list_of(figures: Sequence[Figure]) -> str:
    """Return a table with a row for each figure."""
    rows = [asdict(figure) | {"missed": "" if figure.is_met else "missed"} for figure in figures]
    return table_of("", COLUMNS, rows)


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
