# SPDX-License-Identifier: Apache-2.0
"""MInference's pattern for each head (arXiv:2407.02490, section 3.2, Algorithm 1; appendix C.2 and table 7).

Table 7's candidates, an A-shape, four vertical-slashes and a block-sparse one, are first brought to equal cost, that of
the A-shape with 1,024 and 4,096 tokens: a setting is changed in steps of 50 until it costs as much. Then the candidate
with the least output error is the head's.

What the paper leaves open, and where this departs from it:

* Cost is time on this device: selection and attention of all heads of the layer with the candidate, as served
  (``costs.py``). The paper counts what its kernels compute, and selection not at all.
* What changes in a step: the larger of a candidate's two numbers, so that it stays what it is. A step of block-sparse
  is one block of 64 keys, where the paper's 50 would be 3,200 of them. Candidates are equal that cost the same to
  within a twentieth, or lie at the step that comes nearest. The walk skips steps: it guesses and halves.
* A candidate whose smallest setting still costs too much, or whose largest keeps all and costs less, is left out where
  Algorithm 1 would not end.
* Of the candidates that hold ``bound`` the one with the least error is taken, of those that leave out a tenth of the
  head's pairs or more: scattered slashes may keep them all. Where there is none, the head runs dense.
  Heads of a layer share an index as narrow as the narrowest of them: beside others an A-shape, alone in blocks of 128,
  keeps a little less. So the choices are judged together, and a head for which its own does not hold takes the next.
* Beyond the paper: several budgets, multiples of the paper's cost. Each head takes the smallest at which a candidate
  holds the bound. The paper has one, ``budgets=(1.0,)``. Those as dear as dense attention are left out.

Heads of one pattern differ in their numbers within one launch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, NamedTuple

from vllm_sparse_backend.profiling.measure import Bound, LayerJudge
from vllm_sparse_backend.profiling.sparsest import LEAST_SPARSITY, judge_all
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

STEP = 50
TOLERANCE = 0.05
"""ε of Algorithm 1, as a share of the target."""

BUDGETS = (0.5, 1.0, 2.0, 4.0)
"""Of the paper's cost; the paper has 1 alone."""

Space = tuple[Method, ...]
"""Candidates of equal cost."""


def search_spaces(judge: LayerJudge, budgets: Sequence[float] = BUDGETS) -> list[Space]:
    """The candidates of each budget, the cheapest first, by measured cost on this layer: 1 to 8 passes a candidate.

    They are much the same for all layers: a caller may make them once.
    """
    target, dense = _cost(judge, TARGET)[0], _cost(judge, Dense())[0]
    spaces = []
    for budget in sorted(budgets):
        aim = budget * target
        if aim < (1 - LEAST_SPARSITY) * dense:
            fitted = [TARGET if (one, budget) == (TARGET, 1) else _fitted(judge, one, aim) for one in CANDIDATES]
            spaces.append(tuple(one for one in fitted if one is not None))
    return spaces


def search(judge: LayerJudge, bound: Bound, spaces: Sequence[Space] | None = None) -> list[Method]:
    """One method for each head: of the cheapest space with one that holds the bound, that of the least error; or dense.

    ``spaces``: of ``search_spaces``; None makes them on this layer. One pass for each candidate of a space, until every
    head has its own, and one or a few for all heads' choices together.
    """
    choices: list[list[Method]] = [[] for _ in range(judge.num_heads)]
    for space in search_spaces(judge) if spaces is None else spaces:
        passes = [judge_all(judge, bound, [candidate] * judge.num_heads) for candidate in space]
        for head, judged in enumerate(zip(*passes, strict=True)):
            holding = [one for one in judged if one.holds and one.sparsity >= LEAST_SPARSITY]
            holding.sort(key=lambda one: one.figures.error)
            choices[head] = choices[head] or [one.method for one in holding]
        if all(choices):
            break
    return _together(judge, bound, choices)


