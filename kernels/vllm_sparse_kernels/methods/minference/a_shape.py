# SPDX-License-Identifier: Apache-2.0
"""A-shape heads of MInference (arXiv:2407.02490, section 3).

The query at position p keeps the keys [0, sink) and (p - local, p].

All queries of a tile of 128 keep the same keys, in whole blocks: the union of their windows.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.selection.lists import (
    CHUNK_BLOCKS,
    list_of,
    load_tile,
    store_count,
    tile_and_head,
    tile_blocks,
)
from vllm_sparse_kernels.selection.parameters import require


@dataclass(frozen=True)
class AShape(Method):
    """Global tokens ``sink_tokens`` and local window ``local_tokens``, the paper's 1k and 4k."""

    block_tokens = 128
    differing = ("sink_tokens", "local_tokens")
    leaves_width_to_others = True  # narrow blocks save less than one block of 128 keys at each end of the window

    sink_tokens: int = 1024
    local_tokens: int = 4096

    def __post_init__(self) -> None:
        require(self.sink_tokens >= 0, "sink_tokens", self.sink_tokens, ">= 0")
        require(self.local_tokens >= 1, "local_tokens", self.local_tokens, ">= 1")

    def select(self, call: Call) -> None:
        index = call.index
        _a_shape_kernel[(index.rows.num_tiles, call.num_selected)](
            call.head_ids, index.args, index.rows.num_tiles, call.parameters("sink_tokens", "local_tokens"),
            BLOCK_N=index.block_tokens,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles"])
def _a_shape_kernel(heads, index, num_tiles, numbers, BLOCK_N: tl.constexpr):
    """Write the list of one tile and head: the blocks of the sink and of the local window.

    Grid: (tiles, n). Bound by the launch: it writes 4 bytes for each kept block.

    Args:
        heads: [n] int32 on the device, numbers of the selected query heads.
        numbers: [2, n] float32: global tokens and local window of each head.
    """
    i_tile, i_selected, i_head = tile_and_head(0, heads)
    sink_tokens = tl.load(numbers + i_selected).to(tl.int32)
    local_tokens = tl.load(numbers + tl.num_programs(1) + i_selected).to(tl.int32)
    _, num_causal = tile_blocks(index.tiles, i_tile, BLOCK_N)
    _, _, _, position = load_tile(index.tiles, i_tile)
    num_sink = tl.minimum(tl.cdiv(sink_tokens, BLOCK_N), num_causal)
    oldest = tl.maximum(position - local_tokens + 1, 0)  # key of the first query's window
    first_local = tl.maximum(oldest // BLOCK_N, num_sink)
    count = num_sink + num_causal - first_local
    target = list_of(index, i_head, i_tile)
    for start in range(0, count, CHUNK_BLOCKS):
        o_n = start + tl.arange(0, CHUNK_BLOCKS)
        tl.store(target + o_n, tl.where(o_n < num_sink, o_n, o_n - num_sink + first_local), mask=o_n < count)
    store_count(index.block_counts, i_head, i_tile, num_tiles, count)
