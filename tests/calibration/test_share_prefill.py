# SPDX-License-Identifier: Apache-2.0
"""SharePrefill: clusters of synthetic maps, and each head's choice between its own pattern and its cluster's."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.helpers.calibration_cases import HEADS, LAYERS, TopicCapturer, make_job
from tests.helpers.fake_judge import FakeJudge, figures, most_passes
from vllm_sparse_backend.calibration import head_clusters as module
from vllm_sparse_backend.calibration.calibration_job import Job, JobProgress
from vllm_sparse_backend.calibration.calibration_loop import calibrate, parse_strategy
from vllm_sparse_backend.calibration.head_clusters import (
    EarlyStop,
    attention_maps,
    cluster_heads,
    map_side,
    representations,
    ward_labels,
)
from vllm_sparse_backend.calibration.head_errors import Bound, HeadResult
from vllm_sparse_backend.calibration.layer_judge import Served
from vllm_sparse_backend.calibration.layer_walk import LayerWalk
from vllm_sparse_backend.calibration.share_prefill import (
    SharePrefillSearch,
    SharingOptions,
    survey_layer,
    worthwhile_clusters,
)
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.profile import Profile
from vllm_sparse_backend.evaluation.report import write_json
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.share_prefill.method import NOISE, SharePrefill

SIDE = 16


def synthetic_maps() -> torch.Tensor:
    """Four layers of eight heads: three kinds of attention in turn, and four heads of no kind at the end."""
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


def test_heads_of_a_kind_share_a_cluster_across_layers():
    """Equal maps get equal clusters, because the seed of training is fixed."""
    clusters, again = (cluster_heads(synthetic_maps(), epochs=12) for _ in range(2))
    assert clusters == again
    flat = [c for layer in clusters for c in layer]
    kinds = [set(flat[kind:28:3]) for kind in range(3)]
    assert kinds == [{0}, {1}, {2}]
    assert set(flat[28:]) == {NOISE}


def test_training_stops_where_the_loss_no_longer_drops_by_enough():
    """On a CPU, training stops if the loss drops by less than a hundredth of the first loss in ``patience`` epochs; on
    other devices, by less than a thousandth of the best loss."""

    def epochs(device_type: str, losses: list[float]) -> int:
        stop = EarlyStop(device_type, patience=3)
        return next((i for i, loss in enumerate(losses, 1) if stop.has_converged(loss)), 0)

    falling = [1.0, 0.5, 0.2] + [0.05 * 0.9**i for i in range(30)]  # by a tenth per epoch, forever
    # Three epochs reduce the loss by 0.271 of it: less than 0.01 once it is below 0.0369, in epoch 7 = 0.05 · 0.9³.
    assert epochs("cpu", falling) == 7 + 3
    assert epochs("cuda", falling) == 0
    assert epochs("cuda", [1.0, *[0.5] * 9]) == 5
    assert epochs("cpu", [1.0, *[0.5] * 9]) == 5
    assert epochs("cpu", [1.0, 0.9, 0.8]) == 0
    assert epochs("cpu", [float("nan")] * 9) == 4


def test_maps_are_small_on_a_cpu():
    """Training time depends on the number of pixels: 1,024 tokens took more than 15 minutes at the paper's map size."""
    assert (map_side(1024, "cpu"), map_side(40, "cpu")) == (64, 32)
    assert (map_side(1024, "cuda:0"), map_side(1 << 20, "cuda")) == (1024, 1936)
    with pytest.raises(ConfigurationError, match="prompts: given '15 tokens', expected at least 16 tokens"):
        map_side(15, "cpu")


