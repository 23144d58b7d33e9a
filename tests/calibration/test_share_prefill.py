# SPDX-License-Identifier: Apache-2.0
"""SharePrefill: clusters of synthetic maps, and each head's γ in its cluster."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.helpers.calibration_cases import HEADS, LAYERS, TopicCapturer, make_job
from tests.helpers.fake_judge import FakeJudge, any_method, figures, most_passes
from vllm_sparse_backend.calibration.head_errors import Bound, HeadResult
from vllm_sparse_backend.calibration.job import Job
from vllm_sparse_backend.calibration.judge import Served
from vllm_sparse_backend.calibration.loop import calibrate, method_strategy
from vllm_sparse_backend.calibration.papers import share_prefill as module
from vllm_sparse_backend.calibration.papers.share_prefill import (
    attention_maps,
    choose_shares,
    cluster_heads,
    has_converged,
    map_side,
    representations,
    ward_labels,
)
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.profile import Profile
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


def test_training_stops_where_the_loss_no_longer_drops_by_enough(monkeypatch):
    """On a CPU, training stops if the loss drops by less than a hundredth of the first loss in ``PATIENCE`` epochs; on
    other devices, by less than a thousandth of the best loss."""
    monkeypatch.setattr(module, "PATIENCE", 3)

    def epochs(device_type: str, losses: list[float]) -> int:
        return next((i for i in range(1, len(losses) + 1) if has_converged(losses[:i], device_type)), 0)

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


def head(gamma: float | None):
    """Return an error curve that meets the bound from γ on, with a density of half of γ; None is a pivot."""

    def curve(method: Method) -> HeadResult:
        if isinstance(method, Dense) or gamma is None:
            return figures(0.0, 1.0)
        return figures(0.0 if method.gamma >= gamma else 0.2, method.gamma / 2)

    return curve


def test_each_head_gets_the_smallest_share_within_the_bound(monkeypatch):
    monkeypatch.setattr(module, "default_ladder", lambda name: LADDER)
    monkeypatch.setattr(module, "halved", list)
    judge = FakeJudge(head(None), head(0.7), head(0.9), head(0.9995), head(0.5), head(None))
    choose = partial(choose_shares, clusters=[(0, 0, 1, 1, NOISE, NOISE)])
    members = [replace(LADDER[4], cluster=1), Dense(), replace(LADDER[1], cluster=NOISE), Dense()]
    # A pivot keeps the paper's γ. A head without a cluster that is dense at any γ is dense.
    expected = [SharePrefill(cluster=0), replace(LADDER[2], cluster=0), *members]
    assert choose(judge, BOUND, any_method) == expected
    assert len(judge.passes) <= most_passes(len(LADDER))
    # A method that missed the bound next to others gives way to the next one.
    again = choose(judge, BOUND, lambda head, method: method not in expected[:2])
    assert again[:2] == [Dense(), replace(LADDER[3], cluster=0)]


def sharing_job(folder: Path, monkeypatch: pytest.MonkeyPatch, clusters=((0,) * HEADS,) * LAYERS) -> Job:
    """Return a job on heads whose attention fits a block pattern but no lines, with preset clusters."""
    monkeypatch.setattr(module, "head_clusters", lambda *_: clusters)
    return make_job(folder, num_tokens=1300, seed=1, capturer=TopicCapturer(), served=Served(512, 512))


def shared_profile(job: Job, bound: Bound) -> Profile:
    return calibrate(job, method_strategy("share_prefill", 1000.0), {"high": bound}, "a test")


@pytest.mark.full
def test_the_profile_that_is_written_was_judged_with_the_state_of_earlier_layers(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "default_ladder", lambda name: LADDER)
    paper = partial(SharePrefill, max_sparsity=0.9, max_distance=0.3)
    monkeypatch.setattr(module, "SharePrefill", paper)
    profile = shared_profile(sharing_job(tmp_path / "work", monkeypatch), BOUND)
    assert profile.provenance.held_out["heads_within_bound"] == 1
    members = [
        [getattr(method, "cluster", NOISE) == 0 for method in profile.methods_of(layer, HEADS)]
        for layer in range(LAYERS)
    ]
    assert members == [[True] * (HEADS - 1) + [False]] * LAYERS
    density, error, p99 = (
        profile.provenance.figures.rows(name, profile.model) for name in ("density", "error", "p99_error")
    )
    assert density[0][0] == 1  # the pivot, whose pattern the second layer also uses
    assert max(density[0][1:3] + density[1][:3]) < 0.5
    assert max(map(max, error)) <= 0.09
    assert max(map(max, p99)) <= 0.54


def test_without_a_bound_every_head_has_the_papers_thresholds(tmp_path, monkeypatch):
    """Including heads whose error no bound would allow."""
    profile = shared_profile(sharing_job(tmp_path / "work", monkeypatch), Bound())
    for layer in range(LAYERS):
        assert list(profile.methods_of(layer, HEADS)) == [SharePrefill(cluster=0)] * HEADS
    assert profile.provenance.bounds == {}
    assert set(profile.provenance.held_out) == {"error", "p99_error"}
    assert profile.provenance.held_out["error"] > 0


def test_sharing_needs_a_cluster(tmp_path, monkeypatch):
    job = sharing_job(tmp_path / "work", monkeypatch, ((NOISE,) * HEADS,) * LAYERS)
    with pytest.raises(ConfigurationError, match="found no cluster at --distance 1000, expected at least 5 heads"):
        shared_profile(job, Bound())
