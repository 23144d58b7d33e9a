# SPDX-License-Identifier: Apache-2.0
"""SharePrefill: kernels against the float32 reference, and the paper's promises."""

import dataclasses
import math

import pytest
import torch

from tests.helpers.batches import new_index
from tests.helpers.lined import assert_between, kept_keys, lined_batch
from tests.helpers.masks import mask_of
from tests.helpers.method_cases import DTYPES, SHAPES, Lists, all_lists, by_turns, int32, row_parts, select
from vllm_sparse_kernels.call import HeadGroup
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.flex_prefill.method import FlexVerticalSlash
from vllm_sparse_kernels.methods.share_prefill.block_average import BlockAverages, Spans
from vllm_sparse_kernels.methods.share_prefill.method import NOISE, SharePrefill
from vllm_sparse_kernels.methods.share_prefill.reference import block_average, js_distance

MARGIN = 1e-4
"""Kernels and reference get the same inputs and round float32 sums differently, so blocks and lines that decide over
less than this share of the mass may differ."""


def layer_of(clusters, max_sparsity=0.9, max_distance=0.2, gamma=0.8, **more) -> list[SharePrefill]:
    return [SharePrefill(max_sparsity, max_distance, gamma, cluster, **more) for cluster in clusters]


def small_batch(lengths=((203, 140),), num_heads=3) -> Batch:
    """Return heads of a single kv head; heads 0 and 1 are equal."""
    batch = lined_batch(lengths, num_heads, 1, 64, 16, gap_tokens=1)
    batch.q.mul_(0.5)
    batch.q[:, 1] = batch.q[:, 0]
    return batch


def next_layer(batch: Batch) -> Batch:
    """Return the same rows and keys with slightly different queries."""
    noise = torch.randn(batch.q.shape, generator=torch.Generator().manual_seed(1)).to(batch.q)
    return dataclasses.replace(batch, q=batch.q + 0.3 * noise)


def estimate(batch: Batch, row: int, head: int, block_tokens: int) -> torch.Tensor:
    """Return â in float64."""
    q, keys = row_parts(batch, row, head)
    return block_average(q[-128:], keys * batch.scale, block_tokens).softmax(-1)


def check_layers(batches: list[Batch], layers: list[list[SharePrefill]], block_tokens: int) -> None:
    """Check kernels against the reference through the layers of a forward pass."""
    passes, heads = [dataclasses.replace(batches[0].rows) for _ in range(2)], range(batches[0].num_heads)
    for batch, methods in zip(batches, layers, strict=True):
        index = select(methods, batch, block_tokens)
        index.check()
        bounds = [
            kept_keys(select(changed, batch, block_tokens, by_reference=True, rows=rows), heads)
            for rows, changed in zip(passes, (shifted(methods, -MARGIN), shifted(methods, MARGIN)), strict=True)
        ]
        assert_between(kept_keys(index, heads), *bounds)


def shifted(methods: list[SharePrefill], by: float) -> list[SharePrefill]:
    """Return the methods with another γ."""
    return [dataclasses.replace(method, gamma=method.gamma + by) for method in methods]


def is_dense(index: SparseIndex, head: int, row: int) -> bool:
    tiles = index.rows.tiles_of(row)
    return all(len(index.blocks_of(head, t)) == index.num_causal_blocks(index.rows.tile_list[t]) for t in tiles)


def of_head(index: SparseIndex, head: int) -> list[Lists]:
    return all_lists(index, heads=[head])[0]


@pytest.mark.full
@pytest.mark.parametrize(("shape", "dtype"), by_turns(SHAPES, DTYPES), ids=str)
def test_kernels_keep_what_the_reference_keeps(shape, dtype):
    """Two layers of heads in several clusters and outside of them, with different γ."""
    *sizes, block_tokens, layout = shape
    batch = lined_batch(*sizes, dtype, layout=layout, gap_tokens=2)
    batch.q.mul_(0.5)
    layers = [
        [SharePrefill(0.25, 0.1, 0.6 + 0.09 * (head % 4), clusters[head % 4], 30) for head in range(batch.num_heads)]
        for clusters in ((2, 2, NOISE, 5), (5, 2, 2, 7))
    ]
    check_layers([batch, next_layer(batch)], layers, block_tokens)


