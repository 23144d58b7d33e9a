# SPDX-License-Identifier: Apache-2.0
"""Lists of the fewest blocks of a tile that hold a share of its mass.

A program handles one tile and head, on an array that fits into registers.

A negative mass marks a block that is kept regardless of its mass. Nothing is sorted: bisection over bit patterns finds
the smallest kept mass, and ties go to the first blocks. Bits of floats >= 0 sort as the floats do.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.rows import ceil_div
from vllm_sparse_kernels.selection.lists import (
    above_threshold,
    append,
    list_of,
    load_tile,
    store_count,
    tile_and_head,
    tile_blocks,
)

KEY_BLOCK = Constant(32)

HELD_BLOCKS = 4096
"""Masses that stay in registers during the search for the threshold: the masses of 131,072 keys. Tiles with at most a
half or a quarter of them use narrower arrays, which take a quarter to two fifths less time."""

LISTED_BLOCKS = Constant(1024)
"""Number of blocks whose places in a list are found at a time. More would take registers from other programs."""

NUM_WARPS = 4
"""Warps of a program. Every halving waits for all of them, so four warps take less time than eight with half of the
masses each."""

MAX_REGISTERS = 128
"""Register cap per thread that allows four programs per multiprocessor."""

TWO_BITS = Constant(0x40000000)
"""The bits of 2.0. Masses are at most 1, except for rounding."""


class Limits(NamedTuple):
    """Limits of what each selected head keeps, as arguments of kernels."""

    kept_mass: Any  # [selected heads] float32: p
    most_blocks: Any  # [selected heads] float32: maximum number of a tile's blocks that are kept for their mass


def mass_width(reach: int) -> int:
    """Return the room for one tile's masses: one for each block of 32 keys, in whole steps of 16."""
    return ceil_div(reach, 16 * KEY_BLOCK.value) * 16


def mass_bytes(num_selected: int, reach: int) -> int:
    """Return the memory of one tile's masses."""
    return 4 * num_selected * mass_width(reach)


