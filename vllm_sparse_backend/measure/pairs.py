# SPDX-License-Identifier: Apache-2.0
"""What share of its pairs a server computed for a request: read from its /metrics before and after."""

from dataclasses import dataclass

from vllm_sparse_backend.measure.endpoint import Endpoint
from vllm_sparse_backend.measure.scrape import parse


@dataclass(frozen=True)
class Pairs:
    """(query, key) pairs of sparse rows, of all layers and heads."""

    kept: int = 0
    causal: int = 0

    @staticmethod
    def of(server: Endpoint) -> "Pairs":
        """All since it started; none where it does not count."""
        return Pairs.on_page(server.metrics())

    @staticmethod
    def on_page(text: str) -> "Pairs":
        """Of a /metrics page."""
        layers = parse(text).layers.values()
        return Pairs(sum(one.kept_pairs for one in layers), sum(one.causal_pairs for one in layers))

    @property
    def density(self) -> float | None:
        """None where no row was sparse."""
        return self.kept / self.causal if self.causal else None

    def __add__(self, other: "Pairs") -> "Pairs":
        return Pairs(self.kept + other.kept, self.causal + other.causal)

    def __sub__(self, other: "Pairs") -> "Pairs":
        return Pairs(self.kept - other.kept, self.causal - other.causal)
