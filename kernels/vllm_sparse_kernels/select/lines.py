"""Lists of lines: from the columns and diagonals that a row's heads keep to the lists of its tiles.

A tile keeps the blocks that a kept diagonal crosses as blocks, and the kept columns outside of them as stripes.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.rows import TILE_FIELDS
from vllm_sparse_kernels.select.lists import CHUNK_BLOCKS, append, tile_blocks


class Lines(NamedTuple):
    """What each of n heads keeps of one row; diagonals by bands of one or more offsets, counted from the diagonal 0."""

    columns: Any  # [n, k] int32: ascending key positions
    num_columns: Any  # [n] int32: how many of them there are; None: all k
    whole: Any  # [n, num_blocks] uint8: blocks that are kept whole; None: none
    bands_upto: Any  # [n, >= num_bands] int32: how many bands are kept up to and with each


def write_lines(index: SparseIndex, row: int, heads: torch.Tensor, lines: Lines, band_offsets: int) -> None:
    """Write the lists of ``heads`` for all tiles of one row."""
    first_tile, end_tile = index.rows.tile_starts[row : row + 2]
    strides = (0 if x is None else x.stride(0) for x in (lines.columns, lines.whole, lines.bands_upto))
    _write_lines_kernel[(end_tile - first_tile, len(heads))](
        heads, lines, *strides, lines.columns.shape[1], first_tile,
        index.rows.tiles, index.rows.num_tiles, index.block_counts, index.block_ids, index.block_ids.stride(0),
        index.block_offsets, index.stripe_counts, index.stripe_positions, index.stripe_offsets,
        BAND=band_offsets, BLOCK_N=index.block_tokens, CHUNK=CHUNK_BLOCKS, FIELDS=TILE_FIELDS,
    )  # fmt: skip


@triton.jit
def _is_crossed(upto, b_block, first, last, BAND: tl.constexpr, BLOCK_N: tl.constexpr, mask):
    """Whether a kept band crosses each block within the tile at positions [first, last]."""
    b_near = tl.maximum(first - b_block * BLOCK_N - BLOCK_N + 1, 0) // BAND
    b_upto = tl.load(upto + (last - b_block * BLOCK_N) // BAND, mask=mask, other=0)
    return b_upto > tl.load(upto + b_near - 1, mask=mask & (b_near > 0), other=0)


@triton.jit(
    do_not_specialize=[
        "stride_columns", "stride_whole", "stride_upto", "max_columns", "first_tile", "num_tiles", "stride_ids"
    ]
)  # fmt: skip
def _write_lines_kernel(
    heads, lines, stride_columns, stride_whole, stride_upto, max_columns, first_tile, tiles, num_tiles,
    block_counts, block_ids, stride_ids, block_offsets, stripe_counts, stripe_positions, stripe_offsets,
    BAND: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    i_tile, i_entry = first_tile + tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_head = tl.load(heads + i_entry).to(tl.int64)
    first = tl.load(tiles + i_tile * FIELDS + 3)
    last = first + tl.load(tiles + i_tile * FIELDS + 2) - 1
    diagonal, num_causal = tile_blocks(tiles, i_tile, BLOCK_N, FIELDS)
    upto = lines.bands_upto + i_entry * stride_upto

    count = 0
    target = block_ids + i_head * stride_ids + tl.load(block_offsets + i_tile)
    for start in range(0, num_causal, CHUNK):
        o_n = start + tl.arange(0, CHUNK)
        causal = o_n < num_causal
        b_kept = _is_crossed(upto, o_n, first, last, BAND, BLOCK_N, causal) | (o_n >= diagonal)
        if lines.whole is not None:
            b_kept |= tl.load(lines.whole + i_entry * stride_whole + o_n, mask=causal, other=0) != 0
        count = append(target, count, o_n, causal & b_kept)
    tl.store(block_counts + i_head * num_tiles + i_tile, count)

    count = 0
    target = stripe_positions + tl.load(stripe_offsets + i_head * num_tiles + i_tile)
    num_columns = max_columns if lines.num_columns is None else tl.load(lines.num_columns + i_entry)
    for start in range(0, num_columns, CHUNK):
        o_c = start + tl.arange(0, CHUNK)
        b_key = tl.load(lines.columns + i_entry * stride_columns + o_c, mask=o_c < num_columns, other=0)
        before = (o_c < num_columns) & (b_key < diagonal * BLOCK_N)
        b_free = before & (_is_crossed(upto, b_key // BLOCK_N, first, last, BAND, BLOCK_N, before) == 0)
        count = append(target, count, b_key, b_free)
    tl.store(stripe_counts + i_head * num_tiles + i_tile, count)
