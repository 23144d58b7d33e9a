# SPDX-License-Identifier: Apache-2.0
"""A-shape, vertical-slash and block-sparse: kernels against the references, the references against the definitions.

Where a score lies so close to the smallest kept one that rounding decides, a kernel may keep either: the selection must
hold everything that is surely kept and nothing that is surely not. The margins are worst-case bounds of float32
arithmetic, u = 2⁻²⁴ per operation, computed from the data in float64.
"""

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.reference import minference as reference
from vllm_sparse_kernels.reference.flex_vertical_slash import block_diagonals, softmax_of
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.select import METHODS, lines, minference, name_of
from vllm_sparse_kernels.select.base import Method
from vllm_sparse_kernels.select.last_queries import last_query_sums
from vllm_sparse_kernels.select.minference import PER_TILE, AShape, BlockSparse
from vllm_sparse_kernels.select.pooled import KeyPool, pool_queries, products_of_slabs, slabs_of
from vllm_sparse_kernels.select.vertical_slash import VerticalSlash, VerticalSlashLayer
from vllm_sparse_kernels.testing.batches import Batch, random_batch
from vllm_sparse_kernels.workspace import Workspace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies bf16 tiles wrongly, without an error.
F32, F16 = (torch.bfloat16, torch.float16) if DEVICE == "cuda" else (torch.float32, torch.float16)
UNIT = 2.0**-24
POISON = -7


@dataclass(frozen=True)
class Case:
    lengths: tuple[tuple[int, int], ...]
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 64
    page_size: int = 16
    block_tokens: int = 64
    dtype: torch.dtype = F32
    layout: str = "NHD"

    def batch(self) -> Batch:
        return random_batch(
            self.lengths, self.num_heads, self.num_kv_heads, self.head_dim, self.page_size, self.dtype, DEVICE,
            layout=self.layout, gap_tokens=3,
        )  # fmt: skip


CASES = [
    Case(((0, 1), (64, 1), (0, 63))),
    Case(((37, 130), (5, 63)), 2, 2, dtype=F16, page_size=64, block_tokens=128, layout="HND"),
    Case(((301, 130), (0, 1)), 4, 2, block_tokens=128),
    Case(((0, 1000),), 1, 1, dtype=F16, page_size=128, layout="HND"),
    Case(((300, 63),), 8, 1, page_size=48, dtype=F16),
    Case(((129, 70),), 6, 2, head_dim=96, block_tokens=128, page_size=128),
    Case(((200, 129),), 2, 1, head_dim=128, dtype=F16),
    Case(((90, 65),), 2, 1, head_dim=256, block_tokens=128),
]
LONG = Case(((0, 2049),), 1, 1, page_size=64, dtype=F16)


def select(method: Method, batch: Batch, block_tokens: int, heads: list[int] | None = None, by_reference=False):
    """The selection of ``heads`` (all unless told) in a poisoned index."""
    heads = list(range(batch.num_heads)) if heads is None else heads
    layout = method.stripe_layout(batch.rows)
    index = SparseIndex.allocate(batch.rows, batch.num_heads, block_tokens, dict.fromkeys(heads, layout))
    poisoned = [index.block_counts, index.block_ids, index.stripe_positions]
    for tensor in [*poisoned, index.stripe_counts] if layout.capacity else poisoned:
        tensor.fill_(POISON)
    run = (lambda *a: METHODS[name_of(method)].reference(method, *a)) if by_reference else method.select
    run(batch.q, batch.cache, index, torch.tensor(heads, dtype=torch.int32, device=DEVICE), batch.scale)
    if len(heads) == batch.num_heads:
        index.check()
    return index


def lists(index: SparseIndex, head: int, i_tile: int) -> tuple[list[int], list[int]]:
    return index.blocks_of(head, i_tile).tolist(), index.stripes_of(head, i_tile).tolist()


def all_lists(index: SparseIndex) -> list[tuple[list[int], list[int]]]:
    return [lists(index, head, i) for head in range(index.num_heads) for i in range(index.rows.num_tiles)]


