# SPDX-License-Identifier: Apache-2.0
"""Read what this backend counted from the text of a server's /metrics, all engines together."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from vllm_sparse_backend.settings.metrics import PREFIX


@dataclass
class LayerCounts:
    tiles: int = 0
    kept_pairs: int = 0
    causal_pairs: int = 0

    @property
    def density(self) -> float:
        """Kept (query, key) pairs over causal pairs; not a number where the layer computed nothing sparsely."""
        return self.kept_pairs / self.causal_pairs if self.causal_pairs else float("nan")


@dataclass
class Report:
    """Totals since the server started."""

    rows: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By path and reason."""
    layers: dict[int, LayerCounts] = field(default_factory=dict)
    attention: Counter[str] = field(default_factory=Counter)
    """The model's layers by what computes the attention of their prefills."""
    compilations: Counter[str] = field(default_factory=Counter)
    """By when: warmup or serving."""
    arena_overflows: int = 0
    guard_checks: int = 0
    guard_trips: int = 0
    device_bytes: int = 0
    """What all workers hold of their devices; 0 where they run on CPUs."""
    engines: Counter[str] = field(default_factory=Counter)
    """By what they did when they were asked: answered or silent. None at all where the server has no such counters."""

    def rows_of(self, path: str) -> int:
        return sum(count for (row_path, _), count in self.rows.items() if row_path == path)

    @property
    def pairs(self) -> "Pairs":
        """Of all layers together."""
        layers = self.layers.values()
        return Pairs(sum(one.kept_pairs for one in layers), sum(one.causal_pairs for one in layers))

    @property
    def density(self) -> float:
        """Of all layers together; not a number where nothing was computed sparsely."""
        found = self.pairs.density
        return float("nan") if found is None else found

    def problem(self) -> str | None:
        """Why these counts do not show a sparse prefill, or None if they do."""
        if not self.rows_of("sparse"):
            why = ", ".join(f"{reason}: {count}" for (path, reason), count in self.rows.items() if path == "dense")
            return f"no row ran sparse ({f'dense rows: {why}' if why else 'the server counted no rows at all'})"
        if not self.layers:
            return "rows ran sparse, but no layer counted its pairs"
        for layer, counts in sorted(self.layers.items()):
            if not 0 < counts.density < 1:
                return f"layer {layer} has density {counts.density}, expected more than 0 and less than 1"
        return None


@dataclass(frozen=True)
class Pairs:
    """(query, key) pairs of sparse rows, of all layers and heads."""

    kept: int = 0
    causal: int = 0

    @property
    def density(self) -> float | None:
        """None where no row was sparse."""
        return self.kept / self.causal if self.causal else None

    @property
    def figures(self) -> dict[str, Any]:
        """As cases of a report have them."""
        return {"density": self.density, "kept_pairs": self.kept, "causal_pairs": self.causal}

    @staticmethod
    def of_cases(cases: Iterable[Mapping[str, Any]]) -> "Pairs":
        """Of cases of a report, all together."""
        return sum((Pairs(case["kept_pairs"], case["causal_pairs"]) for case in cases), Pairs())

    def __add__(self, other: "Pairs") -> "Pairs":
        return Pairs(self.kept + other.kept, self.causal + other.causal)

    def __sub__(self, other: "Pairs") -> "Pairs":
        return Pairs(self.kept - other.kept, self.causal - other.causal)


def parse(text: str) -> Report:
    """The report of a /metrics page (Prometheus text format)."""
    report = Report()
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(PREFIX):
            continue
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                name = sample.name.removeprefix(PREFIX).removesuffix("_total")
                _add(report, name, sample.labels, sample.value)
    return report


def _add(report: Report, name: str, labels: Mapping[str, str], value: float) -> None:
    if name == "rows":
        report.rows[labels["path"], labels.get("reason", "")] += int(value)
    elif name == "layers":
        report.attention[labels["attention"]] += int(value)
    elif name == "compilations":
        report.compilations[labels["when"]] += int(value)
    elif name == "up":
        report.engines["answered" if value else "silent"] += 1
    elif name in ("arena_overflows", "guard_checks", "guard_trips", "device_bytes"):
        setattr(report, name, getattr(report, name) + int(value))
    elif name in ("tiles", "kept_pairs", "causal_pairs"):
        counts = report.layers.setdefault(int(labels["layer"]), LayerCounts())
        setattr(counts, name, getattr(counts, name) + int(value))
