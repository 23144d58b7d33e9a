# SPDX-License-Identifier: Apache-2.0
"""The choice of methods from known figures and costs, and a bounded mean error spent where it saves most time."""

import itertools
import random
from dataclasses import dataclass, field
from statistics import fmean
from types import SimpleNamespace

import pytest

from tests.helpers.calibration_cases import HEADS, make_job
from tests.helpers.fake_judge import FakeJudge, figures, most_passes
from vllm_sparse_backend.calibration import cheapest_method
from vllm_sparse_backend.calibration.calibration_loop import calibrate, cheapest_strategy, choose_jointly
from vllm_sparse_backend.calibration.cheapest_method import (
    CheapestSearch,
    cheapest_methods,
    judge_uniformly,
    methods_within_bound,
    price_of,
)
from vllm_sparse_backend.calibration.head_costs import Cost, EstimatedCosts, LayerCost, kind_of
from vllm_sparse_backend.calibration.head_errors import Bound
from vllm_sparse_backend.calibration.search import ladder_of
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.minference.a_shape import AShape
from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.methods.sparge_attn.method import SpargeAttn

CHEAP, CLOSE = SpargeAttn(kept_mass=0.5), SpargeAttn(kept_mass=0.9)
LOCAL, FINE = AShape(64, 512), Sale(tau=0.03)
AMONG = [LOCAL, CHEAP, CLOSE, FINE]
BOUND = Bound(0.05)


@dataclass
class SavedCosts:
    """Costs: 10 ms for each dense head; ``kinds`` has the times of a selection and of each of its heads, by name."""

    kinds: dict[str, tuple[float, float]] = field(default_factory=dict)
    layer: LayerCost = LayerCost(base_ms=0.0, dense_ms=40.0)  # noqa: RUF009

    def of(self, method: Method) -> Cost:
        return Cost(*self.kinds.get(name_of(method), (0.0, 0.0)), full_ms=10.0)


def judge_of(*heads: dict[Method, tuple[float, float]]) -> FakeJudge:
    """Return a judge with these (error, density) by head. Unlisted methods lose everything; dense loses nothing."""

    def curve(outcomes):
        return lambda m: figures(0.0, 1.0) if isinstance(m, Dense) else figures(*outcomes.get(m, (1.0, 0.01)))

    return FakeJudge(*map(curve, heads))


def test_each_head_has_the_cheapest_that_holds():
    sure = {LOCAL: (0.2, 0.05), CHEAP: (0.04, 0.3), CLOSE: (0.01, 0.6), FINE: (0.03, 0.2)}
    heads = sure, sure | {FINE: (0.9, 0.2)}, sure | {FINE: (0.9, 0.2), CHEAP: (0.06, 0.3)}, {CLOSE: (0.06, 0.6)}
    judge = judge_of(*heads)
    assert choose_jointly(judge, CheapestSearch(None, BOUND, AMONG, SavedCosts()), BOUND)[0] == [
        FINE,
        CHEAP,
        CLOSE,
        Dense(),
    ]
    # Two passes for two settings of a kind, one for each other setting, and one for the final choice.
    assert len(judge.passes) == 5
    assert judge.passes[-1] == [FINE, CHEAP, CLOSE, Dense()]


def test_no_head_loses_more_than_so_many_times_what_the_default_does():
    """Bisection finds the sparsest setting of each kind within the bound: at most 17 passes for five kinds of 37
    settings."""
    bound, lost = Bound(of_default=1.5), {m: (round(2 - 2 * m.kept_mass, 6), m.kept_mass) for m in ladder_of("top_p")}
    judge = judge_of(lost, lost | dict.fromkeys([m for m in lost if m.kept_mass < 0.99], (float("nan"), 0.1)))
    search = cheapest_strategy(["top_p", "sale", "a_shape"])(
        SimpleNamespace(
            costs=SavedCosts(),
            prompts=SimpleNamespace(prompts=[range(32768)]),
            shape=SimpleNamespace(head_dim=64),
        ),
        bound,
    )
    methods, results = choose_jointly(judge, search, bound)
    assert [method.kept_mass for method in methods] == [0.95, 0.99]
    assert [bound.used_fraction(result) for result in results] == pytest.approx([1 / 1.5, 0.2 / 1.5])
    assert len(judge.passes) <= sum(map(most_passes, (10, 3, 9, 9, 6))) + 1


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
    judge = judge_of(*heads)
    assert choose_jointly(judge, CheapestSearch(None, BOUND, AMONG, SavedCosts(kinds)), BOUND)[0] == expected
    assert kind_of(CHEAP) == kind_of(CLOSE) != kind_of(FINE)


@pytest.mark.parametrize("seed", range(4))
def test_no_choice_of_the_same_mean_error_keeps_less(seed):
    rng = random.Random(seed)
    among, heads = [SpargeAttn(kept_mass=tau) for tau in (0.3, 0.6, 0.9)], []
    for _ in range(4):  # a method that keeps more loses less
        errors, kept = (sorted(rng.random() for _ in among) for _ in range(2))
        heads.append(dict(zip(among, zip(reversed(errors), kept), strict=True)))
    held = methods_within_bound(judge_uniformly(judge_of(*heads), among), Bound(1.0))
    costs, layers = EstimatedCosts(2, selects=False), [held[:2], held[2:]]
    assert price_of(layers, costs, 1.0) == price_of(layers, costs, float("inf")) == 0.0
    for most_mean in (0.05, 0.2, 0.4):
        price = price_of(layers, costs, most_mean)
        chosen = [method for layer in layers for method in cheapest_methods(layer, costs, price)]
        points = [
            (0.0, 1.0) if isinstance(method, Dense) else points_of_head[method]
            for method, points_of_head in zip(chosen, heads)
        ]
        error, density = (fmean(point[i] for point in points) for i in range(2))
        assert error <= most_mean
        for other in itertools.product(*([(0.0, 1.0), *points_of_head.values()] for points_of_head in heads)):
            if fmean(point[0] for point in other) <= error:
                assert fmean(point[1] for point in other) >= density - 1e-12


@pytest.mark.full
def test_a_profile_of_a_bounded_mean(tmp_path, monkeypatch):
    """The profile holds the mean and the bounds of single heads, and a larger mean keeps less. This is independent of
    the price found for heads that were judged separately."""
    among = [AShape(64, 128), SpargeAttn(kept_mass=0.6), SpargeAttn(kept_mass=0.9)]
    bounds = {"high": Bound(0.5, 3.0, 4.0, mean=0.005), "fast": Bound(0.5, 3.0, 4.0, mean=0.1)}

    def search(job, bound):
        return CheapestSearch(job, bound, among, EstimatedCosts(HEADS, selects=False))

    def made():
        return calibrate(make_job(tmp_path / "work"), search, bounds, "a test")

    profile = made()
    for name, bound in bounds.items():
        level = profile.at_level(name)
        errors = level.provenance.figures.rows("error", profile.model)
        assert fmean(x for layer in errors for x in layer or [0.0] * HEADS) <= bound.mean * 1.0001
        assert max(x for layer in errors for x in layer or [0.0]) <= bound.error
        assert level.provenance.bounds == bound.numbers
        assert level.provenance.held_out["mean_of_bound"] > 0
    assert profile.at_level("fast").provenance.density < profile.provenance.density < 1
    assert made().to_yaml() == profile.to_yaml()
    monkeypatch.setattr(cheapest_method, "price_of", lambda *_: 0.0)
    errors = made().provenance.figures.rows("error", profile.model)
    assert 0 < fmean(x for layer in errors for x in layer or [0.0] * HEADS) <= 0.005
