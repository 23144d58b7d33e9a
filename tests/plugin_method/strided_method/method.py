# SPDX-License-Identifier: Apache-2.0
"""Strided attention: the pattern of Sparse Transformers (arXiv:1904.10509, section 4.2), over blocks of keys.

A query keeps the first tokens, a local window, and every ``stride_tokens``-th key between them. A tile of 128 queries
keeps the blocks that contain such a key. Neither queries nor keys are read.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.selection.lists import CHUNK_BLOCKS, append, load_tile, tile_blocks
from vllm_sparse_kernels.selection.parameters import require


@dataclass(frozen=True)
class Strided(Method):
    """First tokens ``sink_tokens``, local window ``local_tokens``, and the stride of all keys between."""

    block_tokens = 128
    differing = ("sink_tokens", "local_tokens", "stride_tokens")

    sink_tokens: int = 128
    local_tokens: int = 1024
    stride_tokens: int = 1024

    def __post_init__(self) -> None:
        for name, least in (("sink_tokens", 0), ("local_tokens", 1), ("stride_tokens", 1)):
            require(getattr(self, name) >= least, name, getattr(self, name), f">= {least}")

    def select(self, call: Call) -> None:
        index = call.index
        _strided_kernel[(index.rows.num_tiles, len(call.heads))](
            call.head_ids, call.parameters(*self.differing), index.rows.tiles, index.rows.num_tiles,
            index.block_offsets, index.block_counts, index.block_ids, index.block_ids.stride(0),
            BLOCK_N=index.block_tokens,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles", "stride_ids"])
def _strided_kernel(
    heads, numbers, tiles, num_tiles, block_offsets, block_counts, block_ids, stride_ids,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the list of a tile and head. ``numbers`` [3, n] has the sink, window and stride of each head."""
    i_tile, i_selected, num_selected = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    i_head = tl.load(heads + i_selected).to(tl.int64)
    sink_tokens = tl.load(numbers + i_selected).to(tl.int32)
    local_tokens = tl.load(numbers + num_selected + i_selected).to(tl.int32)
    stride_tokens = tl.load(numbers + 2 * num_selected + i_selected).to(tl.int32)
    _, _, _, position = load_tile(tiles, i_tile)  # of the tile's first query
    _, num_causal = tile_blocks(tiles, i_tile, BLOCK_N)
    target = block_ids + i_head * stride_ids + tl.load(block_offsets + i_tile)
    count = 0
    for start in range(0, num_causal, CHUNK_BLOCKS):
        o_n = start + tl.arange(0, CHUNK_BLOCKS)
        b_first, b_last = o_n * BLOCK_N, o_n * BLOCK_N + BLOCK_N - 1
        b_kept = (b_first < sink_tokens) | (b_last > position - local_tokens)
        b_kept |= b_last // stride_tokens * stride_tokens >= b_first
        count = append(target, count, o_n, b_kept & (o_n < num_causal))
    tl.store(block_counts + i_head * num_tiles + i_tile, count)
