# SPDX-License-Identifier: Apache-2.0
"""The bisection that searches share: for each head the sparsest setting that holds the bound, all heads at once.

A judge's pass takes one method for each head, so that a step of the bisection judges every head, each at the middle of
its own range. What is returned was judged itself: a curve of errors that is not monotone costs sparsity, never the
bound.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm_sparse_backend.profiling.measure import Bound, Figures, LayerJudge
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense

LEAST_SPARSITY = 0.1
"""Share of the pairs that a head must leave out to be worth its selection: what SpargeAttn's authors' code asks for."""


class Judged(NamedTuple):
    """A method of one head and what came of it."""

    method: Method
    figures: Figures
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

    ``ladders``: for each head that is asked about its settings, the sparsest first. At most ⌈log2(n + 1)⌉ passes for
    ladders of n settings.
    """
    low = dict.fromkeys(ladders, 0)
    high = {head: len(ladder) for head, ladder in ladders.items()}
    found: dict[int, Judged] = {}
    while going := [head for head in ladders if low[head] < high[head]]:
        middles = {head: (low[head] + high[head]) // 2 for head in going}
        asked = {head: ladders[head][middle] for head, middle in middles.items()}
        # The others are judged along: as one that is asked about, they need no launches of their own.
        along = asked[going[0]]
        judged = judge_all(judge, bound, [asked.get(head, along) for head in range(judge.num_heads)])
        for head, middle in middles.items():
            if judged[head].holds:
                high[head] = middle
            else:
                low[head] = middle + 1
            if judged[head].holds or high[head] == len(ladders[head]):
                found[head] = judged[head]
    return found


def cheapest(judge: LayerJudge, bound: Bound, ladder: Sequence[Method], price: float) -> dict[int, Judged]:
    """For each head the setting that holds the bound at which its density, and its error at a price, come to least;
    where none holds it, the last one. As many passes as there are settings."""
    passes = [judge_all(judge, bound, [setting] * judge.num_heads) for setting in ladder]
    found = {}
    for head, of_head in enumerate(zip(*passes, strict=True)):
        holding = [one for one in of_head if one.holds]
        found[head] = min(holding, key=lambda one: one.figures.density + price * one.figures.error, default=of_head[-1])
    return found


def for_all(judge: LayerJudge, ladder: Sequence[Method]) -> dict[int, Sequence[Method]]:
    """One ladder for every head."""
    return dict.fromkeys(range(judge.num_heads), ladder)


def sparse_enough(judged: Judged | None) -> Method:
    """The method if it holds and leaves out ``LEAST_SPARSITY``, else dense."""
    return judged.method if judged and judged.holds and judged.sparsity >= LEAST_SPARSITY else Dense()
