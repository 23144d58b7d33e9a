# SPDX-License-Identifier: Apache-2.0
"""Pooled queries and keys: means of blocks, and the products of mean queries with mean keys.

A pooled query is the mean of a tile of 128 queries or of half a tile, and a pooled key is the mean of a block of 64
keys. The same launches pool all rows of a step; each program handles some blocks of one head. If means or products of a
large batch would need more than ``SLAB_BYTES``, tiles are selected slab by slab. The selection of a tile does not
depend on its slab.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.paged import load_keys, load_queries, padded_dim, query_args
from vllm_sparse_kernels.rows import KEY_ALIGN, TILE, TILE_FIELDS, Rows, ceil_div
from vllm_sparse_kernels.selection.key_sums import mean_keys
from vllm_sparse_kernels.selection.lists import load_row, load_tile, place_in_slab
from vllm_sparse_kernels.selection.slabs import SLAB_BYTES, most_at_once, rows_within
from vllm_sparse_kernels.vectors import load_vector, store_padded

KEY_BLOCK = KEY_ALIGN
"""Number of keys in a pooled key. Each row begins with a block."""

SPLIT_BLOCKS = Constant(8)
"""Blocks that one program pools one after the other."""

POOL_STEP = Constant(64)
"""Queries that are loaded at a time to be averaged."""

PRODUCT_M, PRODUCT_N, PRODUCT_D = Constant(64), Constant(64), Constant(32)
"""Pooled queries and pooled keys that one program multiplies, and channels of a step."""

ALIGNED = Constant(64)
"""Rows of products are padded to a multiple of this, which allows wide loads."""

HEADS_AT_ONCE = Constant(128)
"""Number of selected heads that ``is_read`` checks per step."""

UNSPECIALIZED = (
    "num_heads", "num_tiles", "first_tile", "end_tile", "first_row", "num_blocks", "width",
)  # fmt: skip
"""Kernel arguments that change from step to step and must not cause new variants of a kernel."""


class PooledSlab(NamedTuple):
    """Rows whose keys are pooled in one launch, and runs of their tiles whose products are computed together."""

    first_row: int
    end_row: int
    num_blocks: int  # blocks of 64 keys of the buffer, which all slabs of the step share
    max_blocks: int  # blocks in the longest row
    runs: list[tuple[int, int]]  # runs of tiles, [first, end)

    @property
    def width(self) -> int:
        """Columns of a row of products, in units of ``ALIGNED``."""
        return ceil_div(self.max_blocks, ALIGNED.value)


class Pooled(NamedTuple):
    """Means [query heads of a list or kv heads, blocks, head_dim] float32, for blocks of all rows or of a slab."""

    means: torch.Tensor
    similarity: torch.Tensor | None  # [heads, blocks] float32


def pooled_slabs(rows: Rows, num_selected: int, num_kv_heads: int, head_dim: int, per_tile: int) -> list[PooledSlab]:
    """Return the slabs of a step."""
    most_products = SLAB_BYTES // (4 * num_selected * per_tile * ALIGNED.value)  # in units of ``ALIGNED``
    most_blocks = SLAB_BYTES // (4 * num_kv_heads * head_dim)
    blocks, slabs = [ceil_div(seq_len, KEY_BLOCK.value) for seq_len in rows.seq_lens], []
    for first, end in rows_within(blocks, most_blocks):
        slab = PooledSlab(first, end, most_at_once(blocks, most_blocks), max(blocks[first:end]), [])
        num_tiles, end_tile = max(most_products // slab.width, 1), rows.tile_starts[end]
        for tile in range(rows.tile_starts[first], end_tile, num_tiles):
            slab.runs.append((tile, min(tile + num_tiles, end_tile)))
        slabs.append(slab)
    return slabs


def _num_warps(head_dim: int) -> int:
    """Return the minimum number of warps that hold 64 tokens in registers: sums over few warps synchronise less."""
    return max(2, padded_dim(head_dim) // 64)


def pool_queries(call: Call, per_tile: int, with_similarity: bool) -> Pooled:
    """Average the queries of tiles or of parts of tiles."""
    rows, num_selected, empty = call.rows, call.num_selected, call.workspace.empty
    num_pooled, head_dim = rows.num_tiles * per_tile, call.q.shape[2]
    means = empty(num_selected, num_pooled, head_dim)
    similarity = empty(num_selected, num_pooled) if with_similarity else None
    _pool_queries_kernel[(num_selected, num_pooled)](
        query_args(call.q), rows.tiles, call.head_ids, means, similarity,
        HEAD_DIM=head_dim, BLOCK_D=padded_dim(head_dim), PER_TILE=per_tile, num_warps=_num_warps(head_dim),
    )  # fmt: skip
    return Pooled(means, similarity)


def pool_keys(call: Call, slab: PooledSlab, centers: torch.Tensor | None) -> Pooled:
    """Average the keys of the slab's blocks."""
    cache, empty = call.cache, call.workspace.empty
    num_kv_heads, head_dim, num_selected = cache.num_kv_heads, cache.head_dim, call.num_selected
    pooled = Pooled(
        empty(num_kv_heads, slab.num_blocks, head_dim),
        None if centers is None else empty(num_kv_heads, slab.num_blocks),
    )
    _pool_keys_kernel[(num_kv_heads, ceil_div(slab.max_blocks, SPLIT_BLOCKS.value), slab.end_row - slab.first_row)](
        call.key_args, call.rows.row_table, slab.first_row, slab.num_blocks,
        call.head_ids if num_selected < call.q.shape[1] else None, num_selected, *pooled, centers,
        HEAD_DIM=head_dim, BLOCK_D=padded_dim(head_dim), GROUP=call.group,
        num_warps=_num_warps(head_dim),
    )  # fmt: skip
    return pooled