def _together(judge: LayerJudge, bound: Bound, choices: Sequence[Sequence[Method]]) -> list[Method]:
    """Of each head the first choice that holds the bound beside the other heads' too; dense where none does."""
    chosen: list[Method] = [of_head[0] if of_head else Dense() for of_head in choices]
    judged = judge_all(judge, bound, chosen)
    if all(one.holds for one, of_head in zip(judged, choices, strict=True) if of_head):
        return chosen
    left = [of_head if one.holds else of_head[1:] for one, of_head in zip(judged, choices, strict=True)]
    return _together(judge, bound, left)


def resized(candidate: Method, steps: int | None = None) -> tuple[Method, int]:
    """ChangeSpace: the candidate with its larger number as so many steps and what it had beside, and that many steps.

    None: as it is.
    """
    match candidate:
        case AShape(local_tokens=number):
            field, step = "local_tokens", STEP
        case VerticalSlash(vertical_tokens=verticals, slash_tokens=slashes):
            field, number, step = ("slash_tokens", slashes, STEP)
            if verticals > slashes:
                field, number = "vertical_tokens", verticals
        case BlockSparse(top_blocks=number):
            field, step = "top_blocks", 1
        case _:
            raise ValueError(f"candidate: given {candidate!r}, expected a pattern of MInference")
    whole, beside = divmod(number, step)
    steps = whole if steps is None else steps
    changes: dict[str, Any] = {field: steps * step + beside}
    return replace(candidate, **changes), steps


def _fitted(judge: LayerJudge, candidate: Method, aim: float) -> Method | None:
    """The candidate resized until it costs ``aim``, or next to it; None where none of its sizes does."""
    too_few: Sized = Sized(0, 0.0)
    too_many: Sized | None = None
    at, nearest = resized(candidate)[1], (float("inf"), candidate)
    for halve in cycle((False, True)):
        method = resized(candidate, at)[0]
        time_ms, sparsity = _cost(judge, method)
        nearest = min(nearest, (abs(time_ms - aim), method), key=lambda one: one[0])
        if nearest[0] <= TOLERANCE * aim:
            return nearest[1]
        if time_ms > aim:
            too_many = Sized(at, time_ms)
        elif sparsity < LEAST_SPARSITY:
            return None
        else:
            too_few = Sized(at, time_ms)
        if too_many is not None and too_many.steps - too_few.steps <= 1:
            return nearest[1] if too_few.steps else None
        at = _next_size(too_few, too_many, aim, halve)
    raise AssertionError("a cycle has no end")


class Sized(NamedTuple):
    """A size, in steps, and its cost."""

    steps: int
    time_ms: float


def _next_size(too_few: Sized, too_many: Sized | None, aim: float, halve: bool) -> int:
    """Where cost in proportion to size would be ``aim``; or halfway, as it need not be in proportion."""
    if too_many is None:
        return min(max(round(too_few.steps * aim / too_few.time_ms), too_few.steps + 1), 4 * too_few.steps)
    between = too_many.steps - too_few.steps
    share = 0.5 if halve else (aim - too_few.time_ms) / (too_many.time_ms - too_few.time_ms)
    return too_few.steps + min(max(round(share * between), 1), between - 1)


def _cost(judge: LayerJudge, method: Method) -> tuple[float, float]:
    """Time of a layer all of whose heads have this method, in ms, and the share of the pairs that it leaves out."""
    figures = judge.judge([method] * judge.num_heads)
    return sum(one.time_ms for one in figures), 1 - sum(one.density for one in figures) / judge.num_heads


def ladders() -> Mapping[str, tuple[Method, ...]]:
    """Each pattern for all heads alike, the sparsest first."""
    shares = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2)
    return {
        "a_shape": tuple(AShape(min(n // 4, 1024), n) for n in (512, 1024, 2048, 4096, 8192, 16384)),
        "vertical_slash": tuple(VerticalSlash(int(1000 * x), int(6096 * x)) for x in shares),
        "block_sparse": tuple(BlockSparse(n) for n in (8, 16, 32, 64, 100, 160, 256)),
    }
