# SPDX-License-Identifier: Apache-2.0
"""Vertical-slash: kernels against the references, sums and lists against their definitions."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from benchmarks.batches import random_batch
from tests.methods.cases import DEVICE, F32, all_lists, lists, row_alone, row_parts, select
from tests.methods.minference_cases import CASES, LONG, UNIT, Case, vertical_slash_between
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.flex_prefill.method import FlexVerticalSlash
from vllm_sparse_kernels.methods.flex_prefill.reference import block_diagonals, softmax_of
from vllm_sparse_kernels.methods.minference import reference
from vllm_sparse_kernels.methods.minference.vertical_slash import VerticalSlash
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.select import last_queries, lines
from vllm_sparse_kernels.select.last_queries import last_query_sums
from vllm_sparse_kernels.trial import Batch


def vertical_slash_of(case: Case) -> VerticalSlash:
    """Parameters that leave something out at a case's length."""
    total = max(c + n for c, n in case.lengths)
    return VerticalSlash(total // 10, total // 40, 64, total // 40, total // 100)


@pytest.mark.full
@pytest.mark.parametrize("case", [*CASES, LONG], ids=str)
def test_vertical_slash_kernel_is_the_reference(case):
    batch, method = case.batch(), vertical_slash_of(case)
    by_kernel = select(method, batch, case.block_tokens)
    by_reference = select(method, batch, case.block_tokens, by_reference=True)
    vertical_slash_between(method, batch, by_kernel, by_reference)


@pytest.mark.parametrize("last_queries", [1, 17])
def test_fewer_last_queries(last_queries):
    batch = random_batch([(137, 100), (0, 10)], 2, 1, 64, 16, F32, DEVICE)
    method = VerticalSlash(20, 5, last_queries, 3, 2)
    vertical_slash_between(method, batch, select(method, batch, 64))


def check_sums(batch: Batch, heads: list[int], band: int, last_queries: int = 64, spread: bool = False) -> None:
    """Every column sum and every sum of diagonals, within the bound of ``vertical_slash_bounds``."""
    index = SparseIndex.allocate(batch.rows, batch.num_heads, 64)
    entries = torch.tensor(heads, dtype=torch.int32, device=DEVICE)
    num_rows, starts = batch.rows.num_rows, batch.rows.key_starts
    sums = last_query_sums(
        batch.q, batch.cache, index, (0, num_rows), entries, batch.scale, last_queries, band, spread=spread
    )
    columns, diagonals = sums.values.split([len(heads) * starts[-1], len(heads) * starts[-1] // band])
    for row, seq_len in enumerate(batch.rows.seq_lens):
        for i_entry, head in enumerate(heads):
            q, keys = row_parts(batch, row, head)
            count = min(last_queries, len(q))
            places = torch.arange(len(q) - count, len(q), device=DEVICE)
            if spread:
                places = torch.tensor([(i + 1) * len(q) // count - 1 for i in range(count)], device=DEVICE)
            positions = seq_len - len(q) + places
            size = float((q[places].abs() @ keys.abs().T).max()) * batch.scale
            relative = UNIT * (2 * (q.shape[1] + 4) * size + seq_len + 64 * band + 8)
            weights = softmax_of(q[places], keys, positions, batch.scale)
            exact = weights.sum(0)
            given = columns.view(len(heads), -1)[i_entry, starts[row] : starts[row] + seq_len]
            assert ((given - exact).abs() <= relative * exact).all()
            if band == 1:
                exact = reference.vertical_slash_sums(q[places], keys, batch.scale)[1]
            else:
                exact = block_diagonals(weights, positions)
            start = starts[row] // band
            given = diagonals.view(len(heads), -1)[i_entry, start : start + len(exact)]
            assert ((given - exact).abs() <= relative * exact).all()


@pytest.mark.full
@pytest.mark.parametrize(("band", "queries", "spread"), [(1, 64, False), (64, 128, False), (64, 50, True)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_are_those_of_the_softmax(case, band, queries, spread):
    """Heads of one's own choice, all rows at once."""
    batch = case.batch()
    check_sums(batch, [batch.num_heads - 1, 0][: batch.num_heads], band, queries, spread)


@pytest.mark.full
def test_more_splits_than_are_joined_at_once():
    check_sums(random_batch([(4299, 70)], 1, 1, 64, 128, F32, DEVICE), [0], 64)


def test_queries_spread_over_a_chunk():
    """Of more queries than are asked, over several key tiles that some of them may not look at."""
    check_sums(random_batch([(100, 333), (0, 40)], 4, 2, 64, 16, F32, DEVICE), [0, 3], 64, 256, spread=True)


SETTINGS = [VerticalSlash(40, 9, 64, 3, 2), VerticalSlash(7, 60, 64, 0, 50), VerticalSlash(0, 0), VerticalSlash(400, 3)]


def test_what_is_merged():
    merged = VerticalSlash.merged(SETTINGS)
    assert merged.of_heads(4) == tuple(SETTINGS)
    assert merged.alike == SETTINGS[0].alike == VerticalSlash()
    assert name_of(merged) == "vertical_slash"
    assert VerticalSlash.merged(SETTINGS[:1] * 2) == SETTINGS[0]
    assert VerticalSlash(last_queries=17).alike != VerticalSlash().alike
    rows = Rows((0,), (500,), (9000,), torch.zeros(1, 1, dtype=torch.int32))
    assert merged.stripe_layout(rows) == VerticalSlash(400).stripe_layout(rows)
    with pytest.raises(ValueError, match="methods: given"):
        VerticalSlash.merged([VerticalSlash(), VerticalSlash(last_queries=17)])


@pytest.mark.parametrize("method", [VerticalSlash(30, 10, 64, 0, 0), FlexVerticalSlash(0.5)], ids=name_of)
def test_a_longer_row_that_is_split_less_takes_nothing_from_a_shorter_one(monkeypatch, method):
    """33 tiles of keys make 7 splits of 5 where 32 make 8 of 4: the shorter row has the most."""
    monkeypatch.setattr(last_queries, "PROGRAMS", 16)
    batch = random_batch([(1984, 64), (2048, 64)], 2, 2, 64, 64, F32, DEVICE)
    alone, beside = select(method, row_alone(batch, 0)), select(method, batch)
    assert [lists(beside, head, 0) for head in range(2)] == [lists(alone, head, 0) for head in range(2)]


@pytest.mark.full
def test_rows_in_slabs_are_the_same(monkeypatch):
    """As many rows at a time as the workspace allows, down to one; and what a slab took is free again after it."""
    batch = random_batch([(0, 65), (201, 130), (9, 1)], 2, 1, 64, 16, F32, DEVICE, gap_tokens=3)
    method = VerticalSlash(30, 10, 64, 5, 5)
    together = select(method, batch, 64)
    for num_bytes, slabs in ((0, [(0, 1), (1, 2), (2, 3)]), (2 * 4096 * 2 * lines.KEY_BYTES, [(0, 2), (2, 3)])):
        monkeypatch.setattr(lines, "SLAB_BYTES", num_bytes)
        index = select(method, batch, 64)
        assert list(lines.slabs_of_rows(index.rows, 2)) == slabs
        assert all_lists(index) == all_lists(together)
        assert index.workspace.peak_bytes < together.workspace.peak_bytes
        most = max(end - first for first, end in slabs) * 4096 * 2 * lines.KEY_BYTES
        assert index.workspace.peak_bytes - index.workspace.used_bytes <= most


def test_reference_sums_by_their_definition():
    generator = torch.Generator().manual_seed(0)
    q, keys = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (5, 12))
    vertical, slash = reference.vertical_slash_sums(q, keys, 0.3)
    column, diagonal = torch.zeros(12, dtype=torch.float64), torch.zeros(12, dtype=torch.float64)
    for i in range(5):
        position = 7 + i
        weights = torch.stack([torch.exp(0.3 * (q[i] @ keys[j])) for j in range(position + 1)])
        for j in range(position + 1):
            column[j] += weights[j] / weights.sum()
            diagonal[position - j] += weights[j] / weights.sum()
    torch.testing.assert_close(vertical, column)
    torch.testing.assert_close(slash, diagonal)


tiles = st.fixed_dictionaries(
    {
        "context_len": st.integers(0, 300),
        "query_len": st.integers(1, 300),
        "block_tokens": st.sampled_from([64, 128]),
        "density": st.sampled_from([0.0, 0.003, 0.03, 0.3]),
        "seed": st.integers(0, 1000),
    }
)


@pytest.mark.full
@settings(max_examples=60, deadline=None, derandomize=True)
@given(tiles)
def test_reference_lists_are_the_merge_of_algorithm_4(shape):
    """The vectorised lists against the literal merge, and against what a slash and a vertical are."""
    rows = Rows((0,), (shape["query_len"],), (shape["context_len"],), torch.zeros(1, 1, dtype=torch.int32))
    generator = torch.Generator().manual_seed(shape["seed"])
    verticals, slashes = torch.rand(2, rows.seq_lens[0], generator=generator) < shape["density"]
    index = SparseIndex.allocate(rows, 1, shape["block_tokens"], {0: VerticalSlash(10**9).stripe_layout(rows)})
    for i_tile, tile in enumerate(rows.tile_list):
        reference.set_vertical_slash(verticals, slashes, index, 0, i_tile)
        points, offsets = verticals.nonzero().flatten().tolist(), slashes.nonzero().flatten().tolist()
        assert lists(index, 0, i_tile) == reference.merge(points, offsets[::-1], tile, shape["block_tokens"])

        positions, keys = torch.arange(tile.position, tile.last_position + 1), torch.arange(tile.last_position + 1)
        apart = positions[:, None] - keys
        crossed = (slashes[apart.clamp(min=0)] | (apart == 0)) & (apart >= 0)
        blocks = crossed.any(0).nonzero().flatten().div(shape["block_tokens"], rounding_mode="floor").unique()
        assert index.blocks_of(0, i_tile).tolist() == blocks.tolist()
        assert index.tile_keys(0, i_tile)[verticals[: len(keys)] & (keys < tile.position)].all()
    index.check()


def test_forced_lines_are_always_there():
    """First columns and nearest diagonals, however small their sums."""
    batch = random_batch([(300, 200)], 1, 1, 64, 16, F32, DEVICE)
    index = select(VerticalSlash(40, 60, 64, 20, 50), batch, 64)
    mask = index.to_mask(0)[0]
    positions, keys = torch.arange(300, 500, device=DEVICE)[:, None], torch.arange(500, device=DEVICE)
    near = (positions - keys >= 0) & (positions - keys < 50)
    assert mask[near].all()
    assert mask[:, :20].all()


def test_a_planted_column_and_a_planted_diagonal_are_found():
    """All queries look at key 77; each query at position p looks at key p - 291 (and 291 + 64, one period further)."""
    batch = random_batch([(400, 230)], 2, 2, 64, 16, F32, DEVICE)
    row, positions = batch.rows.block_table[0], torch.arange(630, device=DEVICE)
    slots = (row[positions // 16].long(), positions % 16)
    batch.q.mul_(0.01)
    batch.q[:, 0, 0] = 8.0
    batch.cache.keys[slots[0][77], slots[1][77], 0, 0] = 16.0
    eye = 8.0 * torch.eye(64, device=DEVICE).to(F32)
    batch.q[:, 1] = eye[(positions[400:] - 291) % 64]
    batch.cache.keys[(*slots, torch.ones_like(positions))] = eye[positions % 64]
    index = select(VerticalSlash(1, 10, 64, 0, 0), batch, 64)
    for i_tile, tile in enumerate(batch.rows.tile_list):
        assert index.tile_keys(0, i_tile)[77]
        for position in range(tile.position, tile.last_position + 1):
            assert index.tile_keys(1, i_tile)[position - 291]
    assert index.density() < 0.8
