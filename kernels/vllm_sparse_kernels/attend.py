"""Attention over a SparseIndex: one kernel that knows nothing of papers.

A program owns one (query head, tile). It walks the tile's blocks with FlashAttention's online softmax (in base 2),
masks only where a block touches the diagonal, then gathers the tile's stripes. Scores are computed one block ahead of
the softmax, so that the matrix units work while the exponentials are taken.

Programs run kv head by kv head, heaviest tile first, the heads of a group side by side: keys and values of one kv head
stay in the L2 cache while all of its readers run.

Blocks are loaded by bulk tensor copies (Hopper and later) where a block lies within a page and the head dimension is a
power of two, else by pointers, which take any page size.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache, key_offsets
from vllm_sparse_kernels.rows import TILE_FIELDS, TILE_TOKENS

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)


class QueryArgs(NamedTuple):
    """q and what is written: out of q's shape, and the log-sum-exp [num_heads, num_tokens] or None."""

    q: Any
    out: Any
    lse: Any
    stride_token: int
    stride_head: int
    stride_out_token: int
    stride_out_head: int
    stride_lse_head: int


class CacheArgs(NamedTuple):
    """Keys and values by pointer, and the block table that places them."""

    k: Any
    v: Any
    stride_page: int
    stride_token: int
    stride_head: int
    page_size: int
    block_table: Any
    stride_table: int


class BulkArgs(NamedTuple):
    """Keys and values as matrices for bulk copies, and how (page, kv head) becomes (matrix row, matrix column)."""

    k: Any
    v: Any
    rows_per_page: int
    rows_per_head: int
    columns_per_head: int


class IndexArgs(NamedTuple):
    """Tensors of Rows and SparseIndex."""

    tiles: Any
    order: Any
    num_tiles: int
    num_heads: int
    block_counts: Any
    block_ids: Any
    block_offsets: Any
    stride_ids: int
    stripe_counts: Any
    stripe_positions: Any
    stripe_offsets: Any


def attend(
    q: torch.Tensor,
    cache: PagedCache,
    index: SparseIndex,
    out: torch.Tensor,
    scale: float,
    lse: torch.Tensor | None = None,
    bulk: bool | None = None,
) -> None:
    """Write softmax(scale · q kᵀ) v over the index's keys into ``out`` for the index's tokens.

    q and out: [num_tokens, num_heads, head_dim], fp16, bf16 or fp32, head_dim contiguous. lse: [num_heads, num_tokens]
    float32, natural logarithm, or None. Tokens outside the index's rows stay untouched. ``bulk`` chooses the way blocks
    are loaded; None takes bulk copies where they can be had. Raises ValueError on shapes that do not fit the index.
    """
    rows, num_heads, head_dim = index.rows, index.num_heads, cache.head_dim
    if q.shape[1:] != (num_heads, head_dim) or out.shape[1:] != q.shape[1:] or num_heads % cache.num_kv_heads:
        raise ValueError(
            f"attend: q {tuple(q.shape)} and out {tuple(out.shape)} must be [num_tokens, {num_heads}, {head_dim}] with "
            f"heads a multiple of the cache's {cache.num_kv_heads} kv heads"
        )
    if bulk is None:
        bulk = supports_bulk(cache, index.block_tokens)
    block_d = triton.next_power_of_2(head_dim)
    queries = QueryArgs(
        q, out, lse, q.stride(0), q.stride(1), out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0)
    )
    stride_page, stride_token, stride_head = cache.strides
    cache_args = CacheArgs(
        cache.keys, cache.values, stride_page, stride_token, stride_head, cache.page_size,
        rows.block_table, rows.block_table.stride(0),
    )  # fmt: skip
    index_args = IndexArgs(
        rows.tiles, rows.heaviest_first, rows.num_tiles, num_heads,
        index.block_counts, index.block_ids, index.block_offsets, index.block_ids.stride(0),
        index.stripe_counts, index.stripe_positions, index.stripe_offsets,
    )  # fmt: skip
    wide = index.block_tokens * block_d >= 128 * 128
    _attend_kernel[(rows.num_tiles * num_heads,)](
        queries, cache_args, bulk_args(cache, index.block_tokens) if bulk else None, index_args,
        scale * LOG2_E,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        GROUP=num_heads // cache.num_kv_heads,
        BLOCK_M=TILE_TOKENS,
        BLOCK_N=index.block_tokens,
        STRIPES=min(64, index.block_tokens),
        FIELDS=TILE_FIELDS,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=8 if wide or block_d >= 128 else 4,
        num_stages=2,
    )  # fmt: skip


def supports_bulk(cache: PagedCache, block_tokens: int) -> bool:
    """Whether blocks of this cache can be fetched by bulk tensor copies."""
    keys = cache.keys
    return (
        keys.is_cuda
        and torch.cuda.get_device_capability(keys.device) >= (9, 0)
        and cache.page_size % block_tokens == 0
        and cache.head_dim & (cache.head_dim - 1) == 0
        and keys.data_ptr() % 16 == 0
        and cache.values.data_ptr() % 16 == 0
        and all(s * keys.element_size() % 16 == 0 for s in cache.strides)
        and _matrix_layout(cache) is not None
    )


