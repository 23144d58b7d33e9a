# SPDX-License-Identifier: Apache-2.0
"""What a method does to each head of a layer, on captured prompts: error of its output, density, time on this device.

A search asks a ``LayerJudge`` what came of one method for each head; it knows nothing of captures or devices. It is a
function ``search(judge, bound, ...) -> list[Method]``: one for each head, ``Dense()`` where nothing holds the bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_sparse_backend.calibrate.costs import Costs
from vllm_sparse_kernels.select.base import Method

WORST = 0.01
"""The share of queries that ``Figures.worst`` leaves out: those that retrieve are few, and means hide them."""


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
    l2: float
    """‖O − Õ‖₂ / ‖O‖₂ over all queries together."""
    density: float
    """Kept pairs over causal pairs."""
    time_ms: float
    """This head's share of selection and attention of one prompt's chunks, were the layer's other heads selected by the
    same kind of method (``costs.py``)."""


@dataclass(frozen=True)
class Bound:
    """The most error that a head may have."""

    error: float
    """Of ``Figures.error``."""
    worst: float = math.inf
    """Of ``Figures.worst``."""

    def holds(self, figures: Figures) -> bool:
        """Never for what is no number."""
        return figures.error <= self.error and figures.worst <= self.worst

    def share(self, figures: Figures) -> float:
        """How much of the bound the head takes up: above 1 it does not hold."""
        return max(figures.error / self.error, figures.worst / self.worst)


class LayerJudge(Protocol):
    """One layer on captured prompts."""

    layer: int
    num_heads: int
    costs: Costs
    """What kinds of methods take on this device; ``costs.timed`` says whether that is measured or an estimate."""

    def judge(self, methods: Sequence[Method]) -> list[Figures]:
        """What comes of one method for each head. All heads are selected and attended in one pass of each chunk."""
