# SPDX-License-Identifier: Apache-2.0
"""Options that the benchmark programs share, and functions for their results."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from vllm_sparse_backend.cli.common import say
from vllm_sparse_backend.config.errors import not_one_of
from vllm_sparse_backend.evaluation.cuda_device import Card
from vllm_sparse_backend.evaluation.report import BenchError, line_of, table_of
from vllm_sparse_kernels import AttendOptions, PagedCache, SparseIndex
from vllm_sparse_kernels.attention import AttendEngine, AttendSpec, choose_engine

Json = Annotated[Path | None, typer.Option("--json", help="JSON file for all results.")]
Results = Annotated[Path | None, typer.Option(help="List of figures to merge this run's into.")]
Methods = Annotated[
    list[str] | None, typer.Option("--method", help="NAME or NAME:FIELD=VALUE,…; repeatable. Default: all.")
]
Contexts = Annotated[str, typer.Option(help="Cached tokens before the chunk, comma-separated.")]
Chunk = Annotated[int, typer.Option(help="Tokens of a chunk (--max-num-batched-tokens).")]
Engines = Annotated[str, typer.Option(help="Engines, comma-separated. Default: all that support the case.")]
Model = Annotated[Path | None, typer.Option(help="Model folder whose heads are measured. Default: an 8B model's.")]
Page = Annotated[int, typer.Option("--page-size", help="Tokens of a page of the cache.")]
Device = Annotated[str | None, typer.Option(help="cuda; or cpu, which runs the slow references.")]
Text = Annotated[Path | None, typer.Option(help="Text file, or folder of *.py. Default: vLLM's sources.")]


def engines_named(card: Card, names: Sequence[str]) -> list[str]:
    """Return the named engines, or all. Raises BenchError for an unknown name."""
    if unknown := [name for name in names if name not in card.engines]:
        raise BenchError(f"--engines: {not_one_of(unknown[0], card.engines)}")
    return list(names or card.engines)


def is_default(
    table: Mapping[str, AttendEngine],
    name: str,
    cache: PagedCache,
    index: SparseIndex,
    options: AttendOptions | None = None,
) -> bool:
    """Return whether a server uses this engine for such an index by default."""
    return choose_engine(table.values(), AttendSpec.of(cache, index, options)).engine.name == name


def difference(out: torch.Tensor, dense: torch.Tensor) -> float:
    """Return ‖out − dense‖ / ‖dense‖ over all elements."""
    return float((out.float() - dense.float()).norm() / dense.float().norm())


def show(title: str, columns: Mapping[str, str], cases: Iterable[dict[str, Any]]) -> None:
    """Print each case when it is measured, and a table at the end."""
    shown = []
    for case in cases:
        shown.append(case)
        print(line_of(columns, case), file=sys.stderr)
    say(table_of(title, columns, shown))