def _matrix_layout(cache: PagedCache) -> tuple[int, int, int, int, int] | None:
    """The cache as one matrix: (rows, row stride, rows per page, rows per kv head, columns per kv head), or None.

    Tokens of a page are matrix rows. In vLLM's NHD layout kv heads lie side by side in a row; in HND they are stacked.
    """
    num_pages, page_size, num_kv_heads, _ = cache.keys.shape
    stride_page, stride_token, stride_head = cache.strides
    if stride_page % stride_token:
        return None
    rows_per_page = stride_page // stride_token
    num_rows = (num_pages - 1) * rows_per_page + page_size
    if stride_head * num_kv_heads <= stride_token:
        return num_rows, stride_token, rows_per_page, 0, stride_head
    if stride_head % stride_token == 0:
        rows_per_head = stride_head // stride_token
        return num_rows + (num_kv_heads - 1) * rows_per_head, stride_token, rows_per_page, rows_per_head, 0
    return None


def bulk_args(cache: PagedCache, block_tokens: int) -> BulkArgs:
    """Tensor descriptors of ``cache`` for blocks of ``block_tokens`` keys; ask ``supports_bulk`` first."""
    layout = _matrix_layout(cache)
    if layout is None:
        raise ValueError(f"attend: a cache of strides {cache.strides} is no matrix; bulk copies cannot read it")
    num_rows, row_stride, rows_per_page, rows_per_head, columns_per_head = layout
    columns = columns_per_head * (cache.num_kv_heads - 1) + cache.head_dim
    keys, values = (
        TensorDescriptor(x, [num_rows, columns], [row_stride, 1], [block_tokens, cache.head_dim])
        for x in (cache.keys, cache.values)
    )
    return BulkArgs(keys, values, rows_per_page, rows_per_head, columns_per_head)


