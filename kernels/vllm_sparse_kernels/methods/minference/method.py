# SPDX-License-Identifier: Apache-2.0
"""A-shape and block-sparse heads of MInference (arXiv:2407.02490), section 3; vertical-slash has a file of its own.

*A-shape*: the query at position p keeps the keys [0, sink) and (p - local, p]. *Block-sparse* (Algorithm 3): queries
and keys averaged in 64s, the k_b key blocks with the largest products for each query block.

Deviations from the paper:

* A tile of 128 queries keeps the same keys, in whole blocks. The A-shape: the union of its queries' windows.
  Block-sparse: the union of its two query blocks' k_b blocks. In an index of 128 keys a block stands for two of 64.
* ``per_query_block: false`` makes k_b the budget of a tile: the blocks with the largest sums of both query blocks'
  softmaxes, their estimated mass. That keeps 0.7 to 0.9 of the union's pairs; at equal density both hold about the
  same. In two layers of a trained model, 8K tokens, the union holds 0.002 to 0.004 more of the mass, and 0.03 to 0.05
  more for the worst hundredth of queries; on structured data the sum holds up to 0.01 more where it keeps under a third
  of the pairs. The larger of both softmaxes instead of their sum does no better.
* Query blocks are counted from the row's first query of this step, key blocks from position 0. The last block of either
  is averaged over the tokens that exist; the authors' code fills it up with zeros.
* A key block is a candidate when its first key is not later than the query block's last query. Sums of softmaxes are
  compared by their logarithms, which do not underflow; within one query block softmax keeps the order of the products,
  and is left out.
* Diagonal blocks are always kept, beyond the k_b. Equal products: the earliest block first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.base import Method, PerHead
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import TILE_FIELDS
from vllm_sparse_kernels.select.lists import CHUNK_BLOCKS, append, tile_blocks
from vllm_sparse_kernels.select.parameters import on_device, require
from vllm_sparse_kernels.select.pooled import (
    ALIGNED,
    KEY_BLOCK_TOKENS,
    KeyPool,
    pool_queries,
    products_of_slabs,
    slabs_of,
)
from vllm_sparse_kernels.select.topk import kept_in_chunk, load_bits

POOL = tl.constexpr(KEY_BLOCK_TOKENS)
"""Tokens of a pooled query or key: the paper's block_size."""

PER_TILE = 2
"""Query blocks of a tile."""

MOST = 1 << 24
"""Tokens or blocks that are told apart: float32, as which heads' numbers travel, has every whole number up to it."""

HELD_BLOCKS = 2048
"""Scores of each of a tile's two rows that stay in registers, those of 131,072 keys."""


@dataclass(frozen=True)
class AShape(Method):
    """Global tokens ``sink_tokens`` and local window ``local_tokens``, the paper's 1k and 4k."""

    block_tokens = 128

    sink_tokens: int = 1024
    local_tokens: int = 4096

    def __post_init__(self) -> None:
        require(self.sink_tokens >= 0, "sink_tokens", self.sink_tokens, ">= 0")
        require(self.local_tokens >= 1, "local_tokens", self.local_tokens, ">= 1")

    @property
    def alike(self) -> "AShape":
        return AShape()

    @classmethod
    def merged(cls, methods: Sequence[Self]) -> Method:
        return AShapeLayer.join(methods)

    def select(self, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float) -> None:
        settings = self.of_heads(len(heads))
        sinks, locals_ = (
            [min(getattr(one, name), MOST) for one in settings] for name in ("sink_tokens", "local_tokens")
        )
        _a_shape_kernel[(index.rows.num_tiles, len(heads))](
            heads, index.rows.tiles, index.rows.num_tiles, index.block_counts, index.block_ids,
            index.block_ids.stride(0), index.block_offsets, on_device((*sinks, *locals_), heads.device),
            BLOCK_N=index.block_tokens, CHUNK=CHUNK_BLOCKS, FIELDS=TILE_FIELDS,
        )  # fmt: skip


@dataclass(frozen=True)
class AShapeLayer(PerHead, AShape):
    """Heads that differ in how much they keep."""


