# SPDX-License-Identifier: Apache-2.0
"""SALE: kernel and reference against the paper's steps in float64, properties."""

import math
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch

from benchmarks.batches import random_batch
from tests.methods.cases import DEVICE, DTYPES, by_turns, select
from tests.methods.sale_cases import (
    assert_agrees,
    channels_of,
    definition,
    keys_of,
    make_batch,
    regions,
    rounded_by_kernels,
)
from vllm_sparse_kernels.methods.sale import means as sale_means, method as module, scores as sale_scores
from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.methods.sale.reference import paper_blocks, paper_density
from vllm_sparse_kernels.workspace import Workspace

# lengths, heads, kv heads, head_dim, page size, block_tokens, physical layout, method
CASES = [
    ([(0, 1), (0, 63), (0, 1000)], 1, 1, 64, 16, 64, "NHD", Sale(0.3)),
    ([(477, 300), (300, 63)], 4, 2, 64, 64, 128, "HND", Sale(0.3)),
    ([(841, 100)], 4, 1, 64, 128, 64, "HND", Sale(0.2, sink_tokens=0)),
    ([(633, 130), (129, 1), (255, 2)], 8, 1, 64, 16, 128, "NHD", Sale(0.3, sink_tokens=96, local_tokens=160)),
    ([(1800, 249)], 1, 1, 96, 64, 64, "NHD", Sale(0.3)),
    ([(2300, 70)], 2, 1, 256, 16, 64, "NHD", Sale(0.3)),
    ([(0, 2049)], 1, 1, 128, 128, 128, "NHD", Sale(0.5)),
    ([(477, 300), (0, 63), (801, 1)], 4, 2, 64, 16, 32, "HND", Sale(0.3)),
    ([(711, 130)], 6, 2, 64, 32, 32, "NHD", Sale(0.3, sink_tokens=96, local_tokens=160)),
    ([(513, 64)], 1, 1, 64, 16, 32, "NHD", Sale(0.2, sink_tokens=0)),
    ([(477, 300), (0, 63), (801, 1)], 4, 2, 128, 16, 32, "HND", Sale(0.3, channels="half")),
    ([(633, 130), (129, 1), (255, 2)], 6, 2, 96, 64, 64, "NHD", Sale(0.4, channels="half")),
    ([(900, 70)], 8, 1, 256, 32, 32, "NHD", Sale(0.4, channels="half")),
    ([(633, 300), (0, 70)], 4, 2, 64, 16, 32, "NHD", Sale(0.3, channels="half")),
    ([(500, 130)], 1, 1, 32, 16, 32, "NHD", Sale(0.2, channels="half")),
]


@pytest.mark.full
@pytest.mark.parametrize(("case", "dtype"), by_turns(CASES, DTYPES), ids=str)
def test_kernel_agrees_with_the_paper(case, dtype):
    lengths, num_heads, num_kv_heads, head_dim, page_size, block_tokens, layout, method = case
    batch = make_batch(lengths, num_heads, num_kv_heads, head_dim, page_size, dtype, layout=layout)
    assert_agrees(batch, method, select(method, batch, block_tokens))


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_agrees_with_the_paper(case):
    lengths, num_heads, num_kv_heads, head_dim, page_size, block_tokens, layout, method = case
    batch = make_batch(lengths, num_heads, num_kv_heads, head_dim, page_size, layout=layout)
    assert_agrees(batch, method, select(method, batch, block_tokens, by_reference=True))
    heads = torch.arange(num_heads)
    ours = {(head, i): x for head, i, x in paper_blocks(method, batch.q, batch.cache, batch.rows, heads, batch.scale)}
    for row, head in product(range(len(lengths)), range(num_heads)):
        for i_tile, surely, maybe in definition(batch, method, row, head):
            assert bool((ours[head, i_tile] | ~surely).all() and (maybe | ~ours[head, i_tile]).all())
    density = paper_density(method, batch.q, batch.cache, batch.rows, heads, batch.scale)
    assert density == pytest.approx(
        sum(int(x.sum()) for x in ours.values())
        / sum(b[2] for t in batch.rows.tile_list for b in regions(method, t.position, t.length_tokens)) / num_heads
    )  # fmt: skip


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("tau", [0.0, 1e-300])
def test_smallest_tau_is_dense(tau, reference):
    index = select(Sale(tau), make_batch([(500, 140), (0, 70)]), by_reference=reference)
    assert index.density() == 1


