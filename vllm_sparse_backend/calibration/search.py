# SPDX-License-Identifier: Apache-2.0
"""The interface of searches, and the search of most methods: the sparsest setting of a ladder that meets the bound.

Methods whose papers describe a procedure have their own search (``minference.py``, ``sparge_attn.py``,
``share_prefill.py``). ``calibration_loop.py`` runs all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from vllm_sparse_backend.calibration.head_errors import Bound, HeadResult, LayerJudge
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_kernels.methods import METHODS
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.sale.method import Sale

LEAST_SPARSITY = 0.1
"""Minimum share of pairs that a head must leave out to be worth its selection, as in SpargeAttn's code."""

MethodT = TypeVar("MethodT", bound=Method)

IsAllowed = Callable[[int, Method], bool]
"""Returns whether a head may use a method: False if the method missed the bound jointly with other heads."""


class Search(ABC):
    """A search that chooses methods layer by layer."""

    others: Sequence[Method] = ()
    """Methods that heads of other layers may have, for methods that need them (``Method.sharing``)."""

    @abstractmethod
    def choose(self, judge: LayerJudge, is_allowed: IsAllowed) -> list[Method]:
        """Choose the methods of one layer."""

    def should_repeat(self, methods: Sequence[Sequence[Method]], mean_error: float) -> bool:
        """Return whether to choose for the whole model again. A search adjusts itself before it returns True."""
        return False


class Judged(NamedTuple):
    """A head's method with its figures, and whether they meet the bound."""

    method: Method
    figures: HeadResult
    holds: bool

    @property
    def sparsity(self) -> float:
        """Share of causal pairs that the method leaves out."""
        return 1 - self.figures.density


def judge_all(judge: LayerJudge, bound: Bound, methods: Sequence[Method]) -> list[Judged]:
    """Judge one method for each head in one pass."""
    figures = judge.judge(methods)
    return [Judged(method, of_head, bound.holds(of_head)) for method, of_head in zip(methods, figures, strict=True)]


def sparsest(judge: LayerJudge, bound: Bound, ladders: Mapping[int, Sequence[Method]]) -> dict[int, Judged]:
    """Find, by bisection, the sparsest setting of each head's ladder that meets the bound.

    A pass runs one method on each head, so each step of the bisection judges all heads in one pass, each head at the
    middle of its own range. Ladders of n settings need at most ⌈log2(n + 1)⌉ passes. The returned setting itself was
    judged, so an error curve that is not monotone costs sparsity but never violates the bound.
    """
    low = dict.fromkeys(ladders, 0)
    high = {head: len(ladder) for head, ladder in ladders.items()}
    sparsest_by_head: dict[int, Judged] = {}
    while going := [head for head in ladders if low[head] < high[head]]:
        middles = {head: (low[head] + high[head]) // 2 for head in ladders}
        # Finished heads keep their method, and heads without a ladder use an active head's, to avoid extra launches.
        methods = {head: ladder[min(middles[head], len(ladder) - 1)] for head, ladder in ladders.items() if ladder}
        along = methods[going[0]]
        judged = judge_all(judge, bound, [methods.get(head, along) for head in range(judge.num_heads)])
        for head in going:
            if judged[head].holds:
                high[head] = middles[head]
            else:
                low[head] = middles[head] + 1
            if judged[head].holds or high[head] == len(ladders[head]):
                sparsest_by_head[head] = judged[head]
    return sparsest_by_head


def sparse_enough(judged: Judged | None) -> Method:
    """Return a judged method if it is worth its selection, otherwise dense."""
    return judged.method if judged and judged.holds and judged.sparsity >= LEAST_SPARSITY else Dense()


class LadderSearch(Search):
    """Search for each head's sparsest setting of one ladder that meets the bound."""

    def __init__(self, bound: Bound, settings: Sequence[Method]) -> None:
        self.bound, self.settings = bound, settings

    def choose(self, judge: LayerJudge, is_allowed: IsAllowed) -> list[Method]:
        """Choose each head's sparsest allowed setting that meets the bound."""
        heads = range(judge.num_heads)
        ladders = {head: [setting for setting in self.settings if is_allowed(head, setting)] for head in heads}
        judged = sparsest(judge, self.bound, ladders)
        return [sparse_enough(judged.get(head)) for head in heads]


def ladder_of(name: str) -> list[Method]:
    """Return a method's ladder from its description."""
    return [make_method(name, setting) for setting in METHODS[name].ladder]


def halving_settings(settings: Sequence[Sale], most: float, least: float) -> list[Sale]:
    """Return SALE's settings with the thresholds of its paper's calibration (section 3.3).

    The paper begins with τ = 0.008 and halves it until the bound is met. The authors' code stops at 0.0001: a head that
    misses the bound at every larger τ is dense.
    """
    taus = []
    tau = most
    while tau > least:
        taus.append(tau)
        tau /= 2
    return [replace(settings[0], tau=tau) for tau in taus]


def halved(ladder: Sequence[MethodT]) -> list[MethodT]:
    """Insert a setting between neighbours that differ in one float parameter."""
    finer = list(ladder[:1])
    for before, after in pairwise(ladder):
        differing = [field.name for field in fields(after) if getattr(before, field.name) != getattr(after, field.name)]
        ends = [getattr(method, differing[0]) for method in (before, after)]
        if len(differing) == 1 and all(isinstance(end, float) for end in ends):
            middle: Any = {differing[0]: round(sum(ends) / 2, 6)}
            finer.append(replace(after, **middle))
        finer.append(after)
    return finer
