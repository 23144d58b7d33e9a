# SPDX-License-Identifier: Apache-2.0
"""Block-sparse heads of MInference (arXiv:2407.02490, Algorithm 3).

Queries and keys are averaged in blocks of 64. Each query block keeps the k_b key blocks with the largest products.

Deviations from the paper:

* All queries of a tile of 128 keep the same keys: the union of the k_b blocks of its two query blocks. If the index has
  blocks of 128 keys, each of them contains two of these blocks.
* Query blocks are counted from the row's first query of this step, key blocks from position 0. The last query block and
  the last key block are averaged over the tokens that exist; the authors' code pads them with zeros.
* A key block is a candidate when its first key is not later than the query block's last query. Softmax does not change
  the order of the products, so it is left out.
* Diagonal blocks are always kept, in addition to the k_b. Ties go to the earliest block.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.selection.lists import CHUNK_BLOCKS, append, list_of, load_tile, tile_blocks
from vllm_sparse_kernels.selection.parameters import require
from vllm_sparse_kernels.selection.pooled import ALIGNED, KEY_BLOCK_TOKENS, pooled_products
from vllm_sparse_kernels.selection.topk import kept_in_chunk, load_bits

POOL = Constant(KEY_BLOCK_TOKENS)
"""Tokens of a pooled query or key: the paper's block_size."""

PER_TILE = 2
"""Query blocks of a tile."""

HELD_BLOCKS = 2048
"""Scores that stay in registers, for each of a tile's two rows: the scores of 131,072 keys."""


@dataclass(frozen=True)
class BlockSparse(Method):
    """k_b ``top_blocks`` blocks of 64 keys for each block of 64 queries."""

    differing = ("top_blocks",)

    top_blocks: int = 100

    def __post_init__(self) -> None:
        require(self.top_blocks >= 0, "top_blocks", self.top_blocks, ">= 0")

    def select(self, call: Call) -> None:
        for first_tile, scores, _ in pooled_products(call, PER_TILE):
            write_top_blocks(call, scores, first_tile)


