# SPDX-License-Identifier: Apache-2.0
"""The choice of each search for heads with known figures, and the loop that runs the searches."""

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest

from tests.helpers.fake_judge import FakeJudge, any_method, figures, most_passes, of
from vllm_sparse_backend.calibration import loop
from vllm_sparse_backend.calibration.costs import Cost, Costs
from vllm_sparse_backend.calibration.judge import Bound, HeadErrors, HeadResult
from vllm_sparse_backend.calibration.papers import minference, sale, sparge_attn
from vllm_sparse_backend.calibration.search import (
    choose_cheapest,
    choose_in_order,
    choose_sparsest,
    halved,
    ladder_of,
    sparsest,
)
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.anchor_attention.method import AnchorAttention
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.minference.a_shape import AShape
from vllm_sparse_kernels.methods.minference.block_sparse import BlockSparse
from vllm_sparse_kernels.methods.minference.vertical_slash import VerticalSlash
from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.methods.sparge_attn.method import SpargeAttn

BOUND = Bound(0.1, 0.1)
LADDER = [AnchorAttention(theta=float(i)) for i in range(40)]


def by_theta(error, density=lambda theta: theta / 20):
    return of(lambda method: method.theta, error, density)


@pytest.mark.parametrize("num_settings", [1, 2, 7, 15, 40])
def test_the_sparsest_setting_that_holds_in_few_passes(num_settings):
    ladder = LADDER[:num_settings]
    firsts = [0, num_settings // 3, num_settings - 1, num_settings]  # the last has none
    judge = FakeJudge(*[by_theta(lambda theta, first=first: 1.0 if theta < first else 0.0) for first in firsts])
    results = sparsest(judge, BOUND, dict.fromkeys(range(4), ladder))
    expected = [*((ladder[first], True) for first in firsts[:-1]), (ladder[-1], False)]
    assert [(result.method, result.holds) for result in results.values()] == expected
    assert len(judge.passes) <= most_passes(num_settings)


@pytest.mark.parametrize("seed", range(5))
def test_on_any_curve_the_bound_holds(seed):
    """Errors are random, not monotone. The result is the sparsest judged setting within the bound."""
    generator = random.Random(seed)
    errors = [generator.random() * 0.2 for _ in LADDER]
    judge = FakeJudge(by_theta(lambda theta: errors[int(theta)]))
    result = sparsest(judge, BOUND, {0: LADDER})[0]
    holding = [method.theta for method, seen in judge.judged(0).items() if BOUND.holds(seen)]
    assert result.holds == bool(holding)
    assert result.method.theta == (min(holding) if holding else 39)
    assert result.figures == judge.curves[0](result.method)


def test_a_ladder_gives_each_head_its_own_and_dense_where_little_is_left_out():
    judge = FakeJudge(*[by_theta(lambda theta, first=first: float(theta < first)) for first in (0, 7, 19, 99)])
    methods = choose_sparsest(judge, BOUND, any_method, ladders=[LADDER])
    assert methods == [LADDER[0], LADDER[7], Dense(), Dense()]
    # The next setting is taken if a setting is not allowed because it missed the bound next to other heads.
    again = choose_sparsest(judge, BOUND, lambda head, method: method != LADDER[7], ladders=[LADDER])
    assert again[1] == LADDER[8]


def test_steps_are_halved_where_one_number_differs():
    ladder = [Sale(tau=0.2), Sale(tau=0.1), Sale(tau=0.1, int8_scores=True), Sale(tau=0.05, int8_scores=True)]
    between = [Sale(tau=0.15), Sale(tau=0.075, int8_scores=True)]
    assert [setting for setting in halved(ladder) if setting not in ladder] == between
    blocks = [AShape(64, 128), AShape(64, 256)]
    assert halved(blocks) == blocks
    assert halved([]) == []


def first_allowed(*choices):
    """Return a search that chooses the first allowed method of a preset list for each head."""
    return lambda judge, bound, is_allowed: [
        next((method for method in methods if is_allowed(i, method)), Dense()) for i, methods in enumerate(choices)
    ]


def test_what_fails_beside_others_gives_way_until_all_hold():
    """An A-shape may fail next to other methods, because its blocks are narrower there. The figures are those of the
    last choice."""
    a_shape, lines, blocks = AShape(64, 512), VerticalSlash(30, 512), BlockSparse(8)

    class Layer(FakeJudge):
        def judge(self, methods):
            self.passes.append(list(methods))
            mixed = len({type(method) for method in methods}) > 1
            return [figures(0.2 if mixed and type(method) is AShape else 0.01, 0.5) for method in methods]

    judge = Layer(*[lambda method: figures(0.0, 1.0)] * 3)
    methods, seen = loop.choose_jointly(judge, first_allowed([a_shape, lines], [a_shape], [blocks]), BOUND)
    assert methods == [lines, Dense(), blocks]
    assert judge.passes == [[a_shape, a_shape, blocks], methods]
    assert len(seen) == 3


def test_a_search_that_always_fails_ends_dense():
    judge = FakeJudge(lambda method: figures(float("nan"), 0.5), lambda method: figures(0.2, 0.5))
    everything = [AnchorAttention(theta=float(i)) for i in range(30)]
    assert loop.choose_jointly(judge, first_allowed(everything, everything), BOUND) == ([Dense()] * 2, None)
    assert len(judge.passes) == loop.MOST_ROUNDS


def test_prompts_in_which_a_method_keeps_every_key_are_refused():
    for search, names, least in (
        (loop.search_of_method, "anchor_attention", 2048),
        (loop.search_for_cheapest, ["anchor_attention"], 512),  # some settings of the ladder have whole blocks
    ):
        expected = f"prompts: given '{least} tokens', expected prompts of more than {least} tokens: anchor_attention.* "
        with pytest.raises(ConfigurationError, match=expected + "keeps every key of shorter prompts; pass --tokens"):
            search(job_of(least), names)
        search(job_of(least + 1), names)


# The cheapest methods

CHEAP, CLOSE = SpargeAttn(kept_mass=0.5), SpargeAttn(kept_mass=0.9)
LOCAL, FINE = AShape(64, 512), Sale(tau=0.03)
TIGHT = Bound(0.05)


def costs_of(kinds: dict[str, tuple[float, float]]) -> Costs:
    """Return costs: 10 ms for each dense head; ``kinds`` has the times of a selection and of each head, by name."""
    return Costs(0.0, 40.0, lambda method: Cost(*kinds.get(name_of(method), (0.0, 0.0)), full_ms=10.0))


def job_of(num_tokens: int) -> SimpleNamespace:
    return SimpleNamespace(costs=costs_of({}), prompts=[range(num_tokens)])


def cheapest(kinds: dict[str, tuple[float, float]]):
    return partial(choose_cheapest, settings=[LOCAL, CHEAP, CLOSE, FINE], costs=costs_of(kinds))


def judge_of(*heads: dict[Method, tuple[float, float]]) -> FakeJudge:
    """Return a judge with these (error, density) by head. Unlisted methods lose everything; dense loses nothing."""

    def curve(outcomes):
        return lambda m: figures(0.0, 1.0) if isinstance(m, Dense) else figures(*outcomes.get(m, (1.0, 0.01)))

    return FakeJudge(*map(curve, heads))


def test_each_head_has_the_cheapest_that_holds():
    sure = {LOCAL: (0.2, 0.05), CHEAP: (0.04, 0.3), CLOSE: (0.01, 0.6), FINE: (0.03, 0.2)}
    heads = sure, sure | {FINE: (0.9, 0.2)}, sure | {FINE: (0.9, 0.2), CHEAP: (0.06, 0.3)}, {CLOSE: (0.06, 0.6)}
    judge = judge_of(*heads)
    assert loop.choose_jointly(judge, cheapest({}), TIGHT)[0] == [FINE, CHEAP, CLOSE, Dense()]
    # Two passes for two settings of a kind, one for each other setting, and one for the final choice.
    assert len(judge.passes) == 5
    assert judge.passes[-1] == [FINE, CHEAP, CLOSE, Dense()]


def test_no_head_loses_more_than_so_many_times_what_the_default_does():
    """Bisection finds the sparsest setting of each kind within the bound: at most 13 passes for three kinds of 44
    settings."""
    bound, lost = Bound(of_default=1.5), {m: (round(2 - 2 * m.kept_mass, 6), m.kept_mass) for m in ladder_of("top_p")}
    judge = judge_of(lost, lost | dict.fromkeys([m for m in lost if m.kept_mass < 0.99], (float("nan"), 0.1)))
    search = loop.search_for_cheapest(job_of(32768), ["top_p", "sale", "a_shape"])
    methods, results = loop.choose_jointly(judge, search, bound)
    assert [method.kept_mass for method in methods] == [0.95, 0.99]
    assert [bound.used_fraction(result) for result in results] == pytest.approx([1 / 1.5, 0.2 / 1.5])
    assert len(judge.passes) <= sum(map(most_passes, (14, 9, 21))) + 1


ONE = {CHEAP: (0.04, 0.5), CLOSE: (0.01, 0.9)}
BOTH = ONE | {FINE: (0.04, 0.3)}


@pytest.mark.parametrize(
    ("kinds", "heads", "expected"),
    [
        ({}, [BOTH], [FINE]),
        ({"sale": (0.0, 2.5)}, [BOTH], [CHEAP]),  # a sparser method that takes more time is not chosen
        # A selection takes 3 ms for any number of heads: it saves time for three heads, but not for one.
        ({"sale": (3.0, 0.0)}, [BOTH, ONE, ONE, ONE], [CHEAP] * 4),
        ({"sale": (3.0, 0.0)}, [BOTH, BOTH, BOTH, ONE], [FINE] * 3 + [CHEAP]),
        ({"sparge_attn": (10.0, 0.0)}, [ONE] * 4, [CHEAP] * 4),
        ({"sparge_attn": (30.0, 0.0)}, [ONE] * 4, [Dense()] * 4),  # as much as dense attention of the layer
    ],
)
def test_selections_own_time_counts(kinds, heads, expected):
    assert loop.choose_jointly(judge_of(*heads), cheapest(kinds), TIGHT)[0] == expected


# SALE


def released_calibration(error_of: Callable[[float], float], bound: float) -> float:
    """Return the threshold at which SALE's released calibration ends, for a head and a prompt at a time."""
    tau = 0.008
    while error_of(tau) >= bound and tau:
        tau = tau / 2 if tau / 2 > 0.0001 else 0.0
    return tau


@pytest.mark.parametrize("least_error", [0.0, 0.3])
@pytest.mark.parametrize("slope", [1.0, 60.0, 250.0, 900.0, 3000.0, 4000.0, 1e5])
def test_sale_is_calibrated_as_by_its_authors(slope, least_error):
    """The head is dense if the threshold of the authors' code is 0."""

    def absolute(tau: float) -> float:
        return least_error * (tau > 0) + slope * tau

    def curve(method: Method) -> HeadResult:
        tau = 0.0 if isinstance(method, Dense) else method.tau
        errors = HeadErrors(error=9 * tau, p99=9 * tau, of_default=90 * tau, absolute=absolute(tau))
        return HeadResult(seen=errors, unseen=errors, density=0.5)

    bound = Bound(absolute=0.4)
    (method,) = sale.choose_threshold(FakeJudge(curve), bound, any_method)
    wanted = released_calibration(absolute, bound.absolute)
    assert method == (Sale(tau=wanted) if wanted else Dense())
    (again,) = sale.choose_threshold(FakeJudge(curve), bound, lambda head, other: other != method)
    assert again == (Sale(tau=wanted / 2) if wanted > 0.0002 else Dense())


# SpargeAttn


def sparge_head(least_tau: float, best_theta: float = 0.0, margin: float = -5.0, first=0.079):
    """At ``best_theta``, τ from ``least_tau`` on suffice; other θ need a higher τ. λ up to ``margin`` costs 0.009."""

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
    bound = Bound(0.09, 0.09)
    methods = sparge_attn.choose_thresholds(judge, bound, any_method, skipping=True)
    # The second head keeps 0.7² · 1.125, but 0.75² at θ = 0; the last keeps nearly everything.
    expected = [SpargeAttn(0.5, 0.0, skip_margin=-5.0), SpargeAttn(0.7, 0.5, skip_margin=-2.1), Dense(), Dense()]
    assert methods == expected
    # The pair may use eight ninths of the bound: 0.081 is too much if the bound is 0.09.
    judge = FakeJudge(sparge_head(0.5, first=0.081))
    assert sparge_attn.choose_thresholds(judge, bound, any_method, skipping=True) == [Dense()]
    assert sparge_attn.choose_thresholds(judge, bound, any_method) == [SpargeAttn(0.5, 0.0)]


# MInference


def pattern_costs(selection: float = 0.02) -> Costs:
    """A head's time is its share of pairs, plus a constant share for patterns that select."""
    return Costs(0.0, 3.0, lambda method: Cost(0.0, 0.0 if isinstance(method, (AShape, Dense)) else selection, 1.0))


def kept(method) -> float:
    """Return the density in prompts of 40,000 tokens."""
    match method:
        case AShape():
            return min(1.0, (method.sink_tokens + method.local_tokens) / 40_000)
        case VerticalSlash():
            return min(1.0, (3 * method.slash_tokens + 2 * method.vertical_tokens) / 40_000)
        case BlockSparse():
            return min(1.0, 64 * method.top_blocks / 40_000)
        case _:
            return 1.0


def pattern_head(error=lambda method: 0.0):
    return lambda method: figures(error(method), kept(method))


def test_candidates_of_minference_cost_the_same(monkeypatch):
    monkeypatch.setattr(minference, "BUDGETS", (0.5, 1.0, 2.0))
    judge = FakeJudge(*[pattern_head()] * 3)
    half, paper, double = minference.search_spaces(judge, pattern_costs())
    assert paper[0] == minference.TARGET
    for budget, space in ((0.5, half), (1.0, paper), (2.0, double)):
        assert [type(method) for method in space] == [type(method) for method in minference.CANDIDATES]
        for method in space:
            selection = 0.0 if isinstance(method, AShape) else 0.02
            assert kept(method) + selection == pytest.approx(0.128 * budget, abs=75 / 40_000)  # half a step


def test_minference_leaves_out_what_cannot_cost_as_much_and_dear_budgets(monkeypatch):
    monkeypatch.setattr(minference, "BUDGETS", (1.0,))
    # A selection that costs more than the whole budget.
    ((only,),) = minference.search_spaces(FakeJudge(pattern_head()), pattern_costs(0.2))
    assert only == minference.TARGET
    monkeypatch.setattr(minference, "BUDGETS", (1.0, 7.0, 7.1, 100.0))  # 0.9 · 40,000 / 5,120 = 7.03
    assert len(list(minference.search_spaces(FakeJudge(pattern_head()), pattern_costs()))) == 2


def test_output_error_decides_the_pattern_in_the_smallest_budget_that_holds():
    small, large = (AShape(64, 512), BlockSparse(8)), (AShape(64, 4096), VerticalSlash(30, 512))
    errors = {small[0]: (0.05, 0.2, 0.2, 0.2), small[1]: (0.02, 0.2, 0.2, 0.04), large[0]: (0.0, 0.05, 0.2, 0.0),
              large[1]: (0.0, 0.03, 0.2, 0.0)}  # fmt: skip
    heads = [lambda method, i=i: figures(errors[method][i], 0.95 if i == 3 else 0.5) for i in range(4)]
    choose = partial(choose_in_order, spaces=[small, large])
    methods = choose(FakeJudge(*heads), BOUND, any_method)
    assert methods == [small[1], large[1], Dense(), Dense()]  # all candidates of the last budget keep nearly everything
    again = choose(FakeJudge(*heads), BOUND, lambda head, method: method != small[1])
    assert again[0] == small[0]
