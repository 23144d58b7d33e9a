# SPDX-License-Identifier: Apache-2.0
"""Searches for the methods of a layer's heads: the sparsest setting within the bound, and the cheapest one.

Methods whose papers describe a procedure have their own search in ``papers``. ``loop.py`` runs all of them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain, combinations, pairwise
from operator import itemgetter
from typing import NamedTuple

from vllm_sparse_backend.calibration.costs import Costs
from vllm_sparse_backend.calibration.judge import Bound, CapturedLayer, HeadResult
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_kernels.methods import METHODS
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense

LEAST_SPARSITY = 0.1
"""Minimum share of pairs that a head must leave out to be worth its selection, as in SpargeAttn's code."""

MOST_KINDS = 3
"""Maximum number of sparse kinds of methods in a layer: each kind adds a selection."""

IsAllowed = Callable[[int, Method], bool]
"""Returns whether a head may use a method: False if the method missed the bound jointly with other heads."""

Choose = Callable[[CapturedLayer, Bound, IsAllowed], list[Method]]
"""Chooses a method within the bound for each head of a layer; dense for heads without one."""


class Judged(NamedTuple):
    """A head's method with its figures, and whether they meet the bound."""

    method: Method
    figures: HeadResult
    holds: bool

    @property
    def sparsity(self) -> float:
        """Share of causal pairs that the method leaves out."""
        return 1 - self.figures.density

    @property
    def pays(self) -> bool:
        """Whether the method meets the bound, and leaves out enough pairs to be worth its selection."""
        return self.holds and self.sparsity >= LEAST_SPARSITY


def judge_all(judge: CapturedLayer, bound: Bound, methods: Sequence[Method]) -> list[Judged]:
    """Judge one method for each head in one pass."""
    figures = judge.judge(methods)
    return [Judged(method, of_head, bound.holds(of_head)) for method, of_head in zip(methods, figures, strict=True)]


def sparsest(judge: CapturedLayer, bound: Bound, ladders: Mapping[int, Sequence[Method]]) -> dict[int, Judged]:
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


def allowed_ladders(
    heads: Iterable[int], settings: Sequence[Method], is_allowed: IsAllowed
) -> dict[int, Sequence[Method]]:
    """Return the settings that each head may use."""
    return {head: [method for method in settings if is_allowed(head, method)] for head in heads}


def choose_sparsest(
    judge: CapturedLayer, bound: Bound, is_allowed: IsAllowed, *, ladders: Iterable[Sequence[Method]]
) -> list[Method]:
    """Choose each head's sparsest setting within the bound.

    Later ladders keep more, so a head that leaves out too few pairs skips them.
    """
    chosen: dict[int, Judged] = {}
    heads = list(range(judge.num_heads))
    for settings in ladders:
        for head, judged in sparsest(judge, bound, allowed_ladders(heads, settings, is_allowed)).items():
            if judged.pays and (head not in chosen or judged.sparsity > chosen[head].sparsity):
                chosen[head] = judged
            if judged.sparsity < LEAST_SPARSITY:
                heads.remove(head)
    return [chosen[head].method if head in chosen else Dense() for head in range(judge.num_heads)]


def choose_in_order(
    judge: CapturedLayer, bound: Bound, is_allowed: IsAllowed, *, spaces: Iterable[Sequence[Method]]
) -> list[Method]:
    """Choose each head's candidate with the least error, in the first space that has one within the bound."""
    chosen: list[Method | None] = [None] * judge.num_heads
    for space in spaces:
        passes = [judge_all(judge, bound, [candidate] * judge.num_heads) for candidate in space]
        for head, judged in enumerate(zip(*passes, strict=True)):
            allowed = [result for result in judged if result.pays and is_allowed(head, result.method)]
            if chosen[head] is None and allowed:
                chosen[head] = min(allowed, key=lambda result: result.figures.seen.error).method
        if None not in chosen:
            break
    return [method or Dense() for method in chosen]


def choose_cheapest(
    judge: CapturedLayer, bound: Bound, is_allowed: IsAllowed, *, settings: Sequence[Method], costs: Costs
) -> list[Method]:
    """Choose the methods that cost a layer least, among the sparsest settings of each kind within the bound.

    No paper describes this search. ``settings`` lists the candidates, within each kind the sparsest setting first.
    """
    ladders: dict[Method, list[Method]] = defaultdict(list)
    for method in settings:
        ladders[method.group_key].append(method)
    heads = range(judge.num_heads)
    offers: list[dict[Method, tuple[float, Method]]] = [{} for _ in heads]
    for kind, ladder in ladders.items():
        for head, judged in sparsest(judge, bound, allowed_ladders(heads, ladder, is_allowed)).items():
            if judged.holds:
                offers[head][kind] = costs.head_ms(judged.method, judged.figures.density), judged.method
    return cheapest_methods(offers, costs)


def cheapest_methods(offers: Sequence[Mapping[Method, tuple[float, Method]]], costs: Costs) -> list[Method]:
    """Choose the methods that cost a layer least.

    ``offers`` has, for each head and kind, the time in ms and the method. Each kind in a layer also costs a fixed time
    of selection, so the choice is made for the whole layer: every set of up to ``MOST_KINDS`` kinds is tried.
    """
    dense: Method = Dense()
    dense_offer = costs.head_ms(dense, 1.0), dense
    group_ms = {kind: costs.of(kind).group_ms for kind in dict.fromkeys(chain.from_iterable(offers))}
    best_ms, best = costs.dense_ms, [dense] * len(offers)
    for num_kinds in range(1, MOST_KINDS + 1):
        for kinds in combinations(group_ms, num_kinds):
            cheapest = [
                min((dense_offer, *(of_head[kind] for kind in kinds if kind in of_head)), key=itemgetter(0))
                for of_head in offers
            ]
            total_ms = sum((ms for ms, _ in cheapest), costs.base_ms + sum(group_ms[kind] for kind in kinds))
            if total_ms < best_ms:
                best_ms, best = total_ms, [method for _, method in cheapest]
    return best


def ladder_of(name: str) -> list[Method]:
    """Return a method's ladder from its description."""
    return [make_method(name, setting) for setting in METHODS[name].ladder]


def default_ladder(name: str) -> list[Method]:
    """Return the part of a method's ladder that is of the same kind as the method's defaults."""
    ladder, default = ladder_of(name), METHODS[name].parameters()
    return [setting for setting in ladder if setting.group_key == default.group_key] or ladder


def halved(ladder: Sequence[Method]) -> list[Method]:
    """Insert a setting between neighbours that differ in one float parameter."""
    finer = list(ladder[:1])
    for before, after in pairwise(ladder):
        old = asdict(before)
        match [(name, old[name], end) for name, end in asdict(after).items() if end != old[name]]:
            case [(name, float(start), float(end))]:
                finer.append(replace(after, **{name: round((start + end) / 2, 6)}))
        finer.append(after)
    return finer
