# SPDX-License-Identifier: Apache-2.0
"""SharePrefill: kernels against the float32 reference, and what the paper promises."""

import dataclasses
import math

import pytest
import torch

from tests.helpers.lined import assert_between, kept_keys, lined_batch, selected
from tests.methods.cases import DEVICE, DTYPES, by_turns, int32, row_alone
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.flex_prefill.method import FlexVerticalSlash
from vllm_sparse_kernels.methods.flex_prefill.reference import select_flex_vertical_slash
from vllm_sparse_kernels.methods.share_prefill.block_average import BlockAverages, Spans
from vllm_sparse_kernels.methods.share_prefill.method import (
    DENSE,
    NOISE,
    Pivots,
    SharePrefill,
    SharePrefillLayer,
    _decide,
)
from vllm_sparse_kernels.methods.share_prefill.reference import (
    block_average,
    block_average_map,
    js_distance,
    select_share_prefill,
)
from vllm_sparse_kernels.select.radix import EQUAL_BITS, LEAST_KEY
from vllm_sparse_kernels.trial import Batch

MARGIN = 1e-4
"""Kernels and reference see the same inputs and round float32 sums differently: blocks and lines may differ that decide
over less than this share of the mass, and decisions about distances that near to a threshold."""


def layer_of(clusters, max_sparsity=0.9, max_distance=0.2, gamma=0.8, **more) -> SharePrefillLayer:
    heads = [SharePrefill(max_sparsity, max_distance, gamma, cluster, **more) for cluster in clusters]
    return SharePrefill.merged(heads)


def small_batch(lengths=((203, 140),), num_heads=3) -> Batch:
    """Heads of one kv head, of which 0 and 1 are the same."""
    batch = lined_batch(lengths, num_heads, 1, 64, 16, gap_tokens=1)
    batch.q.mul_(0.5)
    batch.q[:, 1] = batch.q[:, 0]
    return batch


def next_layer(batch: Batch) -> Batch:
    """The same rows and keys with slightly other queries."""
    noise = torch.randn(batch.q.shape, generator=torch.Generator().manual_seed(1)).to(batch.q)
    return dataclasses.replace(batch, q=batch.q + 0.3 * noise)