def test_one_element_keeps_its_block():
    batch = random_batch([(650, 200)], 2, 1, 64, 16, torch.float32, DEVICE)
    method = Sale(0.9)
    before = select(method, batch)
    token, head, position = 150, 1, 330
    # Its score with that one query is about 7, with all others about 0.
    batch.cache.keys[batch.rows.block_table[0, position // 16], position % 16, 0] = 0.9 * batch.q[token, head]
    after = select(method, batch)
    for head, i_tile in product(range(2), range(2)):
        extra = {330 // 64} if (head, i_tile) == (1, 1) else set()
        was, now = (set(index.blocks_of(head, i_tile).tolist()) for index in (before, after))
        assert now - was == extra
        assert was <= now


@pytest.mark.parametrize("reference", [False, True])
def test_sink_and_local_region_are_kept_at_any_score(reference):
    """Keys before the tile point away from its queries, those of sink and local region too."""
    batch = random_batch([(1210, 100)], 1, 1, 64, 16, torch.float32, DEVICE)
    batch.q[:] = 1 + 0.01 * batch.q
    keys = batch.cache.keys
    keys.copy_(torch.where(keys.isnan(), keys, -1 + 0.01 * keys))
    for position in range(1210, 1310):
        keys[batch.rows.block_table[0, position // 16], position % 16] = 1
    index = select(Sale(0.5), batch, 64, by_reference=reference)
    # The first query block ends at 1273, in its 40th block. Past the sink are 9 segments; one, and 3 blocks, are local.
    assert regions(Sale(0.5), 1210, 100)[0] == (slice(0, 64), 32 + 8 * 128, 40)
    assert index.blocks_of(0, 0).tolist() == [0, *range((32 + 8 * 128) // 64, 1310 // 64 + 1)]


def test_local_region_has_128_to_224_tokens():
    sizes = {
        num_blocks * 32 - local
        for position in range(300, 900, 17)
        for _, local, num_blocks in regions(Sale(), position, 128)
    }
    assert sizes == {128, 160, 192, 224}


@pytest.mark.parametrize("block_tokens", [32, 64])
def test_channels_that_hold_nothing_need_not_be_multiplied(block_tokens):
    """Half of 128 channels are the same in all keys of the first kv head, in all queries of the second: bitwise."""
    batch = make_batch([(700, 130), (0, 63), (533, 1)], 4, 2, 128, dtype=torch.float16)
    dead = torch.randperm(128, generator=torch.Generator().manual_seed(0))[:64].to(DEVICE)
    batch.cache.keys[:, :, 0, dead] = 0.5
    batch.q[:, 2:, dead] = 0.5
    halves, wholes = (select(Sale(0.3, channels=channels), batch, block_tokens) for channels in ("half", "all"))
    assert torch.equal(halves.block_counts, wholes.block_counts)
    for head, i_tile in product(range(4), range(batch.rows.num_tiles)):
        assert torch.equal(halves.blocks_of(head, i_tile), wholes.blocks_of(head, i_tile))
    assert halves.density() < 0.9
    queries, keys = rounded_by_kernels(Sale(0.3, channels="half"), batch)
    assert queries.integers.shape[2] == keys.integers.shape[2] == 64


@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_the_channels_that_weigh_most_are_multiplied(head_dim):
    """Of the first kv head all keys of the first row are alike, and one channel of the second row holds a NaN."""
    batch = make_batch([(300, 70), (0, 140)], 6, 3, head_dim, 64)
    pages = batch.rows.block_table
    batch.cache.keys[pages[0, :6], :, 0] = 1.0
    batch.cache.keys[pages[1, 0], 5, 0, 7] = torch.nan
    kept_d = sale_means.kept_channels(head_dim, half=True)
    assert kept_d == {64: 32, 96: 64, 256: 128}[head_dim]
    means = sale_means.row_means(batch.q, batch.cache, batch.rows, kept_d, Workspace(torch.device(DEVICE)))
    assert means.channels[0, 0].tolist() == list(range(kept_d))
    assert 7 not in means.channels[1, 0]
    assert means.channels[1, 0].unique().numel() == kept_d
    assert 0 <= means.channels.min() <= means.channels.max() < head_dim
    for row, kv in product(range(2), (1, 2)):
        expected = channels_of(batch, Sale(channels="half"), row, 2 * kv)
        assert means.channels[row, kv].tolist() == expected
        variance = keys_of(batch, row, 2 * kv).var(0, correction=0)
        variance[expected] = 0
        torch.testing.assert_close(means.left_out[row, kv, :head_dim].double(), variance, rtol=1e-4, atol=0)
        assert not means.left_out[row, kv, head_dim:].any()


def test_what_is_merged():
    settings = [Sale(0.3), Sale(0.1), Sale(0.3, int8_scores=True)]
    merged = Sale.merged(settings)
    assert list(merged.of_heads(3)) == settings
    assert merged.alike == settings[0].alike == Sale()
    common = {"sink_tokens": 32, "local_tokens": 128, "channels": "all", "settings": 3}
    assert merged.summary([merged, Sale(0.3)]) == common
    assert Sale.merged(settings[:1] * 2) == settings[0]
    assert Sale(sink_tokens=64).alike != Sale().alike
    assert Sale(channels="half").alike == Sale(0.3, channels="half").alike != Sale().alike
    with pytest.raises(ValueError, match="methods alike"):
        Sale.merged([Sale(), Sale(sink_tokens=64)])


def test_higher_tau_keeps_less():
    batch = random_batch([(900, 128)], 2, 1, 64, 16, torch.float32, DEVICE)
    masks = [select(Sale(tau), batch, by_reference=True).to_mask(0) for tau in (0.15, 0.25, 0.35, 0.5)]
    for more, less in pairwise(masks):
        assert bool((more | ~less).all())
        assert int(more.sum()) > int(less.sum())


def test_rows_in_slabs_select_what_they_select_together(monkeypatch):
    """Three rows of which two are cut, in slabs of 512 keys and in one; bitwise, blocks of 32."""
    batch = make_batch([(1211, 130), (700, 5), (300, 70)], 4, 2)
    methods = [Sale(0.3), Sale(0.0), Sale(0.4), Sale(0.2)]
    monkeypatch.setattr(sale_scores, "SPAN_TOKENS", 256)
    together = select(Sale.merged(methods), batch, 32)
    batch.rows.state.clear()
    monkeypatch.setattr(module, "SLAB_TOKENS", 512)
    assert len(module.slabs_of_rows(methods[0], batch.rows)) > 3
    apart = select(Sale.merged(methods), batch, 32)
    assert torch.equal(apart.block_counts, together.block_counts)
    for head, i_tile in product(range(4), range(batch.rows.num_tiles)):
        assert torch.equal(apart.blocks_of(head, i_tile), together.blocks_of(head, i_tile))
    assert 0.1 < together.density() < 0.9


@pytest.mark.parametrize(
    ("field", "value"),
    [("tau", -0.1), ("tau", 1.0), ("tau", math.nan), ("sink_tokens", 16), ("sink_tokens", -32), ("local_tokens", 96),
     ("local_tokens", 130), ("sink_tokens", 32.0), ("channels", "most"), ("channels", 64)],
)  # fmt: skip
def test_parameters_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field}: given {value!r}, expected"):
        Sale(**{field: value})


def test_defaults_are_the_papers():
    assert Sale() == Sale(tau=0.004, sink_tokens=32, local_tokens=128)


def test_a_hopper_kernel_that_does_not_compile_is_done_without(monkeypatch):
    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("no such layout")

    monkeypatch.setattr(sale_scores, "UNUSABLE", [])
    monkeypatch.setattr(sale_scores.sale_hopper, "half_kernel", Broken())
    rounded = SimpleNamespace(integers=None)
    assert not sale_scores._test_on_hopper((1, 1, 1), rounded, rounded, (), torch.empty(0), {})
    assert sale_scores.UNUSABLE == ["RuntimeError: no such layout"]
