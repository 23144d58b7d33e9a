# SPDX-License-Identifier: Apache-2.0
"""What a method does to each head of a layer, on captured prompts: error of its output, density; and bounds of these.

A search asks a ``LayerJudge`` what came of one method for each head; it knows nothing of captures or devices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from vllm_sparse_kernels.methods.base import Method

BEYOND_P99 = 0.01
"""The share of queries that ``HeadResult.p99`` leaves out: those that retrieve are few, and means hide them."""
BEYOND_P999 = 0.001
"""The same of ``HeadResult.p999``: queries that look up an answer may be no more than a hundredth of a prompt's."""

LEAST_ERROR = 0.02
"""What the default counts as losing where it loses less: a head that must do better would be dense for nothing."""

ERRORS = ("error", "p99", "p999", "mean")
"""Of ``Bound``, those that are errors as they are."""


class Errors(NamedTuple):
    """What ``HeadResult`` has of these names."""

    error: float
    p99: float
    p999: float
    of_default: float


@dataclass(frozen=True)
class HeadResult:
    """Of one head under one method, over the queries of all prompts, selected and attended chunk by chunk as served.

    A query's error is ‖o − õ‖₁ / ‖o‖₁: o is its output under dense attention, õ under the method. Of several prompts
    errors are those of the one where they are largest: a bound that holds, holds on each.
    """

    error: float
    """Mean over queries."""
    p99: float
    """A hundredth of queries (``BEYOND_P99``) has more."""
    p999: float
    """A thousandth of queries (``BEYOND_P999``) has more."""
    of_default: float
    """The least k for which the head loses k times what it loses under the server's default: its mean is at most k
    times that (or ``LEAST_ERROR``), and a thousandth of queries, each beside itself, has more than k − 1 more.

    Means and tails by themselves do not tell who is hit: heads that look everywhere have a tail of 0.8 under the
    default, from queries that lose nothing, and a method with the same tail may lose every lookup.
    """
    density: float
    """Kept pairs over causal pairs."""
    unseen: Errors | None = None
    """What a prompt that was not seen may have, by leave-one-out: as far beyond these prompts as the one with most lies
    beyond the others; of a single prompt what that has."""


@dataclass(frozen=True)
class Bound:
    """The most error that a head may have."""

    error: float = math.inf
    """Of ``HeadResult.error``."""
    p99: float = math.inf
    """Of ``HeadResult.p99``."""
    p999: float = math.inf
    """Of ``HeadResult.p999``."""
    mean: float = math.inf
    """Of the mean of all heads' ``HeadResult.error``, dense ones too: a matter of the whole model."""
    of_default: float = math.inf
    """Of ``HeadResult.of_default``."""

    @property
    def has_mean(self) -> bool:
        return math.isfinite(self.mean)

    def with_margin(self, margin: float) -> "Bound":
        """What searches keep to: all but a share of the errors; ``of_default`` is of the same prompts, and stays."""
        return replace(self, **{name: getattr(self, name) * (1 - margin) for name in ERRORS})

    def holds(self, figures: HeadResult) -> bool:
        """On unseen prompts too, as far as ``HeadResult.unseen`` can tell. Never for what is no number."""
        return all(share <= 1 for share in self._shares(figures.unseen or figures))

    def used_fraction(self, figures: HeadResult) -> float:
        """How much of the bound the head takes up on these prompts: above 1 it does not hold."""
        return max(self._shares(figures))

    def _shares(self, errors: HeadResult | Errors) -> list[float]:
        return [getattr(errors, name) / getattr(self, name) for name in Errors._fields]

    @property
    def numbers(self) -> dict[str, float]:
        """By name, those that bind."""
        return {name: most for name in (*ERRORS, "of_default") if math.isfinite(most := getattr(self, name))}


class LayerJudge(Protocol):
    """One layer on captured prompts."""

    layer: int
    num_heads: int

    def judge(self, methods: Sequence[Method]) -> list[HeadResult]:
        """What comes of one method for each head. All heads are selected and attended in one pass of each chunk."""