def estimate(batch: Batch, row: int, head: int, block_tokens: int) -> torch.Tensor:
    """â in float64."""
    rows = batch.rows
    keys, _ = batch.cache.gather(rows.block_table[row], rows.seq_lens[row])
    end = rows.tokens[row] + rows.query_lens[row]
    q = batch.q[max(rows.tokens[row], end - 128) : end, head].double()
    keys = keys[:, head // (batch.num_heads // batch.cache.num_kv_heads)].double()
    return block_average(q, keys * batch.scale, block_tokens).softmax(-1)


def check_distances(batches: list[Batch], methods: list[SharePrefillLayer], block_tokens: int) -> None:
    """No distance that a decision could be about lies too near to its threshold for float32."""
    for row in range(batches[0].rows.num_rows):
        members: dict[int, list[torch.Tensor]] = {}
        for batch, method in zip(batches, methods, strict=True):
            for head, cluster in enumerate(method.clusters):
                members.setdefault(cluster, []).append(estimate(batch, row, head, block_tokens))
        for estimates in members.values():
            for i, mine in enumerate(estimates):
                sparsity = js_distance(mine, torch.full_like(mine, 1 / len(mine)))
                assert abs(sparsity - methods[0].max_sparsity) > MARGIN
                for other in estimates[:i]:
                    assert abs(js_distance(mine, other) - methods[0].max_distance) > MARGIN


def check_layers(batches: list[Batch], methods: list[SharePrefillLayer], block_tokens: int) -> None:
    """Kernels against the reference through the layers of one forward pass."""
    passes = [dataclasses.replace(batches[0].rows) for _ in range(2)]
    for batch, method in zip(batches, methods, strict=True):
        index = selected(method, batch, block_tokens)
        index.check()
        bounds = [
            kept_keys(
                selected(changed, dataclasses.replace(batch, rows=rows), block_tokens, reference=select_share_prefill),
                range(batch.num_heads),
            )
            for rows, changed in zip(passes, (shifted(method, -MARGIN), shifted(method, MARGIN)), strict=True)
        ]
        assert_between(kept_keys(index, range(batch.num_heads)), *bounds)


def shifted(method: SharePrefillLayer, by: float) -> SharePrefillLayer:
    """With another γ, of each head where they differ."""
    return dataclasses.replace(method, gamma=method.gamma + by, gammas=tuple(gamma + by for gamma in method.gammas))


def is_dense(index: SparseIndex, head: int, row: int) -> bool:
    tiles = range(index.rows.tile_starts[row], index.rows.tile_starts[row + 1])
    return all(len(index.blocks_of(head, t)) == index.num_causal_blocks(index.rows.tile_list[t]) for t in tiles)


def equal_lists(a: SparseIndex, head_a: int, b: SparseIndex, head_b: int, tiles=None) -> bool:
    """``tiles`` maps tiles of a to those of b; all to the same if not given."""
    pairs = tiles or {t: t for t in range(a.rows.num_tiles)}
    return all(
        torch.equal(a.blocks_of(head_a, t), b.blocks_of(head_b, u))
        and torch.equal(a.stripes_of(head_a, t), b.stripes_of(head_b, u))
        for t, u in pairs.items()
    )


CASES = [
    # lengths, query heads, kv heads, head_dim, page size, block, layout, clusters of each layer
    ([(0, 1), (0, 63)], 2, 2, 64, 16, 64, "NHD", ((0, 0), (0, 0))),
    ([(437, 200)], 4, 2, 64, 64, 64, "HND", ((2, 2, NOISE, 5), (5, 2, 2, 7))),
    ([(150, 140), (37, 20)], 4, 1, 96, 16, 128, "NHD", ((1, 0, 0, 1), (1, 1, NOISE, 0))),
    ([(450, 66)], 8, 1, 128, 128, 64, "NHD", ((0, 0, 0, 0, 1, 1, 1, 1),)),
]


@pytest.mark.full
@pytest.mark.parametrize(("case", "dtype"), by_turns(CASES, DTYPES), ids=str)
def test_kernels_keep_what_the_reference_keeps(case, dtype):
    lengths, num_heads, num_kv_heads, head_dim, page_size, block_tokens, layout, clusters = case
    batch = lined_batch(lengths, num_heads, num_kv_heads, head_dim, page_size, dtype, layout=layout, gap_tokens=2)
    batch.q.mul_(0.5)
    batches = [batch, next_layer(batch)][: len(clusters)]
    methods = [layer_of(c, 0.25, 0.1) for c in clusters]
    check_distances(batches, methods, block_tokens)
    check_layers(batches, methods, block_tokens)


@pytest.mark.parametrize("block_tokens", [64, 128])
def test_averages_are_those_of_all_pairs(block_tokens):
    """Estimates, exact to float32: (mean q) · (mean k) before the diagonal, causal pairs on it."""
    batch = lined_batch([(333, 140), (5, 3)], 2, 1, 64, 16, gap_tokens=1)
    index = SparseIndex.allocate(batch.rows, 2, block_tokens)
    heads = int32([1, 0])
    averages = BlockAverages(batch.q, batch.cache, index, heads, batch.scale, Spans.of(index))
    estimates, sparsity = averages.estimates()
    estimates = estimates.double()
    expected = [torch.cat([estimate(batch, row, head, block_tokens) for row in (0, 1)]) for head in (1, 0)]
    torch.testing.assert_close(estimates, torch.stack(expected), rtol=1e-5, atol=1e-9)
    for place, head in enumerate((1, 0)):
        for row in (0, 1):
            one = estimate(batch, row, head, block_tokens)
            distance = js_distance(one, torch.full_like(one, 1 / len(one)))
            assert float(sparsity[place, row]) == pytest.approx(distance, abs=1e-4)


@pytest.mark.full
def test_maps_are_averages_of_all_pairs():
    """To float32, of new pivots alone, and their weights are those of the first pass over each tile."""
    batch = lined_batch([(333, 650), (5, 3)], 3, 1, 64, 16, gap_tokens=1)
    index, heads = SparseIndex.allocate(batch.rows, 3, 64), int32([1, 0, 2])
    places, pivots, method = int32([0, NOISE, 1]), Pivots(index), layer_of((4, NOISE, 7), 0.9)
    slots = int32(pivots.slots_of([7, 4], index)).flip(0)
    for x in (pivots.maps, pivots.weights):
        x.fill_(float("nan"))
    pivots.exists[1, 1] = 1
    averages = BlockAverages(batch.q, batch.cache, index, heads, batch.scale, pivots.spans, places)
    patterns = int32([[9, 9]] * 3)
    _decide(method, pivots, index, averages, places, slots, patterns)
    assert patterns[[0, 2], 0].tolist() == [DENSE, DENSE]
    for head, slot in ((1, 1), (2, 0)):
        for row in (0, 1):
            tiles_of_row = range(batch.rows.tile_starts[row], batch.rows.tile_starts[row + 1])
            offsets = index.block_offsets[list(tiles_of_row)].tolist()
            if (head, row) == (1, 1):
                assert pivots.maps[slot, offsets[0] :].isnan().all()
                assert pivots.weights[slot, list(tiles_of_row)].isnan().all()
                continue
            keys, _ = batch.cache.gather(batch.rows.block_table[row], batch.rows.seq_lens[row])
            begin, end = batch.rows.tokens[row], batch.rows.tokens[row] + batch.rows.query_lens[row]
            queries = batch.q[begin:end, head].double()
            weights = block_average_map(queries, keys[:, 0].double() * batch.scale, index, row)
            for tile, offset, expected in zip(tiles_of_row, offsets, weights, strict=True):
                found = pivots.maps[slot, offset : offset + len(expected)]
                torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-9)
                digits = mass_keys_of(found) >> 8
                sums = torch.zeros(256, device=DEVICE).index_add(0, digits, found)
                torch.testing.assert_close(pivots.weights[slot, tile], sums, rtol=1e-3, atol=0)


