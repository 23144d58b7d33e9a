"""A-shape and block-sparse heads of MInference (arXiv:2407.02490), section 3; vertical-slash has a file of its own.

*A-shape*: the query at position p keeps the keys [0, sink) and (p - local, p]. *Block-sparse* (Algorithm 3): queries
and keys averaged in 64s, the k_b key blocks with the largest products for each query block.

Deviations from the paper:

* A tile of 128 queries keeps what any of its queries keeps, in whole blocks: the A-shape of the union of their
  windows, and the union of two query blocks (and of two key blocks where blocks are 128 keys).
* Query blocks are counted from the row's first query of this step, key blocks from position 0. The last block of either
  is averaged over the tokens that exist; the authors' code fills it up with zeros.
* A key block is a candidate when its first key is not later than the query block's last query. The paper takes the
  softmax of the products first, which keeps their order within a query block: it is left out.
* Diagonal blocks are always kept, beyond the k_b. Equal products: the earliest block first.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache, key_offsets
from vllm_sparse_kernels.rows import TILE_FIELDS, Rows, ceil_div
from vllm_sparse_kernels.select.base import Method, require
from vllm_sparse_kernels.select.lists import CHUNK_BLOCKS, append, tile_blocks
from vllm_sparse_kernels.select.topk import ALIGNED, kept_in_chunk, kth_largest, load_bits

POOL = tl.constexpr(64)
"""Tokens of a pooled query or key: the paper's block_size."""


