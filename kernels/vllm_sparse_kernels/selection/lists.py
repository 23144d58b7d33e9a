# SPDX-License-Identifier: Apache-2.0
"""A program's row, tile, head and list in a SparseIndex, and the conversion of a method's flags to sorted lists."""

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.rows import ROW_FIELDS, TILE_FIELDS

CHUNK_BLOCKS = Constant(1024)
"""Blocks of a step."""


@triton.jit
def append(target, count, b_values, b_kept):
    """Append the kept values to the first ``count`` values of ``target``, in order."""
    b_kept = b_kept.to(tl.int32)
    o_target = count + tl.cumsum(b_kept, 0) - 1
    tl.store(target + o_target, b_values, mask=b_kept != 0)
    return count + tl.sum(b_kept, 0)


@triton.jit
def above_threshold(b_values, bits, num_equal, num_seen):
    """Flag floats >= 0 with more than these bits, and the first ``num_equal`` with exactly these bits.

    ``num_seen`` such floats came before ``b_values``. Returns the flags and the new ``num_seen``.
    """
    b_bits = b_values.to(tl.int32, bitcast=True)
    b_equal = (b_bits == bits).to(tl.int32)
    b_is_first = (b_equal != 0) & (num_seen + tl.cumsum(b_equal, 0) <= num_equal)
    return (b_bits > bits) | b_is_first, num_seen + tl.sum(b_equal, 0)


@triton.jit
def load_tile(tiles, i_tile):
    """Load the fields of a tile."""
    tile = tiles + i_tile * TILE_FIELDS
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)


@triton.jit
def load_row(rows, i_row):
    """Load the four fields of a row of ``Rows.row_table``, or of ``Part.rows`` of MLA."""
    row = rows + i_row * ROW_FIELDS
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def place_in_slab(rows, i_row, first_row):
    """Return the place of a row's first key in the arrays of a slab, whose first row is ``first_row``."""
    _, _, _, start = load_row(rows, i_row)
    _, _, _, first = load_row(rows, first_row)
    return start - first


@triton.jit
def tile_blocks(tiles, i_tile, BLOCK_N: tl.constexpr):
    """Return the range of diagonal blocks of a tile."""
    _, _, length, first = load_tile(tiles, i_tile)
    return first // BLOCK_N, (first + length - 1) // BLOCK_N + 1


@triton.jit
def tile_and_head(first_tile, heads):
    """Return this program's tile, the place of its head in ``heads``, and the head. Grid: (tiles, n)."""
    i_selected = tl.program_id(1).to(tl.int64)
    return first_tile + tl.program_id(0), i_selected, tl.load(heads + i_selected).to(tl.int64)


@triton.jit
def list_place(index, i_list, i_tile):
    """Return the place of a tile's first block in ``block_ids``, and in flags of the same order."""
    return i_list * index.stride_blocks + tl.load(index.block_offsets + i_tile)


@triton.jit
def list_of(index, i_head, i_tile):
    """Return a pointer to the list of blocks of a head and a tile."""
    return index.block_ids + list_place(index, i_head, i_tile)


@triton.jit
def store_count(counts, i_head, i_tile, num_tiles, count):
    """Store the length of the list of a head and a tile."""
    tl.store(counts + i_head * num_tiles + i_tile, count)


def compact_blocks(kept: torch.Tensor | None, call: Call) -> None:
    """Write the block lists of the call's heads from flags; None keeps all blocks.

    ``kept`` has a flag for each block of the call's heads, in the order of ``block_ids``. Diagonal blocks are always
    kept.
    """
    index = call.index
    _compact_blocks_kernel[(index.rows.num_tiles, call.num_selected)](
        kept, call.head_ids, index.args, BLOCK_N=index.block_tokens
    )


@triton.jit
def _compact_blocks_kernel(kept, heads, index, BLOCK_N: tl.constexpr):
    """Write the list of block ids of one (tile, head), in order, from its uint8 flags; see ``compact_blocks``.

    Grid: (tiles, n). Bound by memory: it reads a byte and writes at most 4 for each causal block.

    Args:
        kept: [n, block_capacity] uint8, flags of blocks, laid out as ``block_ids``.
        heads: [n] int32 on the device, numbers of the selected query heads.
    """
    i_tile, i_selected, i_head = tile_and_head(0, heads)
    diagonal, num_causal = tile_blocks(index.tiles, i_tile, BLOCK_N)
    place = list_place(index, i_selected, i_tile)
    target = list_of(index, i_head, i_tile)
    count = 0
    for first in range(0, num_causal, CHUNK_BLOCKS):
        o_n = first + tl.arange(0, CHUNK_BLOCKS)
        causal = o_n < num_causal
        b_kept = causal
        if kept is not None:
            flags = tl.load(kept + place + o_n, mask=causal, other=0)
            b_kept &= (flags != 0) | (o_n >= diagonal)
        count = append(target, count, o_n, b_kept)
    store_count(index.block_counts, i_head, i_tile, tl.num_programs(0), count)
