# SPDX-License-Identifier: Apache-2.0
"""What a search is, and the one that most methods need: along a ladder, the sparsest setting that holds the bound.

Where a paper states a procedure of its own, it is a search of its own (``minference.py``, ``sparge_attn.py``,
``share_prefill.py``); the loop that all of them run in is ``calibrate.py``.
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

LEAST_SPARSITY = 0.1
"""Share of the pairs that a head must leave out to be worth its selection: what SpargeAttn's authors' code asks for."""

MethodT = TypeVar("MethodT", bound=Method)

IsAllowed = Callable[[int, Method], bool]
"""Whether a head may have a method: one that missed the bound beside the other heads' methods it may not."""


class Search(ABC):
    """Chooses for one layer after the other."""

    others: Sequence[Method] = ()
    """Methods that heads of other layers may have, where a layer's need some (``Method.sharing``)."""

    @abstractmethod
    def choose(self, judge: LayerJudge, is_allowed: IsAllowed) -> list[Method]:
        """One method for each head, ``Dense()`` where none that it may have holds the bound."""

    def should_repeat(self, methods: Sequence[Sequence[Method]], mean_error: float) -> bool:
        """Whether the whole model is to be chosen for once more, now that this has come of it."""
        return False


class Judged(NamedTuple):
    """A method of one head and what came of it."""

    method: Method
    figures: HeadResult
    holds: bool

    @property
    def sparsity(self) -> float:
        return 1 - self.figures.density


def judge_all(judge: LayerJudge, bound: Bound, methods: Sequence[Method]) -> list[Judged]:
    """One pass."""
    figures = judge.judge(methods)
    return [Judged(method, of_head, bound.holds(of_head)) for method, of_head in zip(methods, figures, strict=True)]


def sparsest(judge: LayerJudge, bound: Bound, ladders: Mapping[int, Sequence[Method]]) -> dict[int, Judged]:
    """For each head the first setting found that holds the bound; where none does, the last one, which does not.

    ``ladders``: for each head that is asked about its settings, the sparsest first. A pass takes one method for each
    head, so that each step of the bisection judges all heads, each at the middle of its own range: at most
    ⌈log2(n + 1)⌉ passes for ladders of n settings. What is returned was judged itself: a curve of errors that is not
    monotone costs sparsity, never the bound.
    """
    low = dict.fromkeys(ladders, 0)
    high = {head: len(ladder) for head, ladder in ladders.items()}
    sparsest_by_head: dict[int, Judged] = {}
    while going := [head for head in ladders if low[head] < high[head]]:
        middles = {head: (low[head] + high[head]) // 2 for head in ladders}
        # Heads that are done are judged along as they were, others as one that is asked about: no more launches.
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
    """The method if it holds and leaves out ``LEAST_SPARSITY``, else dense."""
    return judged.method if judged and judged.holds and judged.sparsity >= LEAST_SPARSITY else Dense()


class LadderSearch(Search):
    """Of each head the sparsest setting of a ladder that holds the bound."""

    def __init__(self, bound: Bound, settings: Sequence[Method]) -> None:
        self.bound, self.settings = bound, settings

    def choose(self, judge: LayerJudge, is_allowed: IsAllowed) -> list[Method]:
        heads = range(judge.num_heads)
        ladders = {head: [setting for setting in self.settings if is_allowed(head, setting)] for head in heads}
        judged = sparsest(judge, self.bound, ladders)
        return [sparse_enough(judged.get(head)) for head in heads]


def ladder_of(name: str) -> list[Method]:
    """A method's own ladder, from its folder's description: the sparsest setting of each kind first."""
    return [make_method(name, setting) for setting in METHODS[name].ladder]


def halved(ladder: Sequence[MethodT]) -> list[MethodT]:
    """A setting more between two that differ in one number."""
    finer = list(ladder[:1])
    for before, after in pairwise(ladder):
        differing = [field.name for field in fields(after) if getattr(before, field.name) != getattr(after, field.name)]
        ends = [getattr(method, differing[0]) for method in (before, after)]
        if len(differing) == 1 and all(isinstance(end, float) for end in ends):
            middle: Any = {differing[0]: round(sum(ends) / 2, 6)}
            finer.append(replace(after, **middle))
        finer.append(after)
    return finer
