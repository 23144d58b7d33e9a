"""Attention over a SparseIndex: one kernel that knows nothing of papers.

A program owns one (query head, tile). It walks the tile's blocks with FlashAttention's online softmax (in base 2),
masks only where a block touches the diagonal, then gathers the tile's stripes.

Programs run kv head by kv head, heaviest tile first, the heads of a group side by side: keys and values of one kv head
stay in the L2 cache while all of its readers run.

Blocks are loaded in one of two ways. Where a block lies within a page, its *place*, a row of the cache seen as a
matrix, is looked up once for all, and the block is fetched by a bulk tensor copy (Hopper and later) or by pointers.
Smaller pages cost a look-up in the block table for every key.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.compiler.compiler import max_shared_mem
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


class MatrixArgs(NamedTuple):
    """The cache as a matrix whose rows are tokens: where a kv head and a page lie in it."""

    num_rows: int
    rows_per_page: int
    rows_per_head: int
    columns_per_head: int


class IndexArgs(NamedTuple):
    """Tensors of Rows and SparseIndex; ``blocks`` are block ids, or places once these are looked up.

    No number here changes with a batch's size in a way that Triton specialises on (the list's length is a multiple of
    16): a kernel that is compiled at start-up serves every later batch.
    """

    tiles: Any
    order: Any
    block_counts: Any
    blocks: Any
    block_offsets: Any
    stride_blocks: int
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

    q and out: [num_tokens, num_heads, head_dim], fp16 or bf16 (fp32 in the interpreter), head_dim contiguous. lse:
    [num_heads, num_tokens] float32, natural logarithm, or None. Tokens outside the index's rows stay untouched.
    ``bulk`` asks for or forbids bulk tensor copies; None takes them where they can be had. Raises ValueError on shapes
    that do not fit the index, and where bulk copies are asked for but cannot be had.
    """
    rows, num_heads, head_dim = index.rows, index.num_heads, cache.head_dim
    if q.shape[1:] != (num_heads, head_dim) or out.shape[1:] != q.shape[1:] or num_heads % cache.num_kv_heads:
        raise ValueError(
            f"attend: q {tuple(q.shape)} and out {tuple(out.shape)} must be [num_tokens, {num_heads}, {head_dim}] with "
            f"heads a multiple of the cache's {cache.num_kv_heads} kv heads"
        )
    matrix = matrix_args(cache) if cache.page_size % index.block_tokens == 0 else None
    if bulk is None:
        bulk = matrix is not None and supports_bulk(cache)
    elif bulk and matrix is None:
        raise ValueError(
            f"attend: bulk copies cannot read blocks of {index.block_tokens} from pages of {cache.page_size}"
        )
    queries = QueryArgs(
        q, out, lse, q.stride(0), q.stride(1), out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0)
    )
    cache_args = CacheArgs(
        cache.keys, cache.values, *cache.strides, cache.page_size, rows.block_table, rows.block_table.stride(0)
    )
    index_args = IndexArgs(
        rows.tiles, rows.heaviest_first,
        index.block_counts, index.block_ids, index.block_offsets, index.block_ids.stride(0),
        index.stripe_counts, index.stripe_positions, index.stripe_offsets,
    )  # fmt: skip
    descriptors: list[TensorDescriptor] | tuple[None, None] = (None, None)
    if matrix is not None:
        index_args = index_args._replace(blocks=_place_blocks(index_args, cache_args, matrix, index))
        if bulk:
            descriptors = _descriptors(cache, matrix, index.block_tokens)
    block_d = triton.next_power_of_2(head_dim)
    _attend_kernel[(rows.num_tiles * num_heads,)](
        queries, cache_args, *descriptors, matrix, index_args, scale * LOG2_E,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        NUM_HEADS=num_heads,
        GROUP=num_heads // cache.num_kv_heads,
        BLOCK_M=TILE_TOKENS,
        BLOCK_N=index.block_tokens,
        STRIPES=64 if index.has_stripes else 0,
        FIELDS=TILE_FIELDS,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=8 if block_d >= 128 else 4,
        num_stages=_num_stages(index.block_tokens, head_dim, shared_bytes(q.device)),
    )  # fmt: skip


