# SPDX-License-Identifier: Apache-2.0
"""MInference's three patterns: kernels against the references, references against the definitions, and lists and top-k
from invented sums and scores."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.helpers.batches import new_index, random_batch
from tests.helpers.masks import mask_of
from tests.helpers.method_cases import (
    DEVICE,
    F32,
    SHAPES,
    all_lists,
    assert_agree,
    by_turns,
    int32,
    lists,
    row_alone,
    select,
)
from vllm_sparse_kernels.call import Call, HeadGroup
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.flex_prefill.method import FlexVerticalSlash
from vllm_sparse_kernels.methods.minference import block_sparse as minference, reference, vertical_slash
from vllm_sparse_kernels.methods.minference.a_shape import AShape
from vllm_sparse_kernels.methods.minference.block_sparse import BlockSparse
from vllm_sparse_kernels.methods.minference.vertical_slash import VerticalSlash
from vllm_sparse_kernels.methods.references import set_lines
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.selection import last_queries
from vllm_sparse_kernels.selection.last_queries import Sums
from vllm_sparse_kernels.selection.lines import Lines, write_lines

# More key blocks than a single product covers, and more splits than are joined at once.
LONG = ([(4200, 65)], 1, 1, 64, 128, 64, "NHD")


@pytest.mark.full
@pytest.mark.parametrize(("shape", "dtype"), by_turns([*SHAPES, LONG], (F32, torch.float16)), ids=str)
def test_kernels_are_the_reference(shape, dtype):
    *sizes, block_tokens, layout = shape
    batch = random_batch(*sizes, dtype, DEVICE, layout=layout, gap_tokens=3)
    total = max(batch.rows.seq_lens)
    lines = VerticalSlash(total // 10, total // 40, 64, total // 40, total // 100)
    for method in (
        AShape(100, 150),
        AShape(0, 1),
        AShape(65, 64),
        BlockSparse(2),
        lines,
        replace(lines, last_queries=17),
    ):
        assert_agree(*(select(method, batch, block_tokens, by_reference=way) for way in (False, True)))


def test_reference_block_scores_by_their_definition():
    generator = torch.Generator().manual_seed(0)
    q, keys = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (150, 190))
    scores = reference.block_scores(q, keys, 0.3)
    assert scores.shape == (3, 3)
    for i, (q_start, q_end) in enumerate([(0, 64), (64, 128), (128, 150)]):
        for j, (k_start, k_end) in enumerate([(0, 64), (64, 128), (128, 190)]):
            exact = 0.3 * (q[q_start:q_end].mean(0) @ keys[k_start:k_end].mean(0))
            # Queries are at positions 40 to 189; the first block's last query, 103, is before the third block's keys.
            assert scores[i, j] == (-torch.inf if (i, j) == (0, 2) else pytest.approx(float(exact)))


@pytest.mark.parametrize("top_blocks", [1, 3])
def test_block_sparse_takes_the_earliest_of_equals(top_blocks):
    """Equal keys give equal products; those of head 1 are negative."""
    batch = random_batch([(500, 70)], 2, 1, 64, 16, F32, DEVICE)
    keys = torch.full_like(batch.cache.keys, 0.5)
    batch = Batch(torch.ones_like(batch.q), PagedCache(keys, keys), batch.rows, batch.scale)
    batch.q[:, 1] = -1.0
    assert all_lists(select(BlockSparse(top_blocks), batch)) == [[([*range(top_blocks), 7, 8], [])]] * 2


def test_a_shape_keeps_sinks_and_windows_and_little_else():
    batch = random_batch([(437, 200)], 1, 1, 64, 16, F32, DEVICE)
    index = select(AShape(100, 150), batch, 64)
    positions, keys = torch.arange(437, 637, device=DEVICE)[:, None], torch.arange(637, device=DEVICE)
    kept = ((keys < 100) | (keys > positions - 150)) & (keys <= positions)
    mask = mask_of(index, 0)[0]
    assert not (kept & ~mask).any()
    # Only blocks of 64 with a sink, or with a key of the window of one of the tile's queries.
    first_queries = 437 + (positions - 437) // 128 * 128
    allowed = (keys // 64 <= 99 // 64) | (keys // 64 >= (first_queries - 149) // 64)
    assert not (mask & ~allowed).any()


@pytest.mark.full
@pytest.mark.parametrize("method", [VerticalSlash(30, 10, 64, 0, 0), FlexVerticalSlash(0.5)], ids=name_of)
def test_a_longer_row_that_is_split_less_takes_nothing_from_a_shorter_one(monkeypatch, method):
    """33 tiles of keys make 7 splits of 5, but 32 tiles make 8 splits of 4, so the shorter row has more splits."""
    monkeypatch.setattr(last_queries, "PROGRAMS", 16)
    batch = random_batch([(1984, 64), (2048, 64)], 2, 2, 64, 64, F32, DEVICE)
    alone, beside = select(method, row_alone(batch, 0)), select(method, batch)
    assert [lists(beside, head, 0) for head in range(2)] == [lists(alone, head, 0) for head in range(2)]


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


@pytest.mark.full
@settings(max_examples=100)
@given(
    context_len=st.integers(0, 300),
    query_len=st.integers(1, 300),
    block_tokens=st.sampled_from([32, 64, 128]),
    density=st.sampled_from([0.0, 0.003, 0.03, 0.3]),
    band=st.sampled_from([1, 64]),
    seed=st.integers(0, 1000),
)
def test_lists_are_what_algorithm_4_merges(context_len, query_len, block_tokens, density, band, seed):
    """Blocks on a slash or on the diagonal, and verticals before the diagonal's blocks that are in no other block.

    FlexPrefill's slashes are those of blocks of 64 tokens.
    """
    rows = unread_row(query_len, context_len)
    generator = torch.Generator().manual_seed(seed)
    verticals, slashes = (torch.rand(2, rows.key_starts[1], generator=generator) < density).to(DEVICE)
    points = verticals[: rows.seq_lens[0]].nonzero().flatten()
    layouts = {0: VerticalSlash(10**9).stripe_layout(rows)}
    index, by_kernel = (new_index(rows, 1, block_tokens, layouts) for _ in range(2))
    for i_tile, tile in enumerate(rows.tile_list):
        set_lines(index, 0, i_tile, verticals, slashes, band)
        positions = torch.arange(tile.position, tile.last_position + 1, device=DEVICE)
        keys = torch.arange(tile.last_position + 1, device=DEVICE)
        apart = positions[:, None] - keys
        bands_apart = positions[:, None] // band - keys // band
        crossed = (slashes[bands_apart.clamp(min=0)] | (apart == 0)) & (apart >= 0)
        blocks = crossed.any(0).nonzero().flatten().div(block_tokens, rounding_mode="floor").unique()
        assert index.blocks_of(0, i_tile).tolist() == blocks.tolist()
        before = points[points < tile.position // block_tokens * block_tokens]
        assert torch.equal(index.stripes_of(0, i_tile), before[~torch.isin(before // block_tokens, blocks)])
    index.check()
    bands_upto = slashes.cumsum(0)[None, : len(slashes) // band].int()
    write_row(by_kernel, Lines(points.int().view(1, 1, -1), int32([[len(points)]]), None, bands_upto), band)
    assert all_lists(by_kernel) == all_lists(index)


def unread_row(query_len: int, context_len: int) -> Rows:
    """Return a row whose keys are never read, so lists longer than a chunk of blocks can be tested alone."""
    return Rows((0,), (query_len,), (context_len,), torch.zeros(1, 1, dtype=torch.int32, device=DEVICE))


def call_without_data(index: SparseIndex, *methods: Method) -> Call:
    """Return the arguments of a selection that reads neither queries nor keys."""
    nothing, cache = torch.empty(0, device=DEVICE), PagedCache(*torch.empty(2, 1, 16, 1, 64, device=DEVICE))
    return Call(nothing, cache, index, 1.0, HeadGroup(tuple(range(len(methods))), methods))


def write_row(index: SparseIndex, lines: Lines, band: int = 1) -> None:
    """Write the lists of all heads of an index with one row."""
    rows, num_heads = index.rows, index.num_heads
    sums = Sums(torch.empty(0), None, rows.key_starts[1], num_heads, band, 0, 1)
    write_lines(call_without_data(index, *[VerticalSlash()] * num_heads), sums, lines)


def check_a_shape(method: AShape, rows: Rows, block_tokens: int) -> None:
    """Check that the kernel's lists equal the reference's, for rows whose keys are never read."""
    ours, theirs = (new_index(rows, 1, block_tokens) for _ in range(2))
    call = call_without_data(ours, method)
    method.select(call)
    reference.select_a_shape(replace(call, index=theirs))
    ours.check()
    assert all_lists(ours) == all_lists(theirs)


@pytest.mark.parametrize("block_tokens", [32, 64, 128])
def test_a_shape_at_the_edges_of_blocks(block_tokens):
    """The oldest key of the first query's window and the end of the sinks are just before, at, and just after an
    edge."""
    for oldest in (-1, 0, 1, 63, 64, 65, 127, 128, 129):
        for sink_tokens in (0, 1, 63, 64, 65, 128, 300):
            check_a_shape(AShape(sink_tokens, 202 - oldest), unread_row(70, 201), block_tokens)


@pytest.mark.parametrize("block_tokens", [64, 128])
def test_lists_beyond_one_chunk(block_tokens):
    """For a row of 200,070 keys: lists of a-shape, of a vertical and slash merge, and of block-sparse."""
    rows, generator = unread_row(70, 200_000), torch.Generator(DEVICE).manual_seed(0)
    check_a_shape(AShape(70_000, 90_000), rows, block_tokens)

    verticals = torch.randperm(200_070, generator=generator, device=DEVICE)[:2500].sort().values
    slashes = torch.rand(200_128, generator=generator, device=DEVICE) < 0.001
    slashes[200_070:] = False
    layouts = {0: VerticalSlash(2500).stripe_layout(rows)}
    index, expected = (new_index(rows, 1, block_tokens, layouts) for _ in range(2))
    lines = Lines(verticals.int().view(1, 1, -1), int32([[2500]]), None, slashes.cumsum(0)[None].int())
    write_row(index, lines)
    index.check()
    every = torch.zeros(200_070, dtype=torch.bool, device=DEVICE)
    every[verticals] = True
    set_lines(expected, 0, 0, every, slashes[:200_070], band=1)
    assert all_lists(index) == all_lists(expected)

    scores = 1000 * torch.randn(1, 2, 3136, generator=generator, device=DEVICE)
    # The first query block ends at position 200,063, in key block 3125; the second at 200,069, in 3126.
    causal = scores[0, :, :3127].clone()
    causal[0, 3126] = -torch.inf
    assert minference.HELD_BLOCKS < 3127  # more scores than fit in registers
    for top_blocks in (0, 3, 100, 10**9):
        index, expected = (new_index(rows, 1, block_tokens) for _ in range(2))
        expected.set_blocks(0, 0, reference.tile_blocks(causal, top_blocks)[0], 64)
        minference.write_top_blocks(call_without_data(index, BlockSparse(top_blocks)), scores, 0)
        index.check()
        assert all_lists(index) == all_lists(expected)


def made_up(kind: str, count: int) -> torch.Tensor:
    values = torch.rand(count, generator=torch.Generator(DEVICE).manual_seed(count), device=DEVICE)
    if kind == "integers":  # their bits end in zeros
        return values.argsort().float() / 1024  # sums of 64 weights are no larger
    if kind == "few":
        return (values * 4).floor() / 4
    if kind == "tiny":
        return values * 1e-38 * (values > 0.5)
    return torch.zeros_like(values) if kind == "equal" else values


def check_top_k(lengths: list[int], kind: str, numbers: list[tuple[int, int]]) -> None:
    """Check the top k of invented sums of two heads; ``numbers`` has (k, forced) of each head."""
    rows = Rows((0,) * len(lengths), (1,) * len(lengths), tuple(n - 1 for n in lengths),
                torch.zeros(len(lengths), 1, dtype=torch.int32, device=DEVICE))  # fmt: skip
    index = new_index(rows, 2, 64)
    values = made_up(kind, 4 * rows.key_starts[-1]).view(2, 2, -1)
    for start, length, end in zip(rows.key_starts, lengths, rows.key_starts[1:]):
        values[..., start + length : end] = float("nan")  # undefined places of a last tile
    methods = tuple(VerticalSlash(k, k // 2, 64, forced, 2 * forced) for k, forced in numbers)
    sums = Sums(values.flatten(), None, rows.key_starts[-1], 2, 1, 0, len(lengths))
    kept = vertical_slash.keep_largest(call_without_data(index, *methods), sums)
    for row, (start, length) in enumerate(zip(rows.key_starts, lengths)):
        for head, (k, forced) in enumerate(numbers):
            columns, slashes = values[:, head, start : start + length]
            expected = reference.keep(columns, k, forced).nonzero().flatten().tolist()
            assert len(expected) == min(k, length)
            assert kept.columns[row, head, : kept.num_columns[row, head]].tolist() == expected
            expected = reference.keep(slashes, k // 2, 2 * forced).cumsum(0).int()
            assert torch.equal(kept.bands_upto[head, start : start + length], expected)


@pytest.mark.full
@pytest.mark.parametrize("numbers", [[(0, 0), (1, 0)], [(333, 50), (20, 50)], [(8300, 0), (10**12, 7)]])
@pytest.mark.parametrize("kind", ["distinct", "integers", "few", "tiny", "equal"])
def test_top_k_is_exact_and_takes_the_earliest_of_equals(kind, numbers):
    """Compared with a stable sort: sums with many equal values, zeros, denormals; forced entries; k from 0 to more than
    all."""
    check_top_k([1, 1000, 8200], kind, numbers)


def test_top_k_where_a_chunk_is_more_than_is_read_at_once():
    check_top_k([70_000], "few", [(2000, 3), (40_000, 0)])
