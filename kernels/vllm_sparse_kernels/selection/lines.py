# SPDX-License-Identifier: Apache-2.0
"""Converts the columns and diagonals that heads keep of a row to the lists of its tiles.

A tile keeps the blocks that a kept diagonal crosses as blocks, and the kept columns outside of them as stripes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.rows import round_up
from vllm_sparse_kernels.selection.last_queries import Estimate, Sums, last_query_sums
from vllm_sparse_kernels.selection.last_query_kernels import UNSPECIALIZED
from vllm_sparse_kernels.selection.lists import (
    CHUNK_BLOCKS,
    append,
    list_of,
    load_tile,
    place_in_slab,
    store_count,
    tile_and_head,
    tile_blocks,
)
from vllm_sparse_kernels.selection.slabs import SLAB_BYTES, most_at_once, rows_within

KEY_BYTES = 24
"""Maximum workspace for sums and kept lines per key and head, with rows counted in multiples of 4,096 keys."""


class Lines(NamedTuple):
    """The kept lines of n heads in each row; diagonals are of keys (bands of 1) or of blocks of 64 (bands of 64).

    Rows are those of a slab [first_row, end_row). In arrays by key, row i begins at
    ``key_starts[i] - key_starts[first_row]``; in arrays by block or band, at that place divided by their size.
    """

    columns: Any  # [num_rows, n, k] int32: ascending key positions
    num_columns: Any  # [num_rows, n] int32: number of columns
    whole: Any  # [n, capacity / 64] uint8: blocks that are kept whole; None if there are none
    bands_upto: Any  # [n, capacity / band] int32: number of kept bands up to and including each band


def select_lines(
    call: Call, estimate: Estimate, keep: Callable[[Call, Sums], Lines], patterns: torch.Tensor | None = None
) -> None:
    """Sum Â (``last_query_sums``), choose lines by ``keep``, and write the lists of the call's heads."""
    sizes = [round_up(n, 4096) * call.num_selected * KEY_BYTES for n in call.rows.seq_lens]
    call.workspace.expect(most_at_once(sizes, SLAB_BYTES))
    for row_range in rows_within(sizes, SLAB_BYTES):
        with call.workspace.frame():
            sums = last_query_sums(call, row_range, estimate, patterns)
            write_lines(call, sums, keep(call, sums))


def write_lines(call: Call, sums: Sums, lines: Lines) -> None:
    """Write the lists of the call's heads for all tiles of the rows whose sums these are."""
    index, rows = call.index, call.rows
    first_tile, end_tile = rows.tile_starts[sums.first_row], rows.tile_starts[sums.end_row]
    _write_lines_kernel[(end_tile - first_tile, call.num_selected)](
        *sums.args(rows), call.head_ids, lines, lines.columns.shape[2], first_tile, index.args, rows.num_tiles,
        BAND=sums.band, BLOCK_N=index.block_tokens,
    )  # fmt: skip


@triton.jit
def _is_crossed(upto, b_block, first, last, BAND: tl.constexpr, BLOCK_N: tl.constexpr, mask):
    """Return, for each block, whether a kept diagonal crosses it within the tile at positions [first, last]."""
    b_near = tl.maximum(first // BAND - (b_block * BLOCK_N + BLOCK_N - 1) // BAND, 0)
    b_upto = tl.load(upto + last // BAND - b_block * BLOCK_N // BAND, mask=mask, other=0)
    return b_upto > tl.load(upto + b_near - 1, mask=mask & (b_near > 0), other=0)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "max_columns", "first_tile", "num_tiles"])
def _write_lines_kernel(
    sums, num_selected, first_row, num_rows, capacity, heads, lines, max_columns, first_tile, index, num_tiles,
    BAND: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the lists of one (tile, head).

    Blocks crossed by a kept diagonal, whole blocks and diagonal blocks become blocks of the list. The other kept
    columns become stripes if they lie before the tile's diagonal blocks and outside kept blocks. Entries of
    ``sums.patterns`` other than 0 are written elsewhere.

    Grid: (tiles of the slab, n). Bound by the latency of dependent loads; it reads counts of bands and columns once.

    Args:
        heads: [n] int32 on the device, numbers of the selected query heads.
    """
    i_tile, i_selected, i_head = tile_and_head(first_tile, heads)
    i_row, _, length, first = load_tile(index.tiles, i_tile)
    pattern = 0 if sums.patterns is None else tl.load(sums.patterns + i_selected * num_rows + i_row)
    if pattern != 0:
        return
    last = first + length - 1
    diagonal, num_causal = tile_blocks(index.tiles, i_tile, BLOCK_N)
    start = place_in_slab(sums.rows, i_row, first_row)
    upto = lines.bands_upto + (i_selected * capacity + start) // BAND

    count = 0
    target = list_of(index, i_head, i_tile)
    for start_block in range(0, num_causal, CHUNK_BLOCKS):
        o_n = start_block + tl.arange(0, CHUNK_BLOCKS)
        causal = o_n < num_causal
        b_kept = _is_crossed(upto, o_n, first, last, BAND, BLOCK_N, causal) | (o_n >= diagonal)
        if lines.whole is not None:
            whole = lines.whole + (i_selected * capacity + start) // 64
            b_kept |= tl.load(whole + o_n, mask=causal, other=0) != 0
        count = append(target, count, o_n, causal & b_kept)
    store_count(index.block_counts, i_head, i_tile, num_tiles, count)

    count = 0
    target = index.stripe_positions + tl.load(index.stripe_offsets + i_head * num_tiles + i_tile)
    i_list = (i_row - first_row) * num_selected + i_selected
    columns = lines.columns + i_list * max_columns
    num_columns = tl.load(lines.num_columns + i_list)
    for start_column in range(0, num_columns, CHUNK_BLOCKS):
        o_c = start_column + tl.arange(0, CHUNK_BLOCKS)
        b_key = tl.load(columns + o_c, mask=o_c < num_columns, other=0)
        before = (o_c < num_columns) & (b_key < diagonal * BLOCK_N)
        b_free = before & (_is_crossed(upto, b_key // BLOCK_N, first, last, BAND, BLOCK_N, before) == 0)
        count = append(target, count, b_key, b_free)
    store_count(index.stripe_counts, i_head, i_tile, num_tiles, count)