def mass_keys_of(masses: torch.Tensor) -> torch.Tensor:
    return ((masses.view(torch.int32) >> EQUAL_BITS.value) - LEAST_KEY.value).clamp(0, 256 * 256 - 2)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES[1:2], ids=str)
def test_heads_that_differ_in_gamma_keep_what_the_reference_keeps(case):
    lengths, num_heads, num_kv_heads, head_dim, page_size, block_tokens, layout, clusters = case
    batch = lined_batch(lengths, num_heads, num_kv_heads, head_dim, page_size, torch.float32, layout=layout)
    batch.q.mul_(0.5)
    more = {"estimating": "spread", "last_queries": 30}
    heads = [[SharePrefill(0.25, 0.1, 0.6 + 0.09 * i, c, **more) for i, c in enumerate(layer)] for layer in clusters]
    batches, methods = [batch, next_layer(batch)], [SharePrefill.merged(layer) for layer in heads]
    check_distances(batches, methods, block_tokens)
    check_layers(batches, methods, block_tokens)


def test_heads_of_no_cluster_cost_no_estimate():
    """Nor do key heads that have no other: their keys are not read."""
    batch = lined_batch([(70, 60)], 4, 2, 64, 16)
    batch.cache.keys[:, :, 1] = float("nan")
    index = SparseIndex.allocate(batch.rows, 4, 64)
    index.workspace.buffer = torch.full((1 << 20,), 0xFF, dtype=torch.uint8, device=DEVICE)  # NaN
    heads = int32([2, 0, 1, 3])
    clusters = int32([NOISE, NOISE, 0, NOISE])
    averages = BlockAverages(batch.q, batch.cache, index, heads, batch.scale, Spans.of(index), clusters)
    estimates, sparsity = averages.estimates()
    assert averages.scores[2:].isnan().all()
    assert estimates[[0, 1, 3]].isnan().all()
    torch.testing.assert_close(estimates[2].double(), estimate(batch, 0, 1, 64), rtol=1e-5, atol=1e-9)
    assert sparsity.isnan().flatten().tolist() == [True, True, False, True]


