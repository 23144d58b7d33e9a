"""MInference's lists and top-k alone, from made-up sums and scores: edges of blocks, rows beyond one chunk, equals."""

import math

import pytest
import torch

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.reference import minference as reference
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.select.lines import Lines, write_lines
from vllm_sparse_kernels.select.minference import AShape, write_top_blocks
from vllm_sparse_kernels.select.vertical_slash import VerticalSlash, _join_lse_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def lists(index: SparseIndex, head: int, i_tile: int) -> tuple[list[int], list[int]]:
    return index.blocks_of(head, i_tile).tolist(), index.stripes_of(head, i_tile).tolist()


def all_lists(index: SparseIndex) -> list[tuple[list[int], list[int]]]:
    return [lists(index, head, i) for head in range(index.num_heads) for i in range(index.rows.num_tiles)]


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
    slashes = torch.eye(351, device=DEVICE, dtype=torch.int32)[offsets]
    verticals = torch.tensor(keys, dtype=torch.int32, device=DEVICE)[:, None]
    heads = torch.arange(len(offsets), dtype=torch.int32, device=DEVICE)
    layouts = dict.fromkeys(range(len(offsets)), VerticalSlash(1).stripe_layout(rows))
    index = SparseIndex.allocate(rows, len(offsets), block_tokens, layouts)
    write_lines(index, 0, heads, Lines(verticals, None, None, slashes.cumsum(1).int()), 1)
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
        slashes = torch.rand(200_070, generator=generator, device=DEVICE) < 0.001
        index = SparseIndex.allocate(rows, 1, block_tokens, {0: VerticalSlash(2500).stripe_layout(rows)})
        heads = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        write_lines(index, 0, heads, Lines(verticals[None].int(), None, None, slashes.cumsum(0)[None].int()), 1)
        index.check()
        offsets = slashes.nonzero().flatten().tolist()[::-1]
        assert lists(index, 0, 0) == reference.merge(verticals.tolist(), offsets, rows.tile_list[0], block_tokens)

    def test_block_sparse(self, block_tokens):
        rows = unread_row(70, 200_000)
        scores = torch.randn(1, 2, 3136, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE)
        index, expected = (SparseIndex.allocate(rows, 1, block_tokens) for _ in range(2))
        write_top_blocks(scores, 100, index, 0, torch.zeros(1, dtype=torch.int32, device=DEVICE))
        index.check()
        # The first query block ends at position 200,063, in key block 3125; the second at 200,069, in 3126.
        kept = torch.stack([torch.nn.functional.pad(reference.top(scores[0, i, :n], 100), (0, 3127 - n))
                            for i, n in ((0, 3126), (1, 3127))])  # fmt: skip
        reference.set_block_sparse(kept, expected, 0, 0)
        assert all_lists(index) == all_lists(expected)


@pytest.mark.parametrize("num_splits", [1, 33, 128])
def test_splits_of_the_log_sum_exp(num_splits):
    """More splits than are joined at once, some of which hold no key that a query may see."""
    partial = torch.randn(2, num_splits, 64, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE) * 9
    partial[:, 1:, 5] = -torch.inf
    partial[:, 40:] = -torch.inf
    lse = torch.empty(2, 64, device=DEVICE)
    _join_lse_kernel[(2,)](partial, lse, num_splits, SPLITS=32)
    exact = torch.logsumexp(partial.double() * math.log(2), 1) / math.log(2)
    torch.testing.assert_close(lse.double(), exact, rtol=2.0**-21, atol=2.0**-21)


@pytest.mark.parametrize("length", [1, 1000, 8200])
@pytest.mark.parametrize("values", ["distinct", "integers", "few", "tiny", "equal"])
def test_top_k_is_exact_and_takes_the_earliest_of_equals(length, values):
    """Against a stable sort: sums with many equals, zeros, denormals; forced ones; k from 0 to more than there are."""
    generator = torch.Generator(DEVICE).manual_seed(length)
    sums = torch.rand(2, 1, (length + 63) // 64 * 64, generator=generator, device=DEVICE)
    if values == "integers":  # their bits end in zeros: the search stops at the k-th value itself
        sums = sums.argsort(-1).float()
    elif values == "few":
        sums = (sums * 4).floor() / 4
    elif values == "tiny":
        sums = sums * 1e-38 * (sums > 0.5)
    elif values == "equal":
        sums = torch.zeros_like(sums)
    sums[..., length:] = float("nan")  # undefined places of the last tile
    for k, forced in ((0, 0), (1, 0), (length // 3, 50), (20, 50), (length + 9, 0)):
        method = VerticalSlash(k, k, 64, forced, forced)
        lines = method._keep_largest(sums, length)
        for kind in range(2):
            kept = reference.keep(sums[kind, 0, :length], k, forced)
            assert int(kept.sum()) == min(k, length)
            if kind == 0:
                assert lines.columns[0].tolist() == kept.nonzero().flatten().tolist()
            else:
                assert torch.equal(lines.bands_upto[0, :length], kept.cumsum(0).int())
