# SPDX-License-Identifier: Apache-2.0
"""The choice of each search for heads with known figures, and the loop that runs the searches."""

import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.helpers.calibration_cases import make_job
from tests.helpers.fake_judge import FakeJudge, any_method, figures, most_passes, of
from vllm_sparse_backend.calibration import calibration_loop, minference
from vllm_sparse_backend.calibration.head_costs import Cost, LayerCost
from vllm_sparse_backend.calibration.head_errors import Bound, HeadResult
from vllm_sparse_backend.calibration.search import LadderSearch, Search, halved, ladder_of, sparsest
from vllm_sparse_backend.calibration.sparge_attn import SpargeAttnSearch
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_kernels.methods import METHODS, name_of
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
    assert LadderSearch(BOUND, LADDER).choose(judge, any_method) == [LADDER[0], LADDER[7], Dense(), Dense()]
    # The next setting is taken if a setting is not allowed because it missed the bound next to other heads.
    assert LadderSearch(BOUND, LADDER).choose(judge, lambda head, method: method != LADDER[7])[1] == LADDER[8]


def test_steps_are_halved_where_one_number_differs():
    ladder = [Sale(tau=0.2), Sale(tau=0.1), Sale(tau=0.1, channels="half"), Sale(tau=0.05, channels="half")]
    between = [Sale(tau=0.15), Sale(tau=0.075, channels="half")]
    assert [setting for setting in halved(ladder) if setting not in ladder] == between
    blocks = [AShape(64, 128), AShape(64, 256)]
    assert halved(blocks) == blocks
    assert halved([]) == []


class Given(Search):
    """A search that chooses the first allowed method of a preset list for each head."""

    def __init__(self, *choices) -> None:
        self.choices = choices

    def choose(self, judge, is_allowed):
        return [
            next((method for method in methods if is_allowed(i, method)), Dense())
            for i, methods in enumerate(self.choices)
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
    methods, seen = calibration_loop.choose_jointly(judge, Given([a_shape, lines], [a_shape], [blocks]), BOUND)
    assert methods == [lines, Dense(), blocks]
    assert judge.passes == [[a_shape, a_shape, blocks], methods]
    assert len(seen) == 3


def test_a_search_that_always_fails_ends_dense():
    judge = FakeJudge(lambda method: figures(float("nan"), 0.5), lambda method: figures(0.2, 0.5))
    everything = [AnchorAttention(theta=float(i)) for i in range(30)]
    assert calibration_loop.choose_jointly(judge, Given(everything, everything), BOUND) == ([Dense()] * 2, None)
    assert len(judge.passes) == calibration_loop.MOST_ROUNDS


@pytest.mark.parametrize("name", [name for name in METHODS if name != "dense"])
def test_ladders_are_of_their_method_and_have_its_own_settings(name):
    ladder = ladder_of(name)
    assert {name_of(setting) for setting in ladder} == {name}
    assert len(set(ladder)) == len(ladder) >= 5
    assert any(setting.group_key == METHODS[name].parameters().group_key for setting in ladder)


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [("sale", "channels", "all"), ("sale:channels=half", "channels", "half"),
     ("flex_vertical_slash:estimating=spread,last_queries=256", "last_queries", 256),
     ("anchor_attention:whole_blocks=true", "sample_tokens", 8)],
)  # fmt: skip
def test_a_methods_settings_are_of_one_kind(text, field, value, tmp_path):
    search = calibration_loop.parse_strategy(text, {"high": BOUND})(make_job(tmp_path, num_tokens=600), BOUND)
    assert {getattr(setting, field) for setting in search.settings} == {value}
    assert set(search.settings) > {
        setting for setting in ladder_of(text.split(":")[0]) if getattr(setting, field) == value
    }


def test_a_ladder_takes_options_that_are_on_or_off(tmp_path):
    text = "anchor_attention:dense_tail=true,first_group=true"
    search = calibration_loop.parse_strategy(text, {"high": BOUND})(make_job(tmp_path, num_tokens=6200), BOUND)
    plain = calibration_loop.parse_strategy("anchor_attention", {"high": BOUND})(
        make_job(tmp_path, num_tokens=6200), BOUND
    )
    assert search.settings == [replace(setting, dense_tail=True, first_group=True) for setting in plain.settings]