@triton.jit(do_not_specialize=["num_tiles", "stride_ids"])
def _a_shape_kernel(
    heads, tiles, num_tiles, block_counts, block_ids, stride_ids, block_offsets, numbers,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """``numbers`` [2, n]: global tokens and local window of each head."""
    i_tile = tl.program_id(0)
    i_head = tl.load(heads + tl.program_id(1)).to(tl.int64)
    sink_tokens = tl.load(numbers + tl.program_id(1)).to(tl.int32)
    local_tokens = tl.load(numbers + tl.num_programs(1) + tl.program_id(1)).to(tl.int32)
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

    per_query_block: bool = True
    """False: for each tile of 128 queries, by both query blocks' estimated mass."""

    def __post_init__(self) -> None:
        require(self.top_blocks >= 0, "top_blocks", self.top_blocks, ">= 0")

    @property
    def alike(self) -> "BlockSparse":
        return BlockSparse(per_query_block=self.per_query_block)

    @classmethod
    def merged(cls, methods: Sequence[Self]) -> Method:
        return BlockSparseLayer.join(methods)

    def select(self, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float) -> None:
        rows, workspace = index.rows, index.workspace
        slabs = slabs_of(rows, len(heads), cache.num_kv_heads, cache.head_dim, PER_TILE)
        queries = pool_queries(q, rows, heads, PER_TILE, workspace, similar=False)
        pool = KeyPool(cache, rows, slabs, heads, q.shape[1], workspace)
        for slab, scores in products_of_slabs(queries, pool, slabs, heads, scale, PER_TILE, workspace):
            write_top_blocks(scores, self, index, slab.first_tile, heads)


@dataclass(frozen=True)
class BlockSparseLayer(PerHead, BlockSparse):
    """Heads that differ in k_b."""


def write_top_blocks(
    scores: torch.Tensor, method: BlockSparse, index: SparseIndex, first_tile: int, heads: torch.Tensor
) -> None:
    """Lists of the tiles from ``first_tile`` on: the blocks that ``method`` chooses by their scores, and the diagonal.

    scores: [len(heads), 2 · tiles, a multiple of 64] float32, undefined where none of the queries may look.
    Overwritten unless ``method.per_query_block``.
    """
    num_entries, num_q, width = scores.shape
    counts = on_device(tuple(min(one.top_blocks, MOST) for one in method.of_heads(num_entries)), scores.device)
    _top_blocks_kernel[(num_q // PER_TILE, num_entries)](
        scores, width // ALIGNED.value, counts, heads, first_tile, index.rows.tiles, index.rows.num_tiles,
        index.block_counts, index.block_ids, index.block_ids.stride(0), index.block_offsets,
        PER_QUERY_BLOCK=method.per_query_block, BLOCK_N=index.block_tokens, HELD=HELD_BLOCKS, CHUNK=CHUNK_BLOCKS,
        FIELDS=TILE_FIELDS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["width", "first_tile", "num_tiles", "stride_ids"])
def _top_blocks_kernel(
    scores, width, counts, heads, first_tile, tiles, num_tiles,
    block_counts, block_ids, stride_ids, block_offsets,
    PER_QUERY_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, HELD: tl.constexpr, CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """One tile's list by its two query blocks' rows of scores, each ``width`` · 64, and the diagonal."""
    i_tile, i_entry = first_tile + tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_head = tl.load(heads + i_entry).to(tl.int64)
    top_blocks = tl.load(counts + i_entry).to(tl.int32)
    length = tl.load(tiles + i_tile * FIELDS + 2)
    first = tl.load(tiles + i_tile * FIELDS + 3)
    diagonal, num_causal = tile_blocks(tiles, i_tile, BLOCK_N, FIELDS)
    row_0 = scores + (i_entry * tl.num_programs(0) + tl.program_id(0)) * 2 * (width * ALIGNED)
    row_1 = row_0 + width * ALIGNED
    num_0 = (first + tl.minimum(length, POOL) - 1) // POOL + 1
    num_1 = tl.where(length > POOL, (first + length - 1) // POOL + 1, 0)
    if not PER_QUERY_BLOCK:
        _join(row_0, num_0, row_1, num_1, HELD)
        num_0, num_1 = tl.maximum(num_0, num_1), 0
    rows = (row_0, num_0, row_1, num_1)
    threshold_0, num_ties_0, threshold_1, num_ties_1 = _kth_largest_of_two(rows, top_blocks, HELD)

    RATIO: tl.constexpr = BLOCK_N // POOL
    target = block_ids + i_head * stride_ids + tl.load(block_offsets + i_tile)
    count, above_0, ties_0, above_1, ties_1 = 0, 0, 0, 0, 0
    for start in range(0, tl.maximum(num_0, num_1), CHUNK):
        b_0, b_1 = load_bits(row_0, start, num_0, 0, CHUNK), load_bits(row_1, start, num_1, 0, CHUNK)
        b_kept_0, _, above_0, ties_0 = kept_in_chunk(b_0, threshold_0, num_ties_0, above_0, ties_0)
        b_kept_1, _, above_1, ties_1 = kept_in_chunk(b_1, threshold_1, num_ties_1, above_1, ties_1)
        b_kept = tl.max(tl.reshape((b_kept_0 | b_kept_1).to(tl.int32), [CHUNK // RATIO, RATIO]), 1)
        o_n = start // RATIO + tl.arange(0, CHUNK // RATIO)
        count = append(target, count, o_n, (o_n < num_causal) & ((b_kept != 0) | (o_n >= diagonal)))
    tl.store(block_counts + i_head * num_tiles + i_tile, count)


@triton.jit
def _join(row_0, num_0, row_1, num_1, CHUNK: tl.constexpr):
    """Logarithms of the sums of both rows' softmaxes, in place of the first row. The second one is longer, or empty."""
    log_sum_0, log_sum_1 = _log_sum(row_0, num_0, CHUNK), _log_sum(row_1, num_1, CHUNK)
    for start in range(0, tl.maximum(num_0, num_1), CHUNK):
        o_n = start + tl.arange(0, CHUNK)
        b_0 = _load_scores(row_0, start, num_0, CHUNK) - log_sum_0
        b_1 = _load_scores(row_1, start, num_1, CHUNK) - log_sum_1
        b_most = tl.maximum(b_0, b_1)
        b_sum = b_most + tl.log(1.0 + tl.exp(tl.minimum(b_0, b_1) - b_most))
        tl.store(row_0 + o_n, b_sum, mask=o_n < tl.maximum(num_0, num_1))
    tl.debug_barrier()


@triton.jit
def _log_sum(row, length, CHUNK: tl.constexpr):
    """Logarithm of the sum of the exponentials of row[:length]; 0 of none."""
    b_first = _load_scores(row, 0, length, CHUNK)
    largest = tl.max(b_first, 0)
    for start in range(CHUNK, length, CHUNK):
        largest = tl.maximum(largest, tl.max(_load_scores(row, start, length, CHUNK), 0))
    largest = tl.where(length > 0, largest, 0.0)
    total = tl.sum(tl.exp(b_first - largest), 0)
    for start in range(CHUNK, length, CHUNK):
        total += tl.sum(tl.exp(_load_scores(row, start, length, CHUNK) - largest), 0)
    return tl.where(length > 0, largest + tl.log(total), 0.0)


@triton.jit
def _load_scores(row, start, length, CHUNK: tl.constexpr):
    """row[start : start + CHUNK], −∞ from ``length`` on. It is read in whole ALIGNED, so that loads can be wide."""
    o_n = start + tl.arange(0, CHUNK)
    b_s = tl.load(row + o_n, mask=o_n < (length + ALIGNED - 1) // ALIGNED * ALIGNED, other=0.0)
    return tl.where(o_n < length, b_s, float("-inf"))


@triton.jit
def _kth_largest_of_two(rows, k, CHUNK: tl.constexpr):
    """For each of two rows (threshold, ties): its k largest are those above and the first ``ties`` equal ones.

    Found bit by bit from the highest down. The first CHUNK values are held; of longer rows the rest is read for every
    bit.
    """
    row_0, num_0, row_1, num_1 = rows
    b_0, b_1 = load_bits(row_0, 0, num_0, 0, CHUNK), load_bits(row_1, 0, num_1, 0, CHUNK)
    threshold_0, threshold_1 = tl.full([], 0, tl.uint32), tl.full([], 0, tl.uint32)
    reach_0, above_0, reach_1, above_1 = num_0, 0, num_1, 0  # values >= threshold, values known to be above the k-th
    bit = tl.full([], 1 << 31, tl.uint32)
    while (bit > 0) & ((reach_0 > k) | (reach_1 > k)):
        n_0, n_1 = _count_two(b_0, b_1, rows, threshold_0 + bit, threshold_1 + bit, CHUNK)
        threshold_0, reach_0, above_0 = _next_bit(threshold_0, reach_0, above_0, n_0, k, bit)
        threshold_1, reach_1, above_1 = _next_bit(threshold_1, reach_1, above_1, n_1, k, bit)
        bit = bit >> 1
    threshold_0, num_ties_0 = _settled(threshold_0, reach_0, above_0, k)
    threshold_1, num_ties_1 = _settled(threshold_1, reach_1, above_1, k)
    return threshold_0, num_ties_0, threshold_1, num_ties_1


@triton.jit
def _next_bit(threshold, reach, above, n, k, bit):
    """One bit of one row's threshold; nothing any more once no more than k values reach it."""
    is_open = reach > k
    is_set = is_open & (n >= k)
    above = tl.where(is_open & (n < k), n, above)
    return tl.where(is_set, threshold + bit, threshold), tl.where(is_set, n, reach), above


@triton.jit
def _settled(threshold, reach, above, k):
    return tl.where(reach <= k, tl.maximum(threshold, 1) - 1, threshold), tl.where(reach <= k, 0, k - above)


@triton.jit
def _count_two(b_0, b_1, rows, least_0, least_1, CHUNK: tl.constexpr):
    """How many values of each row have at least these bits."""
    row_0, num_0, row_1, num_1 = rows
    n_0, n_1 = _count_held(b_0, b_1, least_0, least_1)
    for start in range(CHUNK, tl.maximum(num_0, num_1), CHUNK):
        b_0, b_1 = load_bits(row_0, start, num_0, 0, CHUNK), load_bits(row_1, start, num_1, 0, CHUNK)
        more_0, more_1 = _count_held(b_0, b_1, least_0, least_1)
        n_0 += more_0
        n_1 += more_1
    return n_0, n_1


@triton.jit
def _count_held(b_0, b_1, least_0, least_1):
    """Both counts by one reduction; a chunk is shorter than 2 ** 15."""
    both = tl.sum((b_0 >= least_0).to(tl.int32) + ((b_1 >= least_1).to(tl.int32) << 16), 0)
    return both & 0xFFFF, both >> 16
