# SPDX-License-Identifier: Apache-2.0
"""A-shape and block-sparse: kernels against the references, the references against the definitions.

Tests of all three patterns at once are here too.
"""

import pytest
import torch

from benchmarks.batches import random_batch
from tests.methods.cases import DEVICE, F32, all_lists, row_parts, select
from tests.methods.minference_cases import (
    CASES,
    LONG,
    UNIT,
    Case,
    block_sparse_between,
    vertical_slash_between,
)
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.minference import block_sparse as minference, reference
from vllm_sparse_kernels.methods.minference.a_shape import AShape
from vllm_sparse_kernels.methods.minference.block_sparse import PER_TILE, BlockSparse
from vllm_sparse_kernels.methods.minference.vertical_slash import VerticalSlash
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.select.pooled import KeyPool, pool_queries, products_of_slabs, slabs_of
from vllm_sparse_kernels.trial import Batch
from vllm_sparse_kernels.workspace import Workspace


@pytest.mark.full
@pytest.mark.parametrize("case", [*CASES, LONG], ids=str)
@pytest.mark.parametrize("method", [AShape(100, 150), AShape(0, 1), AShape(65, 64)], ids=str)
def test_a_shape_kernel_is_the_reference(case, method):
    batch = case.batch()
    assert all_lists(select(method, batch, case.block_tokens)) == all_lists(
        select(method, batch, case.block_tokens, by_reference=True)
    )


@pytest.mark.full
@pytest.mark.parametrize("case", [*CASES, LONG], ids=str)
@pytest.mark.parametrize("method", [BlockSparse(2)], ids=str)
def test_block_sparse_kernel_is_the_reference(case, method):
    batch = case.batch()
    by_kernel = select(method, batch, case.block_tokens)
    by_reference = select(method, batch, case.block_tokens, by_reference=True)
    block_sparse_between(method, batch, by_kernel, by_reference)


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


@pytest.mark.full
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


@pytest.mark.full
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
        kept = reference.tile_blocks(scores[head, :3].double().masked_fill(unseen[:3], -torch.inf), top_blocks)
        for i_tile in range(2):
            reference.set_block_sparse(kept[i_tile], wanted, head, i_tile)
    assert all_lists(kernel) == all_lists(wanted)


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
    mask = index.to_mask(0)[0]
    assert not (kept & ~mask).any()
    # Nothing beyond the blocks of 64 that hold a sink, or a key of the window of one of the tile's queries.
    first_queries = 437 + (positions - 437) // 128 * 128
    allowed = (keys // 64 <= 99 // 64) | (keys // 64 >= (first_queries - 149) // 64)
    assert not (mask & ~allowed).any()


@pytest.mark.parametrize("method", [AShape(), VerticalSlash(), BlockSparse()], ids=str)
def test_short_prompts_are_dense_at_the_defaults(method):
    """The papers' budgets exceed a few hundred tokens: nothing may be lost."""
    batch = random_batch([(150, 140), (0, 9)], 2, 1, 64, 16, F32, DEVICE)
    assert select(method, batch, 64).density() == 1.0


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
