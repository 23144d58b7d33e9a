# SPDX-License-Identifier: Apache-2.0
"""Per head the cheapest of all methods whose output error holds the bound; dense where none does. (No paper has this.)

Of each kind of method the sparsest setting that holds is found by bisection. What a selection takes beside its heads is
paid once for each kind in a layer (``costs.py``), so the choice is one for the whole layer: of all sets of up to
``MOST_KINDS`` kinds and dense attention, the one in which heads with their cheapest settings take least time together.

A bound of the mean over all heads (``Bound.mean``) is kept to by a price of error. Heads take what costs least in time
and error together; at one price for the whole model no other choice of the same mean error costs less (heads then have
equal slopes: Lagrange). ``price_of`` finds the least price at which the mean holds, once every layer is judged under
every candidate.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from operator import itemgetter
from statistics import fmean

from vllm_sparse_backend.calibration.calibration_job import Job
from vllm_sparse_backend.calibration.head_costs import Costs, head_ms, kind_of
from vllm_sparse_backend.calibration.head_errors import Bound, HeadResult, LayerJudge
from vllm_sparse_backend.calibration.layer_walk import walk
from vllm_sparse_backend.calibration.search import IsAllowed, Search, sparsest
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense

Held = list[dict[Method, HeadResult]]
"""Of each head methods that hold the bound, and what came of them."""

MOST_KINDS = 3
"""Of sparse methods in a layer: each has a selection of its own."""

PRICE_STEPS = 40
"""Of a bisection between a thousandth and a million times what a dense head costs."""

LEAST_PRICE = 1e-3
"""Of what a dense head costs."""

DEARER = 1.25
"""By which a price rises where heads that were chosen by it miss the mean once they are judged together."""


class CheapestSearch(Search):
    """Of each head what costs least of settings that hold the bound, its error included at one price for all heads.

    ``among``: of each kind the sparsest setting first.
    """

    def __init__(self, job: Job, bound: Bound, among: Sequence[Method], costs: Costs) -> None:
        self.bound, self.among, self.costs = bound, among, costs
        self.price = 0.0
        """What an error of 1 is worth, in the unit of costs."""
        if bound.has_mean:
            dense: list[Method] = [Dense()] * job.shape.num_heads
            held_by_layer = walk(
                job, "prompts", (), lambda judge: (dense, methods_within_bound(judge_uniformly(judge, among), bound))
            )[1]
            layers = [of_layer for of_layer in held_by_layer if of_layer is not None]
            # Layers that never go sparse have no error, and are part of the mean.
            self.price = price_of(layers, costs, bound.mean * job.shape.num_layers / len(layers))

    def choose(self, judge: LayerJudge, is_allowed: IsAllowed) -> list[Method]:
        if not self.bound.has_mean:
            return cheapest_methods(sparsest_of_kinds(judge, self.bound, self.among, is_allowed), self.costs)
        held = methods_within_bound(judge_uniformly(judge, self.among), self.bound)
        allowed = [
            {method: seen for method, seen in head_results.items() if is_allowed(i, method)}
            for i, head_results in enumerate(held)
        ]
        return cheapest_methods(allowed, self.costs, self.price)

    def should_repeat(self, methods: Sequence[Sequence[Method]], mean_error: float) -> bool:
        """What does not hold beside other heads is chosen anew, and may lose more than when the price was found."""
        if mean_error <= self.bound.mean:
            return False
        dense_ms = self.costs.layer.dense_ms / len(methods[0])
        self.price = max(self.price * DEARER, LEAST_PRICE * dense_ms)
        return True


def sparsest_of_kinds(judge: LayerJudge, bound: Bound, among: Sequence[Method], is_allowed: IsAllowed) -> Held:
    """Of each head the sparsest method of each kind that holds the bound: where no error has a price, the cheapest."""
    held: Held = [{} for _ in range(judge.num_heads)]
    for kind in dict.fromkeys(map(kind_of, among)):
        ladder = [method for method in among if kind_of(method) == kind]
        ladders = {head: [method for method in ladder if is_allowed(head, method)] for head in range(judge.num_heads)}
        for head, result in sparsest(judge, bound, ladders).items():
            if result.holds:
                held[head][result.method] = result.figures
    return held


def judge_uniformly(judge: LayerJudge, among: Sequence[Method]) -> dict[Method, list[HeadResult]]:
    """What comes of each where all heads of the layer have it."""
    return {method: judge.judge([method] * judge.num_heads) for method in among}


def methods_within_bound(figures: Mapping[Method, Sequence[HeadResult]], bound: Bound) -> Held:
    """Of each head the methods that hold the bound."""
    num_heads = len(next(iter(figures.values())))
    return [
        {method: results[head] for method, results in figures.items() if bound.holds(results[head])}
        for head in range(num_heads)
    ]


def price_of(layers: Sequence[Sequence[Mapping[Method, HeadResult]]], costs: Costs, most_mean: float) -> float:
    """The least price of error at which heads that choose by it have a mean error of at most ``most_mean``.

    ``layers``: ``holding`` of every layer. 0 where what is cheapest holds it.
    """

    def holds(price: float) -> bool:
        errors = []
        for heads in layers:
            chosen = zip(heads, cheapest_methods(heads, costs, price), strict=True)
            errors += [results[method].error if method in results else 0.0 for results, method in chosen]
        return fmean(errors) <= most_mean

    if math.isinf(most_mean) or holds(0.0):
        return 0.0
    dense_ms = costs.layer.dense_ms / len(layers[0])
    low, high = LEAST_PRICE * dense_ms, 1e6 * dense_ms
    for _ in range(PRICE_STEPS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def cheapest_methods(holding: Sequence[Mapping[Method, HeadResult]], costs: Costs, price: float = 0.0) -> list[Method]:
    """The methods that cost the layer least, of those that each head may have; every head may be dense."""
    dense: Method = Dense()
    dense_ms = head_ms(costs, dense, 1.0)
    cheapest = [_cheapest_of_kinds(results, costs, price) for results in holding]
    group_ms = {kind: costs.of(kind).group_ms for offers_by_kind in cheapest for kind in offers_by_kind}
    base_ms = costs.layer.base_ms
    best_ms, best = costs.layer.dense_ms, [dense] * len(holding)
    for size in range(1, MOST_KINDS + 1):
        for chosen in combinations(group_ms, size):
            total_ms = base_ms + sum(group_ms[kind] for kind in chosen)
            heads: list[Method] = []
            for offers_by_kind in cheapest:
                offers = [(dense_ms, dense), *(offers_by_kind[kind] for kind in chosen if kind in offers_by_kind)]
                ms, method = min(offers, key=itemgetter(0))
                total_ms += ms
                heads.append(method)
            if total_ms < best_ms:
                best_ms, best = total_ms, heads
    return best


def _cheapest_of_kinds(
    results: Mapping[Method, HeadResult], costs: Costs, price: float
) -> dict[Method, tuple[float, Method]]:
    """By kind what its cheapest setting costs, error included, and that."""
    cheapest: dict[Method, tuple[float, Method]] = {}
    for method, figures in results.items():
        timed = head_ms(costs, method, figures.density) + price * figures.error, method
        kind = kind_of(method)
        if kind not in cheapest or timed[0] < cheapest[kind][0]:
            cheapest[kind] = timed
    return cheapest
