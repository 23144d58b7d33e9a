# SPDX-License-Identifier: Apache-2.0
"""Output error and density of each head of a layer on captured prompts, and their bounds.

A search gets the figures of one method for each head from a ``LayerJudge``, so it does not depend on captures or
devices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from vllm_sparse_kernels.methods.base import Method

BEYOND_P99 = 0.01
"""Share of queries above ``HeadResult.p99``: only few queries retrieve, and a mean hides them."""
BEYOND_P999 = 0.001
"""Share of queries that ``HeadResult.of_default`` leaves out: fewer than a hundredth of a prompt's queries may look up
an answer."""

LEAST_ERROR = 0.02
"""Lower limit of the default's error in ratios. A smaller denominator would make heads dense needlessly."""

ERRORS = ("error", "p99")
"""Fields of ``Bound`` that are relative errors."""


class Errors(NamedTuple):
    """The errors of ``HeadResult``, by the same names."""

    error: float
    p99: float
    of_default: float
    absolute: float


@dataclass(frozen=True)
class HeadResult:
    """Figures of one head under one method, over the queries of all prompts, which run chunk by chunk.

    A query's error is ‖o − õ‖₁ / ‖o‖₁, where o is its output under dense attention and õ its output under the method.
    With several prompts, each error is the largest over the prompts, so a bound holds on every prompt.
    """

    error: float
    """Mean over queries."""
    p99: float
    """Error that a hundredth of queries (``BEYOND_P99``) exceeds."""
    of_default: float
    """Error relative to the server's default: the smallest k for which the mean error is at most k times the default's
    (or ``LEAST_ERROR``), and at most a thousandth of queries exceed their own error under the default by k − 1.

    Means and tails alone do not show which queries have the errors. Heads that attend everywhere have a tail of 0.8
    under the default, from queries that lose nothing. A method with the same tail may lose every lookup.
    """
    absolute: float
    """SALE's Err(τ) = ‖O − Õ‖₁ / N (section 3.3): the sum over a head's channels of |o − õ|, averaged over the N tokens
    of a prompt, including tokens that run dense. Its size depends on the model's values."""
    density: float
    """Kept pairs divided by causal pairs."""
    unseen: Errors | None = None
    """Expected errors on an unseen prompt, by leave-one-out: the largest plus its distance to the second largest. With
    a single prompt, its own errors. ``absolute`` is the largest of the prompts, as SALE compares it."""


@dataclass(frozen=True)
class Bound:
    """Upper limits of a head's error."""

    error: float = math.inf
    """Limit of ``HeadResult.error``."""
    p99: float = math.inf
    """Limit of ``HeadResult.p99``."""
    of_default: float = math.inf
    """Limit of ``HeadResult.of_default``."""
    absolute: float = math.inf
    """Limit of ``HeadResult.absolute``: SALE's θ."""

    def with_margin(self, margin: float) -> "Bound":
        """Tighten the bound for a search, leaving a margin for unseen prompts.

        ``of_default`` is unchanged, because it compares two methods on the same prompts. ``absolute`` is unchanged,
        because it is the paper's number.
        """
        return replace(self, **{name: getattr(self, name) * (1 - margin) for name in ERRORS})

    def holds(self, figures: HeadResult) -> bool:
        """Return whether a head meets the bound, including on unseen prompts as ``HeadResult.unseen`` predicts."""
        return all(share <= 1 for share in self._shares(figures.unseen or figures))

    def used_fraction(self, figures: HeadResult) -> float:
        """Return the fraction of the bound that a head uses on these prompts."""
        return max(self._shares(figures))

    def _shares(self, errors: HeadResult | Errors) -> list[float]:
        return [getattr(errors, name) / getattr(self, name) for name in Errors._fields]

    @property
    def numbers(self) -> dict[str, float]:
        """The finite limits by name."""
        limits = {name: getattr(self, name) for name in Errors._fields}
        return {name: limit for name, limit in limits.items() if math.isfinite(limit)}


class LayerJudge(Protocol):
    """Measures methods on one layer of captured prompts."""

    @property
    def num_heads(self) -> int:
        """Number of query heads."""

    def judge(self, methods: Sequence[Method]) -> list[HeadResult]:
        """Measure one method for each head, in one pass of selection and attention over each chunk."""