@pytest.mark.parametrize("reference", [None, select_share_prefill], ids=["kernels", "reference"])
def test_pivot_is_dense_and_equal_heads_take_its_pattern(reference):
    """However small τ is, in the pivot's layer and in the next; noise never does; another step starts anew."""
    batch = small_batch()
    first = selected(layer_of((4, 4, NOISE), 0.9, 1e-6, 0.6), batch, 64, reference=reference)
    assert is_dense(first, 0, 0)
    assert not is_dense(first, 1, 0)
    assert int(first.stripe_counts[1].max()) == 0
    lines = selected(FlexVerticalSlash(0.6), batch, 64, reference=reference and select_flex_vertical_slash)
    assert equal_lists(first, 2, lines, 2)
    assert not equal_lists(first, 1, lines, 1)
    second = selected(layer_of((4, NOISE, 4), 0.9, 1e-6, 0.6), batch, 64, reference=reference)
    assert equal_lists(second, 0, first, 1)
    assert equal_lists(second, 1, lines, 1)
    assert equal_lists(second, 2, lines, 2)
    next_step = dataclasses.replace(batch, rows=dataclasses.replace(batch.rows))
    for step, starts_anew in ((batch, False), (next_step, True)):
        index = selected(layer_of((4, NOISE, NOISE), 0.9, 1e-6, 0.6), step, 64, reference=reference)
        assert is_dense(index, 0, 0) == starts_anew


@pytest.mark.parametrize("thresholds", [(1.01, 0.0), (0.0, 1.0)], ids=["no distance", "no sparsity"])
@pytest.mark.parametrize("reference", [None, select_share_prefill], ids=["kernels", "reference"])
def test_without_thresholds_nothing_is_shared_and_no_pivot_paid(reference, thresholds):
    batch = small_batch()
    index = selected(layer_of((0, 0, 0), *thresholds), batch, 64, reference=reference)
    lines = selected(FlexVerticalSlash(0.8), batch, 64, reference=reference and select_flex_vertical_slash)
    assert all(equal_lists(index, head, lines, head) for head in range(3))


@pytest.mark.parametrize("reference", [None, select_share_prefill], ids=["kernels", "reference"])
def test_a_head_too_sparse_is_no_pivot(reference):
    """The next one in order is, and heads too far from it take their own lines."""
    batch = small_batch(num_heads=4)
    batch.q[:, 2] *= 6
    heads = [2, 1, 0, 3]  # the order that counts
    estimates = [estimate(batch, 0, head, 64) for head in heads]
    sparsity = [js_distance(a, torch.full_like(a, 1 / len(a))) for a in estimates]
    max_sparsity = (sparsity[0] + max(sparsity[1:])) / 2
    max_distance = js_distance(estimates[1], estimates[3]) / 2
    assert sparsity[0] > max_sparsity
    assert max_distance > MARGIN
    method = layer_of((0, 0, 0, 0), max_sparsity, max_distance, 0.6)
    index = selected(method, batch, 64, heads, reference)
    lines = selected(FlexVerticalSlash(0.6), batch, 64, reference=reference and select_flex_vertical_slash)
    assert equal_lists(index, 2, lines, 2)
    assert is_dense(index, 1, 0)
    assert not is_dense(index, 0, 0)
    assert equal_lists(index, 3, lines, 3)


def test_rows_never_see_each_other():
    """Two rows in one batch select bitwise what each selects alone, layer after layer, with pivots of their own."""
    batch = small_batch(((75, 135), (230, 60)), num_heads=2)
    batch.q[batch.rows.tokens[1] :, 0] *= 8  # in row 1 head 0 is too sparse, and head 1 becomes the pivot
    batches, methods = [batch, next_layer(batch)], [layer_of((0, 0), 0.3)] * 2
    together = [selected(m, b, 64) for b, m in zip(batches, methods, strict=True)]
    assert is_dense(together[0], 0, 0)
    assert not is_dense(together[0], 0, 1)
    assert is_dense(together[0], 1, 1)
    for row in (0, 1):
        rows = row_alone(batch, row).rows
        for b, m, both in zip(batches, methods, together, strict=True):
            alone = selected(m, dataclasses.replace(b, rows=rows), 64)
            tiles = {t: batch.rows.tile_starts[row] + t for t in range(rows.num_tiles)}
            assert all(equal_lists(alone, head, both, head, tiles) for head in range(2))


