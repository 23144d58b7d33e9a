# SPDX-License-Identifier: Apache-2.0
"""Options that the benchmark programs share, and functions for their results."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.figures import FigureReport
from vllm_sparse_backend.calibration.cuda_device import Card
from vllm_sparse_backend.cli.commands import Command, add_command
from vllm_sparse_backend.cli.common import say
from vllm_sparse_backend.evaluation.report import line_of, table_of

Json = Annotated[Path | None, typer.Option("--json", help="JSON file for all results.")]


@dataclass(frozen=True, kw_only=True)
class ChunkOptions:
    """Options of programs that time a chunk against FlashAttention on this card."""

    contexts: Annotated[str, typer.Option(help="Cached tokens before the chunk, comma-separated.")] = "24576,122880"
    chunk: Annotated[int, typer.Option(help="Tokens of a chunk (--max-num-batched-tokens).")] = 8192
    json_path: Json = None
    results: Annotated[Path | None, typer.Option(help="List of figures to merge this run's into.")] = None

    def report(self, bench: str, card: Card) -> FigureReport:
        return FigureReport(bench, torch.cuda.get_device_name(card.device), self.json_path, self.results)


def run_alone(options: type[Command]) -> None:
    """Run a program that has a single command, as ``typer.run`` does with a function."""
    app = typer.Typer(add_completion=False)
    add_command(app, options)
    app()


def numbers(text: str) -> list[int]:
    """Parse comma-separated numbers."""
    return [int(part) for part in text.split(",")]


def difference(out: torch.Tensor, dense: torch.Tensor) -> float:
    """Return ‖out − dense‖ / ‖dense‖ over all elements."""
    return float((out.float() - dense.float()).norm() / dense.float().norm())


def show(title: str, cases: Iterable[dict[str, Any]], columns: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Print each case when it is measured and a table at the end, and return the cases. By default, show all fields."""
    shown: list[dict[str, Any]] = []
    for case in cases:
        columns = columns or {column: column for column in case}
        shown.append(case)
        print(line_of(columns, case), file=sys.stderr)
    if columns and shown:
        say(table_of(title, columns, shown))
    return shown
