# SPDX-License-Identifier: Apache-2.0
"""A dense last tile: heads that ask for it keep every key for the last tile of each row's chunk, whatever the method.

What a prompt's last queries miss, no later token makes up for. A tile counts from the chunk's first query: the last one
has what is left over, 1 to 128 queries. No paper of ours has it; it costs a tile's share of dense attention a chunk.
"""

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.rows import TILE_FIELDS
from vllm_sparse_kernels.select.lists import CHUNK_BLOCKS, tile_blocks


def keep_last_tiles(index: SparseIndex, heads: torch.Tensor) -> None:
    """Of ``heads`` [n] int32, once selected: every causal block and no stripe for the last tile of each row."""
    _keep_last_tiles_kernel[(index.rows.num_tiles, len(heads))](
        heads, index.rows.tiles, index.block_offsets, index.block_counts, index.block_ids, index.block_ids.stride(0),
        index.stripe_counts, BLOCK_N=index.block_tokens, CHUNK=CHUNK_BLOCKS, FIELDS=TILE_FIELDS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride_ids"])
def _keep_last_tiles_kernel(
    heads, tiles, block_offsets, block_counts, block_ids, stride_ids, stripe_counts,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    i_tile, i_group = tl.program_id(0), tl.program_id(1)
    num_tiles = tl.num_programs(0)
    i_row = tl.load(tiles + i_tile * FIELDS)
    next_row = tl.load(tiles + (i_tile + 1) * FIELDS, mask=i_tile + 1 < num_tiles, other=-1)
    if next_row != i_row:
        i_head = tl.load(heads + i_group)
        _, num_causal = tile_blocks(tiles, i_tile, BLOCK_N, FIELDS)
        target = block_ids + i_head.to(tl.int64) * stride_ids + tl.load(block_offsets + i_tile)
        for first in range(0, num_causal, CHUNK):
            o_n = first + tl.arange(0, CHUNK)
            tl.store(target + o_n, o_n, mask=o_n < num_causal)
        tl.store(block_counts + i_head * num_tiles + i_tile, num_causal)
        tl.store(stripe_counts + i_head * num_tiles + i_tile, 0)
