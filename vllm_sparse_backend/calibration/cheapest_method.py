# SPDX-License-Identifier: Apache-2.0
"""Search for each head's cheapest method that meets the error bound. A head without such a method is dense.

No paper describes this search.

For each kind of method, bisection finds the sparsest setting that meets the bound. Each kind in a layer also costs a
fixed time for its selection (``head_costs.py``), so the choice is made for the whole layer: the set of up to
``MOST_KINDS`` kinds, plus dense attention, in which the heads' cheapest settings take the least time in total. The
settings are the ladders of all methods (``MethodSpec.ladder``).

A bound of the mean over all heads (``Bound.mean``) becomes a price of error: heads minimise time plus price · error. If
all heads of the model have the same price, no other choice with the same mean error costs less (Lagrange: all slopes
are equal). After every layer is judged under every candidate, ``price_of`` finds the lowest price at which the mean
meets its bound.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from operator import itemgetter
from statistics import fmean

from vllm_sparse_backend.calibration.calibration_job import Job
from vllm_sparse_backend.calibration.head_costs import Costs, head_ms, kind_of
from vllm_sparse_backend.calibration.head_errors import Bound, HeadResult, LayerJudge
from vllm_sparse_backend.calibration.layer_walk import walk_layers
from vllm_sparse_backend.calibration.search import IsAllowed, Search, sparsest
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense

Held = list[dict[Method, HeadResult]]
"""For each head, the methods that meet the bound, with their figures."""

MOST_KINDS = 3
"""Maximum number of sparse kinds of methods in a layer: each kind adds a selection."""

PRICE_STEPS = 40
"""Steps of the bisection between ``LEAST_PRICE`` and a million times the cost of a dense head."""

LEAST_PRICE = 1e-3
"""Lowest price of error, as a multiple of the cost of a dense head."""

DEARER = 1.25
"""Factor by which the price rises if the methods chosen at the current price jointly miss the bound of the mean."""


class CheapestSearch(Search):
    """Search for the methods that cost a layer least among settings that meet the bound.

    With a bound on the mean error, cost includes error, at the same price for all heads of the model. ``among`` lists
    the candidates, within each kind the sparsest setting first.
    """

    def __init__(self, job: Job, bound: Bound, among: Sequence[Method], costs: Costs) -> None:
        self.bound, self.among, self.costs = bound, among, costs
        self.price = 0.0
        """Price of an error of 1, in ms."""
        if bound.has_mean:
            dense: list[Method] = [Dense()] * job.shape.num_heads
            held_by_layer = walk_layers(
                job, "prompts", (), lambda judge: (dense, methods_within_bound(judge_uniformly(judge, among), bound))
            )[1]
            layers = [of_layer for of_layer in held_by_layer if of_layer is not None]
            # Layers that never run sparse have no error, but count in the mean.
            self.price = price_of(layers, costs, bound.mean * job.shape.num_layers / len(layers))

    def choose(self, judge: LayerJudge, is_allowed: IsAllowed) -> list[Method]:
        """Choose the layer's cheapest methods among those that meet the bound and are allowed."""
        if not self.bound.has_mean:
            held = sparsest_of_kinds(judge, self.bound, self.among, is_allowed)
            return cheapest_methods(held, self.costs)
        held = methods_within_bound(judge_uniformly(judge, self.among), self.bound)
        allowed = [
            {method: seen for method, seen in head_results.items() if is_allowed(i, method)}
            for i, head_results in enumerate(held)
        ]
        return cheapest_methods(allowed, self.costs, self.price)

    def should_repeat(self, methods: Sequence[Sequence[Method]], mean_error: float) -> bool:
        """Raise the price of error if the joint choice misses the bound of the mean.

        A head whose method fails jointly with other heads gets another method, whose error may be larger than assumed
        when the price was set.
        """
        if mean_error <= self.bound.mean:
            return False
        dense_ms = self.costs.layer.dense_ms / len(methods[0])
        self.price = max(self.price * DEARER, LEAST_PRICE * dense_ms)
        return True


def sparsest_of_kinds(judge: LayerJudge, bound: Bound, among: Sequence[Method], is_allowed: IsAllowed) -> Held:
    """Find, for each head and kind, the sparsest setting that meets the bound. It is the cheapest at price 0."""
    held: Held = [{} for _ in range(judge.num_heads)]
    for kind in dict.fromkeys(map(kind_of, among)):
        ladder = [method for method in among if kind_of(method) == kind]
        ladders = {head: [method for method in ladder if is_allowed(head, method)] for head in range(judge.num_heads)}
        for head, result in sparsest(judge, bound, ladders).items():
            if result.holds:
                held[head][result.method] = result.figures
    return held


def judge_uniformly(judge: LayerJudge, among: Sequence[Method]) -> dict[Method, list[HeadResult]]:
    """Judge each method applied to all heads of the layer."""
    return {method: judge.judge([method] * judge.num_heads) for method in among}


def methods_within_bound(figures: Mapping[Method, Sequence[HeadResult]], bound: Bound) -> Held:
    """Filter the methods of each head by the bound."""
    num_heads = len(next(iter(figures.values())))
    return [
        {method: results[head] for method, results in figures.items() if bound.holds(results[head])}
        for head in range(num_heads)
    ]


def price_of(layers: Sequence[Sequence[Mapping[Method, HeadResult]]], costs: Costs, most_mean: float) -> float:
    """Find the lowest price of error at which the chosen methods' mean error is within a limit."""

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
    """Choose the methods that cost a layer least."""
    dense: Method = Dense()
    dense_ms = head_ms(costs, dense, 1.0)
    kinds = list(dict.fromkeys(kind_of(method) for results in holding for method in results))
    cheapest = [_cheapest_of_kinds(results, costs, price) for results in holding]
    group_ms = {kind: costs.of(kind).group_ms for kind in kinds}
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
    """Return (cost in ms, setting) of each kind's cheapest setting. The cost includes a price for the error."""
    cheapest: dict[Method, tuple[float, Method]] = {}
    for method, figures in results.items():
        timed = head_ms(costs, method, figures.density) + price * figures.error, method
        kind = kind_of(method)
        if kind not in cheapest or timed[0] < cheapest[kind][0]:
            cheapest[kind] = timed
    return cheapest
