# SPDX-License-Identifier: Apache-2.0
"""Query-aware heads of FlexPrefill (arXiv:2502.20766, Algorithms 2 and 4): blocks by mean queries and mean keys.

Means tell what a head looks at, or they do not: ā, the softmax over key blocks of (mean of the last queries) · (mean
key), is held against â, what a block really gets from these queries. Where √JSD(ā, â) < τ, the head's tiles keep what
their own mean queries ask for; elsewhere it has lines.

Differences from the paper: γ holds for each tile, not for all of a head's map together, which leaves tiles whose mass
is spread thin with less. ā is that of the chunk's last tile, which may be shorter than the queries of â.
"""

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.sparge_attn.method import keep_top_mass
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import KEY_ALIGN, ROW_FIELDS, TILE_FIELDS, Rows
from vllm_sparse_kernels.select.last_queries import LOG2_E, Sums
from vllm_sparse_kernels.select.parameters import on_device
from vllm_sparse_kernels.select.pooled import (
    ALIGNED,
    KEY_BLOCK_TOKENS,
    KeyPool,
    pool_queries,
    products_of_slabs,
    slabs_of,
)
from vllm_sparse_kernels.workspace import padded_bytes

CHUNK_SCORES = 1024


def write_query_aware(
    q: torch.Tensor,
    cache: PagedCache,
    index: SparseIndex,
    heads: torch.Tensor,
    scale: float,
    shares: tuple[float, ...],
) -> torch.Tensor:
    """Write the lists of ``heads`` as if all were query-aware: per tile the fewest blocks with γ of the mass.

    ``shares``: γ of each head.

    Returns ā's scores in base 2, [len(heads), key_starts[-1] / 64], row i's from ``key_starts[i] / 64`` on.
    """
    rows, workspace = index.rows, index.workspace
    last = workspace.empty(len(heads), rows.key_starts[-1] // KEY_ALIGN)
    with workspace.frame():
        kept_mass, no_judge = on_device(shares, q.device), on_device((-1.0,) * len(heads), q.device)
        slabs = slabs_of(rows, len(heads), cache.num_kv_heads, cache.head_dim, per_tile=1)
        tiles = pool_queries(q, rows, heads, 1, workspace, similar=True)
        pool = KeyPool(cache, rows, slabs, heads, q.shape[1], workspace)
        for slab, scores in products_of_slabs(tiles, pool, slabs, heads, scale * LOG2_E, 1, workspace):
            _take_last_kernel[(slab.num_tiles, len(heads))](
                scores, slab.width, rows.tiles, rows.row_table, slab.first_tile, last, last.stride(0),
                CHUNK=CHUNK_SCORES, BLOCK=KEY_BLOCK_TOKENS, FIELDS=TILE_FIELDS, ROW_FIELDS=ROW_FIELDS,
            )  # fmt: skip
            keep_top_mass(scores, tiles.similarity, index, slab.first_tile, heads, kept_mass, no_judge, True)
    return last


def query_aware_bytes(rows: Rows, num_selected: int) -> int:
    """What ``write_query_aware`` and ``query_aware_heads`` leave in the workspace."""
    num_patterns = num_selected * rows.num_rows
    return padded_bytes(num_selected, rows.key_starts[-1] // KEY_ALIGN) + padded_bytes(num_patterns)


def query_aware_heads(
    index: SparseIndex, sums: Sums, last_queries: int, last: torch.Tensor, max_distance: float
) -> torch.Tensor:
    """[n, num_rows] int32, set for the rows of ``sums``: 1 where √JSD(ā, â) < τ.

    ``last``: ā's scores; ``max_distance``: τ.
    """
    assert sums.by_block is not None
    rows = index.rows
    patterns = index.workspace.empty(sums.num_entries, rows.num_rows, dtype=torch.int32)
    _decide_kernel[(sums.num_entries, sums.end_row - sums.first_row)](
        last, last.stride(0), sums.by_block, rows.row_table, sums.first_row, rows.num_rows, sums.capacity, last_queries,
        max_distance, patterns, QUERIES=sums.by_block.shape[2], BLOCK=KEY_BLOCK_TOKENS, CHUNK=32, FIELDS=ROW_FIELDS,
    )  # fmt: skip
    return patterns


@triton.jit(do_not_specialize=["width", "first_tile", "stride_last"])
def _take_last_kernel(
    scores, width, tiles, rows, first_tile, last, stride_last,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr, ROW_FIELDS: tl.constexpr,
):  # fmt: skip
    """Scores of a row's last tile."""
    i_slab, i_entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tile = tiles + (first_tile + i_slab) * FIELDS
    row = rows + tl.load(tile) * ROW_FIELDS
    if tl.load(tile + 1) + tl.load(tile + 2) == tl.load(row) + tl.load(row + 1):
        source = scores + (i_entry * tl.num_programs(0) + i_slab) * (width * ALIGNED)
        target = last + i_entry * stride_last + tl.load(row + 3) // BLOCK
        num_blocks = tl.cdiv(tl.load(row + 2), BLOCK)
        for start in range(0, num_blocks, CHUNK):
            o_n = start + tl.arange(0, CHUNK)
            tl.store(target + o_n, tl.load(source + o_n, mask=o_n < num_blocks), mask=o_n < num_blocks)


@triton.jit(do_not_specialize=["stride_last", "first_row", "num_rows", "capacity", "last_queries"])
def _decide_kernel(
    last, stride_last, by_block, rows, first_row, num_rows, capacity, last_queries, tau, patterns,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """One head of one row."""
    i_entry, i_row = tl.program_id(0).to(tl.int64), first_row + tl.program_id(1)
    row = rows + i_row * FIELDS
    num_blocks = tl.cdiv(tl.load(row + 2), BLOCK)
    place = tl.load(row + 3)
    scores = last + i_entry * stride_last + place // BLOCK
    begin = (i_entry * capacity + place - tl.load(rows + first_row * FIELDS + 3)) // BLOCK
    o_r = tl.arange(0, QUERIES)
    count = tl.minimum(last_queries, tl.load(row + 1))
    peak, total = float("-inf"), 0.0
    for start in range(0, num_blocks, CHUNK):
        o_n = start + tl.arange(0, CHUNK)
        b_s = tl.load(scores + o_n, mask=o_n < num_blocks, other=float("-inf"))
        higher = tl.maximum(peak, tl.max(b_s, 0))
        total = total * tl.exp2(peak - higher) + tl.sum(tl.exp2(b_s - higher), 0)
        peak = higher
    b_apart = tl.zeros([CHUNK], tl.float32)
    for start in range(0, num_blocks, CHUNK):
        o_n = start + tl.arange(0, CHUNK)
        there = o_n < num_blocks
        b_mean = tl.exp2(tl.load(scores + o_n, mask=there, other=float("-inf")) - peak) / total
        o_part = (begin + o_n)[:, None] * QUERIES + o_r[None, :]
        b_part = tl.load(by_block + o_part, mask=there[:, None] & (o_r >= QUERIES - count)[None, :], other=0.0)
        b_true = tl.sum(b_part, 1) / count
        b_half = (b_mean + b_true) * 0.5
        b_apart += tl.where(b_mean > 0, b_mean * tl.log(b_mean / b_half), 0.0) * 0.5
        b_apart += tl.where(b_true > 0, b_true * tl.log(b_true / b_half), 0.0) * 0.5
    distance = tl.sqrt(tl.maximum(tl.sum(b_apart, 0), 0.0))
    tl.store(patterns + i_entry * num_rows + i_row, (distance < tau).to(tl.int32))
