# SPDX-License-Identifier: Apache-2.0
"""Kernels of SharePrefill (share_prefill.py): who shares, what of a pivot's map is kept, and the lists of both."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from vllm_sparse_kernels.select.block_average import divergence
from vllm_sparse_kernels.select.lists import append, tile_blocks
from vllm_sparse_kernels.select.radix import DIGITS, mass_keys, masses_by_digit, next_digit


class MapArgs(NamedTuple):
    """What heads take of their pivots' maps, which lie by ``slots`` [clusters of the layer].

    ``weights`` [passes, heads, num_tiles, 256]: a tile's masses by the next digit of their keys (radix.py), of which
    ``shares`` [heads] is kept.
    """

    maps: Any
    slots: Any
    places: Any
    patterns: Any
    weights: Any
    shares: Any
    tile_starts: Any


@triton.jit(do_not_specialize=["stride", "stride_last", "num_heads", "num_rows"])
def decide_kernel(
    estimates, stride, sparsity, places, slots, exists, last_rows, stride_last, block_starts, patterns, new_pivots,
    num_heads, num_rows, max_sparsity, max_distance,
    HEADS: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """One (head, row). Where a cluster has no pivot yet, its first head that is not too sparse becomes it."""
    i, i_row = tl.program_id(0), tl.program_id(1)
    place = tl.load(places + i)
    pattern = 0
    if place >= 0:
        slot = tl.load(slots + place).to(tl.int64)
        known = tl.load(exists + slot * num_rows + i_row)
        o_h = tl.arange(0, HEADS)
        b_same = tl.load(places + o_h, mask=o_h < num_heads, other=-1) == place
        b_sparsity = tl.load(sparsity + o_h * num_rows + i_row, mask=b_same, other=float("inf"))
        pivot = tl.min(tl.where(b_sparsity < max_sparsity, o_h, HEADS), 0)
        if tl.min(tl.where(b_same, o_h, HEADS), 0) == i:
            is_new = (known == 0) & (pivot < HEADS)
            tl.store(new_pivots + place * num_rows + i_row, tl.where(is_new, pivot, -1))
        if tl.load(sparsity + i * num_rows + i_row) < max_sparsity:
            if (pivot == i) & (known == 0):
                pattern = DENSE
            else:
                start = tl.load(block_starts + i_row)
                num_blocks = (tl.load(block_starts + i_row + 1) - start).to(tl.int32)
                num_fresh = tl.where(known == 0, num_blocks, 0)  # the pivot's estimate: this layer's, or stored
                num_stored = num_blocks - num_fresh
                mine = estimates + i.to(tl.int64) * stride + start
                fresh = estimates + pivot.to(tl.int64) * stride + start
                stored = last_rows + slot * stride_last + start
                b_sum = tl.zeros([CHUNK], tl.float32)
                for first in range(0, num_blocks, CHUNK):
                    o_n = first + tl.arange(0, CHUNK)
                    b_pivot = tl.load(fresh + o_n, mask=o_n < num_fresh, other=0.0)
                    b_pivot += tl.load(stored + o_n, mask=o_n < num_stored, other=0.0)
                    b_sum += divergence(tl.load(mine + o_n, mask=o_n < num_blocks, other=0.0), b_pivot)
                if tl.sqrt(tl.maximum(tl.sum(b_sum, 0), 0.0)) < max_distance:
                    pattern = SHARED
    tl.store(patterns + i * num_rows + i_row, pattern)


@triton.jit
def _map_of(args, stride_map, i, offset):
    """(the cluster's slot, its pivot's map from ``offset`` on)."""
    slot = tl.load(args.slots + tl.load(args.places + i)).to(tl.int64)
    return slot, args.maps + slot * stride_map + offset


@triton.jit
def _joined_weights(args, i_pass, i, num_heads, num_tiles, i_row, i_tile, PER_TILE: tl.constexpr):
    """Weights [256] of one pass: a tile's own, or those of all tiles of its row, in order."""
    first, end = i_tile, i_tile + 1
    if not PER_TILE:
        first, end = tl.load(args.tile_starts + i_row), tl.load(args.tile_starts + i_row + 1)
    o_digit = tl.arange(0, DIGITS)
    source = args.weights + (i_pass * num_heads + i).to(tl.int64) * num_tiles * DIGITS
    b_sum = tl.zeros([DIGITS], tl.float32)
    for start in range(first, end, 16):
        o_t = start + tl.arange(0, 16)
        b_sum += tl.sum(
            tl.load(source + o_t[:, None] * DIGITS + o_digit[None, :], mask=(o_t < end)[:, None], other=0.0), 0
        )
    return b_sum


