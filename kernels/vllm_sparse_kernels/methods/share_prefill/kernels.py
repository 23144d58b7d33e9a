# SPDX-License-Identifier: Apache-2.0
"""Kernels of SharePrefill (method.py): sharing decisions, the maps of new pivots, their kept parts, and the lists.

Few heads are new pivots, so few programs make their maps, and these programs must finish early. They therefore run in
the launch of the decisions, together with the first pass of radix.py, which does not depend on the decisions.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.methods.share_prefill.block_average import (
    MEANS_AT_ONCE,
    average_tile,
    divergence,
    softmax_sums,
)
from vllm_sparse_kernels.selection.lists import (
    CHUNK_BLOCKS,
    append,
    list_of,
    list_place,
    load_tile,
    store_count,
    tile_blocks,
)
from vllm_sparse_kernels.selection.radix import DIGITS, mass_keys, masses_by_high_digit, masses_by_low_digit, next_digit
from vllm_sparse_kernels.vectors import load_padded, load_vectors, store_vector

VERTICAL_SLASH, SHARED, DENSE = Constant(0), Constant(1), Constant(2)
"""The pattern of a head in a row: its own vertical-slash lines, its cluster's pattern, or everything (the pivot)."""

TILES_AT_ONCE = Constant(32)
"""Tiles whose weights are loaded at a time when the weights of a row are added up."""


class SharingThresholds(NamedTuple):
    """δ and τ as arguments of kernels."""

    max_sparsity: float
    max_distance: float


class ShareArgs(NamedTuple):
    """State of sharing as arguments of all three kernels.

    Fields are by head [n], by cluster of the layer, by slot of ``Pivots``, or by row or tile.

    A tile's masses are summed by a digit of their keys (radix.py). ``weights`` [slots, num_tiles, 256] has sums by the
    upper digit, and is kept with the maps. ``high`` [n, num_tiles] is the threshold's upper digit, and ``left`` the
    mass still missing. ``low_weights`` [n, num_tiles, 256] has sums by the lower digit, of keys whose upper digit is
    ``high``.
    """

    heads: Any
    places: Any  # [n] each head's cluster among those of the layer, below 0: noise
    slots: Any  # [clusters of the layer]
    patterns: Any  # [n, num_rows]
    shares: Any  # [n] the share of its pivot's map that each head keeps
    estimates: Any
    sparsity: Any
    mean_keys: Any
    exists: Any
    last_rows: Any
    maps: Any
    weights: Any
    low_weights: Any
    high: Any
    left: Any
    block_starts: Any
    tile_starts: Any


@triton.jit
def _slot_of(args, place):
    """Return the slot of a cluster of the layer."""
    return tl.load(args.slots + place).to(tl.int64)


@triton.jit
def _new_pivot(args, place, i_row, num_heads, num_rows, max_sparsity, HEADS: tl.constexpr):
    """Return whether the cluster has a pivot, and the head to make its pivot otherwise, as an index in ``heads``.

    This is the first head that is not too sparse; HEADS if all are too sparse.
    """
    known = tl.load(args.exists + _slot_of(args, place) * num_rows + i_row)
    o_h = tl.arange(0, HEADS)
    b_same = tl.load(args.places + o_h, mask=o_h < num_heads, other=-1) == place
    b_sparsity = tl.load(args.sparsity + o_h * num_rows + i_row, mask=b_same, other=float("inf"))
    return known != 0, tl.min(tl.where(b_sparsity < max_sparsity, o_h, HEADS), 0)


@triton.jit(
    do_not_specialize=[
        "num_heads", "num_rows", "num_map_programs", "num_blocks", "num_tiles",
    ]
)  # fmt: skip
def decide_kernel(
    args, num_heads, num_rows, thresholds, queries, keys, index, num_map_programs, num_blocks, num_tiles,
    HEADS: tl.constexpr, SHAPE,
):  # fmt: skip
    """Decide which heads share, one (head, row) per program, and make the maps of new pivots.

    Programs for maps, one (cluster, tile) each, come first. They do not wait for the decisions, because they find the
    pivot themselves.

    Grid: (clusters · tiles + n · rows). Bound by the time of the few maps, each of which reads the mean keys once.
    """
    i = tl.program_id(0)
    if i >= num_map_programs:
        i_selected = i - num_map_programs
        _decide(
            args, i_selected % num_heads, i_selected // num_heads, num_heads, num_rows, num_blocks, thresholds, HEADS,
        )  # fmt: skip
    else:
        place, i_tile = i // num_tiles, i % num_tiles
        i_row, _, _, _ = load_tile(index.tiles, i_tile)
        known, pivot = _new_pivot(args, place, i_row, num_heads, num_rows, thresholds.max_sparsity, HEADS)
        if (not known) & (pivot < HEADS):
            _make_map(
                args, index, queries, keys,
                _slot_of(args, place), tl.load(args.heads + pivot).to(tl.int64),
                tl.load(args.block_starts + i_row), i_tile, num_blocks, num_tiles, SHAPE,
            )  # fmt: skip


