# SPDX-License-Identifier: Apache-2.0
"""FlexPrefill's vertical-slash: kernels against the float32 reference, and what the paper promises."""

import dataclasses

import pytest
import torch

from benchmarks.batches import random_batch
from tests.helpers.lined import DEVICE, assert_between, kept_keys, lined_batch, selected, single_row
from vllm_sparse_kernels.methods.flex_prefill.method import FlexVerticalSlash
from vllm_sparse_kernels.methods.flex_prefill.reference import (
    block_diagonals,
    fewest_with_mass,
    select_flex_vertical_slash,
    softmax_of,
    whole_blocks,
)
from vllm_sparse_kernels.rows import Rows

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])

MARGIN = 1e-4
"""Kernels and reference see the same inputs and round float32 sums differently: lines may differ that decide over less
than this share of the mass."""


CASES = [
    # lengths, query heads, kv heads, head_dim, page size, block, layout, gap
    ([(0, 1), (0, 63)], 2, 2, 64, 16, 64, "NHD", 3),
    ([(500, 137)], 4, 1, 64, 64, 64, "HND", 0),
    ([(37, 300), (191, 2)], 4, 2, 96, 16, 128, "NHD", 5),
    ([(1920, 129)], 1, 1, 128, 128, 64, "NHD", 0),
    ([(871, 129)], 8, 1, 64, 16, 128, "HND", 0),
]


# The interpreter is slow: half precision on the short cases alone.
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for dtype in DTYPES for case in (CASES[:2] if (DEVICE, dtype) == ("cpu", torch.float16) else CASES)],
    ids=str,
)
def test_kernels_keep_what_the_reference_keeps(case, dtype):
    lengths, num_heads, num_kv_heads, head_dim, page_size, block_tokens, layout, gap = case
    batch = lined_batch(lengths, num_heads, num_kv_heads, head_dim, page_size, dtype, layout=layout, gap_tokens=gap)
    index = selected(FlexVerticalSlash(0.8), batch, block_tokens)
    index.check()
    heads = range(num_heads)
    bounds = [
        kept_keys(selected(FlexVerticalSlash(g), batch, block_tokens, reference=select_flex_vertical_slash), heads)
        for g in (0.8 - MARGIN, 0.8 + MARGIN)
    ]
    assert_between(kept_keys(index, heads), *bounds)
    if lengths[0][0] >= 500:
        assert index.density() < 0.9


OTHERS = {
    "spread": FlexVerticalSlash(0.8, last_queries=64, estimating="spread"),
    "few queries": FlexVerticalSlash(0.8, last_queries=17),
    "more queries": FlexVerticalSlash(0.8, last_queries=128),
    "budget": FlexVerticalSlash(0.3, min_budget=100),
}


@pytest.mark.parametrize("method", OTHERS.values(), ids=OTHERS)
def test_other_queries_and_budgets(method):
    batch = lined_batch([(37, 200), (301, 70), (0, 5)], 4, 2, 64, 16, gap_tokens=2)
    index = selected(method, batch, 64)
    index.check()
    bounds = [
        kept_keys(
            selected(dataclasses.replace(method, gamma=g), batch, 64, reference=select_flex_vertical_slash), range(4)
        )
        for g in (method.gamma - MARGIN, method.gamma + MARGIN)
    ]
    assert_between(kept_keys(index, range(4)), *bounds)