def row_parts(batch: Batch, row: int, head: int, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """A row's queries and keys of one head: [query_len, d], [seq_len, d]."""
    token, query_len = batch.rows.tokens[row], batch.rows.query_lens[row]
    keys, _ = batch.cache.gather(batch.rows.block_table[row], batch.rows.seq_lens[row])
    i_kv = head // (batch.num_heads // batch.cache.num_kv_heads)
    return batch.q[token : token + query_len, head].to(dtype), keys[:, i_kv].to(dtype)


def sure_and_possible(scores: torch.Tensor, k: int, margin: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
    """Flags of what every top k within ``margin`` of float64 keeps, and of what one may keep, along the last axis."""
    if k >= scores.shape[-1]:
        return torch.ones_like(scores, dtype=torch.bool), torch.ones_like(scores, dtype=torch.bool)
    if k == 0:
        return torch.zeros_like(scores, dtype=torch.bool), torch.zeros_like(scores, dtype=torch.bool)
    ordered = (scores - margin).sort(-1, descending=True).values, (scores + margin).sort(-1, descending=True).values
    # Kept for sure: above the largest that the first one left out may be. Possible: reaching the k-th at its smallest.
    return scores - margin > ordered[1][..., k : k + 1], scores + margin >= ordered[0][..., k - 1 : k]


def vertical_slash_bounds(method: VerticalSlash, batch: Batch, row: int, head: int):
    """(surely, possibly kept) verticals, the same of slashes.

    An element of Â is exp(s - lse). The rounding of s is at most (d + 4) u Σ|q k| · scale, of lse no more than that
    and seq_len u for its sum; the sum over the queries adds 64 u: the relative error is twice the first and the rest.
    """
    q, keys = row_parts(batch, row, head)
    q = q[-method.last_queries :]
    size = float((q.abs() @ keys.abs().T).max()) * batch.scale
    # Sums alike in ten bits of the mantissa count as equal.
    relative = UNIT * (2 * (q.shape[1] + 4) * size + len(keys) + 64 + 8) + 2.0**-11
    bounds = []
    for sums, k, forced in zip(
        reference.vertical_slash_sums(q, keys, batch.scale),
        (method.vertical_tokens, method.slash_tokens),
        (method.forced_verticals, method.forced_slashes),
        strict=True,
    ):
        margin = sums * relative
        # In order, far above the others, and in float64, as float32 could not tell them apart there.
        sums[:forced] = 1e9 - torch.arange(len(sums[:forced]), dtype=sums.dtype, device=sums.device)
        bounds.append(sure_and_possible(sums, k, margin))
    return bounds


def check_between(lower: SparseIndex, index: SparseIndex, upper: SparseIndex) -> None:
    """Blocks, and keys in all, hold those of ``lower`` and lie within those of ``upper``; few keys are left open.

    Keys are counted, not lists: one undecided line of a long row is in every list, and still hardly any of its keys.
    """
    num_open = num_possible = 0
    for head in range(index.num_heads):
        for i_tile in range(index.rows.num_tiles):
            low, given, high = (x.blocks_of(head, i_tile) for x in (lower, index, upper))
            assert torch.isin(low, given).all(), (
                f"head {head}, tile {i_tile}: {low.tolist()} not all in {given.tolist()}"
            )
            assert torch.isin(given, high).all(), f"head {head}, tile {i_tile}: {given.tolist()} beyond {high.tolist()}"
            low, given, high = (x.tile_keys(head, i_tile) for x in (lower, index, upper))
            assert not (low & ~given).any(), f"head {head}, tile {i_tile}: keys missing"
            assert not (given & ~high).any(), f"head {head}, tile {i_tile}: keys too many"
            num_open += int((high & ~low).sum())
            num_possible += int(high.sum())
    assert num_open <= 0.05 * num_possible, f"margins leave {num_open} of {num_possible} keys open"


def vertical_slash_between(method: VerticalSlash, batch: Batch, *indices: SparseIndex) -> None:
    rows = batch.rows
    layouts = dict.fromkeys(range(batch.num_heads), VerticalSlash(10**9).stripe_layout(rows))
    lower, upper = (SparseIndex.allocate(rows, batch.num_heads, indices[0].block_tokens, layouts) for _ in range(2))
    for row in range(rows.num_rows):
        for head in range(batch.num_heads):
            verticals, slashes = vertical_slash_bounds(method, batch, row, head)
            for i_tile in range(rows.tile_starts[row], rows.tile_starts[row + 1]):
                for bound, index in enumerate((lower, upper)):
                    reference.set_vertical_slash(verticals[bound], slashes[bound], index, head, i_tile)
    for index in indices:
        check_between(lower, index, upper)


def block_sparse_between(method: BlockSparse, batch: Batch, *indices: SparseIndex) -> None:
    """A mean of 64 has error 64 u of the mean magnitude, a product of d terms d u: 2 · 65 + d + 2 roundings in all.

    A tile's mass is joined from differences of two such scores, one of them within a logarithm of a sum of n terms:
    twice the largest error of a product, n u for the sum, and 16 u of the magnitudes for the functions.
    """
    rows = batch.rows
    lower, upper = (SparseIndex.allocate(rows, batch.num_heads, indices[0].block_tokens) for _ in range(2))
    for row in range(rows.num_rows):
        for head in range(batch.num_heads):
            q, keys = row_parts(batch, row, head)
            scores = reference.block_scores(q, keys, batch.scale)
            size = reference.mean_pool(q.abs()) @ reference.mean_pool(keys.abs()).T * batch.scale
            margin = UNIT * (q.shape[1] + 132) * size
            if method.per_query_block:
                bounds = sure_and_possible(scores, method.top_blocks, margin)
                bounds = [reference.by_tile(kept & (scores > -torch.inf), False).any(1) for kept in bounds]
            else:
                margin = 2 * float(margin.max()) + UNIT * (scores.shape[1] + 16 * (1 + float(size.max())))
                mass = reference.tile_mass(scores)
                bounds = [kept & (mass > -torch.inf) for kept in sure_and_possible(mass, method.top_blocks, margin)]
            for i_tile in range(rows.tile_starts[row], rows.tile_starts[row + 1]):
                for kept, index in zip(bounds, (lower, upper), strict=True):
                    reference.set_block_sparse(kept[i_tile - rows.tile_starts[row]], index, head, i_tile)
    for index in indices:
        check_between(lower, index, upper)


def vertical_slash_of(case: Case) -> VerticalSlash:
    """Parameters that leave something out at a case's length."""
    total = max(c + n for c, n in case.lengths)
    return VerticalSlash(total // 10, total // 40, 64, total // 40, total // 100)


@pytest.mark.parametrize("case", [*CASES, LONG], ids=str)
@pytest.mark.parametrize("method", [AShape(100, 150), AShape(0, 1), AShape(65, 64)], ids=str)
def test_a_shape_kernel_is_the_reference(case, method):
    batch = case.batch()
    assert all_lists(select(method, batch, case.block_tokens)) == all_lists(
        select(method, batch, case.block_tokens, by_reference=True)
    )


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


@pytest.mark.parametrize("by_reference", [False, True], ids=["kernels", "reference"])
def test_segments_of_a_chunk_select_as_chunks_of_their_own(by_reference):
    """Tiles of 128 + 128 + 44 queries in segments of 1, 2, 3 tiles: the lists of chunks that come one by one."""
    batch = random_batch([(137, 300), (0, 10)], 2, 1, 64, 16, F32, DEVICE)
    rows = batch.rows
    whole = VerticalSlash(20, 9, 64, 3, 2)
    for segment_tokens, lengths in ((128, (128, 128, 44)), (300, (256, 44)), (500, (300,))):
        method = dataclasses.replace(whole, segment_tokens=segment_tokens)
        index = select(method, batch, 64, by_reference=by_reference)
        index.check()
        begin, i_tile = 0, 0
        for length in lengths:
            alone = Rows((rows.tokens[0] + begin,), (length,), (137 + begin,), rows.block_table[:1])
            expected = select(whole, dataclasses.replace(batch, rows=alone), 64, by_reference=by_reference)
            for i in range(alone.num_tiles):
                for head in range(2):
                    assert lists(index, head, i_tile + i) == lists(expected, head, i)
            begin, i_tile = begin + length, i_tile + alone.num_tiles
    with pytest.raises(ValueError, match="segment_tokens: given 127, expected a number of queries >= 128, or none"):
        VerticalSlash(segment_tokens=127)


@pytest.mark.parametrize("case", [*CASES, LONG], ids=str)
@pytest.mark.parametrize("method", [BlockSparse(2), BlockSparse(2, per_query_block=False)], ids=str)
def test_block_sparse_kernel_is_the_reference(case, method):
    batch = case.batch()
    by_kernel = select(method, batch, case.block_tokens)
    by_reference = select(method, batch, case.block_tokens, by_reference=True)
    block_sparse_between(method, batch, by_kernel, by_reference)


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


@pytest.mark.parametrize(("band", "queries", "spread"), [(1, 64, False), (64, 128, False), (64, 50, True)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_are_those_of_the_softmax(case, band, queries, spread):
    """Heads of one's own choice, all rows at once."""
    batch = case.batch()
    check_sums(batch, [batch.num_heads - 1, 0][: batch.num_heads], band, queries, spread)


def test_more_splits_than_are_joined_at_once():
    check_sums(random_batch([(4299, 70)], 1, 1, 64, 128, F32, DEVICE), [0], 64)


def test_queries_spread_over_a_chunk():
    """Of more queries than are asked, over several key tiles that some of them may not look at."""
    check_sums(random_batch([(100, 333), (0, 40)], 4, 2, 64, 16, F32, DEVICE), [0, 3], 64, 256, spread=True)


SETTINGS = [VerticalSlash(40, 9, 64, 3, 2), VerticalSlash(7, 60, 64, 0, 50), VerticalSlash(0, 0), VerticalSlash(400, 3)]


@pytest.mark.parametrize("by_reference", [False, True], ids=["kernels", "reference"])
def test_heads_with_numbers_of_their_own_select_what_they_select_alone(by_reference):
    batch = random_batch([(137, 100), (0, 70)], 4, 2, 64, 16, F32, DEVICE)
    merged = VerticalSlash.merged(SETTINGS)
    assert isinstance(merged, VerticalSlashLayer)
    heads = [2, 0, 3, 1]
    layouts = {head: one.stripe_layout(batch.rows) for head, one in zip(heads, SETTINGS, strict=True)}
    index = SparseIndex.allocate(batch.rows, 4, 64, layouts)
    ids = torch.tensor(heads, dtype=torch.int32, device=DEVICE)
    run = reference.select_vertical_slash if by_reference else VerticalSlash.select
    run(merged, batch.q, batch.cache, index, ids, batch.scale)
    index.check()
    for head, one in zip(heads, SETTINGS, strict=True):
        alone = select(one, batch, 64, [head], by_reference)
        for i_tile in range(batch.rows.num_tiles):
            assert lists(index, head, i_tile) == lists(alone, head, i_tile)


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


@pytest.mark.parametrize("by_reference", [False, True], ids=["kernels", "reference"])
@pytest.mark.parametrize(
    "methods",
    [
        [AShape(0, 1), AShape(100, 150), AShape(65, 64), AShape(1 << 40, 1 << 40)],
        [BlockSparse(0), BlockSparse(2), BlockSparse(1), BlockSparse(1 << 40)],
        [BlockSparse(n, per_query_block=False) for n in (3, 0, 1, 3)],
    ],
    ids=["a_shape", "block_sparse", "block_sparse of tiles"],
)
def test_patterns_of_one_launch_have_numbers_of_their_own(methods, by_reference):
    """In an order of their own: the lists that each head has by itself."""
    batch, heads = random_batch([(300, 130), (0, 65)], 4, 2, 64, 16, F32, DEVICE, gap_tokens=3), [2, 0, 3, 1]
    merged = type(methods[0]).merged(methods)
    assert list(merged.of_heads(4)) == methods
    assert merged.alike == methods[0].alike
    assert name_of(merged) == name_of(methods[0])
    assert type(methods[0]).merged(methods[:1] * 2) == methods[0]
    index = SparseIndex.allocate(batch.rows, 4, 64)
    ids = torch.tensor(heads, dtype=torch.int32, device=DEVICE)
    run = METHODS[name_of(merged)].reference if by_reference else type(merged).select
    run(merged, batch.q, batch.cache, index, ids, batch.scale)
    found = []
    for head, one in zip(heads, methods, strict=True):
        alone = select(one, batch, 64, [head], by_reference)
        found.append([lists(index, head, i_tile) for i_tile in range(batch.rows.num_tiles)])
        assert found[-1] == [lists(alone, head, i_tile) for i_tile in range(batch.rows.num_tiles)]
    assert found[0] != found[1] != found[2]


def test_rows_in_slabs_are_the_same(monkeypatch):
    """As many rows at a time as the workspace allows, down to one; and what a slab took is free again after it."""
    batch = random_batch([(0, 65), (201, 130), (9, 1)], 2, 1, 64, 16, F32, DEVICE, gap_tokens=3)
    method = VerticalSlash(30, 10, 64, 5, 5)
    together = select(method, batch, 64)
    for num_bytes, slabs in ((0, [(0, 1), (1, 2), (2, 3)]), (2 * 4096 * 2 * lines.KEY_BYTES, [(0, 2), (2, 3)])):
        monkeypatch.setattr(lines, "SLAB_BYTES", num_bytes)
        index = select(method, batch, 64)
        assert list(lines.slabs_of_rows(index, 2)) == slabs
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


def test_reference_block_scores_by_their_definition():
    generator = torch.Generator().manual_seed(0)
    q, keys = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (150, 190))
    scores = reference.block_scores(q, keys, 0.3)
    assert scores.shape == (3, 3)
    for i, (q_start, q_end) in enumerate([(0, 64), (64, 128), (128, 150)]):
        for j, (k_start, k_end) in enumerate([(0, 64), (64, 128), (128, 190)]):
            exact = 0.3 * (q[q_start:q_end].mean(0) @ keys[k_start:k_end].mean(0))
            # Queries lie at positions 40 to 189; the first block's last one, 103, is before the third block's keys.
            assert scores[i, j] == (-torch.inf if (i, j) == (0, 2) else pytest.approx(float(exact)))


tiles = st.fixed_dictionaries(
    {
        "context_len": st.integers(0, 300),
        "query_len": st.integers(1, 300),
        "block_tokens": st.sampled_from([64, 128]),
        "density": st.sampled_from([0.0, 0.003, 0.03, 0.3]),
        "seed": st.integers(0, 1000),
    }
)


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


@pytest.mark.parametrize(("context_len", "query_len"), [(4200, 65), (70, 4200)])
def test_pooled_scores_beyond_one_tile(context_len, query_len):
    """More than 64 query or key blocks, within the bound of ``block_sparse_between``."""
    batch = random_batch([(context_len, query_len)], 1, 1, 64, 128, F32, DEVICE)
    heads = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    q, keys = row_parts(batch, 0, 0)
    exact = reference.block_scores(q, keys, batch.scale)
    size = reference.mean_pool(q.abs()) @ reference.mean_pool(keys.abs()).T * batch.scale
    workspace = Workspace(batch.rows.device)
    slabs = slabs_of(batch.rows, 1, 1, 64, PER_TILE)
    queries = pool_queries(batch.q, batch.rows, heads, PER_TILE, workspace, similar=False)
    pool = KeyPool(batch.cache, batch.rows, slabs, heads, 1, workspace)
    for slab, scores in products_of_slabs(queries, pool, slabs, heads, batch.scale, PER_TILE, workspace):
        assert slab == slabs[0]
        scores = scores[0, : exact.shape[0], : exact.shape[1]]
        assert (((scores - exact).abs() <= UNIT * (64 + 132) * size) | (exact == -torch.inf)).all()


@pytest.mark.parametrize("held", [64, 128, 2048])
@pytest.mark.parametrize("top_blocks", [0, 3, 40, 10**9])
def test_long_rows_are_joined_in_parts(held, top_blocks, monkeypatch):
    """More scores than stay in registers, of a tile with two query blocks and of one with one; scores of a thousand."""
    monkeypatch.setattr(minference, "HELD_BLOCKS", held)
    rows = Rows((0,), (190,), (64 * 200,), torch.zeros(1, 1, dtype=torch.int32, device=DEVICE))
    generator = torch.Generator(DEVICE).manual_seed(held)
    scores = torch.randn(2, 4, 256, generator=generator, device=DEVICE)
    scores *= torch.tensor([3.0, 1000.0], device=DEVICE)[:, None, None]
    last = torch.tensor([63, 127, 189, -1], device=DEVICE) + rows.context_lens[0]
    unseen = 64 * torch.arange(256, device=DEVICE) > last[:, None]
    unseen[3] = True
    heads = torch.arange(2, dtype=torch.int32, device=DEVICE)
    kernel, wanted = (SparseIndex.allocate(rows, 2, 64) for _ in range(2))
    method = BlockSparse(top_blocks)
    minference.write_top_blocks(scores.masked_fill(unseen, torch.nan), method, kernel, 0, heads)
    for head in range(2):
        kept = reference.tile_blocks(method, scores[head, :3].double().masked_fill(unseen[:3], -torch.inf))
        for i_tile in range(2):
            reference.set_block_sparse(kept[i_tile], wanted, head, i_tile)
    assert all_lists(kernel) == all_lists(wanted)


def test_top_blocks_is_the_budget_of_a_tile():
    """Both query blocks' masses count: what each wants most, at most k_b beside the diagonal, part of the union."""
    batch = random_batch([(900, 600)], 2, 1, 64, 16, F32, DEVICE)
    batch.q.mul_(4.0)
    tile, union = (select(BlockSparse(3, per_query_block=flag), batch, 64) for flag in (False, True))
    once = select(BlockSparse(6, per_query_block=False), batch, 64)
    for head in range(2):
        for i_tile, place in enumerate(batch.rows.tile_list):
            before = [i for i in tile.blocks_of(head, i_tile).tolist() if i < tile.first_diagonal_block(place)]
            assert len(before) <= 3
            of_both = set(union.blocks_of(head, i_tile).tolist())
            assert len(of_both) <= 3 + 3 + 3
            assert set(before) <= set(once.blocks_of(head, i_tile).tolist())
    assert tile.density() < union.density() < 1


def test_tile_mass_by_its_definition():
    scores = torch.tensor([[1.0, 2.0, -torch.inf], [0.5, -1.0, 3.0], [0.0, 4.0, 1.0]], dtype=torch.float64)
    weights = [[math.exp(x) / sum(map(math.exp, row)) for x in row] for row in scores.tolist()]
    mass = reference.tile_mass(scores).exp()
    assert mass[0].tolist() == pytest.approx([a + b for a, b in zip(weights[0], weights[1], strict=True)])
    assert mass[1].tolist() == pytest.approx(weights[2])


@pytest.mark.parametrize("top_blocks", [1, 3])
def test_block_sparse_takes_the_earliest_of_equals(top_blocks):
    """Equal keys give equal products; those of head 1 are negative."""
    batch = random_batch([(500, 70)], 2, 1, 64, 16, F32, DEVICE)
    keys = torch.full_like(batch.cache.keys, 0.5)
    batch = Batch(torch.ones_like(batch.q), PagedCache(keys, keys), batch.rows, batch.scale)
    batch.q[:, 1] = -1.0
    for per_query_block in (False, True):
        index = select(BlockSparse(top_blocks, per_query_block), batch, 64)
        assert all_lists(index) == [([*range(top_blocks), 7, 8], [])] * 2


def test_a_shape_keeps_sinks_and_windows_and_little_else():
    batch = random_batch([(437, 200)], 1, 1, 64, 16, F32, DEVICE)
    index = select(AShape(100, 150), batch, 64)
    positions, keys = torch.arange(437, 637, device=DEVICE)[:, None], torch.arange(637, device=DEVICE)
    kept = ((keys < 100) | (keys > positions - 150)) & (keys <= positions)
    mask = index.to_mask(0)[0]
    assert not (kept & ~mask).any()
    # Nothing beyond the blocks of 64 that hold a sink, or a key of the window of one of the tile's queries.
    first_queries = 437 + (positions - 437) // 128 * 128
    allowed = (keys // 64 <= 99 // 64) | (keys // 64 >= (first_queries - 149) // 64)
    assert not (mask & ~allowed).any()


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


@pytest.mark.parametrize(
    "method", [AShape(), VerticalSlash(), BlockSparse(), BlockSparse(per_query_block=False)], ids=str
)
def test_short_prompts_are_dense_at_the_defaults(method):
    """The papers' budgets exceed a few hundred tokens: nothing may be lost."""
    batch = random_batch([(150, 140), (0, 9)], 2, 1, 64, 16, F32, DEVICE)
    assert select(method, batch, 64).density() == 1.0


@pytest.mark.parametrize(
    "method",
    [AShape(50, 50), VerticalSlash(30, 10, 64, 5, 5), BlockSparse(1), BlockSparse(1, True)],
    ids=lambda m: type(m).__name__,
)
class TestIndependence:
    def test_only_the_heads_asked_for_are_written(self, method):
        batch = random_batch([(200, 70)], 4, 2, 64, 16, F32, DEVICE)
        everything = select(method, batch, 64)
        index = select(method, batch, 64, heads=[3, 0])
        for head in (0, 3):
            assert lists(index, head, 0) == lists(everything, head, 0)
        for head in (1, 2):
            assert (index.block_counts[head] == POISON).all()
            assert (index.block_ids[head] == POISON).all()

    def test_neither_neighbours_nor_pages_matter(self, method):
        """Bitwise the same lists for a row alone, among others, and on other pages."""
        batch = random_batch([(0, 65), (201, 130), (9, 1)], 2, 1, 64, 16, F32, DEVICE, gap_tokens=3)
        together = select(method, batch, 64)
        for page_size, layout in ((16, "NHD"), (48, "HND")):
            other = random_batch([(201, 130)], 2, 1, 64, page_size, F32, DEVICE, seed=5, layout=layout)
            copied = batch.cache.gather(batch.rows.block_table[1], 331)
            positions = torch.arange(331, device=DEVICE)
            slots = (other.rows.block_table[0][positions // page_size].long(), positions % page_size)
            other.cache.keys[slots], other.cache.values[slots] = copied
            other.q.copy_(batch.q[batch.rows.tokens[1] : batch.rows.tokens[1] + 130])
            alone = select(method, other, 64)
            first = batch.rows.tile_starts[1]
            for head in range(2):
                for i_tile in range(2):
                    assert lists(alone, head, i_tile) == lists(together, head, first + i_tile)


@pytest.mark.parametrize(
    ("method", "field", "value"),
    [
        (AShape, "sink_tokens", -1),
        (AShape, "local_tokens", 0),
        (BlockSparse, "top_blocks", -1),
        (VerticalSlash, "vertical_tokens", -1),
        (VerticalSlash, "slash_tokens", -1),
        (VerticalSlash, "forced_verticals", -1),
        (VerticalSlash, "forced_slashes", -1),
        (VerticalSlash, "last_queries", 0),
        (VerticalSlash, "last_queries", 65),
    ],
)
def test_parameters_out_of_range_are_refused(method, field, value):
    with pytest.raises(ValueError, match=f"{field}: given {value}, expected"):
        method(**{field: value})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_tokens", [64, 128])
@pytest.mark.parametrize("lengths", [((0, 2049),), ((1000, 8192),), ((4000, 2049), (0, 63), (130, 1000))], ids=str)
class TestOnGpu:
    def batch(self, lengths, dtype) -> Batch:
        return Case(lengths, 8, 2, 128, 128, dtype=dtype).batch()

    def test_a_shape(self, lengths, block_tokens, dtype):
        batch, method = self.batch(lengths, dtype), AShape(300, 700)
        assert all_lists(select(method, batch, block_tokens)) == all_lists(
            select(method, batch, block_tokens, by_reference=True)
        )

    def test_vertical_slash(self, lengths, block_tokens, dtype):
        batch, method = self.batch(lengths, dtype), VerticalSlash(200, 40)
        vertical_slash_between(method, batch, select(method, batch, block_tokens))

    def test_block_sparse(self, lengths, block_tokens, dtype):
        batch, method = self.batch(lengths, dtype), BlockSparse(5)
        block_sparse_between(method, batch, select(method, batch, block_tokens))


@pytest.mark.gpu
@pytest.mark.parametrize("method", [AShape(300, 700), VerticalSlash(200, 40), BlockSparse(5)], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(method):
    """One row alone and the same row among 15 others: the same lists."""
    batch = random_batch(
        [(130 * i, 100 + 77 * i) for i in range(16)], 8, 2, 128, 128, torch.bfloat16, "cuda", gap_tokens=3
    )
    together, rows = select(method, batch, 64), batch.rows
    for row in (0, 7, 15):
        alone = Rows(
            rows.tokens[row : row + 1],
            rows.query_lens[row : row + 1],
            rows.context_lens[row : row + 1],
            rows.block_table[row : row + 1],
        )
        index = select(method, Batch(batch.q, batch.cache, alone, batch.scale), 64)
        for head in range(8):
            for i_tile in range(alone.num_tiles):
                assert lists(index, head, i_tile) == lists(together, head, rows.tile_starts[row] + i_tile)