@triton.jit
def _decide(args, i, i_row, num_heads, num_rows, all_blocks, thresholds, HEADS: tl.constexpr):
    """Decide a head's pattern. If a cluster has no pivot yet, the pivot is its first head that is not too sparse."""
    place = tl.load(args.places + i)
    pattern = 0
    if place >= 0:
        known, pivot = _new_pivot(args, place, i_row, num_heads, num_rows, thresholds.max_sparsity, HEADS)
        if tl.load(args.sparsity + i * num_rows + i_row) < thresholds.max_sparsity:
            if (pivot == i) & (not known):
                pattern = DENSE
            else:
                start = tl.load(args.block_starts + i_row)
                num_blocks = (tl.load(args.block_starts + i_row + 1) - start).to(tl.int32)
                mine = args.estimates + i.to(tl.int64) * all_blocks + start
                # The pivot's estimate: that of an earlier layer, or of this one.
                pivot_estimate = args.last_rows + _slot_of(args, place) * all_blocks + start
                if not known:
                    pivot_estimate = args.estimates + pivot.to(tl.int64) * all_blocks + start
                b_sum = tl.zeros([CHUNK_BLOCKS], tl.float32)
                for first in range(0, num_blocks, CHUNK_BLOCKS):
                    o_n = first + tl.arange(0, CHUNK_BLOCKS)
                    b_mine = tl.load(mine + o_n, mask=o_n < num_blocks, other=0.0)
                    b_sum += divergence(b_mine, tl.load(pivot_estimate + o_n, mask=o_n < num_blocks, other=0.0))
                if tl.sqrt(tl.maximum(tl.sum(b_sum, 0), 0.0)) < thresholds.max_distance:
                    pattern = SHARED
    tl.store(args.patterns + i * num_rows + i_row, pattern)