def pooled_products(
    call: Call, per_tile: int, min_similarity: torch.Tensor | None = None
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
    """Multiply mean queries with mean keys, a run of tiles at a time."""
    cache, rows, workspace = call.cache, call.rows, call.workspace
    num_selected, with_similarity = call.num_selected, min_similarity is not None
    queries = pool_queries(call, per_tile, with_similarity)
    centers = mean_keys(cache, rows, workspace) if with_similarity else None
    for slab in rows.once(pooled_slabs, num_selected, cache.num_kv_heads, cache.head_dim, per_tile):
        with workspace.frame():
            keys = pool_keys(call, slab, centers)
            tile_bytes = 4 * num_selected * per_tile * slab.width * ALIGNED.value
            operands = Operands(queries.means, keys, min_similarity)
            workspace.expect(most_at_once([tile_bytes] * rows.num_tiles, SLAB_BYTES))
            for first, end in slab.runs:
                with workspace.frame():
                    num_pooled = (end - first) * per_tile
                    products = workspace.empty(num_selected, num_pooled, slab.width * ALIGNED.value)
                    grid = (
                        ceil_div(slab.max_blocks, PRODUCT_N.value),
                        ceil_div(num_pooled, PRODUCT_M.value),
                        num_selected,
                    )
                    _products_kernel[grid](
                        operands, rows.row_table, rows.tiles, call.head_ids, products, slab.width, first, end,
                        rows.num_tiles, slab.first_row, slab.num_blocks, call.scale,
                        GROUP=call.group, HEAD_DIM=cache.head_dim, PER_TILE=per_tile,
                    )  # fmt: skip
                    yield first, products, queries.similarity


class Operands(NamedTuple):
    """Operands of the products as arguments of kernels."""

    query_means: Any  # [n, num_tiles · PER_TILE, HEAD_DIM] float32
    keys: Any  # Pooled keys of the slab
    min_similarity: Any  # [n] float32, least similarity of blocks that have products; None if all blocks have


@triton.jit
def is_read(i_kv, heads, num_heads, GROUP: tl.constexpr):
    """Return whether any of the query heads reads this kv head."""
    if heads is None:
        return True
    else:
        reads = 0
        for start in range(0, num_heads, HEADS_AT_ONCE):
            o_h = start + tl.arange(0, HEADS_AT_ONCE)
            b_head = tl.load(heads + o_h, mask=o_h < num_heads, other=-GROUP)
            reads = tl.maximum(reads, tl.max((b_head // GROUP == i_kv).to(tl.int32), 0))
        return reads > 0


@triton.jit
def _sum_of_unit_vectors(b_x):
    """Sum tokens [N, D], each scaled to unit length: [D]. Tokens of length zero stay zero."""
    b_squares = tl.sum(b_x * b_x, 1)
    b_inverse = tl.rsqrt(tl.where(b_squares > 0, b_squares, 1.0))
    return tl.sum(b_x * b_inverse[:, None], 0)


@triton.jit
def _mean_cosine(b_units, count):
    """Return the mean cosine over all pairs of ``count`` tokens, including each token with itself."""
    return tl.sum(b_units * b_units, 0) / (count * count)


@triton.jit
def _pool_queries_kernel(
    queries, tiles, heads, means, similarity,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PER_TILE: tl.constexpr,
):  # fmt: skip
    """Average the queries of a part of one tile and head and, on request, compute the mean cosine of all their pairs.

    means is [heads, pooled, HEAD_DIM], and similarity [heads, pooled] float32, with PER_TILE pooled queries per tile.
    The last entries of a short tile stay unchanged.

    Grid: (n, pooled queries). Bound by memory: it reads each query once.

    Args:
        tiles: [num_tiles, 4] int32, ``Rows.tiles``.
        heads: [n] int32 on the device, numbers of the selected query heads.
        means: [heads, blocks, HEAD_DIM] float32; written.
        similarity: [heads, blocks] float32, mean cosine over all pairs of a block's tokens; or None.
    """
    POOL: tl.constexpr = TILE // PER_TILE  # queries of a part
    i_selected, i_pooled = tl.program_id(0), tl.program_id(1)
    i_head = tl.load(heads + i_selected)
    _, token, length, _ = load_tile(tiles, i_pooled // PER_TILE)
    begin = i_pooled % PER_TILE * POOL
    length = tl.minimum(length - begin, POOL)
    if length > 0:
        b_sum = tl.zeros([BLOCK_D], tl.float32)
        b_units = tl.zeros([BLOCK_D], tl.float32)
        for start in tl.static_range(0, POOL, POOL_STEP):
            b_q = load_queries(queries, i_head, token + begin + start, length - start, POOL_STEP, HEAD_DIM, BLOCK_D)
            b_q = b_q.to(tl.float32)
            b_sum += tl.sum(b_q, 0)
            if similarity is not None:
                b_units += _sum_of_unit_vectors(b_q)
        i_out = i_selected.to(tl.int64) * tl.num_programs(1) + i_pooled
        store_padded(means, i_out, b_sum / length, HEAD_DIM)
        if similarity is not None:
            tl.store(similarity + i_out, _mean_cosine(b_units, length.to(tl.float32)))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _pool_keys_kernel(
    keys, rows, first_row, num_blocks, heads, num_heads, means, similarity, centers,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Pool blocks of one split of a row's keys, for one kv head: means and similarity.

    Similarities are those of the keys minus their row's center. Without ``centers``, there are none.

    Grid: (kv heads, splits of the longest row, rows). Bound by memory: it reads each key once.

    Args:
        rows: [num_rows + 1, 4] int32, ``Rows.row_table``.
        heads: [num_heads] int32, numbers of the selected heads; None for all.
        means: [kv heads, num_blocks, HEAD_DIM] float32, written.
        similarity: [heads, blocks] float32, mean cosine over all pairs of a block's tokens; or None.
        centers: [num_rows, kv heads, BLOCK_D] float32, each row's mean key; or None.
    """
    STAGES: tl.constexpr = 3 if similarity is None else 2
    # Programs of neighbouring kv heads run together: in vLLM's usual layout, the kv heads of a token are neighbours.
    i_kv, i_split, i_row = tl.program_id(0), tl.program_id(1), first_row + tl.program_id(2)
    _, _, seq_len, _ = load_row(rows, i_row)
    begin = i_split * SPLIT_BLOCKS * KEY_BLOCK
    if (begin < seq_len) & is_read(i_kv, heads, num_heads, GROUP):
        first_block = place_in_slab(rows, i_row, first_row) // KEY_BLOCK
        o_block = i_kv.to(tl.int64) * num_blocks + first_block
        if centers is not None:
            b_center = load_vector(centers, i_row * tl.num_programs(0) + i_kv, BLOCK_D)
        end = tl.minimum(begin + SPLIT_BLOCKS * KEY_BLOCK, seq_len)
        for start in tl.range(begin, end, KEY_BLOCK, num_stages=STAGES):
            b_k = load_keys(keys, i_row, i_kv, start + tl.arange(0, KEY_BLOCK), seq_len, HEAD_DIM, BLOCK_D)
            b_k = b_k.to(tl.float32)
            count = tl.minimum(seq_len - start, KEY_BLOCK).to(tl.float32)
            i_out = o_block + start // KEY_BLOCK
            store_padded(means, i_out, tl.sum(b_k, 0) / count, HEAD_DIM)
            if similarity is not None:
                in_row = start + tl.arange(0, KEY_BLOCK) < seq_len
                b_k = tl.where(in_row[:, None], b_k - b_center[None, :], 0.0)
                tl.store(similarity + i_out, _mean_cosine(_sum_of_unit_vectors(b_k), count))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _products_kernel(
    operands, rows, tiles, heads, products, width, first_tile, end_tile, num_tiles, first_row, num_blocks, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PER_TILE: tl.constexpr,
):  # fmt: skip
    """Multiply PRODUCT_M pooled queries of a slab with PRODUCT_N key blocks of each row to which the queries belong.

    Grid: (key blocks / PRODUCT_N, pooled queries / PRODUCT_M, n). Bound by the matrix units: three TF32 products of
    each pair.

    Args:
        rows: [num_rows + 1, 4] int32, ``Rows.row_table``.
        tiles: [num_tiles, 4] int32, ``Rows.tiles``.
        heads: [n] int32 on the device, numbers of the selected query heads.
        products: [n, pooled queries of the run, width · 64] float32; written.
    """
    i_n, i_m, i_selected = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_kv = tl.load(heads + i_selected) // GROUP
    o_m = i_m * PRODUCT_M + tl.arange(0, PRODUCT_M)
    o_n = i_n * PRODUCT_N + tl.arange(0, PRODUCT_N)
    o_tile = first_tile + o_m // PER_TILE
    in_slab = o_tile < end_tile
    tile = tiles + o_tile * TILE_FIELDS
    b_row = tl.load(tile, mask=in_slab, other=-1)
    b_end = tl.load(tile + 2, mask=in_slab, other=0) + tl.load(tile + 3, mask=in_slab, other=0)
    o_q = ((i_selected * num_tiles + first_tile) * PER_TILE + o_m)[:, None] * HEAD_DIM
    target = (
        products + (i_selected * (end_tile - first_tile) * PER_TILE + o_m)[:, None] * (width * ALIGNED) + o_n[None, :]
    )
    first_tile_row = tl.load(tiles + (first_tile + i_m * PRODUCT_M // PER_TILE) * TILE_FIELDS)
    for i_row in range(first_tile_row, tl.max(b_row, 0) + 1):
        if i_n * PRODUCT_N * KEY_BLOCK < tl.max(tl.where(b_row == i_row, b_end, 0), 0):
            _, _, seq_len, _ = load_row(rows, i_row)
            in_blocks = o_n < tl.cdiv(seq_len, KEY_BLOCK)
            first_block = place_in_slab(rows, i_row, first_row) // KEY_BLOCK
            o_block = i_kv.to(tl.int64) * num_blocks + first_block + o_n
            b_s = tl.zeros([PRODUCT_M, PRODUCT_N], tl.float32)
            for start in range(0, HEAD_DIM, PRODUCT_D):
                o_d = start + tl.arange(0, PRODUCT_D)
                in_d = (o_d < HEAD_DIM)[None, :]
                b_q = tl.load(operands.query_means + o_q + o_d[None, :], mask=in_slab[:, None] & in_d, other=0.0)
                b_k = tl.load(
                    operands.keys.means + o_block[:, None] * HEAD_DIM + o_d[None, :],
                    mask=in_blocks[:, None] & in_d,
                    other=0.0,
                )
                # Three TF32 products: as exact as float32, on the matrix units.
                b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision="tf32x3")
            b_s *= scale
            if operands.min_similarity is not None:
                b_similar = tl.load(operands.keys.similarity + o_block, mask=in_blocks, other=0.0)
                min_similarity = tl.load(operands.min_similarity + i_selected)
                b_s = tl.where((b_similar >= min_similarity)[None, :], b_s, float("-inf"))
            tl.store(target, b_s, mask=(b_row == i_row)[:, None] & in_blocks[None, :])
