# SPDX-License-Identifier: Apache-2.0
"""Per head the cheapest of all methods whose output error holds the bound; dense where none does. (No paper has this.)

Every candidate is judged once with all heads of the layer on it, which gives every head's figures in one pass. What a
selection takes beside its heads is paid once for each kind of method in a layer (``costs.py``), so the choice is one
for the whole layer: of all sets of up to ``MOST_KINDS`` kinds and dense attention, the one in which heads with their
cheapest settings take least time together. If dense attention of the whole layer takes no longer, it is that.

Methods of a layer share an index whose blocks are as wide as all of them allow (``width.py``), and what one
keeps in narrower blocks is less than it was judged by. So the choice is judged as a whole, and what does not hold the
bound there is struck out, until all hold.

A bound of the mean over all heads (``Bound.mean``) is kept to by a price of error. Under it heads take what costs least
in time and error together; at one price for all of them no other choice of the same mean error costs less (heads then
have equal slopes: Lagrange). ``price_of`` finds the least price at which the mean holds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import fmean

from vllm_sparse_backend.profiling.costs import Costs, head_ms, kind_of
from vllm_sparse_backend.profiling.ladders import LADDERS
from vllm_sparse_backend.profiling.measure import Bound, Figures, LayerJudge
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense

MOST_KINDS = 3
"""Of sparse methods in a layer: each has a selection of its own."""

PRICE_STEPS = 40
"""Of a bisection between a thousandth and a million times what a dense head costs."""

LEAST_PRICE = 1e-3
"""Of what a dense head costs."""

DEARER = 1.25
"""By which a price rises where heads that were chosen by it miss the mean once they are judged together."""

MOST_ROUNDS = 8
"""Of choices for a layer; heads that hold the bound in none of them are dense."""


def candidates(with_means: bool = True, ladders: Sequence[str] = tuple(LADDERS)) -> list[Method]:
    """All methods' settings, each without and, where asked for, with means in place of what it drops.

    ``ladders``: names of ``LADDERS`` to take them from. SharePrefill has none: which pattern a head takes over depends
    on other layers. Alone it is flex_vertical_slash.
    """
    plain = [method for name in ladders for method in LADDERS[name]]
    return plain + [replace(method, block_means=True) for method in plain if with_means]


def search(
    judge: LayerJudge,
    bound: Bound,
    among: Sequence[Method] | None = None,
    costs: Costs | None = None,
    price: float = 0.0,
) -> list[Method]:
    """One method for each head of the layer; ``among``: ``candidates`` unless given.

    ``costs``: the judge's unless given. ``price``: what an error of 1 is worth, in the unit of costs.
    """
    costs = costs or judge.costs
    held = holding(judged(judge, among or candidates()), bound)
    for _ in range(MOST_ROUNDS):
        chosen = choose(held, costs, price)
        if all(isinstance(method, Dense) for method in chosen):
            return chosen
        outcome = zip(chosen, judge.judge(chosen), strict=True)
        # Dense is all there is where even it misses the bound, as it does where an output is no number.
        failing = [
            head for head, (method, of) in enumerate(outcome) if not (isinstance(method, Dense) or bound.holds(of))
        ]
        if not failing:
            return chosen
        for head in failing:
            del held[head][chosen[head]]
    return [Dense() if head in failing else method for head, method in enumerate(chosen)]


def judged(judge: LayerJudge, among: Sequence[Method]) -> dict[Method, list[Figures]]:
    """What comes of each where all heads of the layer have it."""
    return {method: judge.judge([method] * judge.num_heads) for method in among}


def holding(figures: Mapping[Method, Sequence[Figures]], bound: Bound) -> list[dict[Method, Figures]]:
    """Of each head the methods that hold the bound."""
    num_heads = len(next(iter(figures.values())))
    return [{method: of[head] for method, of in figures.items() if bound.holds(of[head])} for head in range(num_heads)]


def price_of(layers: Sequence[Sequence[Mapping[Method, Figures]]], costs: Costs, most_mean: float) -> float:
    """The least price of error at which heads that choose by it have a mean error of at most ``most_mean``.

    ``layers``: ``holding`` of every layer. 0 where what is cheapest holds it.
    """

    def holds(price: float) -> bool:
        errors = []
        for heads in layers:
            chosen = zip(heads, choose(heads, costs, price), strict=True)
            errors += [of[method].error if method in of else 0.0 for of, method in chosen]
        return fmean(errors) <= most_mean

    return 0.0 if math.isinf(most_mean) else least_price(holds, costs.layer.dense_ms / len(layers[0]))


def least_price(holds: Callable[[float], bool], dense: float) -> float:
    """The least price of error that holds, 0 if that does; ``dense``: what a dense head costs."""
    if holds(0.0):
        return 0.0
    low, high = LEAST_PRICE * dense, 1e6 * dense
    for _ in range(PRICE_STEPS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def dearer(price: float, dense: float) -> float:
    """The next price up; ``dense``: what a dense head costs."""
    return max(price * DEARER, LEAST_PRICE * dense)


def choose(holding: Sequence[Mapping[Method, Figures]], costs: Costs, price: float = 0.0) -> list[Method]:
    """The methods that cost the layer least, of those that each head may have; every head may be dense."""
    dense: Method = Dense()
    dense_ms = head_ms(costs, dense, 1.0)
    cheapest = [_cheapest_of_kinds(may, costs, price) for may in holding]
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


def _cheapest_of_kinds(may: Mapping[Method, Figures], costs: Costs, price: float) -> dict[Method, tuple[float, Method]]:
    """By kind what its cheapest setting costs, error included, and that."""
    found: dict[Method, tuple[float, Method]] = {}
    for method, figures in may.items():
        timed = head_ms(costs, method, figures.density) + price * figures.error, method
        kind = kind_of(method)
        if kind not in found or timed[0] < found[kind][0]:
            found[kind] = timed
    return found