def write_top_blocks(call: Call, scores: torch.Tensor, first_tile: int) -> None:
    """Write the lists of the tiles from ``first_tile`` on: the blocks with the largest scores, and the diagonal."""
    index, (num_selected, num_q, width) = call.index, scores.shape
    _top_blocks_kernel[(num_q // PER_TILE, num_selected)](
        scores, width // ALIGNED.value, call.parameters("top_blocks"), call.head_ids, first_tile, index.args,
        index.rows.num_tiles,
        BLOCK_N=index.block_tokens, HELD=HELD_BLOCKS, CHUNK=CHUNK_BLOCKS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["width", "first_tile", "num_tiles"])
def _top_blocks_kernel(
    scores, width, counts, heads, first_tile, index, num_tiles,
    BLOCK_N: tl.constexpr, HELD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the list of one tile and head.

    The kept blocks follow from the scores of its two query blocks (``width`` · 64 each) and from the diagonal.

    Grid: (tiles of the run, n). Bound by latency: 32 halvings over scores in registers.

    Args:
        scores: [n, 2 · tiles, width · 64] float32.
        counts: [n] float32, k_b.
        heads: [n] int32 on the device, numbers of the selected query heads.
    """
    i_tile, i_selected = first_tile + tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_head = tl.load(heads + i_selected).to(tl.int64)
    top_blocks = tl.load(counts + i_selected).to(tl.int32)
    _, _, length, first = load_tile(index.tiles, i_tile)
    diagonal, num_causal = tile_blocks(index.tiles, i_tile, BLOCK_N)
    row_0 = scores + (i_selected * tl.num_programs(0) + tl.program_id(0)) * 2 * (width * ALIGNED)
    row_1 = row_0 + width * ALIGNED
    num_0 = (first + tl.minimum(length, POOL) - 1) // POOL + 1
    num_1 = tl.where(length > POOL, (first + length - 1) // POOL + 1, 0)
    rows = (row_0, num_0, row_1, num_1)
    threshold_0, num_ties_0, threshold_1, num_ties_1 = _kth_largest_of_two(rows, top_blocks, HELD)

    RATIO: tl.constexpr = BLOCK_N // POOL
    target = list_of(index, i_head, i_tile)
    count, above_0, ties_0, above_1, ties_1 = 0, 0, 0, 0, 0
    for start in range(0, tl.maximum(num_0, num_1), CHUNK):
        b_0, b_1 = load_bits(row_0, start, num_0, CHUNK), load_bits(row_1, start, num_1, CHUNK)
        b_kept_0, _places, above_0, ties_0 = kept_in_chunk(b_0, threshold_0, num_ties_0, above_0, ties_0)
        b_kept_1, _places, above_1, ties_1 = kept_in_chunk(b_1, threshold_1, num_ties_1, above_1, ties_1)
        b_kept = tl.max(tl.reshape((b_kept_0 | b_kept_1).to(tl.int32), [CHUNK // RATIO, RATIO]), 1)
        o_n = start // RATIO + tl.arange(0, CHUNK // RATIO)
        count = append(target, count, o_n, (o_n < num_causal) & ((b_kept != 0) | (o_n >= diagonal)))
    tl.store(index.block_counts + i_head * num_tiles + i_tile, count)


@triton.jit
def _kth_largest_of_two(rows, k, CHUNK: tl.constexpr):
    """Return (threshold, ties) for each of two rows.

    The k largest values are those above the threshold and the first ``ties`` equal to it.

    The search goes bit by bit, from the highest down. The first CHUNK values stay in registers. The other values of
    longer rows are read again for every bit.
    """
    row_0, num_0, row_1, num_1 = rows
    b_0, b_1 = load_bits(row_0, 0, num_0, CHUNK), load_bits(row_1, 0, num_1, CHUNK)
    threshold_0, threshold_1 = tl.full([], 0, tl.uint32), tl.full([], 0, tl.uint32)
    num_reaching_0, num_reaching_1 = num_0, num_1  # values >= threshold
    above_0, above_1 = 0, 0  # values known to be above the k-th
    bit = tl.full([], 1 << 31, tl.uint32)
    while (bit > 0) & ((num_reaching_0 > k) | (num_reaching_1 > k)):
        count_0, count_1 = _count_rows(b_0, b_1, rows, threshold_0 + bit, threshold_1 + bit, CHUNK)
        threshold_0, num_reaching_0, above_0 = _settle_bit(threshold_0, num_reaching_0, above_0, count_0, k, bit)
        threshold_1, num_reaching_1, above_1 = _settle_bit(threshold_1, num_reaching_1, above_1, count_1, k, bit)
        bit = bit >> 1
    threshold_0, num_ties_0 = _final_threshold(threshold_0, num_reaching_0, above_0, k)
    threshold_1, num_ties_1 = _final_threshold(threshold_1, num_reaching_1, above_1, k)
    return threshold_0, num_ties_0, threshold_1, num_ties_1


@triton.jit
def _settle_bit(threshold, num_reaching, above, count, k, bit):
    """Determine one bit of a row's threshold, unless at most k values reach the threshold already.

    ``count`` values reach the threshold with this bit.
    """
    is_open = num_reaching > k
    is_set = is_open & (count >= k)
    above = tl.where(is_open & (count < k), count, above)
    return tl.where(is_set, threshold + bit, threshold), tl.where(is_set, count, num_reaching), above


@triton.jit
def _final_threshold(threshold, num_reaching, above, k):
    """Return (threshold, ties) of one row; if at most k values reach the threshold, all of them are kept."""
    keeps_all = num_reaching <= k
    return tl.where(keeps_all, tl.maximum(threshold, 1) - 1, threshold), tl.where(keeps_all, 0, k - above)


@triton.jit
def _count_rows(b_0, b_1, rows, least_0, least_1, CHUNK: tl.constexpr):
    """Count the values of each row with at least these bits."""
    row_0, num_0, row_1, num_1 = rows
    count_0, count_1 = _count_chunk(b_0, b_1, least_0, least_1)
    for start in range(CHUNK, tl.maximum(num_0, num_1), CHUNK):
        b_0, b_1 = load_bits(row_0, start, num_0, CHUNK), load_bits(row_1, start, num_1, CHUNK)
        more_0, more_1 = _count_chunk(b_0, b_1, least_0, least_1)
        count_0 += more_0
        count_1 += more_1
    return count_0, count_1


@triton.jit
def _count_chunk(b_0, b_1, least_0, least_1):
    """Compute both counts by one reduction; a chunk is shorter than 2 ** 15."""
    b_counts = tl.sum((b_0 >= least_0).to(tl.int32) + ((b_1 >= least_1).to(tl.int32) << 16), 0)
    return b_counts & 0xFFFF, b_counts >> 16