def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have; without bound where there is no such thing (the interpreter)."""
    if device.type != "cuda":
        return 1 << 62
    return int(max_shared_mem(torch.cuda.current_device() if device.index is None else device.index))


def widest_block(head_dim: int, limit_bytes: int) -> int | None:
    """Keys of the widest block, 128 or 64, that attend has room for in ``limit_bytes`` of shared memory, or None.

    Blocks of 128 are worth it only with two buffers: one is loaded while the other is multiplied.
    """
    if _needed_bytes(128, head_dim, 2) <= limit_bytes:
        return 128
    return 64 if _needed_bytes(64, head_dim, 1) <= limit_bytes else None


def _needed_bytes(block_tokens: int, head_dim: int, num_buffers: int) -> int:
    """Shared memory of 16-bit queries and buffered keys and values, as compiled for Hopper; Ampere takes no more."""
    block_d = triton.next_power_of_2(head_dim)
    return 2 * block_d * (TILE_TOKENS + 2 * num_buffers * block_tokens) + 1024


def _num_stages(block_tokens: int, head_dim: int, limit_bytes: int) -> int:
    if _needed_bytes(block_tokens, head_dim, 2) > limit_bytes:
        return 1
    return 3 if block_tokens * head_dim <= 64 * 128 else 2


def supports_bulk(cache: PagedCache) -> bool:
    """Whether this cache, if it is a matrix at all, can be read by bulk tensor copies."""
    keys = cache.keys
    return (
        keys.is_cuda
        and torch.cuda.get_device_capability(keys.device) >= (9, 0)
        and cache.head_dim & (cache.head_dim - 1) == 0
        and keys.data_ptr() % 16 == 0
        and cache.values.data_ptr() % 16 == 0
        and all(s * keys.element_size() % 16 == 0 for s in cache.strides)
    )


def matrix_args(cache: PagedCache) -> MatrixArgs | None:
    """The cache as a matrix of tokens, or None where its strides make none.

    In vLLM's NHD layout the kv heads of a token lie side by side in its row; in HND they are stacked.
    """
    stride_page, stride_token, stride_head = cache.strides
    if stride_page % stride_token:
        return None
    rows_per_page = stride_page // stride_token
    num_rows = (cache.keys.shape[0] - 1) * rows_per_page + cache.page_size
    if stride_head * cache.num_kv_heads <= stride_token:
        return MatrixArgs(num_rows, rows_per_page, 0, stride_head)
    if stride_head % stride_token == 0:
        rows_per_head = stride_head // stride_token
        return MatrixArgs(num_rows + (cache.num_kv_heads - 1) * rows_per_head, rows_per_page, rows_per_head, 0)
    return None


def _descriptors(cache: PagedCache, matrix: MatrixArgs, block_tokens: int) -> list[TensorDescriptor]:
    """Keys and values for bulk copies of ``block_tokens`` rows."""
    shape = [matrix.num_rows, matrix.columns_per_head * (cache.num_kv_heads - 1) + cache.head_dim]
    strides, block = [cache.strides[1], 1], [block_tokens, cache.head_dim]
    return [TensorDescriptor(x, shape, strides, block) for x in (cache.keys, cache.values)]


def _place_blocks(args: IndexArgs, cache: CacheArgs, matrix: MatrixArgs, index: SparseIndex) -> torch.Tensor:
    """int32 like ``index.block_ids``: each block's first row in the matrix, less the kv head's part."""
    places = torch.empty_like(index.block_ids)
    _place_blocks_kernel[(index.rows.num_tiles, index.num_heads)](
        args, cache.block_table, cache.stride_table, places, cache.page_size, matrix.rows_per_page,
        BLOCK_N=index.block_tokens, CHUNK=1024, FIELDS=TILE_FIELDS,
    )  # fmt: skip
    return places


@triton.jit
def _place_blocks_kernel(
    index, block_table, stride_table, places, page_size, rows_per_page,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    i_tile, i_head = tl.program_id(0), tl.program_id(1)
    i_row = tl.load(index.tiles + i_tile * FIELDS).to(tl.int64)
    start = i_head.to(tl.int64) * index.stride_blocks + tl.load(index.block_offsets + i_tile)
    count = tl.load(index.block_counts + i_head * tl.num_programs(0) + i_tile)
    for first in range(0, count, CHUNK):
        o_n = first + tl.arange(0, CHUNK)
        position = tl.load(index.blocks + start + o_n, mask=o_n < count, other=0) * BLOCK_N
        page = tl.load(block_table + i_row * stride_table + position // page_size, mask=o_n < count, other=0)
        tl.store(places + start + o_n, page * rows_per_page + position % page_size, mask=o_n < count)


@triton.jit
def _attend_kernel(
    queries, cache, k_matrix, v_matrix, matrix, index, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STRIPES: tl.constexpr, FIELDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # kv head, then tile by falling weight, then head of the group
    i_program = tl.program_id(0)
    num_tiles = tl.num_programs(0) // NUM_HEADS
    i_kv = i_program // (num_tiles * GROUP)
    i_tile = tl.load(index.order + i_program % (num_tiles * GROUP) // GROUP)
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

    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # Blocks before the diagonal need no mask; the diagonal ones are always there, and last.
    blocks = index.blocks + i_head.to(tl.int64) * index.stride_blocks + tl.load(index.block_offsets + i_tile)
    num_blocks = tl.load(index.block_counts + i_head * num_tiles + i_tile)
    num_full = num_blocks - ((first + length - 1) // BLOCK_N - first // BLOCK_N + 1)
    where = (cache, k_matrix, v_matrix, matrix, table, i_kv, first + length)
    b_acc, b_max, b_sum = _walk_full(
        b_q, blocks, num_full, where, scale, b_acc, b_max, b_sum, BLOCK_N, HEAD_DIM, BLOCK_D, PRECISION
    )
    b_acc, b_max, b_sum = _walk_diagonal(
        b_q,
        blocks,
        num_full,
        num_blocks,
        first,
        where,
        scale,
        b_acc,
        b_max,
        b_sum,
        BLOCK_N,
        HEAD_DIM,
        BLOCK_D,
        PRECISION,
    )
    if STRIPES > 0:
        stripes = index.stripe_positions + tl.load(index.stripe_offsets + i_head * num_tiles + i_tile)
        num_stripes = tl.load(index.stripe_counts + i_head * num_tiles + i_tile)
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
    b_q, blocks, num_full, where, scale, b_acc, b_max, b_sum,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Blocks that every query of the tile sees whole.

    Nothing that places a block is carried from one iteration to the next: loads that depend on carried values are not
    pipelined. Computing scores one block ahead by hand gained nothing and cost registers.
    """
    for i in range(num_full):
        entry = tl.load(blocks + i)
        b_k = _load_block(0, entry, where, BLOCK_N, HEAD_DIM, BLOCK_D)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_v = _load_block(1, entry, where, BLOCK_N, HEAD_DIM, BLOCK_D)
        b_acc, b_max, b_sum = _fold(b_s, b_v, scale, b_acc, b_max, b_sum, PRECISION)
    return b_acc, b_max, b_sum


