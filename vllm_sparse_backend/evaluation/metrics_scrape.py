# SPDX-License-Identifier: Apache-2.0
"""Reader of this backend's counters on a server's /metrics, summed over all engines."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from vllm_sparse_backend.config.metrics import PREFIX


@dataclass(frozen=True)
class Pairs:
    """(query, key) pairs of sparse rows, over all heads."""

    kept: int = 0
    causal: int = 0

    @property
    def density(self) -> float | None:
        """Kept pairs divided by causal pairs; None if no row was sparse."""
        return self.kept / self.causal if self.causal else None

    def __add__(self, other: "Pairs") -> "Pairs":
        return Pairs(self.kept + other.kept, self.causal + other.causal)


@dataclass(frozen=True)
class MetricsReport:
    """Totals since the server started, or since an earlier report."""

    samples: Counter[tuple[str, tuple[tuple[str, str], ...]]] = field(default_factory=Counter)
    """Values by name, without this project's prefix, and labels."""

    def __sub__(self, earlier: "MetricsReport") -> "MetricsReport":
        return MetricsReport(self.samples - earlier.samples)

    def by(self, name: str, *labels: str) -> Counter[Any]:
        """Return one metric's sums by the values of these labels: a text for one label, a tuple for several."""
        sums: Counter[Any] = Counter()
        for (sample_name, sample_labels), value in self.samples.items():
            if sample_name == name:
                key = tuple(dict(sample_labels).get(label, "") for label in labels)
                sums[key[0] if len(key) == 1 else key] += value
        return sums

    @cached_property
    def rows(self) -> Counter[tuple[str, str]]:
        """Rows by path and reason."""
        return self.by("rows", "path", "reason")

    @property
    def pairs(self) -> Pairs:
        """Pairs of all layers together."""
        return Pairs(self.by("kept_pairs").total(), self.by("causal_pairs").total())


def parse_metrics(text: str) -> MetricsReport:
    """Parse a /metrics page in Prometheus's text format."""
    report = MetricsReport()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and not sample.name.endswith("_created"):
                name = sample.name.removeprefix(PREFIX).removesuffix("_total")
                report.samples[name, tuple(sample.labels.items())] += int(sample.value)
    return report