def write_block_lists(call: Call, masses: torch.Tensor, first_tile: int) -> None:
    """Write the lists of the tiles from ``first_tile`` on: the fewest blocks that hold the tile's share.

    Heads whose ``kept_mass`` is at least 1 keep everything, and their masses are not read.
    """
    index, method, (num_selected, num_tiles, _) = call.index, call.method, masses.shape
    limits = Limits(call.parameters("kept_mass"), call.parameters("most_blocks"))
    _choose_kernel[(num_tiles, num_selected)](
        masses, masses.stride(0), masses.stride(1), call.head_ids, index.args, index.rows.num_tiles, first_tile,
        limits, method.sink_tokens, method.local_tokens, method.ramp_tokens,
        FINE_BLOCKS=index.block_tokens // KEY_BLOCK.value, HELD=HELD_BLOCKS,
        num_warps=NUM_WARPS, maxnreg=MAX_REGISTERS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride_head", "stride_tile", "num_tiles", "first_tile", "sink", "local", "ramp"])
def _choose_kernel(
    masses, stride_head, stride_tile, heads, index, num_tiles, first_tile, limits, sink, local, ramp,
    FINE_BLOCKS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Write one (tile, head)'s list: the fewest blocks between sink and local region that hold the tile's share.

    masses [heads, tiles, width] float32 holds A[b] of ``method.py`` for blocks of KEY_BLOCK keys. It is negative if
    some query has its peak there, which keeps the block. Blocks that are always kept (sink, local region, diagonal)
    count towards the share, and at most ``most_blocks`` blocks are kept for it. ``sink``, ``local`` and
    ``ramp`` are numbers of tokens. FINE_BLOCKS neighbouring blocks form a block of the index, which is kept if one of
    them is.

    Grid: (tiles of the run, n). Bound by latency: up to 30 bisection steps on masses in registers, which
    end once a single mass decides.

    Args:
        stride_head: Elements between two heads of ``masses``.
        stride_tile: Elements between two tiles of ``masses``.
        heads: [n] int32 on the device, numbers of the selected query heads.
    """
    i_tile, i_selected, i_head = tile_and_head(first_tile, heads)
    tile_masses = masses + i_selected * stride_head + tl.program_id(0).to(tl.int64) * stride_tile
    # Candidates are the blocks between the sink and the local region. All others are always kept.
    begin = tl.cdiv(sink, KEY_BLOCK)
    _, _, _, position = load_tile(index.tiles, i_tile)
    end = tl.maximum(position - local, 0) // KEY_BLOCK
    _, num_blocks = tile_blocks(index.tiles, i_tile, KEY_BLOCK)
    kept_mass = tl.load(limits.kept_mass + i_selected)
    if kept_mass >= 1:
        begin = num_blocks  # no candidates
    kept_mass = 1 - (1 - kept_mass) * tl.minimum(position / ramp, 1.0)
    max_blocks = tl.load(limits.most_blocks + i_selected).to(tl.int32)
    if end <= HELD // 4:
        bits, num_equal = _find_threshold(tile_masses, begin, end, num_blocks, kept_mass, max_blocks, HELD // 4)
    elif end <= HELD // 2:
        bits, num_equal = _find_threshold(tile_masses, begin, end, num_blocks, kept_mass, max_blocks, HELD // 2)
    else:
        bits, num_equal = _find_threshold(tile_masses, begin, end, num_blocks, kept_mass, max_blocks, HELD)

    # Read the masses again, in order, and keep those above the threshold, the first of those equal to it, and peaks.
    diagonal, num_causal = tile_blocks(index.tiles, i_tile, KEY_BLOCK * FINE_BLOCKS)
    ids = list_of(index, i_head, i_tile)
    count, num_seen = 0, 0  # length of the list, and masses equal to the threshold so far
    for first in range(0, num_blocks, LISTED_BLOCKS):
        o_n = first + tl.arange(0, LISTED_BLOCKS)
        b_masses = load_candidates(tile_masses, first, begin, end, LISTED_BLOCKS)
        b_chosen, num_seen = above_threshold(tl.abs(b_masses), bits, num_equal, num_seen)
        b_kept = (b_chosen | (b_masses < 0) | (o_n < begin) | (o_n >= end)).to(tl.int32)
        count = _append_blocks(ids, count, b_kept, first, diagonal, num_causal, FINE_BLOCKS)
    store_count(index.block_counts, i_head, i_tile, num_tiles, count)


@triton.jit
def _append_blocks(ids, count, b_kept, first, diagonal, num_causal, FINE_BLOCKS: tl.constexpr):
    """Append the index blocks in which ``b_kept``, which starts at block ``first``, flags a block of 32 keys.

    Returns the new count.
    """
    WIDTH: tl.constexpr = b_kept.shape[0] // FINE_BLOCKS
    b_kept = tl.max(tl.reshape(b_kept, [WIDTH, FINE_BLOCKS]), 1) != 0
    o_p = first // FINE_BLOCKS + tl.arange(0, WIDTH)
    return append(ids, count, o_p, (o_p < num_causal) & (b_kept | (o_p >= diagonal)))


@triton.jit
def load_candidates(tile_masses, first, begin, end, CHUNK: tl.constexpr):
    """Load masses of blocks from ``first`` on, 0 for blocks that are no candidates: outside of [begin, end)."""
    o_n = first + tl.arange(0, CHUNK)
    return tl.load(tile_masses + o_n, mask=(o_n >= begin) & (o_n < end), other=0.0)


@triton.jit
def _find_threshold(tile_masses, begin, end, num_blocks, kept_mass, max_blocks, HELD: tl.constexpr):
    """Return (bits, number): masses above these bits are kept, and the first ``number`` of exactly these bits.

    The kept candidates and the blocks that are always kept hold ``kept_mass`` of all mass. HELD masses stay in
    registers.
    """
    b_first = tl.abs(load_candidates(tile_masses, 0, begin, end, HELD))
    candidate_mass, _ = sum_and_count(b_first, tile_masses, begin, end, 1, HELD)
    always_mass = tl.zeros([], tl.float32)
    for first in range(0, tl.where(begin < end, num_blocks, 0), HELD):
        o_n = first + tl.arange(0, HELD)
        b_always = tl.load(tile_masses + o_n, mask=((o_n < begin) | (o_n >= end)) & (o_n < num_blocks), other=0.0)
        always_mass += tl.sum(tl.abs(b_always), 0)
    # Rounding must not put the target above what all candidates hold.
    target = tl.minimum(kept_mass * (candidate_mass + always_mass) - always_mass, candidate_mass)
    return search_threshold(b_first, tile_masses, begin, end, target, max_blocks, HELD)


@triton.jit
def search_threshold(b_first, tile_masses, begin, end, target, max_blocks, CHUNK: tl.constexpr):
    """Find the fewest masses of blocks [begin, end), heaviest first, that hold a sum."""
    # Bisection. The masses of at least ``low`` are enough: they reach the target, or there are at least ``max_blocks``.
    # Those of at least ``high`` are not enough.
    # If the other blocks hold the entire target, there is no search: no mass has bits above the bits of 2.
    low = tl.where(target <= 0, TWO_BITS, 1)
    high = TWO_BITS + 1
    num_low, num_high = end - begin, 0  # number of masses of at least ``low`` (at first a bound), and of ``high``
    while (num_low - num_high > 1) & (high - low > 1):
        middle = low + (high - low) // 2
        mass, count = sum_and_count(b_first, tile_masses, begin, end, middle, CHUNK)
        enough = (mass >= target) | (count >= max_blocks)
        low = tl.where(enough, middle, low)
        num_low = tl.where(enough, count, num_low)
        high = tl.where(enough, high, middle)
        num_high = tl.where(enough, num_high, count)
    if high - low > 1:  # at most one mass lies between them, and it is needed: all of at least ``low`` are kept
        low -= 1
        num_equal = 0
    else:
        mass, count = sum_and_count(b_first, tile_masses, begin, end, low + 1, CHUNK)
        num_equal = tl.ceil(tl.minimum((target - mass) / tl.cast(low, tl.float32, bitcast=True), 1e9)).to(tl.int32)
        num_equal = tl.minimum(num_equal, max_blocks - count)
    return low, num_equal


@triton.jit
def sum_and_count(b_first, tile_masses, begin, end, bits, CHUNK: tl.constexpr):
    """Return sum and number of the masses of at least these bits.

    The sum never decreases as more masses count, even in floating point.
    """
    mass, count = _chunk_sum_and_count(b_first, bits)
    for first in range(CHUNK, end, CHUNK):
        b_masses = tl.abs(load_candidates(tile_masses, first, begin, end, CHUNK))
        chunk_mass, chunk_count = _chunk_sum_and_count(b_masses, bits)
        mass += chunk_mass
        count += chunk_count
    return mass, count


@triton.jit
def _chunk_sum_and_count(b_masses, bits):
    """Return sum and number of the masses of a chunk with at least these bits."""
    b_counts = b_masses.to(tl.int32, bitcast=True) >= bits
    # One reduction for both numbers, because the warps wait for each other in each. The count is exact below 2^24.
    b_pairs = tl.join(tl.where(b_counts, b_masses, 0.0), tl.where(b_counts, 1.0, 0.0))
    mass, count = tl.split(tl.sum(b_pairs, 0))
    return mass, count.to(tl.int32)