@pytest.mark.parametrize("block_tokens", [64, 128])
def test_averages_are_those_of_all_pairs(block_tokens):
    """Estimates are exact to float32: (mean q) · (mean k) before the diagonal, causal pairs on it."""
    batch = lined_batch([(333, 140), (5, 3)], 2, 1, 64, 16, gap_tokens=1)
    index = new_index(batch.rows, 2, block_tokens)
    call = batch.call(index, HeadGroup((1, 0), (SharePrefill(cluster=0),) * 2))
    averages = BlockAverages(call, Spans.of(index), int32([0, 0]))
    estimates, sparsity = averages.estimates.double(), averages.sparsity
    expected = [torch.cat([estimate(batch, row, head, block_tokens) for row in (0, 1)]) for head in (1, 0)]
    torch.testing.assert_close(estimates, torch.stack(expected), rtol=1e-5, atol=1e-9)
    for place, head in enumerate((1, 0)):
        for row in (0, 1):
            estimated = estimate(batch, row, head, block_tokens)
            distance = js_distance(estimated, torch.full_like(estimated, 1 / len(estimated)))
            assert float(sparsity[place, row]) == pytest.approx(distance, abs=1e-4)


@pytest.mark.parametrize("by_reference", [False, True], ids=["kernels", "reference"])
def test_pivot_is_dense_and_equal_heads_take_its_pattern(by_reference):
    """The pattern is shared at any τ, in the pivot's layer and in the next. Noise heads never share, and another step
    starts again."""
    batch = small_batch()
    first = select(layer_of((4, 4, NOISE), 0.9, 1e-6, 0.6), batch, by_reference=by_reference)
    assert is_dense(first, 0, 0)
    assert not is_dense(first, 1, 0)
    assert int(first.stripe_counts[1].max()) == 0
    lines = select(FlexVerticalSlash(0.6), batch, by_reference=by_reference)
    assert of_head(first, 2) == of_head(lines, 2)
    assert of_head(first, 1) != of_head(lines, 1)
    second = select(layer_of((4, NOISE, 4), 0.9, 1e-6, 0.6), batch, by_reference=by_reference)
    assert of_head(second, 0) == of_head(first, 1)
    assert of_head(second, 1) == of_head(lines, 1)
    assert of_head(second, 2) == of_head(lines, 2)
    next_step = dataclasses.replace(batch, rows=dataclasses.replace(batch.rows))
    for step, starts_anew in ((batch, False), (next_step, True)):
        index = select(layer_of((4, NOISE, NOISE), 0.9, 1e-6, 0.6), step, by_reference=by_reference)
        assert is_dense(index, 0, 0) == starts_anew


@pytest.mark.parametrize("thresholds", [(1.01, 0.0), (0.0, 1.0)], ids=["no distance", "no sparsity"])
@pytest.mark.parametrize("by_reference", [False, True], ids=["kernels", "reference"])
def test_without_thresholds_nothing_is_shared_and_no_pivot_paid(by_reference, thresholds):
    batch = small_batch()
    index = select(layer_of((0, 0, 0), *thresholds), batch, by_reference=by_reference)
    lines = select(FlexVerticalSlash(0.8), batch, by_reference=by_reference)
    assert all_lists(index) == all_lists(lines)


@pytest.mark.parametrize("by_reference", [False, True], ids=["kernels", "reference"])
def test_a_head_too_sparse_is_no_pivot(by_reference):
    """The next head in order is the pivot, and heads too far from it keep their own lines."""
    batch = small_batch(num_heads=4)
    batch.q[:, 2] *= 6
    heads = [2, 1, 0, 3]  # only the order counts
    estimates = [estimate(batch, 0, head, 64) for head in heads]
    sparsity = [js_distance(a, torch.full_like(a, 1 / len(a))) for a in estimates]
    max_sparsity = (sparsity[0] + max(sparsity[1:])) / 2
    max_distance = js_distance(estimates[1], estimates[3]) / 2
    assert sparsity[0] > max_sparsity
    assert max_distance > MARGIN
    method = layer_of((0, 0, 0, 0), max_sparsity, max_distance, 0.6)
    index = select(method, batch, 64, heads, by_reference)
    lines = select(FlexVerticalSlash(0.6), batch, by_reference=by_reference)
    assert of_head(index, 2) == of_head(lines, 2)
    assert is_dense(index, 1, 0)
    assert not is_dense(index, 0, 0)
    assert of_head(index, 3) == of_head(lines, 3)


@pytest.mark.parametrize("by_reference", [False, True], ids=["kernels", "reference"])
def test_each_row_has_pivots_of_its_own(by_reference):
    """Row 1's head is too sparse in the first layer, so row 1 gets its pivot in the second. There, row 0 shares the
    pivot of the first."""
    second = small_batch(((203, 140), (150, 140)))
    first = dataclasses.replace(second, q=second.q.clone())
    first.q[first.rows.query_starts[1] :] *= 8
    method = layer_of((0, NOISE, NOISE), 0.4, 0.2, 0.6)
    dense = []
    for batch in (first, second):
        index = select(method, batch, by_reference=by_reference)
        dense.append([is_dense(index, 0, row) for row in (0, 1)])
    assert dense == [[True, False], [False, True]]


