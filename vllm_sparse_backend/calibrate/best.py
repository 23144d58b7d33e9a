# SPDX-License-Identifier: Apache-2.0
"""Per head the cheapest of all methods whose output error holds the bound; dense where none does. (No paper has this.)

Every candidate is judged once with all heads of the layer on it, which gives every head's figures in one pass. What a
selection takes beside its heads is paid once for each kind of method in a layer (``costs.py``), so the choice is one
for the whole layer: of all sets of up to ``MOST_KINDS`` kinds and dense attention, the one in which heads with their
cheapest settings take least time together. If dense attention of the whole layer takes no longer, it is that.

Methods of a layer share an index whose blocks are as wide as all of them allow (``select/width.py``), and what one
keeps in narrower blocks is less than it was judged by. So the choice is judged as a whole, and what does not hold the
bound there is struck out, until all hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from vllm_sparse_backend.calibrate.costs import Costs, head_ms, kind_of
from vllm_sparse_backend.calibrate.ladders import LADDERS
from vllm_sparse_backend.calibrate.measure import Bound, Figures, LayerJudge
from vllm_sparse_kernels.select.base import Method
from vllm_sparse_kernels.select.dense import Dense

MOST_KINDS = 3
"""Of sparse methods in a layer: each has a selection of its own."""

MOST_ROUNDS = 8
"""Of choices for a layer; heads that hold the bound in none of them are dense."""


def candidates(with_means: bool = True, ladders: Sequence[str] = tuple(LADDERS)) -> list[Method]:
    """All methods' settings, each without and, where asked for, with means in place of what it drops.

    ``ladders``: names of ``LADDERS`` to take them from. SharePrefill has none: which pattern a head takes over depends
    on other layers. Alone it is flex_vertical_slash.
    """
    plain = [method for name in ladders for method in LADDERS[name]]
    return plain + [replace(method, block_means=True) for method in plain if with_means]


def search(judge: LayerJudge, bound: Bound, among: Sequence[Method] | None = None) -> list[Method]:
    """One method for each head of the layer; ``among``: ``candidates`` unless given."""
    figures = {method: judge.judge([method] * judge.num_heads) for method in among or candidates()}
    holding: list[dict[Method, Figures]] = [
        {method: of[head] for method, of in figures.items() if bound.holds(of[head])} for head in range(judge.num_heads)
    ]
    for _ in range(MOST_ROUNDS):
        chosen = choose(holding, judge.costs)
        if all(isinstance(method, Dense) for method in chosen):
            return chosen
        failing = [head for head, of in enumerate(judge.judge(chosen)) if not bound.holds(of)]
        if not failing:
            return chosen
        for head in failing:
            del holding[head][chosen[head]]
    return [Dense() if head in failing else method for head, method in enumerate(chosen)]


def choose(holding: Sequence[Mapping[Method, Figures]], costs: Costs) -> list[Method]:
    """The methods that take the layer least time, of those that each head may have; every head may be dense."""
    dense: Method = Dense()
    dense_ms = head_ms(costs, dense, 1.0)
    cheapest = [_cheapest_of_kinds(may, costs) for may in holding]
    group_ms = {kind: costs.of(kind).group_ms for of in cheapest for kind in of}
    base_ms = costs.layer.base_ms
    best_ms, best = costs.layer.dense_ms, [dense] * len(holding)
    for size in range(1, MOST_KINDS + 1):
        for chosen in combinations(group_ms, size):
            total_ms = base_ms + sum(group_ms[kind] for kind in chosen)
            heads: list[Method] = []
            for of in cheapest:
                ms, method = min(((*of[kind],) for kind in chosen if kind in of), key=_ms, default=(dense_ms, dense))
                ms, method = (ms, method) if ms < dense_ms else (dense_ms, dense)
                total_ms += ms
                heads.append(method)
            if total_ms < best_ms:
                best_ms, best = total_ms, heads
    return best


def _ms(timed: tuple[float, Method]) -> float:
    return timed[0]


def _cheapest_of_kinds(may: Mapping[Method, Figures], costs: Costs) -> dict[Method, tuple[float, Method]]:
    """By kind the time of its cheapest setting, and that."""
    found: dict[Method, tuple[float, Method]] = {}
    for method, figures in may.items():
        timed = head_ms(costs, method, figures.density), method
        kind = kind_of(method)
        if kind not in found or timed[0] < found[kind][0]:
            found[kind] = timed
    return found
