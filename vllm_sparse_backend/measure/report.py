# SPDX-License-Identifier: Apache-2.0
"""What a benchmark found, as files: its cases as they were measured, and figures that have a name."""

import json
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from vllm_sparse_backend.identity import PACKAGE, package_version

FORMAT = 1
FIELDS = ("name", "value", "unit", "bar", "better", "device", "command")


class BenchError(RuntimeError):
    """A benchmark could not run; the message says why, and what to do."""


class Report:
    """Cases and figures of one run. Files are written anew with each: a run that is broken off leaves what it has.

    ``json_path`` gets all of it; ``results_path`` is a list of figures from many runs, in which those of equal names
    are replaced and keep their ``bar``.
    """

    def __init__(
        self,
        bench: str,
        device: str,
        json_path: Path | None = None,
        results_path: Path | None = None,
        command: str | None = None,
    ) -> None:
        if results_path is not None and results_path == json_path:
            raise BenchError(f"--results, --json: given {results_path} for both, expected two files")
        if results_path is not None and results_path.exists():
            read_figures(results_path)  # what is no results file is found out before anything is measured
        self.on_case: Callable[[dict[str, Any]], object] = lambda case: None
        """Is told of each case."""
        self.bench, self.device, self.json_path, self.results_path = bench, device, json_path, results_path
        self.command = command or command_of(sys.argv[1:])
        self.date = datetime.now(UTC).isoformat(timespec="seconds")
        self.cases: list[dict[str, Any]] = []
        self.figures: dict[str, dict[str, Any]] = {}

    def add_case(self, case: Mapping[str, Any]) -> None:
        # JSON has no NaN.
        self.cases.append({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in case.items()})
        self._write()
        self.on_case(self.cases[-1])

    def add_figure(
        self, name: str, value: float, unit: str, better: Literal["higher", "lower"], bar: float | None = None
    ) -> None:
        """A figure of that name; a second one of the same name takes the first one's place.

        bar: what is expected of it, for a results file that has none for it yet.
        """
        values = (name, float(f"{value:.4g}"), unit, bar, better, self.device, self.command)
        self.figures[name] = dict(zip(FIELDS, values, strict=True))
        self._write()

    def _write(self) -> None:
        if self.json_path is not None:
            figures = [
                {field: row[field] for field in ("name", "value", "unit", "better")} for row in self.figures.values()
            ]
            data = {
                "format": FORMAT, "bench": self.bench, "device": self.device, "versions": versions(),
                "command": self.command, "date": self.date, "cases": self.cases, "figures": figures,
            }  # fmt: skip
            write_json(self.json_path, data)
        if self.results_path is not None and self.figures:
            merge_figures(self.results_path, self.figures)


OUTPUTS = ("--json", "--results", "--png", "--html", "--table")


def command_of(arguments: Sequence[str]) -> str:
    """The command that measures the same elsewhere: without its output files, and folders by their names alone."""
    kept: list[str] = []
    left = iter(arguments)
    for argument in left:
        name, equals, _ = argument.partition("=")
        if name in OUTPUTS:
            if not equals:
                next(left, None)
        else:
            kept.append(Path(argument).name if Path(argument).is_absolute() else argument)
    return shlex.join(["sparse-prefill", *kept])


def merge_figures(path: Path, figures: Mapping[str, Mapping[str, Any]], keep_bars: bool = True) -> None:
    """Put figures by name into a list of such on disk: in the place of one of the same name, and with its bar."""
    old = read_figures(path) if path.exists() else []
    new = dict(figures)
    merged: list[Mapping[str, Any]] = []
    for row in old:
        if row["name"] in new:
            row = {**new.pop(row["name"]), **({"bar": row["bar"]} if keep_bars else {})}
        merged.append(row)
    write_json(path, [*merged, *new.values()])


def read_figures(path: Path) -> list[dict[str, Any]]:
    """The figures of a results file. Raises BenchError where it is no such file."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: not a results file: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and {"name", "bar"} <= set(row) for row in rows):
        raise BenchError(f"{path}: not a results file, expected a list of objects with {', '.join(FIELDS)}")
    return rows


def write_json(path: Path, data: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    aside.replace(path)


def versions() -> dict[str, str]:
    """Of what decides about speed."""
    found = {}
    for name in (PACKAGE, "vllm", "torch", "triton"):
        found[name] = package_version(name)
    try:
        import torch

        if torch.version.cuda:
            found["cuda"] = torch.version.cuda
    except ImportError:
        pass
    return found


def table_of(
    title: str, columns: Mapping[str, str], cases: Sequence[Mapping[str, Any]], caption: str | None = None
) -> Table:
    """Cases as a table: ``columns`` maps a case's key to the column's heading. What a case lacks stays empty."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for key, heading in columns.items():
        numeric = any(isinstance(case.get(key), int | float) for case in cases)
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for case in cases:
        table.add_row(*(cell(case.get(key)) for key in columns))
    return table


def cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