@dataclass(frozen=True)
class AShape(Method):
    """Global tokens ``sink_tokens`` and local window ``local_tokens``, the paper's 1k and 4k."""

    block_tokens = 128

    sink_tokens: int = 1024
    local_tokens: int = 4096

    def __post_init__(self) -> None:
        require(self.sink_tokens >= 0, "sink_tokens", self.sink_tokens, ">= 0")
        require(self.local_tokens >= 1, "local_tokens", self.local_tokens, ">= 1")

    def select(self, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float) -> None:
        _a_shape_kernel[(index.rows.num_tiles, len(heads))](
            heads, index.rows.tiles, index.rows.num_tiles, index.block_counts, index.block_ids,
            index.block_ids.stride(0), index.block_offsets, self.sink_tokens, self.local_tokens,
            BLOCK_N=index.block_tokens, CHUNK=CHUNK_BLOCKS, FIELDS=TILE_FIELDS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles", "stride_ids", "sink_tokens", "local_tokens"])
def _a_shape_kernel(
    heads, tiles, num_tiles, block_counts, block_ids, stride_ids, block_offsets, sink_tokens, local_tokens,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    i_tile = tl.program_id(0)
    i_head = tl.load(heads + tl.program_id(1)).to(tl.int64)
    num_causal = tile_blocks(tiles, i_tile, BLOCK_N, FIELDS)[1]
    num_sink = tl.minimum((sink_tokens + BLOCK_N - 1) // BLOCK_N, num_causal)
    oldest = tl.maximum(tl.load(tiles + i_tile * FIELDS + 3) - local_tokens + 1, 0)  # key of the first query's window
    first_local = tl.maximum(oldest // BLOCK_N, num_sink)
    count = num_sink + num_causal - first_local
    target = block_ids + i_head * stride_ids + tl.load(block_offsets + i_tile)
    for start in range(0, count, CHUNK):
        o_n = start + tl.arange(0, CHUNK)
        tl.store(target + o_n, tl.where(o_n < num_sink, o_n, o_n - num_sink + first_local), mask=o_n < count)
    tl.store(block_counts + i_head * num_tiles + i_tile, count)


@dataclass(frozen=True)
class BlockSparse(Method):
    """k_b ``top_blocks`` blocks of 64 keys for each block of 64 queries."""

    top_blocks: int = 100

    def __post_init__(self) -> None:
        require(self.top_blocks >= 0, "top_blocks", self.top_blocks, ">= 0")

    def select(self, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float) -> None:
        for row in range(index.rows.num_rows):
            write_top_blocks(pooled_scores(q, cache, index.rows, row, heads, scale), self.top_blocks, index, row, heads)


def pooled_scores(
    q: torch.Tensor, cache: PagedCache, rows: Rows, row: int, heads: torch.Tensor, scale: float
) -> torch.Tensor:
    """scale · q̂ k̂ᵀ of one row: [len(heads), query blocks, key blocks rounded up to 64] float32.

    Undefined where none of the queries may look.
    """
    query_len, seq_len = rows.query_lens[row], rows.seq_lens[row]
    num_q, num_k = ceil_div(query_len, POOL.value), ceil_div(seq_len, POOL.value)
    num_entries, group = len(heads), q.shape[1] // cache.num_kv_heads
    head_dim, block_d = cache.head_dim, triton.next_power_of_2(cache.head_dim)
    shape = {"HEAD_DIM": head_dim, "BLOCK_D": block_d}
    pooled_q = torch.empty(num_entries, num_q, head_dim, dtype=torch.float32, device=q.device)
    pooled_k = torch.empty(cache.num_kv_heads, num_k, head_dim, dtype=torch.float32, device=q.device)
    width = ceil_div(num_k, ALIGNED.value) * ALIGNED.value
    scores = torch.empty(num_entries, num_q, width, dtype=torch.float32, device=q.device)
    _pool_queries_kernel[(num_q, num_entries)](
        q, q.stride(0), q.stride(1), heads, rows.tokens[row], query_len, pooled_q, **shape
    )
    _pool_keys_kernel[(num_k, cache.num_kv_heads)](
        cache.keys, *cache.strides, cache.page_size, rows.block_table, rows.block_table.stride(0), row, seq_len,
        heads, num_entries, pooled_k, **shape, GROUP=group, ENTRIES=triton.next_power_of_2(num_entries),
    )  # fmt: skip
    block = 64 if block_d <= 128 else 32
    _scores_kernel[(ceil_div(num_k, block), ceil_div(num_q, block), num_entries)](
        pooled_q, pooled_k, scores, heads, num_q, num_k, rows.context_lens[row], scale, **shape,
        GROUP=group, BLOCK=block,
    )  # fmt: skip
    return scores


@triton.jit
def _mean(b_x, count):
    return tl.sum(b_x.to(tl.float32), 0) / count


@triton.jit(do_not_specialize=["token", "query_len"])
def _pool_queries_kernel(
    q, stride_token, stride_head, heads, token, query_len, pooled, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    i_block, i_entry = tl.program_id(0), tl.program_id(1)
    i_head = tl.load(heads + i_entry)
    o_m = i_block * POOL + tl.arange(0, POOL)
    o_d = tl.arange(0, BLOCK_D)
    o_q = (token + o_m).to(tl.int64) * stride_token + i_head * stride_head
    b_q = tl.load(
        q + o_q[:, None] + o_d[None, :], mask=(o_m < query_len)[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0
    )
    b_mean = _mean(b_q, tl.minimum(query_len - i_block * POOL, POOL))
    tl.store(pooled + (i_entry * tl.num_programs(0) + i_block) * HEAD_DIM + o_d, b_mean, mask=o_d < HEAD_DIM)


@triton.jit(do_not_specialize=["stride_table", "row", "seq_len"])
def _pool_keys_kernel(
    k, stride_page, stride_token, stride_head, page_size, block_table, stride_table, row, seq_len,
    heads, num_entries, pooled,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    i_block, i_kv = tl.program_id(0), tl.program_id(1)
    o_entry = tl.arange(0, ENTRIES)
    b_listed = tl.load(heads + o_entry, mask=o_entry < num_entries, other=-GROUP)
    if tl.sum((b_listed // GROUP == i_kv).to(tl.int32), 0) == 0:
        return
    o_n = i_block * POOL + tl.arange(0, POOL)
    o_d = tl.arange(0, BLOCK_D)
    in_row = o_n < seq_len
    table = block_table + row.to(tl.int64) * stride_table
    o_k = key_offsets(table, o_n, in_row, page_size, stride_page, stride_token) + i_kv.to(tl.int64) * stride_head
    b_k = tl.load(k + o_k[:, None] + o_d[None, :], mask=in_row[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0)
    b_mean = _mean(b_k, tl.minimum(seq_len - i_block * POOL, POOL))
    tl.store(pooled + (i_kv * tl.num_programs(0) + i_block) * HEAD_DIM + o_d, b_mean, mask=o_d < HEAD_DIM)


@triton.jit(do_not_specialize=["num_q", "num_k", "context_len"])
def _scores_kernel(
    pooled_q, pooled_k, scores, heads, num_q, num_k, context_len, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_k, i_q, i_entry = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if i_k * BLOCK * POOL >= context_len + (i_q + 1) * BLOCK * POOL:
        return
    i_kv = tl.load(heads + i_entry) // GROUP
    o_m = i_q * BLOCK + tl.arange(0, BLOCK)
    o_n = i_k * BLOCK + tl.arange(0, BLOCK)
    o_d = tl.arange(0, BLOCK_D)
    in_d = (o_d < HEAD_DIM)[None, :]
    b_q = tl.load(
        pooled_q + (i_entry * num_q + o_m)[:, None] * HEAD_DIM + o_d[None, :],
        mask=(o_m < num_q)[:, None] & in_d, other=0.0,
    )  # fmt: skip
    b_k = tl.load(
        pooled_k + (i_kv.to(tl.int64) * num_k + o_n)[:, None] * HEAD_DIM + o_d[None, :],
        mask=(o_n < num_k)[:, None] & in_d, other=0.0,
    )  # fmt: skip
    # Three TF32 products: as exact as float32, on the matrix units.
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="tf32x3") * scale
    width = (num_k + ALIGNED - 1) // ALIGNED * ALIGNED
    target = scores + (i_entry * num_q + o_m)[:, None] * width + o_n[None, :]
    tl.store(target, b_s, mask=(o_m < num_q)[:, None] & (o_n < num_k)[None, :])


def write_top_blocks(scores: torch.Tensor, top_blocks: int, index: SparseIndex, row: int, heads: torch.Tensor) -> None:
    """Lists of one row's tiles from ``pooled_scores``: the largest of each query block, and the diagonal."""
    rows = index.rows
    first_tile, end_tile = rows.tile_starts[row : row + 2]
    _top_blocks_kernel[(end_tile - first_tile, len(heads))](
        scores, scores.shape[1], scores.shape[2] // ALIGNED.value, top_blocks, heads, first_tile,
        rows.tiles, rows.num_tiles, index.block_counts, index.block_ids, index.block_ids.stride(0),
        index.block_offsets,
        BLOCK_N=index.block_tokens, CHUNK=1024, FIELDS=TILE_FIELDS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_q", "width", "top_blocks", "first_tile", "num_tiles", "stride_ids"])
def _top_blocks_kernel(
    scores, num_q, width, top_blocks, heads, first_tile, tiles, num_tiles,
    block_counts, block_ids, stride_ids, block_offsets,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """One tile's list: the largest of its two query blocks' rows of scores, each ``width`` · 64, and the diagonal."""
    i_tile, i_entry = first_tile + tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_head = tl.load(heads + i_entry).to(tl.int64)
    length = tl.load(tiles + i_tile * FIELDS + 2)
    first = tl.load(tiles + i_tile * FIELDS + 3)
    diagonal, num_causal = tile_blocks(tiles, i_tile, BLOCK_N, FIELDS)
    row_0 = scores + (i_entry * num_q + 2 * tl.program_id(0)) * width * ALIGNED
    row_1 = row_0 + width * ALIGNED
    num_0 = (first + tl.minimum(length, POOL) - 1) // POOL + 1
    num_1 = tl.where(length > POOL, (first + length - 1) // POOL + 1, 0)
    threshold_0, num_ties_0 = kth_largest(row_0, num_0, top_blocks, 0, CHUNK)
    threshold_1, num_ties_1 = kth_largest(row_1, num_1, top_blocks, 0, CHUNK)

    RATIO: tl.constexpr = BLOCK_N // POOL
    target = block_ids + i_head * stride_ids + tl.load(block_offsets + i_tile)
    count, above_0, ties_0, above_1, ties_1 = 0, 0, 0, 0, 0
    for start in range(0, tl.maximum(num_0, num_1), CHUNK):
        b_bits = load_bits(row_0, start, num_0, 0, CHUNK)
        b_kept_0, _, above_0, ties_0 = kept_in_chunk(b_bits, threshold_0, num_ties_0, above_0, ties_0)
        b_bits = load_bits(row_1, start, num_1, 0, CHUNK)
        b_kept_1, _, above_1, ties_1 = kept_in_chunk(b_bits, threshold_1, num_ties_1, above_1, ties_1)
        b_kept = tl.max(tl.reshape((b_kept_0 | b_kept_1).to(tl.int32), [CHUNK // RATIO, RATIO]), 1)
        o_n = start // RATIO + tl.arange(0, CHUNK // RATIO)
        count = append(target, count, o_n, (o_n < num_causal) & ((b_kept != 0) | (o_n >= diagonal)))
    tl.store(block_counts + i_head * num_tiles + i_tile, count)
