"""Read this backend's counters from the text of a server's /metrics."""

from collections import Counter
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "sparse_prefill_"


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
    """Totals since the server started: rows by (path, reason), and counts by layer."""

    rows: Counter[tuple[str, str]] = field(default_factory=Counter)
    layers: dict[int, LayerCounts] = field(default_factory=dict)

    def rows_of(self, path: str) -> int:
        return sum(count for (row_path, _), count in self.rows.items() if row_path == path)

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


def parse(text: str) -> Report:
    """The report of a /metrics page (Prometheus text format)."""
    report = Report()
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(PREFIX):
            continue
        for sample in family.samples:
            if not sample.name.endswith("_total"):
                continue
            name, value = sample.name.removeprefix(PREFIX).removesuffix("_total"), int(sample.value)
            if name == "rows":
                report.rows[sample.labels["path"], sample.labels.get("reason", "")] += value
            elif name in ("tiles", "kept_pairs", "causal_pairs"):
                counts = report.layers.setdefault(int(sample.labels["layer"]), LayerCounts())
                setattr(counts, name, getattr(counts, name) + value)
    return report
