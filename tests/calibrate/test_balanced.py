# SPDX-License-Identifier: Apache-2.0
"""Error of a given mean over heads, spent where it saves most: against every choice there is, and in a whole run."""

import itertools
import random
from statistics import fmean

import pytest

from tests.calibrate.fake_judge import FakeJudge, figures
from tests.calibrate.made import HEADS, LAYERS, make_job
from vllm_sparse_backend.profiling import balanced, best
from vllm_sparse_backend.profiling.costs import PairCosts
from vllm_sparse_backend.profiling.job import run
from vllm_sparse_backend.profiling.ladders import LADDERS, SEARCHES, halved, settings_of
from vllm_sparse_backend.profiling.measure import Bound
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.minference.a_shape import AShape
from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.methods.sparge_attn.method import SpargeAttn

AMONG = [SpargeAttn(kept_mass=tau) for tau in (0.3, 0.6, 0.9)]


def random_heads(seed: int, count: int) -> list[dict[Method, tuple[float, float]]]:
    """(error, density) of each setting: what keeps more loses less."""
    rng = random.Random(seed)
    heads = []
    for _ in range(count):
        errors, kept = (sorted(rng.random() for _ in AMONG) for _ in range(2))
        heads.append(dict(zip(AMONG, zip(reversed(errors), kept), strict=True)))
    return heads


def judge_of(heads) -> FakeJudge:
    def curve(of):
        return lambda method: figures(0.0, 1.0) if isinstance(method, Dense) else figures(*of[method])

    return FakeJudge(*map(curve, heads))


@pytest.mark.parametrize("seed", range(10))
def test_no_choice_of_the_same_mean_error_keeps_less(seed):
    heads = random_heads(seed, 4)
    judge = judge_of(heads)
    held = best.holding(best.judged(judge, AMONG), Bound(1.0))
    costs = PairCosts(2)
    layers = [held[:2], held[2:]]
    for most_mean in (0.05, 0.2, 0.4):
        price = best.price_of(layers, costs, most_mean)
        chosen = [method for layer in layers for method in best.choose(layer, costs, price)]
        error, density = (
            fmean((0.0, 1.0)[i] if isinstance(method, Dense) else of[method][i] for method, of in zip(chosen, heads))
            for i in range(2)
        )
        assert error <= most_mean
        for other in itertools.product(*([(0.0, 1.0), *of.values()] for of in heads)):
            if fmean(one[0] for one in other) <= error:
                assert fmean(one[1] for one in other) >= density - 1e-12


def test_error_has_no_price_where_the_mean_does_not_bind():
    held = best.holding(best.judged(judge_of(random_heads(0, 2)), AMONG), Bound(1.0))
    assert best.price_of([held], PairCosts(2), 1.0) == 0.0
    assert best.price_of([held], PairCosts(2), float("inf")) == 0.0


def test_means_count_as_what_they_cost():
    plain, means = Sale(tau=0.1), Sale(tau=0.1, block_means=True)
    loses = {plain: (0.10, 0.50), means: (0.08, 0.50)}
    held = best.holding(best.judged(judge_of([loses]), [plain, means]), Bound(1.0))
    assert best.choose(held, PairCosts(1)) == [plain]
    assert best.choose(held, PairCosts(1), price=1.0) == [means]  # 0.02 of error for a 64th of the pairs


def test_a_profile_of_a_bounded_mean(tmp_path):
    """It keeps less than one whose heads each hold that mean, and holds the bounds of single heads."""
    job = make_job(tmp_path / "work", num_tokens=300)
    among = [AShape(64, 128), *AMONG[1:]]
    bounds = {"high": Bound(0.5, 3.0, 4.0, mean=0.005), "fast": Bound(0.5, 3.0, 4.0, mean=0.1)}
    profile = run(job, balanced.search_of(job, among, bounds, PairCosts(HEADS)), bounds, "a test")
    for name, bound in bounds.items():
        level = profile.at_level(name)
        errors = level.provenance.figures.rows("error", profile.model)
        assert fmean(x for layer in errors for x in layer or [0.0] * HEADS) <= bound.mean * 1.0001
        assert max(x for layer in errors for x in layer or [0.0]) <= bound.error
        assert level.provenance.bounds == bound.numbers
        assert level.provenance.held_out["mean_of_bound"] > 0
    assert profile.at_level("fast").provenance.density < profile.provenance.density < 1
    again = make_job(tmp_path / "work", num_tokens=300)
    search = balanced.search_of(again, among, bounds, PairCosts(HEADS))
    assert run(again, search, bounds, "a test").to_yaml() == profile.to_yaml()
    assert again.capturer.captured == []
    assert len(errors) == LAYERS


def test_the_mean_is_held_by_what_heads_do_together(tmp_path, monkeypatch):
    """Whatever price was found for heads that were judged apart: here one that lets all of them lose what they may."""
    job, among = make_job(tmp_path / "work", num_tokens=300), [AShape(64, 128), *AMONG[1:]]
    bounds = {"high": Bound(0.5, 3.0, 4.0, mean=0.02)}
    monkeypatch.setattr(best, "price_of", lambda *_: 0.0)
    profile = run(job, balanced.search_of(job, among, bounds, PairCosts(HEADS)), bounds, "a test")
    errors = profile.provenance.figures.rows("error", profile.model)
    assert 0 < fmean(x for layer in errors for x in layer or [0.0] * HEADS) <= 0.02
    monkeypatch.setattr(best, "dearer", lambda *_: pytest.fail("no dearer price is needed"))
    loose = {"high": Bound(0.5, 3.0, 4.0, mean=1.0)}
    run(job, balanced.search_of(job, among, loose, PairCosts(HEADS)), loose, "a test")


@pytest.mark.parametrize("method", [name for name in SEARCHES if "+" not in name and name != "minference"])
def test_settings_of_a_method(method):
    found = settings_of(method)
    assert {name_of(one) for one in found} == {method}
    assert len(set(found)) == len(found)
    assert set(LADDERS[method]) < set(found)
    assert sum(one.block_means for one in found) == len(found) / 2


def test_steps_are_halved_where_one_number_differs():
    ladder = [Sale(tau=0.2), Sale(tau=0.1), Sale(tau=0.1, channels="half"), Sale(tau=0.05, channels="half")]
    between = [Sale(tau=0.15), Sale(tau=0.075, channels="half")]
    assert [one for one in halved(ladder) if one not in ladder] == between
    blocks = [AShape(64, 128), AShape(64, 256)]
    assert halved(blocks) == blocks
    assert halved([]) == []
