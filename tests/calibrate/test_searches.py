# SPDX-License-Identifier: Apache-2.0
"""Searches of methods' settings against judges whose curves are known: what they find, and in how many passes."""

import random
from dataclasses import replace
from functools import partial

import pytest

from tests.calibrate.fake_judge import FakeJudge, figures, most_passes, of
from vllm_sparse_backend.profiling import anchor_attention, flex_vertical_slash, minference, sale, sparge_attn
from vllm_sparse_backend.profiling.ladders import LADDERS, SEARCHES
from vllm_sparse_backend.profiling.measure import Bound
from vllm_sparse_backend.profiling.sparsest import for_all, sparsest
from vllm_sparse_kernels.methods import METHODS, name_of
from vllm_sparse_kernels.methods.anchor_attention.method import AnchorAttention
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.flex_prefill.method import FlexVerticalSlash
from vllm_sparse_kernels.methods.minference.a_shape import AShape
from vllm_sparse_kernels.methods.minference.block_sparse import BlockSparse
from vllm_sparse_kernels.methods.minference.vertical_slash import VerticalSlash
from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.methods.sparge_attn.method import SpargeAttn

BOUND = Bound(0.1, 0.3)


def by_theta(error, density=lambda theta: theta / 20):
    return of(lambda method: method.theta, error, density)


@pytest.mark.parametrize("num_settings", [1, 2, 7, 8, 100])
def test_bisection_finds_what_looking_at_every_setting_finds(num_settings):
    ladder = [AnchorAttention(theta=float(i)) for i in range(num_settings)]
    firsts = [
        0,
        num_settings // 3,
        num_settings - 1,
        num_settings,
    ]  # the first setting that holds; of the last head none
    judge = FakeJudge(*[by_theta(lambda theta, first=first: 1.0 if theta < first else 0.0) for first in firsts])
    found = sparsest(judge, BOUND, for_all(judge, ladder))
    assert [(one.method, one.holds) for one in found.values()] == [
        *((ladder[first], True) for first in firsts[:-1]),
        (ladder[-1], False),
    ]
    assert len(judge.passes) <= most_passes(num_settings)


@pytest.mark.parametrize("seed", range(20))
def test_on_any_curve_the_bound_holds(seed):
    """Errors at random: no monotone curve. Of what was judged it is the sparsest that holds."""
    generator = random.Random(seed)
    ladder = [AnchorAttention(theta=float(i)) for i in range(40)]
    errors = [generator.random() * 0.2 for _ in ladder]
    judge = FakeJudge(by_theta(lambda theta: errors[int(theta)]))
    one = sparsest(judge, BOUND, for_all(judge, ladder))[0]
    holding = [method.theta for method, seen in judge.judged(0).items() if BOUND.holds(seen)]
    assert one.holds == bool(holding)
    assert one.method.theta == (min(holding) if holding else 39)
    assert one.figures == judge.curves[0](one.method)
    assert len(judge.passes) <= most_passes(40)


def test_heads_that_are_not_asked_about_are_judged_along():
    judge = FakeJudge(*[by_theta(lambda theta: 1.0 if theta < 2 else 0.0)] * 3)
    ladder = [AnchorAttention(theta=float(i)) for i in range(4)]
    found = sparsest(judge, BOUND, {1: ladder})
    assert {head: one.method.theta for head, one in found.items()} == {1: 2.0}
    assert all(len(set(methods)) == 1 for methods in judge.passes)  # no kind of their own


def sale_head(largest: float, worst_is_tau: bool = False):
    """A head that holds the bound up to ``largest``."""

    def curve(method):
        off = 0.0 if method.tau <= largest else 1.0
        return figures(0.0 if worst_is_tau else off, 0.5, worst=off)

    return curve


def test_sale_halves_each_head_until_it_holds():
    judge = FakeJudge(*[sale_head(tau) for tau in (1.0, 0.003, 0.000125, 0.0001)])
    base = Sale(channels="half")
    expected = [replace(base, tau=0.008), replace(base, tau=0.002), replace(base, tau=0.000125), Dense()]
    assert sale.search(judge, BOUND, base) == expected
    assert len(judge.passes) == 7  # 0.008 to 0.000125


def test_sale_stops_once_all_heads_hold():
    judge = FakeJudge(sale_head(1.0), sale_head(0.005))
    sale.search(judge, BOUND)
    assert len(judge.passes) == 2


def test_sale_may_begin_above_the_papers_threshold():
    judge = FakeJudge(sale_head(0.07), sale_head(0.005), sale_head(0.0))
    found = sale.search(judge, BOUND, first_tau=sale.BEYOND_TAU)
    assert found == [Sale(tau=0.064), Sale(tau=0.004), Dense()]