@triton.jit
def _walk_diagonal(
    b_q, blocks, start, end, first, where, scale, b_acc, b_max, b_sum,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Blocks with keys that some queries of the tile may not see."""
    o_m = first + tl.arange(0, b_q.shape[0])
    limit = where[6]
    for i in range(start, end):
        entry = tl.load(blocks + i)
        o_n = (first // BLOCK_N + i - start) * BLOCK_N + tl.arange(0, BLOCK_N)
        b_k = _load_block(0, entry, where, BLOCK_N, HEAD_DIM, BLOCK_D)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_s = tl.where(o_n[None, :] <= o_m[:, None], b_s, float("-inf"))
        # Past the sequence's end the cache holds anything, NaN too, and 0 · NaN would still be NaN.
        b_v = _load_block(1, entry, where, BLOCK_N, HEAD_DIM, BLOCK_D)
        b_v = tl.where((o_n < limit)[:, None], b_v, 0.0)
        b_acc, b_max, b_sum = _fold(b_s, b_v, scale, b_acc, b_max, b_sum, PRECISION)
    return b_acc, b_max, b_sum


@triton.jit
def _walk_stripes(
    b_q, stripes, num_stripes, where, scale, b_acc, b_max, b_sum,
    STRIPES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Single keys, gathered ``STRIPES`` at a time; all lie before the tile's first query."""
    cache, table, i_kv = where[0], where[4], where[5]
    o_d = tl.arange(0, BLOCK_D)
    for i in range(0, num_stripes, STRIPES):
        o_n = i + tl.arange(0, STRIPES)
        kept = o_n < num_stripes
        o_key = key_offsets(
            table, tl.load(stripes + o_n, mask=kept, other=0), kept,
            cache.page_size, cache.stride_page, cache.stride_token,
        )  # fmt: skip
        o_kv = i_kv.to(tl.int64) * cache.stride_head + o_key[:, None] + o_d[None, :]
        in_kv = kept[:, None] & (o_d < HEAD_DIM)[None, :]
        b_k = tl.load(cache.k + o_kv, mask=in_kv, other=0.0)
        b_v = tl.load(cache.v + o_kv, mask=in_kv, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_s = tl.where(kept[None, :], b_s, float("-inf"))
        b_acc, b_max, b_sum = _fold(b_s, b_v, scale, b_acc, b_max, b_sum, PRECISION)
    return b_acc, b_max, b_sum


@triton.jit
def _load_block(
    WHICH: tl.constexpr, entry, where, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Keys (WHICH 0) or values (1) of a block: [BLOCK_N, BLOCK_D]. Past the sequence's end they hold anything.

    ``entry`` is the block's place where ``matrix`` is given, else its id.
    """
    cache, k_matrix, v_matrix, matrix, table, i_kv, limit = where
    if k_matrix is not None:
        matrix_desc = k_matrix if WHICH == 0 else v_matrix
        return matrix_desc.load([entry + i_kv * matrix.rows_per_head, i_kv * matrix.columns_per_head])
    else:
        o_d = tl.arange(0, BLOCK_D)
        o_n = tl.arange(0, BLOCK_N)
        if matrix is not None:
            o_key = (entry + o_n).to(tl.int64) * cache.stride_token
        else:
            # The table may hold no page past the sequence's end.
            o_n += entry * BLOCK_N
            o_key = key_offsets(table, o_n, o_n < limit, cache.page_size, cache.stride_page, cache.stride_token)
        pointer = (cache.k if WHICH == 0 else cache.v) + i_kv.to(tl.int64) * cache.stride_head
        return tl.load(pointer + o_key[:, None] + o_d[None, :], mask=(o_d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _fold(b_s, b_v, scale, b_acc, b_max, b_sum, PRECISION: tl.constexpr):
    """One step of the online softmax: raw scores [M, N] and values [N, D] into (acc, max, sum).

    ``scale`` takes scores to base 2; the maximum is kept scaled, so that each exponent is one fused multiply-add.
    """
    b_new_max = tl.maximum(b_max, tl.max(b_s, 1) * scale)
    b_decay = tl.exp2(b_max - b_new_max)
    b_p = tl.exp2(b_s * scale - b_new_max[:, None])
    b_sum = b_sum * b_decay + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision=PRECISION)
    return b_acc, b_new_max, b_sum
