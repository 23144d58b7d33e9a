"""Kernels of SharePrefill (share_prefill.py): who shares, what of a pivot's map is kept, and the lists of both."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from vllm_sparse_kernels.select.block_average import divergence
from vllm_sparse_kernels.select.lists import append, tile_blocks
from vllm_sparse_kernels.select.radix import (
    DIGITS,
    keep_state,
    mass_keys,
    masses_by_digit,
    next_digit,
    span_of,
    store_weights,
    threshold_of,
)


class FreshArgs(NamedTuple):
    """What this layer's new pivots are known by: thresholds of each tile, or those of whole maps as ``digits``."""

    maps: Any
    map_starts: Any
    thresholds: Any
    digits: Any
    share: float
    new_pivots: Any
    estimates: Any
    block_starts: Any


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


@triton.jit(do_not_specialize=["stride_map", "chunks"])
def map_digits_kernel(
    maps, stride_map, new_pivots, map_starts, share, digits, chunks, PASS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """A pass of radix.py over the map of one (cluster of the layer, row) that has a new pivot."""
    i_chunk, place, i_row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(new_pivots + place * tl.num_programs(2) + i_row) < 0:
        return
    begin = tl.load(map_starts + i_row)
    length = (tl.load(map_starts + i_row + 1) - begin).to(tl.int32)
    span = span_of(length, CHUNK)
    first, end = i_chunk * span, tl.minimum((i_chunk + 1) * span, length)
    if first >= end:
        return
    i_job = i_row * tl.num_programs(1) + place
    num_jobs = tl.num_programs(1) * tl.num_programs(2)
    prefix = tl.full([], 0, tl.uint32)
    if PASS > 0:
        used = (length + span - 1) // span
        prefix, left, _, _ = threshold_of(digits, PASS - 1, i_job, num_jobs, chunks, used, share, True)
        if i_chunk == 0:
            keep_state(digits, PASS, i_job, num_jobs, prefix, left)
    b_weight = masses_by_digit(maps + place.to(tl.int64) * stride_map + begin, first, end, prefix, PASS)
    store_weights(digits, PASS, i_job, num_jobs, chunks, b_weight)


@triton.jit(do_not_specialize=["stride_map", "num_rows"])
def tile_thresholds_kernel(
    maps, stride_map, new_pivots, num_rows, tiles, block_offsets, share, thresholds,
    BLOCK_N: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """The passes of radix.py over what one tile has of the map of a cluster's new pivot, in one program."""
    i_tile, place = tl.program_id(0), tl.program_id(1)
    i_row = tl.load(tiles + i_tile * FIELDS)
    if tl.load(new_pivots + place * num_rows + i_row) < 0:
        return
    _, num_causal = tile_blocks(tiles, i_tile, BLOCK_N, FIELDS)
    values = maps + place.to(tl.int64) * stride_map + tl.load(block_offsets + i_tile)
    b_weight = masses_by_digit(values, 0, num_causal, tl.full([], 0, tl.uint32), 0)
    high, left = next_digit(b_weight, share * tl.sum(b_weight, 0))
    b_weight = masses_by_digit(values, 0, num_causal, high.to(tl.uint32), 1)
    low, _ = next_digit(b_weight, left)
    tl.store(thresholds + place * tl.num_programs(0) + i_tile, high * DIGITS + low)


@triton.jit(
    do_not_specialize=[
        "num_rows", "stride_map", "stride_estimate", "chunks", "stride_last", "stride_kept", "stride_ids", "num_tiles",
        "num_places",
    ]
)  # fmt: skip
def apply_patterns_kernel(
    patterns, num_rows, places, slots, fresh, stride_map, stride_estimate, chunks,
    exists, last_rows, stride_last, kept, stride_kept, heads, tiles, rows,
    block_offsets, block_counts, block_ids, stride_ids, stripe_counts, num_tiles, num_places,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, CHUNK_MAP: tl.constexpr, FIELDS: tl.constexpr,
    ROW_FIELDS: tl.constexpr, SHARED: tl.constexpr, DENSE: tl.constexpr, PASS: tl.constexpr,
):  # fmt: skip
    i_tile, i = tl.program_id(0), tl.program_id(1)
    i_row = tl.load(tiles + i_tile * FIELDS)
    pattern = tl.load(patterns + i * num_rows + i_row)
    if (pattern != SHARED) & (pattern != DENSE):
        return
    i_head = tl.load(heads + i).to(tl.int64)
    place = tl.load(places + i)
    slot = tl.load(slots + place).to(tl.int64)
    diagonal, num_causal = tile_blocks(tiles, i_tile, BLOCK_N, FIELDS)
    start = tl.load(block_offsets + i_tile)
    flags = kept + slot * stride_kept + start
    target = block_ids + i_head * stride_ids + start
    is_fresh = tl.load(fresh.new_pivots + place * num_rows + i_row) >= 0
    values = fresh.maps + place.to(tl.int64) * stride_map + start
    threshold = 0
    if is_fresh:
        if fresh.thresholds is not None:
            threshold = tl.load(fresh.thresholds + place * num_tiles + i_tile)
        else:
            length = (tl.load(fresh.map_starts + i_row + 1) - tl.load(fresh.map_starts + i_row)).to(tl.int32)
            span = span_of(length, CHUNK_MAP)
            threshold = threshold_of(
                fresh.digits, PASS, i_row * num_places + place, num_rows * num_places, chunks,
                (length + span - 1) // span, fresh.share, True,
            )[0].to(tl.int32)  # fmt: skip
    count = 0
    for first in range(0, num_causal, CHUNK):
        o_n = first + tl.arange(0, CHUNK)
        causal = o_n < num_causal
        if is_fresh:
            b_kept = mass_keys(tl.load(values + o_n, mask=causal, other=0.0)) >= threshold
        else:
            b_kept = tl.load(flags + o_n, mask=causal, other=0) != 0
        if pattern == DENSE:
            tl.store(flags + o_n, b_kept.to(tl.uint8), mask=causal)
            b_kept = causal
        count = append(target, count, o_n, causal & (b_kept | (o_n >= diagonal)))
    tl.store(block_counts + i_head * num_tiles + i_tile, count)
    tl.store(stripe_counts + i_head * num_tiles + i_tile, 0)

    # The pivot's last tile, which ends where the row does, keeps the estimate.
    end = tl.load(tiles + i_tile * FIELDS + 3) + tl.load(tiles + i_tile * FIELDS + 2)
    if (pattern == DENSE) & (end == tl.load(rows + i_row * ROW_FIELDS + 2)):
        begin = tl.load(fresh.block_starts + i_row)
        for first in range(0, num_causal, CHUNK):
            o_n = first + tl.arange(0, CHUNK)
            b_a = tl.load(fresh.estimates + i.to(tl.int64) * stride_estimate + begin + o_n, mask=o_n < num_causal)
            tl.store(last_rows + slot * stride_last + begin + o_n, b_a, mask=o_n < num_causal)
        tl.store(exists + slot * num_rows + i_row, 1)