def papers_masks(queries: torch.Tensor, keys: torch.Tensor, scale: float, method: SharePrefill):
    """Yield the pairs that Algorithms 1 to 4 keep of each head of one cluster; None where it takes vertical-slash.

    The paper's rule in float64 from whole score matrices [tokens, tokens], in blocks of 128 queries and 64 keys.
    """
    causal = torch.ones(queries.shape[1], queries.shape[1], dtype=torch.bool).tril_()
    pairs, last_pairs = block_sums(causal.double()), block_sums(causal[-128:].double())
    pivot: tuple[torch.Tensor, torch.Tensor] | None = None
    for q, k in zip(queries, keys, strict=True):
        scores = (q @ k.T * scale).masked_fill_(~causal, 0)
        estimate = (block_sums(scores[-128:]) / last_pairs)[0].softmax(0)
        if js_distance(estimate, torch.full_like(estimate, 1 / len(estimate))) >= method.max_sparsity:
            yield None
        elif pivot is None:
            averages = (block_sums(scores) / pairs).masked_fill(pairs == 0, -math.inf)
            probabilities, order = averages.softmax(1).flatten().sort(descending=True)
            needed = int((probabilities.cumsum(0) < method.gamma * probabilities.sum()).sum()) + 1
            pattern = torch.zeros(pairs.numel(), dtype=torch.bool)
            pattern[order[:needed]] = True
            pivot = estimate, pattern.view_as(pairs)
            yield causal
        elif js_distance(estimate, pivot[0]) < method.max_distance:
            kept = pivot[1].repeat_interleave(128, 0).repeat_interleave(64, 1)
            yield kept[: len(causal), : len(causal)] & causal
        else:
            yield None


def block_sums(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of blocks of 128 × 64 values, with smaller blocks at the end."""
    return torch.stack([torch.stack([block.sum() for block in part.split(64, 1)]) for part in values.split(128)])


def test_reference_keeps_what_the_paper_keeps():
    """One head is the dense pivot, some share, others take vertical-slash. Blocks on the diagonal are always kept here.

    The last tile of the prompt has 21 queries, so the estimate's 128 queries begin inside the tile before.
    """
    batch, method = lined_batch([(0, 1301)], 4, 2, 64, 16), SharePrefill(1.01, 0.3, 0.8, cluster=0)
    ours, lines = (mask_of(select(m, batch, by_reference=True), 0) for m in (method, method.fallback))
    queries, keys = (torch.stack(parts) for parts in zip(*(row_parts(batch, 0, head) for head in range(4))))
    tokens = torch.arange(1301)
    diagonal = (tokens[:, None] >= tokens) & (tokens[:, None] // 128 <= tokens // 128)
    masks = list(papers_masks(queries, keys, batch.scale, method))
    assert [mask is None for mask in masks] == [torch.equal(ours[head], lines[head]) for head in range(4)]
    shared = [(ours[head], mask | diagonal) for head, mask in enumerate(masks) if mask is not None][1:]
    assert 0 < len(shared) < 3
    for kept, expected in shared:
        assert int((kept & expected).sum()) >= 0.999 * int((kept | expected).sum())
        assert 0.05 < float(kept.sum() / (tokens + 1).sum()) < 0.9


def test_distance():
    a, b = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.0, 1.0])
    assert js_distance(a, a) == 0
    assert js_distance(a, b) == pytest.approx(math.log(2) ** 0.5)
    by_scipy = 0.1839078
    assert js_distance(a, torch.tensor([0.25, 0.75, 0.0])) == pytest.approx(by_scipy, abs=1e-6)


def test_a_model_whose_heads_can_share_nothing_is_objected_to():
    """Sharing requires two heads of a cluster with equal thresholds above 0."""
    a, b = SharePrefill(cluster=0), SharePrefill(cluster=1)
    noise, other = SharePrefill(), SharePrefill(max_distance=0.3, cluster=0)
    for heads in ([noise] * 3, [a, b, noise], [a, other], [SharePrefill(max_distance=0.0, cluster=0)] * 2):
        objection = SharePrefill.objection(heads)
        assert objection is not None
        assert "flex_vertical_slash" in objection
    assert SharePrefill.objection([a, b, noise, a]) is None
    assert SharePrefill.objection([a, SharePrefill(gamma=0.95, cluster=0)]) is None
