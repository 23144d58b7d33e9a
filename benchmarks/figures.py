# SPDX-License-Identifier: Apache-2.0
"""The figures of docs/results: a figure of a benchmark or of a user's command on each line.

    python -m benchmarks.figures served.json docs/results/performance.jsonl

adds the figures of a file by `bench serve --json` to such a file.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vllm_sparse_backend.evaluation.output_files import write_text
from vllm_sparse_backend.evaluation.report import BenchError, CaseReport

Better = Literal["higher", "lower"]

SERVE_FIGURES: Mapping[str, tuple[str, str, Better]] = {
    "ttft_speed_up": ("TTFT, speed-up", "ratio", "higher"),
    "ours_first_s": ("TTFT", "s", "lower"),
    "density": ("density of its sparse rows", "share", "lower"),
    "tpot_speed_up": ("TPOT, speed-up", "ratio", "higher"),
}
"""Name and unit of each figure in a case of `bench serve`, and whether higher or lower is better."""


def today() -> str:
    return datetime.now(UTC).date().isoformat()


@dataclass(frozen=True)
class Figure:
    name: str
    value: float | None
    unit: str
    bar: float | None
    """The target; None without one."""
    better: Better
    device: str
    command: str
    date: str = field(default_factory=today)


class FigureReport(CaseReport):
    """A run's cases and figures. ``results_path`` is a file of many runs' figures, in which a figure keeps its bar."""

    def __init__(
        self,
        bench: str,
        device: str,
        json_path: Path | None = None,
        results_path: Path | None = None,
        command: str | None = None,
    ) -> None:
        if results_path is not None and results_path.exists():
            read_figures(results_path)  # fails before measuring if the file is not a results file
        super().__init__(bench, device, json_path)
        self.command = command or self.command.replace("sparse-prefill", f"python -m benchmarks.{bench}", 1)
        self.results_path = results_path
        self.figures: dict[str, Figure] = {}

    def add_case(self, case: Mapping[str, Any]) -> None:
        # JSON has no NaN, which is the error of a kernel that fails.
        super().add_case({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in case.items()})

    def add_figure(self, name: str, value: float, unit: str, better: Better, bar: float | None = None) -> None:
        """Add a figure. ``bar`` is its target, unless the results file already has one."""
        self.figures[name] = Figure(name, float(f"{value:.4g}"), unit, bar, better, self.device, self.command)
        if self.results_path is not None:
            merge_figures(self.results_path, self.figures.values())


def merge_figures(path: Path, figures: Iterable[Figure]) -> None:
    """Merge figures into a file. A figure replaces the figure of the same name, and keeps its bar."""
    by_name = {figure.name: figure for figure in read_figures(path)} if path.exists() else {}
    for figure in figures:
        old = by_name.get(figure.name)
        by_name[figure.name] = figure if old is None else replace(figure, bar=old.bar)
    lines = [json.dumps(asdict(figure), ensure_ascii=False) + "\n" for figure in by_name.values()]
    write_text(path, "".join(lines))


def read_figures(path: Path) -> list[Figure]:
    """Read the figures of a results file. Raises BenchError if it is not a results file."""
    try:
        return [Figure(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise BenchError(f"{path}: {error}; expected a figure as a JSON object on each line") from None


def main(
    measured: Annotated[Path, typer.Argument(help="File by --json of `bench serve`.")],
    results: Annotated[Path, typer.Argument(help="List of figures to merge these into.")],
) -> None:
    data = json.loads(measured.read_text(encoding="utf-8"))
    if data["bench"] != "serve":
        raise BenchError(f"{measured}: given a file of {data['bench']}, expected one of bench serve")
    report = FigureReport(data["bench"], data["device"], None, results, data["command"])
    for case in data["cases"]:
        for key, (name, unit, better) in SERVE_FIGURES.items():
            if case.get(key) is not None:
                report.add_figure(f"vllm serve, {case['label']}, {case['case']}: {name}", case[key], unit, better)
    print(f"{len(report.figures)} figures in {results}")


if __name__ == "__main__":
    typer.run(main)