def test_the_worst_queries_bind_as_the_mean_does():
    judge = FakeJudge(sale_head(0.003, worst_is_tau=True))
    assert sale.search(judge, BOUND) == [Sale(tau=0.002)]
    assert sale.search(judge, Bound(0.1)) == [Sale(tau=0.008)]


def test_sale_asks_for_no_sparsity():
    assert sale.search(FakeJudge(lambda method: figures(0.0, 0.95)), BOUND) == [Sale(tau=0.008)]


def test_sale_refuses_to_begin_where_it_would_end():
    with pytest.raises(ValueError, match=r"first_tau: given 0.0001, expected a number in \(0.0001, 1\)"):
        sale.search(FakeJudge(sale_head(1.0)), BOUND, first_tau=1e-4)


def test_anchor_attention_takes_the_least_theta_of_each_head():
    heads = [by_theta(lambda theta, least=least: 1.0 if theta < least else 0.0) for least in (0, 7.5, 18, 99)]
    judge = FakeJudge(*heads)
    base = AnchorAttention(step_tiles=4, window_tokens=256)
    dense = [Dense(), Dense()]  # it would keep 0.9 and more, and it holds nowhere
    assert anchor_attention.search(judge, BOUND, base) == [replace(base, theta=2.0), replace(base, theta=8.0), *dense]
    assert len(judge.passes) == 4


def test_anchor_attention_has_thetas_of_its_own_for_sampled_queries():
    judge = FakeJudge(by_theta(lambda theta: 1.0 if theta < 0.3 else 0.0))
    found = anchor_attention.search(judge, BOUND, anchor_attention.SAMPLED)
    assert found == [replace(anchor_attention.SAMPLED, theta=0.5)]


def test_flex_takes_the_least_gamma_of_each_head():
    def head(least):
        return of(lambda method: method.gamma, lambda gamma: 1.0 if gamma < least else 0.0, lambda gamma: gamma**4)

    judge = FakeJudge(head(0.0), head(0.874), head(0.99), head(2.0))
    base = FlexVerticalSlash(estimating="spread")
    expected = [replace(base, gamma=0.3), replace(base, gamma=0.88), Dense(), Dense()]
    assert flex_vertical_slash.search(judge, BOUND, base) == expected
    assert len(judge.passes) == 7


def sparge_head(least_tau: float, best_theta: float = 0.0, margin: float = -5.0, first=0.079):
    """τ holds from ``least_tau`` on at ``best_theta``, elsewhere higher ones; λ up to ``margin`` costs 0.009."""

    def curve(method):
        if isinstance(method, Dense):
            return figures(0.0, 1.0)
        away = abs(method.min_similarity - best_theta)
        error = 0.0 if method.kept_mass >= least_tau + 0.1 * away else 1.0
        if method.skip_margin is not None:
            error = max(error, first + 0.009 if method.skip_margin <= margin else 1.0)
        elif not error:
            error = first
        return figures(error, min(1.0, method.kept_mass**2 * (1 + method.min_similarity / 4)))

    return curve


def test_sparge_attn_finds_pairs_and_margins():
    judge = FakeJudge(sparge_head(0.5), sparge_head(0.7, 0.5, -2.04), sparge_head(2.0), sparge_head(0.999))
    found = sparge_attn.search(judge, Bound(0.09, 0.09), thetas=(0.0, 0.25, 0.5), skipping=True)
    assert found == [
        SpargeAttn(0.5, 0.0, skip_margin=-5.0),
        SpargeAttn(0.7, 0.5, skip_margin=-2.1),  # keeps 0.7² · 1.125, where at θ = 0 it would be 0.75²
        Dense(),
        Dense(),  # it holds, and leaves out next to nothing
    ]


def test_sparge_attn_prefers_the_similarity_that_leaves_out_more():
    def curve(method):
        error = 0.0 if method.kept_mass >= (0.9 if method.min_similarity < 0.25 else 0.6) else 1.0
        return figures(error, method.kept_mass / 2)

    judge = FakeJudge(curve)
    assert sparge_attn.search(judge, BOUND) == [SpargeAttn(0.6, 0.25)]


def test_sparge_attn_leaves_an_error_for_the_skip():
    """Eight ninths of the bound are for the pair: 0.081 is too much where 0.09 is allowed in all."""
    search = partial(sparge_attn.search, bound=Bound(0.09, 0.09), thetas=(0.0,))
    judge = FakeJudge(sparge_head(0.5, first=0.081))
    assert search(judge, skipping=True) == [Dense()]
    assert search(judge) == [SpargeAttn(0.5, 0.0)]
    assert search(FakeJudge(sparge_head(0.5, margin=-99.0)), skipping=True) == [SpargeAttn(0.5, 0.0)]