@pytest.mark.parametrize(
    ("text", "more", "problem"),
    [("anchor_attention:dense_tail=1", {}, "given 'dense_tail=1', expected values of one of its ladders, or options"),
     ("anchor_attention:dense=true", {}, "given 'dense=true', expected values of one of its ladders, or options that"),
     ("sage", {}, "--method: given 'sage', expected one of a_shape, .*did you mean 'sale'"),
     ("sale:channels=few", {}, "--method sale: given 'channels=few', expected values of one of its ladders"),
     ("minference:gamma=0.9", {}, "--method minference: given 'gamma=0.9', expected no fields: its search has"),
     ("share_prefill+paper:gamma=0.9", {}, r"--method share_prefill\+paper: given 'gamma=0.9', expected no fields"),
     ("share_prefill+paper", {}, r"--level: given with --method share_prefill\+paper, expected none: its settings are"),
     ("sale", {"distance": 3.0}, "--distance: given with --method sale, expected only with share_prefill"),
     ("a_shape", {"taus": "0.008:0.0001"}, "--taus: given with --method a_shape, expected only with sale"),
     *(("sale", {"taus": taus}, f"--taus: given '{taus}', expected MOST:LEAST with 0 < LEAST < MOST < 1, such as 0.008")
       for taus in ("0.008", "a:b", "0.1:0.2", "1:0.1", "0.1:0", "0.1:nan", "0.1:0.01:0.001"))],
)  # fmt: skip
def test_what_cannot_be_calibrated_is_refused(text, more, problem):
    with pytest.raises(ConfigurationError, match=problem):
        calibration_loop.parse_strategy(text, {"high": BOUND}, **more)
    with pytest.raises(ConfigurationError, match="--method: given 'share_prefill', expected one of a_shape"):
        calibration_loop.cheapest_strategy(["share_prefill"])


@pytest.mark.parametrize("name", ["minference", "share_prefill", "sparge_attn", "sparge_attn+skip"])
def test_an_absolute_bound_is_for_ladders(name):
    with pytest.raises(ConfigurationError, match=re.escape(f"given an absolute bound with --method {name}, expected")):
        calibration_loop.parse_strategy(name, {"high": Bound(absolute=0.4)})


def released_calibration(error_of: Callable[[float], float], bound: float) -> float:
    """Return the threshold at which SALE's released calibration ends, for a head and a prompt at a time."""
    tau = 0.008
    while error_of(tau) >= bound and tau:
        tau = tau / 2 if tau / 2 > 0.0001 else 0.0
    return tau


@pytest.mark.parametrize("least_error", [0.0, 0.3])
@pytest.mark.parametrize("slope", [1.0, 60.0, 250.0, 900.0, 3000.0, 4000.0, 1e5])
def test_sale_is_calibrated_as_by_its_authors(slope, least_error, tmp_path):
    """The threshold is the same for errors that grow with it. The head is dense if the code's threshold is 0."""

    def absolute(tau: float) -> float:
        return least_error * (tau > 0) + slope * tau

    bound = Bound(absolute=0.4)
    search = calibration_loop.parse_strategy("sale", {"high": bound}, taus="0.008:0.0001")(make_job(tmp_path), bound)
    assert [setting.tau for setting in search.settings] == [0.008 / 2**i for i in range(7)]

    def curve(method: Method) -> HeadResult:
        tau = 0.0 if isinstance(method, Dense) else method.tau
        return replace(figures(9.0 * tau, 0.5), absolute=absolute(tau))

    (method,) = search.choose(FakeJudge(curve), any_method)
    wanted = released_calibration(absolute, bound.absolute)
    assert method == (Sale(tau=wanted) if wanted else Dense())


def test_thresholds_of_other_settings(tmp_path):
    parsed = calibration_loop.parse_strategy("sale:channels=half", {"high": BOUND}, taus="0.1:0.03")
    assert parsed(make_job(tmp_path), BOUND).settings == [Sale(tau=0.1, channels="half"), Sale(0.05, channels="half")]
    spent = Bound(absolute=0.4, mean=0.1)
    parsed = calibration_loop.parse_strategy("sale", {"high": spent}, taus="0.1:0.03")
    assert parsed(make_job(tmp_path), spent).among == [Sale(tau=0.1), Sale(tau=0.05)]


