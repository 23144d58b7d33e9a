# SPDX-License-Identifier: Apache-2.0
"""SharePrefill: clusters of synthetic maps, and the profile with each head's cluster."""

import sys

import pytest
import torch

from tests.helpers.calibration_cases import HEADS, LinedCapturer, make_job
from vllm_sparse_backend.calibration.papers import share_prefill as module
from vllm_sparse_backend.calibration.papers.share_prefill import (
    attention_maps,
    cluster_heads,
    has_converged,
    map_side,
    representations,
    shared_heads,
    ward_labels,
)
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.progress import Progress
from vllm_sparse_kernels.methods.share_prefill.method import NOISE, SharePrefill

SIDE = 16
CPU = torch.device("cpu")


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
        attention = scores.tril() / scores.tril().sum(1, keepdim=True)
        maps.append(attention / attention.max())
    return torch.stack(maps).view(4, 8, SIDE, SIDE)


def test_heads_of_a_kind_share_a_cluster_across_layers(monkeypatch):
    """Equal maps get equal clusters, because the seed of training is fixed."""
    monkeypatch.setattr(module, "EPOCHS", 12)
    clusters, again = (cluster_heads(synthetic_maps(), CPU, Progress()) for _ in range(2))
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
    cuda = torch.device("cuda")
    assert (map_side(1024, CPU), map_side(40, CPU)) == (64, 32)
    assert (map_side(1024, cuda), map_side(1 << 20, cuda)) == (1024, 1936)
    with pytest.raises(ConfigurationError, match="prompts: given '15 tokens', expected at least 16 tokens"):
        map_side(15, CPU)


@pytest.mark.parametrize(("distance", "joined"), [(0.99, 3), (1.0, 2), (10.96, 2), (10.98, 1)])
def test_ward_by_hand(distance, joined):
    """Points 10, 0 and 1: the means of a single point and of two points are 9.5 apart, at a distance of sqrt(2 · 2 · 1
    / 3) · 9.5 = 10.97."""
    labels = ward_labels(torch.tensor([[10.0], [0.0], [1.0]]), distance)
    assert len(set(labels)) == joined
    assert (labels[1] == labels[2]) == (joined < 3)


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


@pytest.mark.gpu
def test_the_papers_side_takes_no_more_memory_than_is_said(monkeypatch):
    """Maps of 32,768 tokens for a layer of an 8B model; training on eight maps, twice with equal results."""
    monkeypatch.setattr(module, "EPOCHS", 2)
    q, k = (torch.randn(32768, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (32, 8))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    maps = attention_maps(q, k, 0.1, module.SIDE)
    assert torch.cuda.max_memory_allocated() - before < 1.3e9
    assert torch.cuda.memory_allocated() == before
    assert (maps.shape, maps.dtype, str(maps.device)) == ((32, 1936, 1936), torch.float16, "cpu")
    del q, k
    torch.cuda.reset_peak_memory_stats()
    first, again = (representations(maps[:8], torch.device("cuda"), Progress()) for _ in range(2))
    assert torch.cuda.max_memory_allocated() < 8.5e9
    assert torch.equal(first, again)


def test_every_head_of_a_sparse_layer_has_its_cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "cluster_heads", lambda maps, *_: [[0, 0, 0, NOISE]] * len(maps))
    job = make_job(tmp_path / "work", capturer=LinedCapturer(left_out=(1,)))
    shared, noise = SharePrefill(cluster=0), SharePrefill(cluster=NOISE)
    assert shared_heads(job) == [[shared, shared, shared, noise], [noise] * HEADS]
    monkeypatch.setattr(module, "cluster_heads", lambda maps, *_: [[NOISE] * HEADS] * len(maps))
    with pytest.raises(ConfigurationError, match="given a model without clusters, expected at least 5 heads"):
        shared_heads(make_job(tmp_path / "again"))
