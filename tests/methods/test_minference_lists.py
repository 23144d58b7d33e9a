# SPDX-License-Identifier: Apache-2.0
"""MInference's lists and top-k alone, from made-up sums and scores: edges of blocks, rows beyond one chunk, equals."""

import pytest
import torch

from tests.methods.cases import DEVICE, all_lists, lists
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.minference import reference
from vllm_sparse_kernels.methods.minference.a_shape import AShape
from vllm_sparse_kernels.methods.minference.block_sparse import BlockSparse, write_top_blocks
from vllm_sparse_kernels.methods.minference.vertical_slash import VerticalSlash
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.select.last_queries import Sums
from vllm_sparse_kernels.select.lines import Lines, write_lines


def unread_row(query_len: int, context_len: int) -> Rows:
    """A row whose keys nobody reads: what kernels do beyond one chunk of blocks can be tested on lists alone."""
    return Rows((0,), (query_len,), (context_len,), torch.zeros(1, 1, dtype=torch.int32, device=DEVICE))


@pytest.mark.parametrize("block_tokens", [64, 128])
def test_a_shape_at_the_edges_of_blocks(block_tokens):
    """The oldest key of the first query's window, and the end of the sinks, one before, at and one after an edge."""
    rows, nothing = unread_row(70, 201), torch.empty(0, device=DEVICE)
    cache = PagedCache(*torch.empty(2, 1, 16, 1, 64, device=DEVICE))
    heads = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for oldest in (-1, 0, 1, 63, 64, 65, 127, 128, 129):
        for sink_tokens in (0, 1, 63, 64, 65, 128, 300):
            method = AShape(sink_tokens, 202 - oldest)
            indices = [SparseIndex.allocate(rows, 1, block_tokens) for _ in range(2)]
            method.select(nothing, cache, indices[0], heads, 1.0)
            reference.select_a_shape(method, nothing, cache, indices[1], heads, 1.0)
            indices[0].check()
            assert all_lists(indices[0]) == all_lists(indices[1])


@pytest.mark.parametrize("block_tokens", [64, 128])
def test_lists_at_the_edges_of_blocks(block_tokens):
    """Kernel lists of one slash and one vertical each, both as near to the edges of blocks and tiles as can be."""
    rows = unread_row(150, 201)
    edges = [201, 350, *range(201 % 64, 351, 64), *range(328 % 64, 351, 64), *range(350 % 64, 351, 64)]
    offsets = sorted({o for edge in edges for o in (edge - 1, edge, edge + 1) if 0 <= o < 351})
    keys = [(64 * i + i % 3 - 1) % 351 for i in range(len(offsets))]
    slashes = torch.eye(384, device=DEVICE, dtype=torch.int32)[offsets]
    verticals = torch.tensor(keys, dtype=torch.int32, device=DEVICE)[None, :, None]
    heads = torch.arange(len(offsets), dtype=torch.int32, device=DEVICE)
    layouts = dict.fromkeys(range(len(offsets)), VerticalSlash(1).stripe_layout(rows))
    index = SparseIndex.allocate(rows, len(offsets), block_tokens, layouts)
    counts = torch.ones(1, len(offsets), dtype=torch.int32, device=DEVICE)
    write_lines(index, (0, 1), heads, Lines(verticals, counts, None, slashes.cumsum(1).int()), 1)
    index.check()
    for head, (offset, key) in enumerate(zip(offsets, keys, strict=True)):
        for i_tile, tile in enumerate(rows.tile_list):
            assert lists(index, head, i_tile) == reference.merge([key], [offset], tile, block_tokens)


@pytest.mark.parametrize("block_tokens", [64, 128])
class TestBeyondOneChunk:
    def test_a_shape(self, block_tokens):
        rows, nothing = unread_row(70, 200_000), torch.empty(0, device=DEVICE)
        indices = [SparseIndex.allocate(rows, 1, block_tokens) for _ in range(2)]
        method, heads = AShape(70_000, 90_000), torch.zeros(1, dtype=torch.int32, device=DEVICE)
        cache = PagedCache(*torch.empty(2, 1, 16, 1, 64, device=DEVICE))
        method.select(nothing, cache, indices[0], heads, 1.0)
        reference.select_a_shape(method, nothing, cache, indices[1], heads, 1.0)
        assert all_lists(indices[0]) == all_lists(indices[1])

    def test_vertical_slash(self, block_tokens):
        rows = unread_row(70, 200_000)
        generator = torch.Generator(DEVICE).manual_seed(0)
        verticals = torch.randperm(200_070, generator=generator, device=DEVICE)[:2500].sort().values
        slashes = torch.rand(200_128, generator=generator, device=DEVICE) < 0.001
        slashes[200_070:] = False
        counts = torch.full((1, 1), 2500, dtype=torch.int32, device=DEVICE)
        index = SparseIndex.allocate(rows, 1, block_tokens, {0: VerticalSlash(2500).stripe_layout(rows)})
        heads = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        lines = Lines(verticals.int().view(1, 1, -1), counts, None, slashes.cumsum(0)[None].int())
        write_lines(index, (0, 1), heads, lines, 1)
        index.check()
        offsets = slashes.nonzero().flatten().tolist()[::-1]
        assert lists(index, 0, 0) == reference.merge(verticals.tolist(), offsets, rows.tile_list[0], block_tokens)

    def test_block_sparse(self, block_tokens):
        method = BlockSparse(100)
        rows = unread_row(70, 200_000)
        scores = torch.randn(1, 2, 3136, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE)
        index, expected = (SparseIndex.allocate(rows, 1, block_tokens) for _ in range(2))
        # The first query block ends at position 200,063, in key block 3125; the second at 200,069, in 3126.
        causal = scores[0, :, :3127].clone()
        causal[0, 3126] = -torch.inf
        reference.set_block_sparse(reference.tile_blocks(causal, 100)[0], expected, 0, 0)
        write_top_blocks(scores, method, index, 0, torch.zeros(1, dtype=torch.int32, device=DEVICE))
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
    """Of made-up sums of two heads; ``numbers`` has (k, forced) of each head."""
    rows = Rows((0,) * len(lengths), (1,) * len(lengths), tuple(n - 1 for n in lengths),
                torch.zeros(len(lengths), 1, dtype=torch.int32, device=DEVICE))  # fmt: skip
    index = SparseIndex.allocate(rows, 2, 64)
    values = made_up(kind, 4 * rows.key_starts[-1]).view(2, 2, -1)
    for start, length, end in zip(rows.key_starts, lengths, rows.key_starts[1:]):
        values[..., start + length : end] = float("nan")  # undefined places of a last tile
    method = VerticalSlash.merged([VerticalSlash(k, k // 2, 64, forced, 2 * forced) for k, forced in numbers])
    sums = Sums(values.flatten(), None, rows.key_starts[-1], 2, 1, 0, len(lengths))
    kept = method.keep_largest(sums, index)
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
    """Against a stable sort: sums with many equals, zeros, denormals; forced ones; k from 0 to more than there are."""
    check_top_k([1, 1000, 8200], kind, numbers)


def test_top_k_where_a_chunk_is_more_than_is_read_at_once():
    check_top_k([70_000], "few", [(2000, 3), (40_000, 0)])
