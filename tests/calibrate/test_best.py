# SPDX-License-Identifier: Apache-2.0
"""Which methods a layer's heads get, where figures and costs are known."""

from dataclasses import dataclass, field, replace

import pytest

from tests.calibrate.fake_judge import FakeJudge, figures
from vllm_sparse_backend.profiling import best
from vllm_sparse_backend.profiling.costs import Cost, LayerCost, head_ms, kind_of
from vllm_sparse_backend.profiling.measure import Bound
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.minference.a_shape import AShape
from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.methods.sparge_attn.method import SpargeAttn

CHEAP, CLOSE = SpargeAttn(kept_mass=0.5), SpargeAttn(kept_mass=0.9)
LOCAL, FINE = AShape(64, 512), Sale(tau=0.03)
AMONG = [LOCAL, CHEAP, CLOSE, FINE]


LAYER = LayerCost(base_ms=0.0, means_ms=0.5, dense_ms=40.0)


@dataclass
class Known:
    """Ten milliseconds a dense head; by name what a kind's selection takes, and each of its heads."""

    kinds: dict[str, tuple[float, float]] = field(default_factory=dict)
    layer: LayerCost = LAYER

    def of(self, method: Method) -> Cost:
        return Cost(*self.kinds.get(name_of(method.selection), (0.0, 0.0)), full_ms=10.0)


def judge_of(costs: Known, *heads: dict[Method, tuple[float, float]]) -> FakeJudge:
    """Per head (error, density) of each method; what is not named loses everything, dense nothing."""

    def curve(of: dict[Method, tuple[float, float]]):
        return lambda m: figures(0.0, 1.0) if isinstance(m, Dense) else figures(*of.get(m, (1.0, 0.01)))

    judge = FakeJudge(*map(curve, heads))
    judge.costs = costs
    return judge


def test_each_head_has_the_cheapest_that_holds():
    sure = {LOCAL: (0.2, 0.05), CHEAP: (0.04, 0.3), CLOSE: (0.01, 0.6), FINE: (0.03, 0.2)}
    judge = judge_of(
        Known(), sure, sure | {FINE: (0.9, 0.2)}, sure | {FINE: (0.9, 0.2), CHEAP: (0.06, 0.3)}, {CLOSE: (0.06, 0.6)}
    )
    assert best.search(judge, Bound(0.05), AMONG) == [FINE, CHEAP, CLOSE, Dense()]
    # One pass for each candidate, and one of what was chosen.
    assert judge.passes == [[one] * 4 for one in AMONG] + [[FINE, CHEAP, CLOSE, Dense()]]


def test_what_costs_more_in_time_is_not_taken_for_its_density():
    of = {CHEAP: (0.04, 0.3), FINE: (0.04, 0.2)}
    assert best.search(judge_of(Known(), of), Bound(0.05), AMONG) == [FINE]
    dear = Known({"sale": (0.0, 1.5)})
    assert best.search(judge_of(dear, of), Bound(0.05), AMONG) == [CHEAP]
    without, means = (head_ms(dear, one, 0.3) for one in (CHEAP, replace(CHEAP, block_means=True)))
    assert means == pytest.approx(without + 0.5)


def test_a_kind_is_paid_once_a_layer():
    """Two heads for which SALE saves 2 ms each: worth a selection of 3 ms, not one of 5."""
    heads = [{CLOSE: (0.01, 0.4), FINE: (0.01, 0.2)}] * 2 + [{CLOSE: (0.01, 0.4)}] * 2
    for fixed_ms, expected in ((3.0, [FINE, FINE, CLOSE, CLOSE]), (5.0, [CLOSE] * 4)):
        judge = judge_of(Known({"sale": (fixed_ms, 0.0)}), *heads)
        assert best.search(judge, Bound(0.05), AMONG) == expected


def test_a_layer_that_does_not_pay_is_dense():
    judge = judge_of(Known({"sale": (25.0, 0.0)}), *[{FINE: (0.01, 0.5)}] * 4)
    assert best.search(judge, Bound(0.05), AMONG) == [Dense()] * 4
    assert len(judge.passes) == len(AMONG)


def test_no_more_kinds_than_a_layer_may_have():
    methods = [LOCAL, FINE, Sale(tau=0.03, sink_tokens=64), Sale(tau=0.03, local_tokens=256), CLOSE]
    assert len({kind_of(one) for one in methods}) == 5
    heads = [{one: (0.01, 0.1), CLOSE: (0.01, 0.3)} for one in methods[:4]]
    judge = judge_of(Known(), *heads)
    chosen = best.search(judge, Bound(0.05), methods)
    assert len({kind_of(one) for one in chosen}) == best.MOST_KINDS
    assert CLOSE in chosen
    assert Dense() not in chosen


def test_what_fails_beside_others_is_struck_out():
    """A method that holds by itself, and does not in the narrower blocks of a mixed layer."""
    judge = judge_of(Known(), {CHEAP: (0.01, 0.2), CLOSE: (0.01, 0.6)}, {FINE: (0.01, 0.2)})
    alone = judge.curves[0]

    def narrower(method: Method):
        beside = len(judge.passes) > len(AMONG)
        return figures(0.2, 0.1) if beside and method == CHEAP else alone(method)

    judge.curves = (narrower, judge.curves[1])
    assert best.search(judge, Bound(0.05), AMONG) == [CLOSE, FINE]


def test_candidates_are_of_every_method_with_means_and_without():
    plain, means = best.candidates(False), best.candidates()
    assert {name_of(one) for one in plain} == {
        "a_shape", "anchor_attention", "block_sparse", "flex_vertical_slash", "sale", "sparge_attn", "vertical_slash",
    }  # fmt: skip
    assert means == plain + [replace(one, block_means=True) for one in plain]
    assert len(set(means)) == len(means)


def test_a_head_that_even_dense_does_not_serve_stays_dense():
    """Its outputs are no numbers, say: other heads still get what holds."""
    judge = judge_of(Known(), {CHEAP: (0.01, 0.3)}, {})
    lost = judge.curves[1]
    judge.curves = (judge.curves[0], lambda m: figures(float("nan"), 1.0) if isinstance(m, Dense) else lost(m))
    assert best.search(judge, Bound(0.05), AMONG) == [CHEAP, Dense()]