@triton.jit
def _make_map(args, index, queries, keys, slot, i_head, start_block, i_tile, num_blocks, num_tiles, SHAPE):
    """Compute the softmax over the causal blocks of one (tile, head), and its weights by the upper digit.

    Its place holds scores until their sum is known.
    """
    row = args.maps + list_place(index, slot, i_tile)
    diagonal, num_causal = tile_blocks(index.tiles, i_tile, SHAPE.BLOCK_N)
    b_q = average_tile(queries, keys, index.tiles, i_tile, i_head, row, SHAPE)
    means = args.mean_keys + ((i_head // SHAPE.GROUP) * num_blocks + start_block) * SHAPE.HEAD_DIM
    # Tensor cores take at least 8 queries. For a single query, a float32 product needs fewer instructions without them.
    for start in tl.range(0, diagonal, MEANS_AT_ONCE, num_stages=SHAPE.MAP_STAGES):
        o_n = start + tl.arange(0, MEANS_AT_ONCE)
        b_k = load_padded(means, o_n, o_n < diagonal, SHAPE.HEAD_DIM, SHAPE.BLOCK_D)
        tl.store(row + o_n, tl.sum(b_k * b_q[None, :], 1), mask=o_n < diagonal)

    tl.debug_barrier()
    peak, total = softmax_sums(row, num_causal)
    for start in range(0, num_causal, CHUNK_BLOCKS):
        o_n = start + tl.arange(0, CHUNK_BLOCKS)
        b_s = tl.load(row + o_n, mask=o_n < num_causal, other=float("-inf"))
        tl.store(row + o_n, tl.exp(b_s - peak) / total, mask=o_n < num_causal)

    tl.debug_barrier()
    b_weight = masses_by_high_digit(row, 0, num_causal, 8, 64)  # by 8 warps
    store_vector(args.weights, slot * num_tiles + i_tile, b_weight)


@triton.jit
def _ranked_head(args, i_row, num_rows, PIVOTS: tl.constexpr, HEADS: tl.constexpr):
    """Return the place of the program's head, −1 for none.

    The program's number on axis 1 is the head's rank among those that share or, with PIVOTS, that share or are pivots.
    Programs without work therefore come last.
    """
    o_h = tl.arange(0, HEADS)
    b_pattern = tl.load(args.patterns + o_h * num_rows + i_row, mask=o_h < tl.num_programs(1), other=0)
    b_in = (b_pattern != 0) if PIVOTS else (b_pattern == SHARED)
    b_in = b_in.to(tl.int32)
    return tl.max(tl.where((b_in > 0) & (tl.cumsum(b_in, 0) == tl.program_id(1) + 1), o_h, -1), 0)


@triton.jit
def _joined(weights, tile_starts, i_row):
    """Add the weights [256] of all tiles of a row, in order."""
    end = tl.load(tile_starts + i_row + 1)
    b_sum = tl.zeros([DIGITS], tl.float32)
    for start in range(tl.load(tile_starts + i_row), end, TILES_AT_ONCE):
        o_t = start + tl.arange(0, TILES_AT_ONCE)
        b_sum += tl.sum(load_vectors(weights, o_t, o_t < end, DIGITS), 0)
    return b_sum


@triton.jit(do_not_specialize=["num_rows"])
def low_weights_kernel(args, num_rows, index, BLOCK_N: tl.constexpr, HEADS: tl.constexpr):
    """Run the second pass of ``radix`` for one tile and one head that shares, over the tile's part of its pivot's map.

    Grid: (tiles, n). Bound by memory: it reads the tile's part of the map once.
    """
    i_tile, num_tiles = tl.program_id(0), tl.num_programs(0)
    i_row, _, _, _ = load_tile(index.tiles, i_tile)
    i = _ranked_head(args, i_row, num_rows, False, HEADS)
    if i < 0:
        return
    slot = _slot_of(args, tl.load(args.places + i))
    b_weight = _joined(args.weights + slot * num_tiles * DIGITS, args.tile_starts, i_row)
    high, left = next_digit(b_weight, tl.load(args.shares + i) * tl.sum(b_weight, 0))
    _, num_causal = tile_blocks(index.tiles, i_tile, BLOCK_N)
    values = args.maps + list_place(index, slot, i_tile)
    b_weight = masses_by_low_digit(values, 0, num_causal, high, CHUNK_BLOCKS)
    i_out = i.to(tl.int64) * num_tiles + i_tile
    store_vector(args.low_weights, i_out, b_weight)
    tl.store(args.high + i_out, high)
    tl.store(args.left + i_out, left)


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "num_tiles"])
def apply_patterns_kernel(
    args, num_rows, num_blocks, index, num_tiles, BLOCK_N: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write the list of one (tile, head) that shares or is the pivot.

    Grid: (tiles, n). Bound by memory: it reads the tile's part of the map once.

    Args:
        num_blocks: Key blocks of all rows.
    """
    i_tile = tl.program_id(0)
    i_row, _, length, first_query = load_tile(index.tiles, i_tile)
    i = _ranked_head(args, i_row, num_rows, True, HEADS)
    if i < 0:
        return
    pattern = tl.load(args.patterns + i * num_rows + i_row)
    i_head = tl.load(args.heads + i).to(tl.int64)
    diagonal, num_causal = tile_blocks(index.tiles, i_tile, BLOCK_N)
    slot = _slot_of(args, tl.load(args.places + i))
    values = args.maps + list_place(index, slot, i_tile)
    target = list_of(index, i_head, i_tile)
    threshold = 0
    if pattern == SHARED:
        i_selected = i.to(tl.int64) * num_tiles
        high, left = tl.load(args.high + i_selected + i_tile), tl.load(args.left + i_selected + i_tile)
        b_weight = _joined(args.low_weights + i_selected * DIGITS, args.tile_starts, i_row)
        low, _left = next_digit(b_weight, left)
        threshold = high * DIGITS + low
    count = 0
    for first in range(0, num_causal, CHUNK_BLOCKS):
        o_n = first + tl.arange(0, CHUNK_BLOCKS)
        causal = o_n < num_causal
        b_kept = mass_keys(tl.load(values + o_n, mask=causal, other=0.0)) >= threshold
        count = append(target, count, o_n, causal & (b_kept | (o_n >= diagonal) | (pattern == DENSE)))
    store_count(index.block_counts, i_head, i_tile, num_tiles, count)
    store_count(index.stripe_counts, i_head, i_tile, num_tiles, 0)

    # The pivot's last tile, which ends where the row does, keeps the estimate.
    if (pattern == DENSE) & (first_query + length == tl.load(index.seq_lens + i_row)):
        begin = tl.load(args.block_starts + i_row)
        for first in range(0, num_causal, CHUNK_BLOCKS):
            o_n = first + tl.arange(0, CHUNK_BLOCKS)
            b_a = tl.load(args.estimates + i.to(tl.int64) * num_blocks + begin + o_n, mask=o_n < num_causal)
            tl.store(args.last_rows + slot * num_blocks + begin + o_n, b_a, mask=o_n < num_causal)
        tl.store(args.exists + slot * num_rows + i_row, 1)