@pytest.mark.parametrize(("text", "least"), [("anchor_attention", 2048), ("anchor_attention:whole_blocks=true", 512)])
def test_prompts_in_which_a_method_keeps_every_key_are_refused(text, least, tmp_path):
    parse = calibration_loop.parse_strategy(text, {"high": BOUND})
    problem = (
        f"prompts: given '{least} tokens', expected prompts of more than {least} tokens: anchor_attention.* keeps "
    )
    with pytest.raises(ConfigurationError, match=problem + "every key of shorter prompts; pass --tokens, or longer"):
        parse(make_job(tmp_path / "short", num_tokens=least), BOUND)
    assert parse(make_job(tmp_path / "long", num_tokens=least + 1), BOUND).settings
    with pytest.raises(ConfigurationError, match="expected prompts of more than 512 tokens"):
        calibration_loop.cheapest_strategy(["anchor_attention"])(make_job(tmp_path / "best", num_tokens=512), BOUND)


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
    methods = SpargeAttnSearch(Bound(0.09, 0.09), skipping=True).choose(judge, any_method)
    # The second head keeps 0.7² · 1.125, but 0.75² at θ = 0; the last keeps nearly everything.
    expected = [SpargeAttn(0.5, 0.0, skip_margin=-5.0), SpargeAttn(0.7, 0.5, skip_margin=-2.1), Dense(), Dense()]
    assert methods == expected
    # The pair may use eight ninths of the bound: 0.081 is too much if the bound is 0.09.
    judge = FakeJudge(sparge_head(0.5, first=0.081))
    assert SpargeAttnSearch(Bound(0.09, 0.09), skipping=True).choose(judge, any_method) == [Dense()]
    assert SpargeAttnSearch(Bound(0.09, 0.09)).choose(judge, any_method) == [SpargeAttn(0.5, 0.0)]


# MInference


class Costs:
    """A head's time is its share of pairs, plus a constant share for patterns that select."""

    layer = LayerCost(0.0, 3.0)

    def __init__(self, selection: float = 0.02) -> None:
        self.selection = selection

    def of(self, method):
        return Cost(0.0, 0.0 if isinstance(method, (AShape, Dense)) else self.selection, 1.0)


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


def test_candidates_of_minference_cost_the_same():
    judge = FakeJudge(*[pattern_head()] * 3)
    half, paper, double = minference.search_spaces(judge, Costs(), (0.5, 1.0, 2.0))
    assert paper[0] == minference.TARGET
    for budget, space in ((0.5, half), (1.0, paper), (2.0, double)):
        assert [type(method) for method in space] == [type(method) for method in minference.CANDIDATES]
        for method in space:
            selection = 0.0 if isinstance(method, AShape) else 0.02
            assert kept(method) + selection == pytest.approx(0.128 * budget, abs=75 / 40_000)  # half a step


def test_minference_leaves_out_what_cannot_cost_as_much_and_dear_budgets():
    # A selection that costs more than the whole budget.
    ((only,),) = minference.search_spaces(FakeJudge(pattern_head()), Costs(0.2), (1.0,))
    assert only == minference.TARGET
    budgets = (1.0, 7.0, 7.1, 100.0)  # 0.9 · 40,000 / 5,120 = 7.03
    assert len(list(minference.search_spaces(FakeJudge(pattern_head()), Costs(), budgets))) == 2


def candidates(spaces, bound=BOUND) -> minference.MInferenceSearch:
    search = minference.MInferenceSearch.__new__(minference.MInferenceSearch)
    search.bound, search.spaces = bound, spaces
    return search


def test_output_error_decides_the_pattern_in_the_smallest_budget_that_holds():
    small, large = (AShape(64, 512), BlockSparse(8)), (AShape(64, 4096), VerticalSlash(30, 512))
    errors = {small[0]: (0.05, 0.2, 0.2, 0.2), small[1]: (0.02, 0.2, 0.2, 0.04), large[0]: (0.0, 0.05, 0.2, 0.0),
              large[1]: (0.0, 0.03, 0.2, 0.0)}  # fmt: skip
    heads = [lambda method, i=i: figures(errors[method][i], 0.95 if i == 3 else 0.5) for i in range(4)]
    methods = candidates([small, large]).choose(FakeJudge(*heads), any_method)
    assert methods == [small[1], large[1], Dense(), Dense()]  # all candidates of the last budget keep nearly everything
    again = candidates([small, large]).choose(FakeJudge(*heads), lambda head, method: method != small[1])
    assert again[0] == small[0]
