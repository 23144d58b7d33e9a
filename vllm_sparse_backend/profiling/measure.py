# SPDX-License-Identifier: Apache-2.0
"""What a method does to each head of a layer, on captured prompts: error of its output, density; and bounds of these.

A search asks a ``LayerJudge`` what came of one method for each head; it knows nothing of captures or devices.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from typing import NamedTuple, Protocol

from vllm_sparse_kernels.methods.base import Method

WORST = 0.01
"""The share of queries that ``Figures.worst`` leaves out: those that retrieve are few, and means hide them."""
RARE = 0.001
"""The same of ``Figures.rare``: of a prompt's queries those that look up an answer may be no more than a hundredth."""


class Errors(NamedTuple):
    """What ``Figures`` has of these names."""

    error: float
    worst: float
    rare: float


@dataclass(frozen=True)
class Figures:
    """Of one head under one method, over the queries of all prompts, selected and attended chunk by chunk as served.

    A query's error is ‖o − õ‖₁ / ‖o‖₁: o is its output under dense attention, õ under the method. Of several prompts
    errors are those of the one where they are largest: a bound that holds, holds on each.
    """

    error: float
    """Mean over queries."""
    worst: float
    """A hundredth of queries (``WORST``) has more."""
    rare: float
    """A thousandth of queries (``RARE``) has more."""
    density: float
    """Kept pairs over causal pairs."""
    unseen: Errors | None = None
    """What a prompt that was not seen may have, by leave-one-out: as far beyond these prompts as the one with most lies
    beyond the others; of a single prompt what that has."""


@dataclass(frozen=True)
class Bound:
    """The most error that a head may have."""

    error: float
    """Of ``Figures.error``."""
    worst: float = math.inf
    """Of ``Figures.worst``."""
    rare: float = math.inf
    """Of ``Figures.rare``."""
    mean: float = math.inf
    """Of the mean of all heads' ``Figures.error``, dense ones included: a matter of the whole model, not of a head."""

    @property
    def has_mean(self) -> bool:
        return math.isfinite(self.mean)

    def less(self, margin: float) -> "Bound":
        """All but a share of it: what searches keep to."""
        return Bound(*(most * (1 - margin) for most in astuple(self)))

    def holds(self, figures: Figures) -> bool:
        """On unseen prompts too, as far as ``Figures.unseen`` can tell. Never for what is no number."""
        of = figures.unseen or figures
        return of.error <= self.error and of.worst <= self.worst and of.rare <= self.rare

    def share(self, figures: Figures) -> float:
        """How much of the bound the head takes up on these prompts: above 1 it does not hold."""
        return max(figures.error / self.error, figures.worst / self.worst, figures.rare / self.rare)

    @property
    def numbers(self) -> dict[str, float]:
        """By name, those that bind."""
        return {name: value for name, value in asdict(self).items() if math.isfinite(value)}


class LayerJudge(Protocol):
    """One layer on captured prompts."""

    layer: int
    num_heads: int

    def judge(self, methods: Sequence[Method]) -> list[Figures]:
        """What comes of one method for each head. All heads are selected and attended in one pass of each chunk."""