@triton.jit
def _first_digit(args, i, num_heads, num_tiles, i_row, i_tile, PER_TILE: tl.constexpr):
    """(the threshold's upper digit, the mass that is left to be reached by the lower one)."""
    b_weight = _joined_weights(args, 0, i, num_heads, num_tiles, i_row, i_tile, PER_TILE)
    return next_digit(b_weight, tl.load(args.shares + i) * tl.sum(b_weight, 0))


@triton.jit(do_not_specialize=["stride_map", "num_rows"])
def weights_kernel(
    args, stride_map, num_rows, tiles, block_offsets,
    PASS: tl.constexpr, PER_TILE: tl.constexpr, BLOCK_N: tl.constexpr, FIELDS: tl.constexpr, CHUNK: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """A pass of radix.py over one tile's part of the map that one head takes its pattern from."""
    i_tile, i = tl.program_id(0), tl.program_id(1)
    num_tiles, num_heads = tl.num_programs(0), tl.num_programs(1)
    i_row = tl.load(tiles + i_tile * FIELDS)
    if tl.load(args.patterns + i * num_rows + i_row) != SHARED:
        return
    prefix = tl.full([], 0, tl.uint32)
    if PASS > 0:
        prefix = _first_digit(args, i, num_heads, num_tiles, i_row, i_tile, PER_TILE)[0].to(tl.uint32)
    _, num_causal = tile_blocks(tiles, i_tile, BLOCK_N, FIELDS)
    _, values = _map_of(args, stride_map, i, tl.load(block_offsets + i_tile))
    b_weight = masses_by_digit(values, 0, num_causal, prefix, PASS, CHUNK, 64)
    target = args.weights + ((PASS * num_heads + i).to(tl.int64) * num_tiles + i_tile) * DIGITS
    tl.store(target + tl.arange(0, DIGITS), b_weight)


@triton.jit(do_not_specialize=["stride_map", "num_rows", "stride_estimate", "stride_last", "stride_ids", "num_tiles"])
def apply_patterns_kernel(
    args, stride_map, num_rows, estimates, stride_estimate, exists, last_rows, stride_last, block_starts,
    heads, tiles, rows, block_offsets, block_counts, block_ids, stride_ids, stripe_counts, num_tiles,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, PER_TILE: tl.constexpr, FIELDS: tl.constexpr,
    ROW_FIELDS: tl.constexpr, SHARED: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """The list of one (tile, head) that shares or is the pivot."""
    i_tile, i, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    i_row = tl.load(tiles + i_tile * FIELDS)
    pattern = tl.load(args.patterns + i * num_rows + i_row)
    if (pattern != SHARED) & (pattern != DENSE):
        return
    i_head = tl.load(heads + i).to(tl.int64)
    diagonal, num_causal = tile_blocks(tiles, i_tile, BLOCK_N, FIELDS)
    start = tl.load(block_offsets + i_tile)
    slot, values = _map_of(args, stride_map, i, start)
    target = block_ids + i_head * stride_ids + start
    threshold = 0
    if pattern == SHARED:
        high, left = _first_digit(args, i, num_heads, num_tiles, i_row, i_tile, PER_TILE)
        b_weight = _joined_weights(args, 1, i, num_heads, num_tiles, i_row, i_tile, PER_TILE)
        threshold = high * DIGITS + next_digit(b_weight, left)[0]
    count = 0
    for first in range(0, num_causal, CHUNK):
        o_n = first + tl.arange(0, CHUNK)
        causal = o_n < num_causal
        b_kept = mass_keys(tl.load(values + o_n, mask=causal, other=0.0)) >= threshold
        count = append(target, count, o_n, causal & (b_kept | (o_n >= diagonal) | (pattern == DENSE)))
    tl.store(block_counts + i_head * num_tiles + i_tile, count)
    tl.store(stripe_counts + i_head * num_tiles + i_tile, 0)

    # The pivot's last tile, which ends where the row does, keeps the estimate.
    end = tl.load(tiles + i_tile * FIELDS + 3) + tl.load(tiles + i_tile * FIELDS + 2)
    if (pattern == DENSE) & (end == tl.load(rows + i_row * ROW_FIELDS + 2)):
        begin = tl.load(block_starts + i_row)
        for first in range(0, num_causal, CHUNK):
            o_n = first + tl.arange(0, CHUNK)
            b_a = tl.load(estimates + i.to(tl.int64) * stride_estimate + begin + o_n, mask=o_n < num_causal)
            tl.store(last_rows + slot * stride_last + begin + o_n, b_a, mask=o_n < num_causal)
        tl.store(exists + slot * num_rows + i_row, 1)
