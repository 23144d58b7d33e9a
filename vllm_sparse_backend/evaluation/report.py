# SPDX-License-Identifier: Apache-2.0
"""The report of a benchmark: its cases in a file, and their tables."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.input_files import read_text
from vllm_sparse_backend.evaluation.output_files import write_text
from vllm_sparse_backend.identity import digest, versions

FORMAT = 2


class BenchError(RuntimeError):
    """A benchmark could not run. The message has the reason and the remedy."""


class CaseReport:
    """Cases of one run. The file is rewritten after each case, so an interrupted run keeps its results."""

    def __init__(self, bench: str, device: str, json_path: Path | None = None) -> None:
        self.bench, self.device, self.json_path = bench, device, json_path
        self.command = command_line()
        self.date = datetime.now(UTC).isoformat(timespec="seconds")
        self.options: Mapping[str, Any] = {}
        """All that must be equal for another run to add to the file."""
        self.cases: list[dict[str, Any]] = []

    def add_case(self, case: Mapping[str, Any]) -> None:
        self.cases.append(dict(case))
        self.write()

    def write(self, **more: object) -> None:
        """Write the file, if there is one, with ``more`` before the cases."""
        if self.json_path is not None:
            about = {
                "format": FORMAT, "bench": self.bench, "device": self.device, "command": self.command,
                "date": self.date, "options": self.options, "versions": versions(),
            }  # fmt: skip
            write_json(self.json_path, {**about, **more, "cases": self.cases})


def options_of(workload: Any, **more: Any) -> dict[str, Any]:
    """Return the fields of a dataclass with a text as JSON, which holds the text's hash."""
    return to_jsonable_python(asdict(workload) | {"text": digest(workload.text or "")} | more)


def read_results(path: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Read an earlier run's file. Raises BenchError if it was measured with other options."""
    try:
        results = dict(json.loads(read_text(path)))
        if results["format"] != FORMAT:
            raise ValueError(f"format {results['format']}, expected {FORMAT}")
        measured = dict(results["options"])
        results["cases"] = [dict(case) for case in results["cases"]]
    except (ConfigurationError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path}: not a file of earlier results: {error!r}; delete it or name another") from None
    changes = [
        f"{name} {measured[name]!r}, now {value!r}"
        for name, value in options.items()
        if measured.get(name, value) != value
    ]
    if changes:
        raise BenchError(f"{path}: measured with {'; '.join(changes)}; delete it or name another")
    return results


def command_line() -> str:
    """Return the command that repeats the measurement elsewhere, without paths of folders."""
    names = [Path(argument).name if Path(argument).is_absolute() else argument for argument in sys.argv[1:]]
    return shlex.join(["sparse-prefill", *names])


def write_json(path: Path, data: object) -> None:
    """Write ``data`` as JSON atomically. Raises ConfigurationError if it cannot be written."""
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def table_of(
    title: str, columns: Mapping[str, str], cases: Sequence[Mapping[str, Any]], caption: str | None = None
) -> str:
    """Return cases as a Markdown table. ``columns`` maps a case's key to its heading; missing values stay empty."""
    rows = [[*columns.values()], *([cell(case.get(key)).replace("|", r"\|") for key in columns] for case in cases)]
    is_number = [any(isinstance(case.get(key), int | float) for case in cases) for key in columns]
    widths = [max(3, *map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * (width - 1) + (":" if right else "-") for width, right in zip(widths, is_number)])
    pads = [str.rjust if right else str.ljust for right in is_number]
    lines = []
    for row in rows:
        cells = [pad(text, width) for pad, text, width in zip(pads, row, widths)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n\n".join(filter(None, [title, "\n".join(lines), caption])) + "\n"


def line_of(columns: Mapping[str, str], case: Mapping[str, Any]) -> str:
    """Return a case as a line of progress, with the same columns as its table."""
    return ", ".join(f"{heading} {cell(case[key])}" for key, heading in columns.items() if case.get(key) is not None)


def cell(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
