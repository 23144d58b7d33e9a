# SPDX-License-Identifier: Apache-2.0
"""Pictures of what was measured: times faster than dense attention, against length and against density."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_sparse_backend.measure.report import BenchError

Series = Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Panel:
    title: str
    x: str
    y: str
    series: Series
    log_x: bool = True
    line_at: float | None = 1.0
    """Where nothing is won and nothing lost."""


def series_of(cases: Iterable[Mapping[str, Any]], x: str, y: str, *names: str) -> dict[str, list[tuple[float, float]]]:
    """Points (x, y) of the cases that have both, one line for each combination of ``names``, sorted by x."""
    found: dict[str, list[tuple[float, float]]] = {}
    for case in cases:
        if case.get(x) is not None and case.get(y) is not None:
            name = ", ".join(str(case[n]) for n in names if case.get(n) is not None)
            found.setdefault(name, []).append((float(case[x]), float(case[y])))
    return {name: sorted(points) for name, points in found.items()}


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """Raises BenchError without matplotlib, and where there is nothing to draw."""
    try:
        import matplotlib
    except ImportError:
        raise BenchError("--png needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [panel for panel in panels if panel.series]
    if not panels:
        raise BenchError(f"{path}: nothing was measured that could be drawn")
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(6.0 * len(panels), 4.6), squeeze=False, layout="constrained"
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        for name, points in panel.series.items():
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3.5, linewidth=1.3, label=name)
        if panel.line_at is not None:
            axis.axhline(panel.line_at, color="black", linewidth=0.8, linestyle="--")
        axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        if panel.log_x:
            axis.set_xscale("log", base=2 if panel.x.startswith("tokens") else 10)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
