# SPDX-License-Identifier: Apache-2.0
"""SharePrefill: clusters of synthetic maps, and the search for each head's γ, each step against its definition."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vllm_sparse_backend.profiling.clustered import Choice, cluster, settle_layer, survey_layer, worth
from vllm_sparse_backend.profiling.flex_vertical_slash import GAMMAS

from tests.calibrate.fake_judge import FakeJudge, figures, most_passes
from tests.calibrate.made import HEADS, LAYERS, TopicCapturer, make_job
from vllm_sparse_backend.measure.report import write_json
from vllm_sparse_backend.profiling import clustered
from vllm_sparse_backend.profiling import share_prefill as module
from vllm_sparse_backend.profiling.chunks import Asked, measure_plans
from vllm_sparse_backend.profiling.flow import Flow
from vllm_sparse_backend.profiling.job import Job, Tell
from vllm_sparse_backend.profiling.judge import Served
from vllm_sparse_backend.profiling.measure import Bound, Figures
from vllm_sparse_backend.profiling.share_prefill import (
    MapAutoencoder,
    attention_maps,
    cluster_heads,
    map_side,
    profile_of,
    representations,
    ward_labels,
)
from vllm_sparse_backend.settings.config import SparsePrefillConfig
from vllm_sparse_backend.settings.errors import ConfigurationError
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.plan import Plan
from vllm_sparse_backend.settings.profile import Profile, parse_profile
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.share_prefill.method import NOISE, SharePrefill

SIDE = 16


def synthetic_maps() -> torch.Tensor:
    """Four layers of eight heads: three kinds of attention in turn, and in the end four heads of no kind."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.arange(SIDE)[:, None], torch.arange(SIDE)[None, :]
    local = (rows - columns < 4).float()
    sinks = (columns < 5).float() + 0.2
    stairs = (columns // 8 == rows // 8).float() + (columns % 8 == 0)
    kinds = [local, sinks, stairs]
    maps = []
    for head in range(32):
        shape = kinds[head % 3] if head < 28 else torch.rand(SIDE, SIDE, generator=generator).pow(2 + head)
        scores = shape + 0.05 * torch.rand(SIDE, SIDE, generator=generator)
        maps.append(scores.tril() / scores.tril().sum(1, keepdim=True))
    return torch.stack(maps).view(4, 8, SIDE, SIDE)


@pytest.fixture(scope="module")
def clusters():
    return cluster_heads(synthetic_maps(), epochs=20)


def test_heads_of_a_kind_share_a_cluster_across_layers(clusters):
    flat = [c for layer in clusters for c in layer]
    kinds = [set(flat[kind:28:3]) for kind in range(3)]
    assert kinds == [{0}, {1}, {2}]
    assert set(flat[28:]) == {NOISE}


def test_representations_are_equal_for_equal_seeds():
    maps = synthetic_maps().flatten(0, 1)[:12]
    first, again = (representations(maps, epochs=3) for _ in range(2))
    assert torch.equal(first, again)
    assert first.shape == (12, 64)
    assert not torch.equal(first, representations(maps, epochs=3, seed=1))


@pytest.mark.parametrize("side", [16, 48])
def test_autoencoder_gives_back_the_shape(side):
    maps = torch.rand(2, 1, side, side)
    assert MapAutoencoder(side)(maps).shape == maps.shape
    with pytest.raises(ValueError, match="given maps of side 40, expected a multiple of 16"):
        MapAutoencoder(40)


def test_ward_by_hand():
    points = torch.tensor([[10.0], [0.0], [1.0]])
    assert ward_labels(points, 0.99) == [0, 1, 2]
    assert ward_labels(points, 1.0) == [0, 1, 1]
    between = (2 * 2 * 1 / 3) ** 0.5 * 9.5  # sqrt(2 |A| |B| / (|A| + |B|)) between the means
    assert ward_labels(points, between - 0.01) == [0, 1, 1]
    assert ward_labels(points, between + 0.01) == [0, 0, 0]
    assert ward_labels(points[:1], 1.0) == [0]


def test_without_scipy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.cluster", None)
    with pytest.raises(
        ConfigurationError, match=r"clusters need scipy \(pip install 'vllm-sparse-backend\[calibrate\]'\)"
    ):
        ward_labels(torch.zeros(2, 1), 1.0)


@pytest.mark.parametrize("score_bytes", [1 << 28, 4 * 2 * 64 * 4 * 3, 1])
def test_attention_maps_average_blocks(monkeypatch, score_bytes):
    """Whatever is made of a map at a time: all of it, three rows, one."""
    monkeypatch.setattr(module, "SCORE_BYTES", score_bytes)
    generator = torch.Generator().manual_seed(5)
    q, k = torch.randn(70, 4, 8, generator=generator), torch.randn(70, 2, 8, generator=generator)
    found = attention_maps(q, k, 0.7, 16)
    assert (found.shape, found.dtype) == ((4, 16, 16), torch.float16)
    future = ~torch.ones(64, 64, dtype=torch.bool).tril()
    for head in range(4):
        scores = (q[:64, head] @ k[:64, head // 2].T * 0.7).masked_fill(future, -torch.inf)
        expected = scores.softmax(-1).view(16, 4, 16, 4).mean((1, 3))
        torch.testing.assert_close(found[head].float(), expected / expected.max(), rtol=1e-3, atol=1e-6)
    with pytest.raises(ValueError, match="given 70 tokens, expected at least side = 80"):
        attention_maps(q, k, 0.7, 80)


def test_maps_are_as_large_as_the_prompt_allows():
    assert [map_side(n) for n in (1000, 1935, 1936, 131072)] == [992, 1920, 1936, 1936]


def test_large_maps_come_in_smaller_batches(monkeypatch):
    """Training never holds more than ``BATCH_PIXELS``, and no map is left out."""
    seen = []
    forward = MapAutoencoder.forward
    monkeypatch.setattr(MapAutoencoder, "forward", lambda self, x: seen.append(x.shape) or forward(self, x))
    monkeypatch.setattr(module, "BATCH_PIXELS", 5 * SIDE**2)
    representations(synthetic_maps().flatten(0, 1)[:12].half(), epochs=1)
    assert [shape[0] for shape in seen] == [5, 5, 2]


def test_maps_that_stay_on_the_host_give_the_same(monkeypatch):
    maps = synthetic_maps().flatten(0, 1)[:12]
    held = representations(maps, epochs=2)
    monkeypatch.setattr(module, "HELD_BYTES", 0)
    assert torch.equal(representations(maps, epochs=2), held)


@pytest.mark.gpu
def test_the_papers_side_takes_no_more_memory_than_is_said():
    """Maps of 32,768 tokens of an 8B model's layer; training on eight of them, twice alike."""
    q, k = (torch.randn(32768, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (32, 8))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    maps = attention_maps(q, k, 0.1, module.SIDE)
    assert torch.cuda.max_memory_allocated() - before < 1.3e9
    assert torch.cuda.memory_allocated() == before
    assert (maps.shape, maps.dtype, str(maps.device)) == ((32, 1936, 1936), torch.float16, "cpu")
    del q, k
    torch.cuda.reset_peak_memory_stats()
    first, again = (representations(maps[:8], epochs=2, device="cuda") for _ in range(2))
    assert torch.cuda.max_memory_allocated() < 8.5e9
    assert torch.equal(first, again)


def test_the_scale_and_the_precision_of_maps_do_not_matter(clusters):
    halved = [(layer / layer.amax((1, 2), keepdim=True)).half() for layer in synthetic_maps()]
    assert cluster_heads(halved, epochs=20) == clusters


def test_profile_names_clustered_heads():
    shape = ModelShape("LlamaForCausalLM", 3, 4, 2, 64)
    clusters = ((0, 0, NOISE, 1), (NOISE,) * 4, (1, 0, 1, 1))
    method = SharePrefill(gamma=0.95, true_mass=True)
    profile = profile_of(clusters, shape, method)
    assert parse_profile(profile.to_yaml(), "test") == profile
    for layer, heads in enumerate(clusters):
        expected = tuple(replace(method, cluster=c) for c in heads)
        assert profile.methods_of(layer, 4) == expected


# The search for each head's γ

BASE = SharePrefill(max_sparsity=0.9, max_distance=0.3)
"""Thresholds under which the heads of ``TopicCapturer`` share."""

BOUND = Bound(0.1, 0.6)


def own(gamma: float) -> SharePrefill:
    return SharePrefill(gamma=gamma)


def head(alone: float, shared: float | None = None):
    """A curve: error just below 0.1 at γ ``alone`` by itself and at ``shared`` as a member, where None is a pivot.

    Density is γ, and as a member half of it.
    """

    def curve(method: Method) -> Figures:
        if isinstance(method, Dense) or (method.cluster != NOISE and shared is None):
            return figures(0.0, 1.0)
        if method.cluster == NOISE:
            return figures(0.09999 * (1 - method.gamma) / (1 - alone), method.gamma)
        return figures(0.09999 * (1 - method.gamma) / (1 - shared), method.gamma / 2)

    return curve


def test_survey_asks_each_head_by_itself_and_in_its_cluster():
    judge = FakeJudge(head(0.8), head(0.7, 0.9), head(0.6, 0.99), head(0.5), head(0.9995, 0.8), head(0.3, 0.95))
    clusters = (0, 0, 0, NOISE, 1, 1)
    choices = survey_layer(judge, BOUND, SharePrefill(), clusters)
    assert [one.own for one in choices] == [own(0.8), own(0.7), own(0.6), own(0.5), Dense(), own(0.3)]
    assert [one.is_pivot for one in choices] == [True] + [False] * 5
    members = [own(0.8), own(0.9), own(0.99), None, own(0.8), None]  # the last keeps less by itself
    assert [one.shared for one in choices] == [
        method and replace(method, cluster=cluster) for method, cluster in zip(members, clusters, strict=True)
    ]
    densities = [-0.2, 0.7 - 0.45, 0.6 - 0.495, 0, 0.6, 0]
    assert [one.saved for one in choices] == pytest.approx(densities)
    # Nobody is ever judged in another's cluster, and a member's cluster is judged with all of its members.
    for methods in judge.passes:
        assert tuple(method.cluster for method in methods) in (clusters, (NOISE,) * 6)
    assert len(judge.passes) == 2 * most_passes(len(GAMMAS)) + 1 == 15
    without = FakeJudge(head(0.8), head(0.7))
    survey_layer(without, BOUND, SharePrefill(), (NOISE, NOISE))
    assert len(without.passes) <= 7


def test_pivots_that_hold_no_lines_have_the_largest_gamma():
    (one,) = survey_layer(FakeJudge(head(0.9995)), BOUND, SharePrefill(), (3,))
    assert (one.own, one.shared) == (Dense(), SharePrefill(gamma=GAMMAS[-1], cluster=3))


def test_a_price_of_error_takes_the_gamma_that_costs_least():
    """Error 0.5 (1 - γ) for a density of γ² at a price of 3: least at γ = 0.75, and so for half of both as a member."""

    def curve(method: Method) -> Figures:
        part = 1.0 if method.cluster == NOISE else 0.5
        return figures(part * 0.5 * (1 - method.gamma), part * method.gamma**2)

    def steep(method: Method) -> Figures:
        return figures(2 * (1 - method.gamma), 0.9 * method.gamma)

    judge = FakeJudge(curve, curve, steep)
    choices = survey_layer(judge, Bound(1.0, 1.0), SharePrefill(), (NOISE, 2, NOISE), 3.0)
    assert [one.own for one in choices] == [own(0.75), own(0.75), own(0.998)]
    assert [one.shared for one in choices] == [None, SharePrefill(gamma=0.75, cluster=2), None]
    assert choices[1].own_cost == pytest.approx(0.75**2 + 3 * 0.125)
    assert choices[1].shared_cost == pytest.approx(choices[1].own_cost / 2)
    assert (choices[1].own_error, choices[1].shared_error) == pytest.approx((0.125, 0.0625))
    assert [choices[1].error_within(clusters) for clusters in ({2}, set())] == pytest.approx([0.0625, 0.125])
    # What costs more than all pairs do is not worth it, and what does not hold the bound cannot be had.
    assert survey_layer(judge, Bound(1.0, 1.0), SharePrefill(), (NOISE,) * 3, 1e4)[2].own == Dense()
    held = survey_layer(judge, Bound(0.1, 1.0), SharePrefill(), (NOISE,) * 3, 3.0)
    assert held[0].own == own(0.8)


def test_means_are_chosen_where_they_lose_less():
    """Under a price alone: as a member too; they keep no pair less, so a head that gains nothing goes without."""

    def curve(method: Method) -> Figures:
        return figures((0.2 if method.block_means else 0.5) * (1 - method.gamma), method.gamma)

    def deaf(method: Method) -> Figures:
        return figures(0.5 * (1 - method.gamma), method.gamma)

    clusters, bound = (NOISE, 2, NOISE), Bound(1.0, 1.0)
    priced = survey_layer(FakeJudge(curve, curve, deaf), bound, SharePrefill(), clusters, 1.0)
    assert [one.own.block_means for one in priced] == [True, True, False]
    assert priced[1].shared == SharePrefill(gamma=0.5, cluster=2, block_means=True)
    judge = FakeJudge(curve, curve, deaf)
    survey_layer(judge, bound, SharePrefill(), clusters)
    assert not any(method.block_means for methods in judge.passes for method in methods)


def choice(cluster: int, own_cost: float, shared_cost: float | None = None, pivot: bool = False) -> Choice:
    shared = SharePrefill(cluster=cluster) if shared_cost is not None else None
    return Choice(own(0.5), own_cost, cluster, shared, shared_cost or 1.0, pivot)


def test_clusters_are_dissolved_where_pivots_cost_more_than_others_save():
    """Over all layers; and where nobody would be left to share with."""
    pays = [choice(0, 0.5, 1.0, True), choice(0, 0.5, 0.2)], [choice(0, 0.5, 0.3)]
    costs = [choice(1, 0.5, 1.0, True), choice(1, 0.5, 0.2)], [choice(1, 0.5, 0.4)]
    alone = [choice(2, 0.5, 0.2), choice(2, 0.5)], [choice(2, 0.5)]
    pivots = [choice(3, 1.0, 1.0, True), choice(3, 1.0, 1.0, True)], []
    never = [choice(4, 0.5, 0.5), choice(NOISE, 0.5)], [choice(4, 0.25, 0.25)]
    layers = [[one for of in (pays, costs, alone, pivots, never) for one in of[layer]] for layer in range(2)]
    assert worth(layers) == {0, 4}
    assert [one.within({0}).cluster for one in layers[0]] == [0, 0] + [NOISE] * 8


def test_heads_that_do_not_hold_leave_their_cluster_then_go_dense():
    """One that held only while another was a member, and another that holds nowhere."""
    member = SharePrefill(cluster=0)
    judge = FakeJudge(*[lambda method: figures(0.0, 1.0)] * 3)

    def judged(methods):
        judge.passes.append(list(methods))
        together = methods[0] == methods[1] == member
        errors = [0.2 if methods[0] != Dense() else 0.0, 0.0 if together or methods[1] == own(0.5) else 0.3, 0.05]
        return [figures(error, 0.5) for error in errors]

    judge.judge = judged
    chosen = settle_layer(judge, BOUND, [member] * 3, [own(0.4), own(0.5), own(0.6)])
    assert chosen == [Dense(), own(0.5), member]
    assert judge.passes[-1] == chosen
    assert len(judge.passes) == 3 <= 2 * 3 + 1


def sharing_job(folder: Path, **changes: object) -> Job:
    """Heads that a pattern fits and no lines; all of them in one cluster, as an earlier run left it."""
    fields = {"num_tokens": 1300, "seed": 1, "capturer": TopicCapturer(), "served": Served(512, 512)} | changes
    job = make_job(folder, **fields)
    write_json(folder / "clusters-16-1000.json", [[0] * HEADS] * LAYERS)
    return job


def test_outcomes_are_known_again_whatever_gamma_and_means_earlier_heads_have(tmp_path):
    """Later layers are given who is in which cluster, and nothing else of it."""
    job = sharing_job(tmp_path / "work")

    def path(*heads: Method) -> Path:
        flow = Flow(job, "prompts")
        flow.add(list(heads))
        return flow.judge().path

    member = replace(BASE, cluster=0)
    assert path(member, Dense()) == path(replace(member, gamma=0.5, block_means=True), replace(BASE, gamma=0.7))
    assert len({path(member, Dense()), path(Dense(), member), path(replace(member, cluster=1), Dense())}) == 3


def searched(job: Job, **bounds: Bound) -> Profile:
    return cluster(job, bounds or {"high": BOUND}, 1000.0, 16, margin=0.1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(clustered, "BASES", {"share_prefill": BASE})
        folder = tmp_path_factory.mktemp("shared")
        job = sharing_job(folder / "work")
        return folder / "work", job, searched(job)


@pytest.fixture
def base(monkeypatch):
    monkeypatch.setattr(clustered, "BASES", {"share_prefill": BASE})


def test_the_profile_that_is_written_was_judged_as_a_whole(undisturbed, tmp_path):
    """A server's plan of it keeps, layer after layer, what the profile says; and every head holds the bound."""
    _, job, profile = undisturbed
    of = profile.provenance
    assert of.bounds == {"error": 0.1, "worst": 0.6, "distance": 1000.0, "side": 16.0}
    assert of.held_out["heads_within_bound"] == 1
    methods = [profile.methods_of(layer, HEADS) for layer in range(LAYERS)]
    members = [[isinstance(one, SharePrefill) and one.cluster == 0 for one in layer] for layer in methods]
    assert members == [[True] * (HEADS - 1) + [False]] * LAYERS
    density, error, worst = (of.figures.rows(name, profile.model) for name in ("density", "error", "worst_error"))
    assert density[0][0] == 1  # the pivot, whose pattern the second layer takes too
    assert max(density[0][1:3] + density[1][:3]) < 0.5
    assert max(map(max, error)) <= 0.09
    assert max(map(max, worst)) <= 0.54
    path = tmp_path / "p.yaml"
    path.write_text(profile.to_yaml())
    plan = Plan.build(SparsePrefillConfig(profile=str(path)), job.shape)
    measured = measure_plans(job.captures("prompts")[0], [Asked(plan)], 512, "cpu", (), min_tokens=512)
    for found, said in zip(measured.kept[0].density, density, strict=True):
        assert found == pytest.approx(said, rel=1e-3)


def test_the_mean_of_all_heads_is_held_where_it_is_bounded(undisturbed, base):
    """It binds: with the bound for each head alone there is more."""
    folder = undisturbed[0]

    def mean(profile):
        rows = profile.provenance.figures.rows("error", profile.model)
        return sum(map(sum, rows)) / (LAYERS * HEADS)

    loose = searched(sharing_job(folder), high=Bound(0.1, 0.6, mean=1.0))
    most = mean(loose) / 2
    bounded = searched(sharing_job(folder), high=Bound(0.1, 0.6, mean=most))
    assert mean(bounded) <= 0.9 * most < mean(loose)
    assert bounded.provenance.bounds["mean"] == pytest.approx(most)
    assert loose.provenance.density < bounded.provenance.density < 1
    assert any(one.cluster != NOISE for layer in range(LAYERS) for one in bounded.methods_of(layer, HEADS))


def test_the_mean_is_held_by_the_profile_that_is_written(undisturbed, base, monkeypatch):
    """Settling changes what heads do after a price was found: here one that lets all of them lose what they may."""
    folder = undisturbed[0]
    loose = searched(sharing_job(folder), high=Bound(0.1, 0.6, mean=1.0))
    rows = loose.provenance.figures.rows("error", loose.model)
    most = sum(map(sum, rows)) / (LAYERS * HEADS) / 2
    monkeypatch.setattr(clustered, "least_price", lambda *_: 0.0)
    bounded = searched(sharing_job(folder), high=Bound(0.1, 0.6, mean=most))
    assert sum(map(sum, bounded.provenance.figures.rows("error", bounded.model))) / (LAYERS * HEADS) <= 0.9 * most


def test_a_pivot_that_is_none_in_some_rows_counts_what_it_loses_there():
    """And what nothing of its own holds has no means of its own."""

    def pivot(method: Method) -> Figures:
        return figures(0.02, 0.96) if method.cluster != NOISE else figures(0.2, 0.8)

    (one,) = survey_layer(FakeJudge(pivot), BOUND, SharePrefill(), (3,), 1.0)
    assert (one.is_pivot, one.shared_error, one.own) == (True, 0.02, Dense())
    assert one.shared == SharePrefill(gamma=0.998, cluster=3)


def test_nothing_is_read_again_for_another_price(tmp_path):
    """Of a layer what it has said is kept, and neither its file nor itself."""
    judge = FakeJudge(head(0.8), head(0.7))
    known = clustered.Recalled(judge)
    first = survey_layer(known, BOUND, SharePrefill(), (0, 0), 1.0)
    passes, known.ask = len(judge.passes), None
    assert survey_layer(known, BOUND, SharePrefill(), (0, 0), 1.0) == first
    assert len(survey_layer(known, BOUND, SharePrefill(), (0, 0), 10.0)) == 2
    assert len(judge.passes) == passes


def test_a_search_that_was_stopped_anywhere_goes_on_to_the_same_bytes(undisturbed, base, tmp_path):
    class Stopped(Exception):
        pass

    _, _, profile = undisturbed
    steps = iter((1, 2, None))

    def after(count: int | None) -> Tell:
        left = iter(range(count or 0))

        def step() -> None:
            if count is not None and next(left, None) is None:
                raise Stopped

        return Tell(step=step)

    for count in steps:
        job = sharing_job(tmp_path / "work", tell=after(count))
        if count is None:
            assert searched(job).to_yaml() == profile.to_yaml()
        else:
            with pytest.raises(Stopped):
                searched(job)
    # What is known needs no captures.
    job.clear()
    again = sharing_job(tmp_path / "work")
    assert searched(again).to_yaml() == profile.to_yaml()
    assert again.capturer.captured == []


def test_where_nothing_gains_by_sharing_another_command_is_named(undisturbed, base):
    folder, _, _ = undisturbed
    with pytest.raises(ConfigurationError, match="without that SharePrefill is flex_vertical_slash: expected a larger"):
        searched(sharing_job(folder), high=Bound(1e-9))
