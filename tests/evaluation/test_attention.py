# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.plan_quality`: single queries against whole matrices, and chunks against the oracle."""

import pytest
import torch

from benchmarks.capture import capture
from benchmarks.oracle import measure
from benchmarks.plan_quality import PlanRequest, measure_plans, select_layer
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_kernels import PagedCache, Rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def captured(llama, prompt, tmp_path):
    # Queries and keys of random weights are short; longer vectors make attention far from uniform.
    return capture(llama(initializer_range=0.3, head_dim=64), prompt, tmp_path / "capture", DEVICE)


def test_single_queries_recall_what_a_mask_leaves_them(captured):
    """The first queries of a tile that keeps only its own blocks have the lowest recall."""
    config = SparsePrefillConfig(method="a_shape", params={"sink_tokens": 0, "local_tokens": 1}, dense_layers=(1,))
    (kept,) = measure_plans(
        captured, [PlanRequest(Plan.build(config, captured.shape), with_queries=True)], 333, DEVICE
    ).kept
    q, k, _ = (x.float() for x in captured.read(0, DEVICE))
    positions = torch.arange(333, device=DEVICE)
    causal = positions[:, None] >= positions
    near = causal & (positions[:, None] // 128 == positions // 128)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * captured.scales[0]
    recalls = (scores.masked_fill(~causal, -torch.inf).softmax(-1) * near).sum(-1).sort(1).values
    # Of 333 queries, a hundredth ends at the fourth, and a thousandth at the first.
    expected = torch.stack([recalls[:, 3], recalls[:, 0], recalls[:, 0]], 1)
    torch.testing.assert_close(torch.tensor(kept.lowest_recalls[0]), expected.cpu(), rtol=0, atol=1e-5)
    assert kept.lowest_recalls[1] == [[1.0] * 3] * 4
    assert int(kept.recall_counts.sum()) == 3 * 4 * 333
    lowest = min(x for layer in kept.lowest_recalls for h in layer for x in h)
    assert kept.quantiles()[2] == pytest.approx(lowest, abs=1e-4)


def test_chunks_are_measured_as_rows_of_their_own(captured):
    """Chunks are compared with the oracle on a step that has a row for each of them."""
    params = {"vertical_tokens": 20, "slash_tokens": 30}
    plan = Plan.build(SparsePrefillConfig(method="vertical_slash", params=params), captured.shape)
    (kept,) = measure_plans(captured, [PlanRequest(plan)], 130, DEVICE).kept
    q, k, v = captured.read(1, DEVICE)
    pages = torch.arange(3, dtype=torch.int32, device=DEVICE)
    cache = PagedCache(*(torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 51)).unflatten(0, (3, 128)) for x in (k, v)))
    rows = Rows((0, 130, 260), (130, 130, 73), (0, 130, 260), pages.expand(3, 3).contiguous())
    index = select_layer(plan.layer(1), q, cache, rows, captured.scales[1])
    expected = measure(q, cache, index, captured.scales[1])
    assert kept.recall[1] == pytest.approx(expected.recall.tolist(), abs=1e-6)
    assert kept.density[1] == pytest.approx(expected.density.tolist(), abs=1e-12)
    assert 0 < min(kept.density[1]) < 1
