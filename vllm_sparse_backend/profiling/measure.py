# SPDX-License-Identifier: Apache-2.0
"""What a method does to each head of a layer, on captured prompts: error of its output, density; and bounds of these.

A search asks a ``LayerJudge`` what came of one method for each head; it knows nothing of captures or devices.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from vllm_sparse_kernels.methods.base import Method

BEYOND_P99 = 0.01
"""The share of queries that ``HeadResult.p99`` leaves out: those that retrieve are few, and means hide them."""
BEYOND_P999 = 0.001
"""The same of ``HeadResult.p999``: queries that look up an answer may be no more than a hundredth of a prompt's."""


class Errors(NamedTuple):
    """What ``HeadResult`` has of these names."""

    error: float
    p99: float
    p999: float


DEFAULT_AT_LEAST = Errors(0.02, 0.15, 0.6)
"""What the default counts as losing where it loses less: a head that must do better would be dense for nothing."""


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
    density: float
    """Kept pairs over causal pairs."""
    unseen: Errors | None = None
    """What a prompt that was not seen may have, by leave-one-out: as far beyond these prompts as the one with most lies
    beyond the others; of a single prompt what that has."""
    default: "HeadResult | None" = None
    """Of the same head under the server's default, where bounds are multiples of that."""


@dataclass(frozen=True)
class Bound:
    """The most error that a head may have: as it is, or by what the default loses on the same head."""

    error: float
    """Of ``HeadResult.error``."""
    p99: float = math.inf
    """Of ``HeadResult.p99``."""
    p999: float = math.inf
    """Of ``HeadResult.p999``."""
    mean: float = math.inf
    """Of the mean of all heads' ``HeadResult.error``, dense ones too: a matter of the whole model."""
    relative: bool = field(default=False, kw_only=True)
    """Whether the first three are multiples k of what the default loses: a head then also keeps 1/k of what the default
    keeps, without which 1.25 times an error of 0.8 would let every lookup fail."""

    @staticmethod
    def of_default(times: float) -> "Bound":
        return Bound(times, times, times, relative=True)

    @property
    def _most(self) -> dict[str, float]:
        return {"error": self.error, "p99": self.p99, "p999": self.p999, "mean": self.mean}

    @property
    def has_mean(self) -> bool:
        return math.isfinite(self.mean)

    def less(self, margin: float) -> "Bound":
        """All but a share of it: what searches keep to."""
        return Bound(*(most * (1 - margin) for most in self._most.values()), relative=self.relative)

    def holds(self, figures: HeadResult) -> bool:
        """On unseen prompts too, as far as ``HeadResult.unseen`` can tell. Never for what is no number."""
        of, default = figures.unseen or figures, figures.default and (figures.default.unseen or figures.default)
        return all(share <= 1 for share in self._shares(of, default))

    def share(self, figures: HeadResult) -> float:
        """How much of the bound the head takes up on these prompts: above 1 it does not hold."""
        return max(self._shares(figures, figures.default))

    def _shares(self, of: HeadResult | Errors, default: HeadResult | Errors | None) -> Iterator[float]:
        for name in Errors._fields:
            most = getattr(self, name)
            if default:
                lost = max(getattr(default, name), getattr(DEFAULT_AT_LEAST, name))
                most = min(most * lost, max(lost, 1 - (1 - lost) / most))
            yield getattr(of, name) / most

    @property
    def numbers(self) -> dict[str, float]:
        """By name, those that bind."""
        given = {"of_default": self.error} if self.relative else self._most
        return {name: most for name, most in given.items() if math.isfinite(most)}


class LayerJudge(Protocol):
    """One layer on captured prompts."""

    layer: int
    num_heads: int

    def judge(self, methods: Sequence[Method]) -> list[HeadResult]:
        """What comes of one method for each head. All heads are selected and attended in one pass of each chunk."""


class BesideDefault:
    """A ``LayerJudge`` that says with every figure what the server's default has on the same head."""

    def __init__(self, judge: LayerJudge, default: Method) -> None:
        self.layer, self.num_heads, self._judge, self._default = judge.layer, judge.num_heads, judge, default

    def judge(self, methods: Sequence[Method]) -> list[HeadResult]:
        defaults = self._judge.judge([self._default] * self.num_heads)
        return [replace(of, default=one) for of, one in zip(self._judge.judge(methods), defaults, strict=True)]