def test_sparge_attn_ends_with_the_similarity_under_which_nothing_is_left_out():
    """And heads that are done are judged along, as settings that others ask for."""

    def curve(method):
        kept = method.min_similarity >= 0.125 or method.kept_mass
        return figures(0.0 if method.kept_mass >= 0.5 else 1.0, float(kept))

    judge = FakeJudge(curve, curve)
    assert sparge_attn.search(judge, BOUND) == [SpargeAttn(0.5, 0.0)] * 2
    assert len(judge.passes) <= 3 * most_passes(999)  # θ of 0, 1/16 and 1/8


def pattern_costs(candidate, a_shape=1.0, vertical_slash=1.0, block_sparse=1.0, selection=1000.0):
    """Keys of a query, and what selecting them costs as if it were keys; of prompts of 40,000 tokens."""
    match candidate:
        case AShape():
            return candidate.sink_tokens + candidate.local_tokens * a_shape, 0.0
        case VerticalSlash():
            return (3 * candidate.slash_tokens + 2 * candidate.vertical_tokens) * vertical_slash, selection
        case BlockSparse():
            return 64 * candidate.top_blocks * block_sparse, selection / 2
        case _:
            return 40_000.0, 0.0


def pattern_head(error, **costs):
    def curve(method):
        keys, selection = pattern_costs(method, **costs)
        density = min(1.0, keys / 40_000)
        return figures(error(method), density, time_ms=density * 40 + selection / 1000)

    return curve


def test_candidates_of_minference_cost_the_same():
    judge = FakeJudge(*[pattern_head(lambda method: 0.0)] * 3)
    half, paper, double = minference.search_spaces(judge, (0.5, 1.0, 2.0))
    assert paper[0] == minference.TARGET
    for budget, space in ((0.5, half), (1.0, paper), (2.0, double)):
        assert [type(one) for one in space] == [type(one) for one in minference.CANDIDATES]
        for one in space:
            keys, selection = pattern_costs(one)
            assert keys + selection == pytest.approx(5120 * budget, rel=minference.TOLERANCE)
    for one, candidate in zip(paper, minference.CANDIDATES, strict=True):
        if isinstance(candidate, VerticalSlash):  # the smaller number stays, the larger one goes in steps of 50
            changed = one.slash_tokens - candidate.slash_tokens, one.vertical_tokens - candidate.vertical_tokens
            assert sorted(x == 0 for x in changed) == [False, True]
            assert all(x % minference.STEP == 0 for x in changed)


def test_minference_leaves_out_what_cannot_cost_as_much():
    dear_selection = FakeJudge(pattern_head(lambda method: 0.0, selection=8000.0))
    ((a_shape, blocks),) = minference.search_spaces(dear_selection, (1.0,))
    assert a_shape == minference.TARGET
    assert blocks.top_blocks * 64 + 4000 == pytest.approx(5120, rel=minference.TOLERANCE)
    keeps_all = FakeJudge(pattern_head(lambda method: 0.0, block_sparse=1e4))  # one block costs as all do
    assert not any(isinstance(one, BlockSparse) for one in minference.search_spaces(keeps_all, (1.0,))[0])
    cheap = FakeJudge(
        lambda method: figures(0.0, 1.0, time_ms=0.1) if isinstance(method, BlockSparse)
        else pattern_head(lambda method: 0.0)(method)
    )  # fmt: skip
    assert not any(isinstance(one, BlockSparse) for one in minference.search_spaces(cheap, (1.0,))[0])


@pytest.mark.parametrize(
    ("power", "budget"), [(0.3, 6.0), (1.0, 0.25), (1.0, 0.7), (1.0, 6.0), (3.0, 0.25), (3.0, 6.0)]
)
def test_sizes_are_found_in_a_few_passes_however_cost_grows(power, budget):
    def curve(method):
        share = min(1.0, pattern_costs(method, selection=0.0)[0] / 40_000)
        return figures(0.0, share, time_ms=5120.0 if method == minference.TARGET else 40_000 * share**power)

    judge = FakeJudge(curve)
    (space,) = minference.search_spaces(judge, (budget,))
    passes, judge.passes = len(judge.passes), []
    assert len(space) >= 3
    assert passes <= 2 + 10 * len(minference.CANDIDATES)
    for one in space:
        steps = minference.resized(one)[1]
        near = [minference.resized(one, at)[0] for at in range(max(1, steps - 1), steps + 2)]
        off = {other: abs(curve(other).time_ms - 5120 * budget) for other in near}
        assert off[one] <= max(minference.TOLERANCE * 5120 * budget, min(off.values()))


