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
from vllm_sparse_kernels.selection.lists import (
    CHUNK_BLOCKS,
    append,
    list_of,
    load_tile,
    store_count,
    tile_and_head,
    tile_blocks,
)
from vllm_sparse_kernels.selection.parameters import require
from vllm_sparse_kernels.selection.pooled import ALIGNED, KEY_BLOCK, pooled_products

PER_TILE = Constant(2)
"""Query blocks of a tile."""

HELD_BLOCKS = Constant(2048)
"""Scores that stay in registers, for each of a tile's two rows: the scores of 131,072 keys."""


@dataclass(frozen=True)
class BlockSparse(Method):
    """k_b ``top_blocks`` blocks of 64 keys for each block of 64 queries."""

    differing = ("top_blocks",)

    top_blocks: int = 100

    def __post_init__(self) -> None:
        require(self.top_blocks >= 0, "top_blocks", self.top_blocks, ">= 0")

    def select(self, call: Call) -> None:
        for first_tile, scores, _ in pooled_products(call, PER_TILE.value):
            write_top_blocks(call, scores, first_tile)


def write_top_blocks(call: Call, scores: torch.Tensor, first_tile: int) -> None:
    """Write the lists of the tiles from ``first_tile`` on: the blocks with the largest scores, and the diagonal."""
    index, (num_selected, num_q, width) = call.index, scores.shape
    _top_blocks_kernel[(num_q // PER_TILE.value, num_selected)](
        scores, width // ALIGNED.value, call.parameters("top_blocks"), call.head_ids, first_tile, index.args,
        index.rows.num_tiles, BLOCK_N=index.block_tokens,
    )  # fmt: skip


@triton.jit(do_not_specialize=["width", "first_tile", "num_tiles"])
def _top_blocks_kernel(scores, width, counts, heads, first_tile, index, num_tiles, BLOCK_N: tl.constexpr):
    """Write the list of one tile and head.

    The kept blocks follow from the scores of its two query blocks (``width`` · 64 each) and from the diagonal.

    Grid: (tiles of the run, n). Bound by latency: 32 bisection steps on scores in registers.

    Args:
        scores: [n, 2 · tiles, width · 64] float32.
        counts: [n] float32, k_b.
        heads: [n] int32 on the device, numbers of the selected query heads.
    """
    i_tile, i_selected, i_head = tile_and_head(first_tile, heads)
    top_blocks = tl.load(counts + i_selected).to(tl.int32)
    _, _, length, first = load_tile(index.tiles, i_tile)
    diagonal, num_causal = tile_blocks(index.tiles, i_tile, BLOCK_N)
    o_r = tl.arange(0, PER_TILE)
    rows = scores + ((i_selected * tl.num_programs(0) + tl.program_id(0)) * PER_TILE + o_r) * (width * ALIGNED)
    # [2] candidates of each query block; a short tile has only one.
    b_num = (first + tl.minimum(length, (o_r + 1) * KEY_BLOCK) - 1) // KEY_BLOCK + 1
    b_num = tl.where(length > o_r * KEY_BLOCK, b_num, 0)
    b_threshold, b_num_ties = _kth_largest(rows, b_num, top_blocks)

    RATIO: tl.constexpr = BLOCK_N // KEY_BLOCK
    target = list_of(index, i_head, i_tile)
    count = 0
    b_seen = tl.zeros([PER_TILE], tl.int32)  # values equal to the threshold so far
    for start in range(0, tl.max(b_num, 0), CHUNK_BLOCKS):
        b_bits = _load_bits(rows, start, b_num, CHUNK_BLOCKS)  # [2, CHUNK_BLOCKS]
        b_tie = ((b_bits == b_threshold[:, None]) & (b_bits != 0)).to(tl.int32)
        b_is_first = b_seen[:, None] + tl.cumsum(b_tie, 1) <= b_num_ties[:, None]
        b_seen += tl.sum(b_tie, 1)
        b_kept = (b_bits > b_threshold[:, None]) | ((b_tie != 0) & b_is_first)
        b_kept = tl.max(b_kept.to(tl.int32), 0)
        b_kept = tl.max(tl.reshape(b_kept, [CHUNK_BLOCKS // RATIO, RATIO]), 1)
        o_n = start // RATIO + tl.arange(0, CHUNK_BLOCKS // RATIO)
        count = append(target, count, o_n, (o_n < num_causal) & ((b_kept != 0) | (o_n >= diagonal)))
    store_count(index.block_counts, i_head, i_tile, num_tiles, count)


@triton.jit
def _kth_largest(rows, b_num, k):
    """Return thresholds and numbers of ties, [2] each, for the first ``b_num`` values of two rows.

    The k largest values are those above the threshold and the first ties with it. The search goes bit by bit, from the
    highest down. The first values stay in registers; the others of longer rows are read again for every bit.
    """
    b_held = _load_bits(rows, 0, b_num, HELD_BLOCKS)
    b_threshold = tl.zeros([PER_TILE], tl.uint32)
    b_reaching = b_num  # number of values >= threshold
    b_above = tl.zeros([PER_TILE], tl.int32)  # number of values known to be above the k-th
    bit = tl.full([], 1 << 31, tl.uint32)
    while (bit > 0) & (tl.max(b_reaching, 0) > k):
        b_least = b_threshold + bit
        b_count = tl.sum((b_held >= b_least[:, None]).to(tl.int32), 1)
        for start in range(HELD_BLOCKS, tl.max(b_num, 0), HELD_BLOCKS):
            b_bits = _load_bits(rows, start, b_num, HELD_BLOCKS)
            b_count += tl.sum((b_bits >= b_least[:, None]).to(tl.int32), 1)
        is_open = b_reaching > k
        is_set = is_open & (b_count >= k)
        b_above = tl.where(is_open & (b_count < k), b_count, b_above)
        b_threshold = tl.where(is_set, b_least, b_threshold)
        b_reaching = tl.where(is_set, b_count, b_reaching)
        bit = bit >> 1
    # If at most k values reach the threshold, all of them are kept.
    keeps_all = b_reaching <= k
    b_threshold = tl.where(keeps_all, tl.maximum(b_threshold, 1) - 1, b_threshold)
    return b_threshold, tl.where(keeps_all, 0, k - b_above)


@triton.jit
def _load_bits(rows, start, b_num, CHUNK: tl.constexpr):
    """Load values [2, CHUNK] of two rows as uint32 that sort as the values do; 0 past the first ``b_num`` values."""
    o_n = start + tl.arange(0, CHUNK)[None, :]
    in_row = o_n < tl.cdiv(b_num[:, None], ALIGNED) * ALIGNED
    b_values = tl.load(rows[:, None] + o_n, mask=in_row, other=0.0) + 0.0  # adding 0 turns -0 into 0
    b_bits = b_values.to(tl.uint32, bitcast=True)
    b_bits = tl.where((b_bits >> 31) != 0, ~b_bits, b_bits | 0x80000000)
    return tl.where(o_n < b_num[:, None], b_bits, 0)
