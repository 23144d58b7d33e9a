# SPDX-License-Identifier: Apache-2.0
"""MInference's pattern for each head (arXiv:2407.02490, section 3.2, Algorithm 1; appendix C.2 and table 7).

Table 7's candidates, an A-shape, four vertical-slashes and a block-sparse one, are first brought to equal cost, that of
the A-shape with 1,024 and 4,096 tokens: a setting is changed in steps until it costs as much. Then the candidate with
the least output error is the head's.

What the paper leaves open, and where this departs from it:

* Cost is time on this device: selection and attention of all heads of the first layer that can go sparse, with the
  candidate, as served (``costs.py``). The paper counts what its kernels compute, and selection not at all.
* What changes in a step: the larger of a candidate's two numbers, so that it stays what it is, by 50 tokens. A step of
  block-sparse is one block of 64 keys, where the paper's 50 would be 3,200 of them.
* A candidate whose smallest setting costs too much, or that keeps all where it costs as much, is left out where
  Algorithm 1 would not end.
* Of the candidates that hold ``bound`` the one with the least error is taken, of those that leave out a tenth of the
  head's pairs or more: scattered slashes may keep them all. Where there is none, the head runs dense.
* Beyond the paper: several budgets, multiples of the paper's cost. Each head takes the smallest at which a candidate
  holds the bound. The paper has one. Those as dear as dense attention are left out.

Heads of one pattern differ in their numbers within one launch.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from vllm_sparse_backend.calibration.calibration_job import Job
from vllm_sparse_backend.calibration.head_costs import Costs, head_ms
from vllm_sparse_backend.calibration.head_errors import Bound, LayerJudge
from vllm_sparse_backend.calibration.layer_walk import first_layer_judge
from vllm_sparse_backend.calibration.search import LEAST_SPARSITY, IsAllowed, Search, judge_all
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.minference.a_shape import AShape
from vllm_sparse_kernels.methods.minference.block_sparse import BlockSparse
from vllm_sparse_kernels.methods.minference.vertical_slash import VerticalSlash

TARGET = AShape(sink_tokens=1024, local_tokens=4096)
"""Whose cost is the paper's budget t."""

CANDIDATES = (
    TARGET,
    VerticalSlash(vertical_tokens=30, slash_tokens=2048),
    VerticalSlash(vertical_tokens=100, slash_tokens=1800),
    VerticalSlash(vertical_tokens=500, slash_tokens=1500),
    VerticalSlash(vertical_tokens=3000, slash_tokens=200),
    BlockSparse(top_blocks=100),
)
"""Table 7."""

SIZES: dict[type[Method], tuple[str, ...]] = {
    AShape: ("local_tokens",), VerticalSlash: ("slash_tokens", "vertical_tokens"), BlockSparse: ("top_blocks",),
}  # fmt: skip
"""What a step may change."""

STEP, MOST_STEPS = 50, 4096
BUDGETS = (0.5, 1.0, 2.0, 4.0)
"""Of the paper's cost; the paper has 1 alone."""

Space = tuple[Method, ...]
"""Candidates of equal cost."""


class MInferenceSearch(Search):
    """Of the cheapest space with one that holds the bound, the candidate of the least error."""

    def __init__(self, job: Job, bound: Bound, budgets: Sequence[float] = BUDGETS) -> None:
        judge = first_layer_judge(job)
        self.bound, self.spaces = bound, list(search_spaces(judge, job.costs, budgets))
        judge.save()

    def choose(self, judge: LayerJudge, is_allowed: IsAllowed) -> list[Method]:
        chosen: list[Method | None] = [None] * judge.num_heads
        for space in self.spaces:
            passes = [judge_all(judge, self.bound, [candidate] * judge.num_heads) for candidate in space]
            for head, judged in enumerate(zip(*passes, strict=True)):
                holding = [result for result in judged if result.holds and result.sparsity >= LEAST_SPARSITY]
                allowed = [result for result in holding if is_allowed(head, result.method)]
                if chosen[head] is None and allowed:
                    chosen[head] = min(allowed, key=lambda result: result.figures.error).method
            if None not in chosen:
                break
        return [method or Dense() for method in chosen]


def search_spaces(judge: LayerJudge, costs: Costs, budgets: Sequence[float]) -> Iterator[Space]:
    """The candidates of each budget, the cheapest first: at most twelve passes a candidate."""
    dense_ms = _cost(judge, costs, Dense())[0]
    for budget in sorted(budgets):
        aim = budget * _cost(judge, costs, TARGET)[0]
        if aim < (1 - LEAST_SPARSITY) * dense_ms:
            fitted = [
                candidate if (candidate, budget) == (TARGET, 1) else _fitted(judge, costs, candidate, aim)
                for candidate in CANDIDATES
            ]
            yield tuple(candidate for candidate in fitted if candidate is not None)


def resized(candidate: Method, steps: int) -> Method:
    """ChangeSpace: the candidate with so many steps as its larger number, and what it had beside whole steps."""
    number, field = max((getattr(candidate, field), field) for field in SIZES[type(candidate)])
    step = 1 if isinstance(candidate, BlockSparse) else STEP
    changes: dict[str, Any] = {field: steps * step + number % step}
    return replace(candidate, **changes)


def _fitted(judge: LayerJudge, costs: Costs, candidate: Method, aim: float) -> Method | None:
    """The candidate in the size that costs next to ``aim``; None where none does, or where it keeps all then."""

    def taken(steps: int) -> float:
        return _cost(judge, costs, resized(candidate, steps))[0]

    over = 1 + bisect_left(range(1, MOST_STEPS), aim, key=taken)
    if over == 1:
        return None
    steps = min(over - 1, over, key=lambda steps: abs(taken(steps) - aim))
    fitted = resized(candidate, steps)
    return fitted if _cost(judge, costs, fitted)[1] >= LEAST_SPARSITY else None


def _cost(judge: LayerJudge, costs: Costs, method: Method) -> tuple[float, float]:
    """Time of a layer all of whose heads have this method, in ms, and the share of the pairs that it leaves out."""
    densities = [result.density for result in judge.judge([method] * judge.num_heads)]
    shared = costs.of(method).group_ms + costs.layer.base_ms
    taken = shared + sum(head_ms(costs, method, density) for density in densities)
    return taken, 1 - sum(densities) / judge.num_heads