def test_minference_leaves_out_budgets_as_dear_as_dense_attention():
    judge = FakeJudge(pattern_head(lambda method: 0.0))
    assert len(minference.search_spaces(judge, (1.0, 7.0, 7.1, 100.0))) == 2  # 0.9 · 40,000 / 5,120 = 7.03


def test_output_error_decides_the_pattern():
    space = minference.CANDIDATES

    def head(errors):
        return lambda method: figures(*(errors[space.index(method)] if method in space else (0.0, 1.0)), time_ms=1.0)

    heads = [
        [(0.05, 0.5, 0.0), (0.02, 0.5, 0.0), (0.03, 0.5, 0.0), (0.09, 0.5, 0.0), (0.09, 0.5, 0.0), (0.04, 0.5, 0.0)],
        [(0.01, 0.5, 0.9), (0.2, 0.5, 0.0), (0.2, 0.5, 0.0), (0.2, 0.5, 0.0), (0.2, 0.5, 0.0), (0.09, 0.5, 0.0)],
        [(0.2, 0.5, 0.0)] * 6,
    ]
    judge = FakeJudge(*map(head, heads))
    assert minference.search(judge, BOUND, [space]) == [space[1], space[5], Dense()]
    assert len(judge.passes) == len(space) + 1  # and all together


def test_a_pattern_that_keeps_all_of_a_head_is_none():
    space = (VerticalSlash(30, 512), BlockSparse(8))
    kept = {VerticalSlash: (1.0, 0.95), BlockSparse: (0.5, 0.95), Dense: (1.0, 1.0)}
    judge = FakeJudge(
        lambda method: figures(0.0 if type(method) is VerticalSlash else 0.05, kept[type(method)][0]),
        lambda method: figures(0.0, kept[type(method)][1]),
    )
    assert minference.search(judge, BOUND, [space]) == [space[1], Dense()]


def test_a_pattern_that_fails_beside_others_gives_way_to_the_next():
    """As an A-shape may, whose blocks are narrower there."""
    space = (AShape(64, 512), VerticalSlash(30, 512), BlockSparse(8))

    class Layer(FakeJudge):
        def judge(self, methods):
            mixed = len({type(method) for method in methods}) > 1
            seen = super().judge(methods)
            return [figures(0.2, 0.5) if mixed and type(m) is AShape else of for m, of in zip(methods, seen)]

    errors = {AShape: (0.01, 0.01, 0.2), VerticalSlash: (0.05, 0.2, 0.05), BlockSparse: (0.06, 0.2, 0.2)}
    judge = Layer(*[
        lambda method, head=head: figures(errors[type(method)][head] if type(method) in errors else 0.0, 0.5)
        for head in range(3)
    ])  # fmt: skip
    assert minference.search(judge, BOUND, [space]) == [space[1], Dense(), space[1]]


def test_each_head_takes_the_smallest_budget_that_holds():
    def head(least_keys):
        return pattern_head(lambda method: 0.0 if pattern_costs(method)[0] >= least_keys else 1.0)

    judge = FakeJudge(head(100), head(6000), head(50_000))
    spaces = minference.search_spaces(judge, (0.5, 1.0, 2.0))
    found = minference.search(judge, BOUND, spaces)
    assert found[0] in spaces[0]
    assert found[1] in spaces[2]
    assert found[2] == Dense()
    assert minference.search(judge, BOUND)[:2] == found[:2]  # spaces of its own


def test_resizing_refuses_what_is_no_pattern():
    with pytest.raises(ValueError, match=r"candidate: given Dense.*, expected a pattern of MInference"):
        minference.resized(Dense())


def test_ladders_are_of_one_method_and_have_its_name():
    for name, ladder in LADDERS.items():
        assert {name_of(method) for method in ladder} == {name.split("+")[0]}
        assert len(set(ladder)) == len(ladder) >= 5
        if "+" not in name:
            assert {method.alike for method in ladder} == {METHODS[name].parameters().alike}


@pytest.mark.parametrize("name", SEARCHES)
def test_searches_are_found_by_name(name):
    """And give what the ladder of that name gives, with another threshold."""
    judge = FakeJudge(lambda method: figures(0.0, 0.5, time_ms=pattern_costs(method)[0]))
    (found,) = SEARCHES[name](judge, BOUND)
    if name == "minference":
        assert isinstance(found, (AShape, VerticalSlash, BlockSparse))
    elif name in LADDERS:
        assert found.alike == LADDERS[name][0].alike
    assert name_of(found) == name.split("+")[0] or name == "minference"