def test_queries_spread_over_the_chunk_find_what_its_last_ones_do_not():
    """Keys that only the first half of a chunk looks at."""
    batch = random_batch([(512, 256)], 1, 1, 64, 16, torch.float32, DEVICE)
    generator = torch.Generator().manual_seed(1)
    early, late = torch.nn.functional.normalize(torch.randn(2, 64, generator=generator), dim=-1).to(DEVICE)
    batch.q[:128], batch.q[128:] = 12 * early, 12 * late
    pages = batch.rows.block_table[0]
    for position, looked_at in ((10, late), (130, early), (300, early)):
        batch.cache.keys[pages[position // 16], position % 16] = 8 * looked_at
    for run in (None, select_flex_vertical_slash):
        for estimating, found in (("last", False), ("spread", True)):
            method = FlexVerticalSlash(0.9, last_queries=64, estimating=estimating)
            index = selected(method, batch, 64, reference=run)
            assert index.tile_keys(0, 0)[[130, 300]].tolist() == [found, found]


def test_heads_whose_means_tell_are_query_aware():
    """Weak and strong queries: of some heads the mean tells what they look at, of others it does not."""
    batch = lined_batch([(37, 300), (301, 129)], 4, 2, 64, 16, gap_tokens=2)
    batch.q[:, ::2] *= 0.05
    method = FlexVerticalSlash(0.8, max_distance=0.3)  # √JSD of the heads: 0.19 to 0.6, none near this
    index = selected(method, batch, 64)
    index.check()
    bounds = [
        kept_keys(
            selected(dataclasses.replace(method, gamma=g), batch, 64, reference=select_flex_vertical_slash), range(4)
        )
        for g in (0.8 - MARGIN, 0.8 + MARGIN)
    ]
    assert_between(kept_keys(index, range(4)), *bounds)
    lines = kept_keys(selected(FlexVerticalSlash(0.8), batch, 64), range(4))
    alike = [torch.equal(a, b) for a, b in zip(kept_keys(index, range(4)), lines)]
    assert set(alike) == {True, False}


def test_a_budget_keeps_the_largest():
    values = torch.tensor([1.0, 30.0, 4.0, 2.0, 8.0, 16.0])
    assert fewest_with_mass(values, 0.5, 2).tolist() == [False, True, False, False, False, True]
    assert fewest_with_mass(values, 0.5, 4).tolist() == [False, True, True, False, True, True]
    assert bool(fewest_with_mass(values, 0.5, 9).all())


def test_diagonals_are_those_of_blocks():
    """A query's block less a key's, wherever in the blocks they lie."""
    weights = torch.zeros(2, 300)
    weights[0, 63], weights[0, 64], weights[1, 63], weights[1, 290] = 1, 2, 4, 8
    assert block_diagonals(weights, torch.tensor([255, 290])).tolist() == [8, 0, 2, 1, 4]


def test_crowded_columns_become_whole_blocks():
    """With room for few stripes nothing is lost, and no tile keeps more than its room."""
    batch = lined_batch([(400, 130)], 2, 1, 64, 16)
    method, roomy = FlexVerticalSlash(0.9, max_stripes=8), selected(FlexVerticalSlash(0.9), batch, 64)
    index = selected(method, batch, 64)
    index.check()
    assert int(index.stripe_counts.max()) <= 8 < int(roomy.stripe_counts.max())
    bounds = [
        kept_keys(
            selected(dataclasses.replace(method, gamma=g), batch, 64, reference=select_flex_vertical_slash), range(2)
        )
        for g in (0.9 - MARGIN, 0.9 + MARGIN)
    ]
    assert_between(kept_keys(index, range(2)), *bounds)
    for few, many in zip(kept_keys(index, range(2)), kept_keys(roomy, range(2))):
        assert not bool((many & ~few).any())


@pytest.mark.parametrize(
    "method", [FlexVerticalSlash(0.8), FlexVerticalSlash(0.5, min_budget=80, estimating="spread")], ids=str
)
def test_a_row_selects_the_same_alone(method):
    """Bitwise, and only rows of the given heads are written."""
    batch = lined_batch([(37, 200), (300, 64)], 4, 2, 64, 16, gap_tokens=1)
    index = selected(method, batch, 64, heads=[3, 0])
    assert bool((index.block_counts[[1, 2]] == -7).all())
    for row in range(2):
        alone = selected(method, single_row(batch, row), 64, heads=[3, 0])
        for i_tile in range(alone.rows.num_tiles):
            i_both = batch.rows.tile_starts[row] + i_tile
            for head in (0, 3):
                assert torch.equal(alone.blocks_of(head, i_tile), index.blocks_of(head, i_both))
                assert torch.equal(alone.stripes_of(head, i_tile), index.stripes_of(head, i_both))


@pytest.mark.parametrize("reference", [None, select_flex_vertical_slash], ids=["kernels", "reference"])
def test_heads_with_a_gamma_of_their_own_select_what_they_select_alone(reference):
    batch = lined_batch([(300, 64), (10, 70)], 3, 1, 64, 16)
    methods = [FlexVerticalSlash(0.5), FlexVerticalSlash(1.0), FlexVerticalSlash(0.4, min_budget=90)]
    merged = FlexVerticalSlash.merged(methods)
    assert merged.of_heads(3) == tuple(methods)
    index = selected(merged, batch, 64, reference=reference)
    index.check()
    for head, method in enumerate(methods):
        alone = selected(method, batch, 64, [head], reference)
        for i_tile in range(batch.rows.num_tiles):
            assert torch.equal(alone.blocks_of(head, i_tile), index.blocks_of(head, i_tile))
            assert torch.equal(alone.stripes_of(head, i_tile), index.stripes_of(head, i_tile))


@pytest.mark.parametrize("reference", [None, select_flex_vertical_slash], ids=["kernels", "reference"])
def test_gamma_of_one_keeps_everything(reference):
    batch = lined_batch([(150, 140)], 2, 1, 64, 16)
    batch.q.mul_(40)  # scores so far apart that most weights underflow to 0
    assert selected(FlexVerticalSlash(1.0), batch, 64, reference=reference).density() == 1


def test_kept_lines_hold_gamma_of_the_estimate():
    """Columns alone, and diagonals of blocks alone, reach γ of Â's mass; one line less would not."""
    batch = lined_batch([(300, 64)], 1, 1, 64, 16)
    keys, _ = batch.cache.gather(batch.rows.block_table[0], 364)
    positions = torch.arange(300, 364, device=DEVICE)
    weights = softmax_of(batch.q[:, 0], keys[:, 0], positions, batch.scale)
    for sums in (weights.sum(0), block_diagonals(weights, positions)):
        kept = fewest_with_mass(sums, 0.8)
        mass = float(sums[kept].sum() / sums.sum())
        assert mass >= 0.8 - 1e-6
        assert mass - float(sums[kept].min() / sums.sum()) < 0.8
        assert 0 < int(kept.sum()) < len(kept)


def test_whole_blocks_are_the_fullest():
    columns = torch.zeros(256, dtype=torch.bool)
    columns[64:69], columns[128:131], columns[192:194] = True, True, True
    assert whole_blocks(columns, 10, 64).tolist() == [True, False, False, False]
    assert whole_blocks(columns, 5, 64).tolist() == [True, True, False, False]
    assert whole_blocks(columns, 4, 64).tolist() == [True, True, True, False]
    assert whole_blocks(columns, 0, 64).tolist() == [True, True, True, True]


def test_stripe_room_depends_on_the_row_alone_and_is_bounded():
    table = torch.zeros(2, 1, dtype=torch.int32)
    method = FlexVerticalSlash()
    long = Rows((0,), (131072,), (0,), table[:1])
    assert method.stripe_layout(long).capacity <= 1024 * 1024
    chunk = Rows((0, 8192), (8192, 64), (122880, 100), table)
    assert method.stripes_of_row(chunk, 0) == 8192
    assert method.stripe_layout(chunk).offsets[-1] == 64 * 8192
    assert method.stripe_layout(chunk).capacity == 64 * 8192 + 100


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gamma", 0.0),
        ("gamma", 1.01),
        ("gamma", float("nan")),
        ("max_stripes", -1),
        ("last_queries", 257),
        ("min_budget", -1),
        ("estimating", "first"),
        ("max_distance", -0.1),
    ],
)
def test_parameters_out_of_range(field, value):
    with pytest.raises(ValueError, match=f"^{field}: given {value!r}"):
        FlexVerticalSlash(**{field: value})