@triton.jit
def _attend_kernel(
    queries, cache, bulk, index, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STRIPES: tl.constexpr, FIELDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # kv head, then tile by falling weight, then head of the group
    i_program = tl.program_id(0)
    i_kv = i_program // (index.num_tiles * GROUP)
    i_tile = tl.load(index.order + i_program % (index.num_tiles * GROUP) // GROUP)
    i_head = i_kv * GROUP + i_program % GROUP

    i_row = tl.load(index.tiles + i_tile * FIELDS)
    token = tl.load(index.tiles + i_tile * FIELDS + 1)
    length = tl.load(index.tiles + i_tile * FIELDS + 2)
    first = tl.load(index.tiles + i_tile * FIELDS + 3)
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_q = (token + o_m).to(tl.int64)
    in_tile = o_m < length
    in_head = in_tile[:, None] & (o_d < HEAD_DIM)[None, :]
    b_q = tl.load(
        queries.q + o_q[:, None] * queries.stride_token + i_head * queries.stride_head + o_d[None, :],
        mask=in_head, other=0.0,
    )  # fmt: skip
    table = cache.block_table + i_row.to(tl.int64) * cache.stride_table
    keys = cache.k + i_kv.to(tl.int64) * cache.stride_head
    values = cache.v + i_kv.to(tl.int64) * cache.stride_head

    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # Blocks before the diagonal need no mask; the diagonal ones are always there, and last.
    ids = index.block_ids + i_head.to(tl.int64) * index.stride_ids + tl.load(index.block_offsets + i_tile)
    num_blocks = tl.load(index.block_counts + i_head * index.num_tiles + i_tile)
    num_full = num_blocks - ((first + length - 1) // BLOCK_N - first // BLOCK_N + 1)
    where = (keys, values, cache, bulk, table, i_kv, first + length)
    b_acc, b_max, b_sum = _walk_full(
        b_q, ids, num_full, where, scale, b_acc, b_max, b_sum, BLOCK_N, HEAD_DIM, BLOCK_D, PRECISION
    )
    b_acc, b_max, b_sum = _walk_diagonal(
        b_q, ids, num_full, num_blocks, first, where, scale, b_acc, b_max, b_sum, BLOCK_N, HEAD_DIM, BLOCK_D, PRECISION
    )
    stripes = index.stripe_positions + tl.load(index.stripe_offsets + i_head * index.num_tiles + i_tile)
    num_stripes = tl.load(index.stripe_counts + i_head * index.num_tiles + i_tile)
    b_acc, b_max, b_sum = _walk_stripes(
        b_q, stripes, num_stripes, where, scale, b_acc, b_max, b_sum, STRIPES, HEAD_DIM, BLOCK_D, PRECISION
    )

    b_out = (b_acc / b_sum[:, None]).to(queries.out.dtype.element_ty)
    o_out = o_q[:, None] * queries.stride_out_token + i_head * queries.stride_out_head + o_d[None, :]
    tl.store(queries.out + o_out, b_out, mask=in_head)
    if queries.lse is not None:
        b_lse = (b_max + tl.log2(b_sum)) * LN_2
        tl.store(queries.lse + i_head.to(tl.int64) * queries.stride_lse_head + o_q, b_lse, mask=in_tile)


@triton.jit
def _walk_full(
    b_q, ids, num_full, where, scale, b_acc, b_max, b_sum,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Blocks that every query of the tile sees whole. A block always follows the last of them: the first diagonal one."""
    i_block = tl.load(ids)
    b_k = _load_block(0, i_block, where, BLOCK_N, HEAD_DIM, BLOCK_D)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    for i in range(0, num_full):
        i_next = tl.load(ids + i + 1)
        b_k = _load_block(0, i_next, where, BLOCK_N, HEAD_DIM, BLOCK_D)
        b_s_next = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_v = _load_block(1, i_block, where, BLOCK_N, HEAD_DIM, BLOCK_D)
        b_acc, b_max, b_sum = _fold(b_s * scale, b_v, b_acc, b_max, b_sum, PRECISION)
        b_s = b_s_next
        i_block = i_next
    return b_acc, b_max, b_sum


@triton.jit
def _walk_diagonal(
    b_q, ids, start, end, first, where, scale, b_acc, b_max, b_sum,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Blocks with keys that some queries of the tile may not see."""
    o_m = first + tl.arange(0, b_q.shape[0])
    limit = where[6]
    for i in range(start, end):
        i_block = tl.load(ids + i)
        o_n = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
        b_k = _load_block(0, i_block, where, BLOCK_N, HEAD_DIM, BLOCK_D)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_s = tl.where(o_n[None, :] <= o_m[:, None], b_s * scale, float("-inf"))
        # Past the sequence's end the cache holds anything, NaN too, and 0 · NaN would still be NaN.
        b_v = _load_block(1, i_block, where, BLOCK_N, HEAD_DIM, BLOCK_D)
        b_v = tl.where((o_n < limit)[:, None], b_v, 0.0)
        b_acc, b_max, b_sum = _fold(b_s, b_v, b_acc, b_max, b_sum, PRECISION)
    return b_acc, b_max, b_sum


@triton.jit
def _walk_stripes(
    b_q, stripes, num_stripes, where, scale, b_acc, b_max, b_sum,
    STRIPES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Single keys, gathered ``STRIPES`` at a time; all lie before the tile's first query."""
    keys, values, cache, bulk, table, i_kv, limit = where
    o_d = tl.arange(0, BLOCK_D)
    for i in range(0, num_stripes, STRIPES):
        o_n = i + tl.arange(0, STRIPES)
        kept = o_n < num_stripes
        o_key = key_offsets(
            table, tl.load(stripes + o_n, mask=kept, other=0), kept,
            cache.page_size, cache.stride_page, cache.stride_token,
        )  # fmt: skip
        o_kv = o_key[:, None] + o_d[None, :]
        in_kv = kept[:, None] & (o_d < HEAD_DIM)[None, :]
        b_k = tl.load(keys + o_kv, mask=in_kv, other=0.0)
        b_v = tl.load(values + o_kv, mask=in_kv, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_s = tl.where(kept[None, :], b_s * scale, float("-inf"))
        b_acc, b_max, b_sum = _fold(b_s, b_v, b_acc, b_max, b_sum, PRECISION)
    return b_acc, b_max, b_sum


@triton.jit
def _load_block(
    WHICH: tl.constexpr, i_block, where, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Keys (WHICH 0) or values (1) of a block: [BLOCK_N, BLOCK_D]. Past the sequence's end they hold anything."""
    keys, values, cache, bulk, table, i_kv, limit = where
    position = i_block * BLOCK_N
    if bulk is not None:
        page = tl.load(table + position // cache.page_size)
        i_matrix = page * bulk.rows_per_page + i_kv * bulk.rows_per_head + position % cache.page_size
        desc = bulk.k if WHICH == 0 else bulk.v
        return desc.load([i_matrix, i_kv * bulk.columns_per_head])
    else:
        # The table may hold no page past the sequence's end.
        o_d = tl.arange(0, BLOCK_D)
        o_n = position + tl.arange(0, BLOCK_N)
        o_key = key_offsets(table, o_n, o_n < limit, cache.page_size, cache.stride_page, cache.stride_token)
        pointer = keys if WHICH == 0 else values
        return tl.load(pointer + o_key[:, None] + o_d[None, :], mask=(o_d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _fold(b_s, b_v, b_acc, b_max, b_sum, PRECISION: tl.constexpr):
    """One step of the online softmax: scores [M, N] in base 2 and values [N, D] into (acc, max, sum)."""
    b_new_max = tl.maximum(b_max, tl.max(b_s, 1))
    b_decay = tl.exp2(b_max - b_new_max)
    b_p = tl.exp2(b_s - b_new_max[:, None])
    b_sum = b_sum * b_decay + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision=PRECISION)
    return b_acc, b_new_max, b_sum
