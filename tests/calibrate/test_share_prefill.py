# SPDX-License-Identifier: Apache-2.0
"""Clustering of heads for SharePrefill: synthetic maps, and each step against its definition."""

import sys
from dataclasses import replace

import pytest
import torch

from vllm_sparse_backend.calibrate import share_prefill as module
from vllm_sparse_backend.calibrate.share_prefill import (
    MapAutoencoder,
    attention_maps,
    cluster_heads,
    map_side,
    profile_of,
    representations,
    ward_labels,
)
from vllm_sparse_backend.settings.errors import ConfigurationError
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import parse_profile
from vllm_sparse_kernels.select.share_prefill import NOISE, SharePrefill

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