def test_few_pixels_take_one_thread_and_all_come_back(monkeypatch):
    """Threads of a small batch wait for each other: an epoch of 20 maps took 3 s on a busy machine, and 0.08 s
    alone."""
    seen, before = [], torch.get_num_threads()
    monkeypatch.setattr(module.EarlyStop, "has_converged", lambda stop, loss: seen.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        representations(torch.rand(3, 16, 16), epochs=1)
        monkeypatch.setattr(module, "THREAD_PIXELS", 3 * 16 * 16 // 2)
        representations(torch.rand(3, 16, 16), epochs=1)
        assert (seen, torch.get_num_threads()) == ([1, 2], 2)
    finally:
        torch.set_num_threads(before)


def test_training_reports_its_progress(monkeypatch):
    """A stage has a step for each epoch, and reports why it stopped early."""
    monkeypatch.setattr(module, "PATIENCE", 2)
    stages, steps, lines = [], [], []
    progress = JobProgress(lambda what, most: stages.append((what, most)), lambda: steps.append(1), lines.append)
    representations(torch.rand(3, 16, 16), epochs=2, progress=progress)
    assert stages == [("autoencoder of 3 maps of 16 × 16, epochs at most", 2)]
    assert (len(steps), lines) == (2, [])
    monkeypatch.setattr(module.EarlyStop, "has_converged", lambda stop, loss: True)
    representations(torch.rand(3, 16, 16), progress=progress)
    assert (len(steps), lines) == (3, ["autoencoder: converged after 1 epochs"])


@pytest.mark.parametrize(("distance", "joined"), [(0.99, 3), (1.0, 2), (10.96, 2), (10.98, 1)])
def test_ward_by_hand(distance, joined):
    """Points 10, 0 and 1: the means of a single point and of two points are 9.5 apart, at a distance of sqrt(2 · 2 · 1
    / 3) · 9.5 = 10.97."""
    labels = ward_labels(torch.tensor([[10.0], [0.0], [1.0]]), distance)
    assert len(set(labels)) == joined
    assert (labels[1] == labels[2]) == (joined < 3)
    assert len(ward_labels(torch.zeros(1, 1), distance)) == 1


def test_without_scipy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.cluster.hierarchy", None)
    said = r"clusters need scipy \(pip install 'vllm-sparse-backend\[calibrate\]'\)"
    with pytest.raises(ConfigurationError, match=said):
        ward_labels(torch.zeros(2, 1), 1.0)


@pytest.mark.parametrize("score_bytes", [1 << 28, 4 * 2 * 64 * 4 * 3, 1])
def test_attention_maps_average_blocks(monkeypatch, score_bytes):
    """The result is the same for whole maps, three rows at a time, and a single row at a time."""
    monkeypatch.setattr(module, "SCORE_BYTES", score_bytes)
    generator = torch.Generator().manual_seed(5)
    q, k = torch.randn(70, 4, 8, generator=generator), torch.randn(70, 2, 8, generator=generator)
    maps = attention_maps(q, k, 0.7, 16)
    assert (maps.shape, maps.dtype) == ((4, 16, 16), torch.float16)
    future = ~torch.ones(64, 64, dtype=torch.bool).tril()
    for head in range(4):
        scores = (q[:64, head] @ k[:64, head // 2].T * 0.7).masked_fill(future, -torch.inf)
        expected = scores.softmax(-1).view(16, 4, 16, 4).mean((1, 3))
        torch.testing.assert_close(maps[head].float(), expected / expected.max(), rtol=1e-3, atol=1e-6)
    with pytest.raises(ValueError, match="given 70 tokens, expected at least side = 80"):
        attention_maps(q, k, 0.7, 80)


@pytest.mark.gpu
def test_the_papers_side_takes_no_more_memory_than_is_said():
    """Maps of 32,768 tokens for a layer of an 8B model; training on eight maps, twice with equal results."""
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


# Each head's γ

LADDER = [SharePrefill(gamma=gamma, max_sparsity=0.9, max_distance=0.3) for gamma in (0.3, 0.5, 0.7, 0.8, 0.9, 0.99)]
"""Thresholds under which the heads of ``TopicCapturer`` share."""
BOUND = Bound(0.1, 0.6)


def own(gamma: float) -> SharePrefill:
    return replace(LADDER[0], gamma=gamma)


def head(alone: float, shared: float | None = None):
    """Return an error curve.

    The error is just below 0.1 at γ ``alone`` without a cluster and at ``shared`` as a member; None is a pivot. The
    density is γ, and half of it as a member.
    """

    def curve(method: Method) -> HeadResult:
        if isinstance(method, Dense) or (method.cluster != NOISE and shared is None):
            return figures(0.0, 1.0)
        if method.cluster == NOISE:
            return figures(0.09999 * (1 - method.gamma) / (1 - alone), method.gamma)
        return figures(0.09999 * (1 - method.gamma) / (1 - shared), method.gamma / 2)

    return curve


def test_survey_asks_each_head_by_itself_and_in_its_cluster():
    judge = FakeJudge(head(0.8), head(0.7, 0.9), head(0.5, 0.99), head(0.5), head(0.9995, 0.8), head(0.3, 0.8))
    clusters = (0, 0, 0, NOISE, 1, 1)
    choices = survey_layer(judge, BOUND, LADDER, clusters)
    assert [options.alone for options in choices] == [own(0.8), own(0.7), own(0.5), own(0.5), Dense(), own(0.3)]
    members = [own(0.8), own(0.9), own(0.99), None, own(0.8), None]  # the last head keeps less without its cluster
    expected = [method and replace(method, cluster=number) for method, number in zip(members, clusters, strict=True)]
    assert [options.shared for options in choices] == expected
    assert [options.saved for options in choices] == pytest.approx([-0.2, 0.7 - 0.45, 0.5 - 0.495, 0, 0.6, 0])
    # No head is judged in another cluster, and a member is judged together with its whole cluster.
    assert {tuple(method.cluster for method in methods) for methods in judge.passes} == {clusters, (NOISE,) * 6}
    assert len(judge.passes) <= 2 * most_passes(len(LADDER))
    without = FakeJudge(head(0.8), head(0.7))
    survey_layer(without, BOUND, LADDER, (NOISE, NOISE))
    assert len(without.passes) <= most_passes(len(LADDER))


def choice(cluster: int, saved: float | None = None) -> SharingOptions:
    return SharingOptions(own(0.5), None if saved is None else SharePrefill(cluster=cluster), saved or 0.0)


def test_clusters_are_dissolved_where_pivots_cost_as_much_as_others_save():
    """Costs and savings are summed over all layers. A cluster is also dissolved if no head is left to share with."""
    pays = [choice(0, -0.5), choice(0, 0.3)], [choice(0, 0.3)]
    costs = [choice(1, -0.5), choice(1, 0.3)], [choice(1, 0.1)]
    alone = [choice(2, 0.3), choice(2)], [choice(2)]
    nothing = [choice(3, 0.0), choice(NOISE)], [choice(3, 0.0)]
    layers = [[options for case in (pays, costs, alone, nothing) for options in case[layer]] for layer in range(2)]
    assert worthwhile_clusters(layers) == {0}


def sharing_job(folder: Path, **changes: object) -> Job:
    """Heads whose attention fits a block pattern but no lines, all in the same cluster, as if left by an earlier
    run."""
    fields = {"num_tokens": 1300, "seed": 1, "capturer": TopicCapturer(), "served": Served(512, 512)} | changes
    write_json(folder / "clusters-1000.json", [[0] * HEADS] * LAYERS)
    return make_job(folder, **fields)


def searched(job: Job, bound: Bound = BOUND) -> Profile:
    return calibrate(job, partial(SharePrefillSearch, ladder=LADDER, distance=1000.0), {"high": bound}, "a test")


@pytest.mark.full
def test_the_profile_that_is_written_was_judged_as_a_whole(tmp_path):
    """The judged figures match the profile layer by layer, every head meets the bound, and the profile can be rebuilt
    without captures."""
    job = sharing_job(tmp_path / "work")
    profile = searched(job)
    provenance = profile.provenance
    assert provenance.held_out["heads_within_bound"] == 1
    methods = [profile.methods_of(layer, HEADS) for layer in range(LAYERS)]
    members = [[isinstance(method, SharePrefill) and method.cluster == 0 for method in layer] for layer in methods]
    assert members == [[True] * (HEADS - 1) + [False]] * LAYERS
    density, error, p99 = (provenance.figures.rows(name, profile.model) for name in ("density", "error", "p99_error"))
    assert density[0][0] == 1  # the pivot, whose pattern the second layer also uses
    assert max(density[0][1:3] + density[1][:3]) < 0.5
    assert max(map(max, error)) <= 0.09
    assert max(map(max, p99)) <= 0.54
    flow = LayerWalk(job, "prompts")  # without others: only the relations between heads are used
    for layer, of_layer in enumerate(methods):
        flow.others = tuple(method for i, other in enumerate(methods) if i != layer for method in other)
        figures_of = flow._read().figures(of_layer)
        assert [result.density for result in figures_of] == pytest.approx(density[layer], rel=1e-3)
        flow.chosen.append(of_layer)
    job.clear()
    again = sharing_job(tmp_path / "work")
    assert searched(again).to_yaml() == profile.to_yaml()
    assert again.capturer.captured == []
    with pytest.raises(ConfigurationError, match="use --method flex_vertical_slash, a larger"):
        searched(sharing_job(tmp_path / "work"), Bound(1e-9))


def test_a_cluster_that_is_left_with_one_head_is_dissolved():
    search = SharePrefillSearch.__new__(SharePrefillSearch)
    search.left = {0, 1}
    member = [replace(LADDER[0], cluster=number) for number in (0, 0, 1)]
    assert search.should_repeat([member[:2], [member[2], Dense()]], 0.0)
    assert search.left == {0}
    assert not search.should_repeat([member[:2], [Dense(), Dense()]], 0.0)


@pytest.mark.parametrize(
    ("clusters", "choices", "said"),
    [
        (
            ((0, 0, 0), (0, 0, NOISE)),
            [[choice(0, -0.9), choice(0, 0.2), choice(0)], [choice(0, 0.3), choice(0), choice(NOISE)]],
            r"given 5 of 6 heads in clusters \(clusters: 1, --distance 10\), expected .* many: 2; dense .* need: 1\)",
        ),
        (
            ((NOISE,) * 3,),
            [[choice(NOISE)] * 3],
            r"given 0 of 3 heads in clusters \(clusters: 0, .* many: 0; .* need: 0\)",
        ),
    ],
)
def test_a_search_without_a_gain_reports_its_clusters_and_what_to_do(clusters, choices, said):
    search = SharePrefillSearch.__new__(SharePrefillSearch)
    search.clusters, search.distance, search.choices = clusters, 10.0, choices
    search.left = worthwhile_clusters(choices)
    with pytest.raises(ConfigurationError, match=said) as refusal:
        search._require_any()
    for remedy in ("--method flex_vertical_slash", "--level", "--distance", "--method share_prefill+paper"):
        assert f"{remedy}" in str(refusal.value).partition("; use ")[2]


def paper_profile(job: Job, distance: float = 1000.0) -> Profile:
    strategy = parse_strategy("share_prefill+paper", {"high": Bound()}, distance)
    return calibrate(job, strategy, {"high": Bound()}, "a test")


def test_the_papers_profile_has_its_clusters_and_thresholds_without_a_bound(tmp_path):
    """Every head is in its cluster with the defaults, also heads whose error no bound would allow."""
    profile = paper_profile(sharing_job(tmp_path / "work"))
    for layer in range(LAYERS):
        assert list(profile.methods_of(layer, HEADS)) == [SharePrefill(cluster=0)] * HEADS
    assert profile.provenance.bounds == {}
    assert set(profile.provenance.held_out) == {"error", "p99_error"}
    assert profile.provenance.held_out["error"] > 0


def test_the_papers_profile_needs_a_cluster(tmp_path):
    job = sharing_job(tmp_path / "work")
    write_json(tmp_path / "work" / "clusters-1000.json", [[NOISE] * HEADS] * LAYERS)
    with pytest.raises(ConfigurationError, match="found no cluster at --distance 1000, expected at least 5 heads"):
        paper_profile(job)