@pytest.mark.parametrize("reference", [None, select_share_prefill], ids=["kernels", "reference"])
def test_each_head_takes_what_its_own_gamma_holds(reference):
    """Heads that differ in γ share with each other, in this layer and in the next, each as if it were all heads' γ."""
    batch = small_batch(((130, 140),), num_heads=4)
    batch.q[:, 2] = batch.q[:, 0]
    gammas, clusters = (0.6, 0.6, 0.9, 0.9), (0, 0, 0, NOISE)
    alike = {
        gamma: [selected(layer_of(clusters, 0.9, 1e-6, gamma), b, 64, reference=reference) for b in (a, a)]
        for gamma in set(gammas)
        for a in [dataclasses.replace(batch, rows=dataclasses.replace(batch.rows))]
    }
    heads = [SharePrefill(0.9, 1e-6, gamma, c) for gamma, c in zip(gammas, clusters, strict=True)]
    method = SharePrefill.merged(heads)
    for layer in range(2):
        index = selected(method, batch, 64, reference=reference)
        assert is_dense(index, 0, 0) == (layer == 0)
        assert not is_dense(index, 1, 0)
        assert all(equal_lists(index, i, alike[gamma][layer], i) for i, gamma in enumerate(gammas))
    assert not equal_lists(index, 1, index, 2)


def test_distance():
    a, b = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.0, 1.0])
    assert js_distance(a, a) == 0
    assert js_distance(a, b) == pytest.approx(math.log(2) ** 0.5)
    assert js_distance(a, torch.tensor([0.25, 0.75, 0.0])) == pytest.approx(
        0.1839078, abs=1e-6
    )  # scipy's jensenshannon


def test_heads_of_a_layer_are_merged():
    heads = [SharePrefill(cluster=c) for c in (3, NOISE, 3)]
    assert len({h.alike for h in heads}) == 1
    merged = SharePrefill.merged(heads)
    assert merged == SharePrefillLayer(clusters=(3, NOISE, 3))
    assert merged.alike == heads[0].alike
    assert name_of(merged) == "share_prefill"
    for field, value in (("clusters", (0, -2)), ("gammas", (0.5,))):
        with pytest.raises(ValueError, match=f"^{field}: given "):
            SharePrefillLayer(**{field: value})
    with pytest.raises(ValueError, match=r"^methods: "):
        SharePrefill.merged([SharePrefill(), SharePrefill(max_distance=0.1)])
    differing = SharePrefill.merged([SharePrefill(gamma=gamma, cluster=3) for gamma in (0.8, 0.95)])
    assert differing == SharePrefillLayer(clusters=(3, 3), gammas=(0.8, 0.95))
    assert differing.alike == merged.alike
    assert SharePrefill.summary([differing])["gamma"] == "0.8 to 0.95"
    assert SharePrefill(gamma=0.8, cluster=3).alone == SharePrefill(gamma=0.8)
    batch = small_batch(((0, 5),))
    for method in (SharePrefill(cluster=3), SharePrefillLayer(clusters=(3, 3))):
        with pytest.raises(ValueError, match=r"^clusters?: "):
            selected(method, batch, 64)


def test_a_model_whose_heads_can_share_nothing_is_objected_to():
    """Sharing takes two heads of one cluster under equal thresholds, which must be above 0."""
    a, b = SharePrefill(cluster=0), SharePrefill(cluster=1)
    noise, other = SharePrefill(), SharePrefill(max_distance=0.3, cluster=0)
    for heads in ([noise] * 3, [a, b, noise], [a, other], [SharePrefill(max_distance=0.0, cluster=0)] * 2):
        objection = SharePrefill.objection(heads)
        assert objection is not None
        assert "flex_vertical_slash" in objection
    assert SharePrefill.objection([a, b, noise, a]) is None
    assert SharePrefill.objection([a, SharePrefill(gamma=0.95, cluster=0)]) is None


def test_summary_counts_clusters_over_layers():
    layers = [SharePrefill.merged([SharePrefill(cluster=c) for c in heads]) for heads in ((0, NOISE, 3), (3, 3, 1))]
    thresholds = {"max_sparsity": 0.3, "max_distance": 0.2, "gamma": 0.9}
    thresholds |= {"last_queries": 64, "estimating": "last"}
    assert SharePrefill.summary(layers) == thresholds | {"clusters": 3, "clustered_heads": 5}
    assert SharePrefill.summary([SharePrefill()]) == thresholds | {"clusters": 0, "clustered_heads": 0}
