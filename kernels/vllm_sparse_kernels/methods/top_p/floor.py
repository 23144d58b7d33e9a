# SPDX-License-Identifier: Apache-2.0
"""The floor of ``top_p``: a query that keeps a smaller share of its attention adds its own heaviest blocks.

``choice.mark_blocks`` chooses the blocks that the whole tile keeps. The shares of single queries are still in the run's
scratch then, as half-precision scores (``portable.py``) or as bytes (``hopper.py``). ``_floor_kernel`` sums the shares
that each query keeps. Most programs end after that, usually after a part of the blocks. For each query below its
target, bisection over the stored codes finds the smallest share to add, without sorting. If shares are equal, the first
blocks are added. Codes have the same order as the shares.

A query's target is ``floor`` times its sum. Bytes are rounded, so their sum differs from the sum before rounding. The
smaller sum counts, so that a query can always reach its target.

``_count_kernel`` then counts the shares that queries keep (``share_counts.py``), for one of ``COUNT_EVERY`` heads per
tile. ``_floor_kernel`` does not know by how much a query exceeds its target, because it stops reading there.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels import share_counts
from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.methods.top_p.choice import ADDED, CHOSEN, KEY_BLOCK
from vllm_sparse_kernels.methods.top_p.scored import TILE, num_scored
from vllm_sparse_kernels.rows import ceil_div
from vllm_sparse_kernels.selection.lists import load_tile
from vllm_sparse_kernels.selection.parameters import on_device
from vllm_sparse_kernels.share_counts import LIFTED, LOST, SHARE_FIELDS, SUM, counted_head

QUERIES = Constant(32)
"""Queries of one program. In a tile with flat attention, every query may be below its target."""

STEP_BLOCKS = 64
"""Half-precision scores of a query that are summed at a time."""

STEP_ROUNDS = 8
"""Rounds of bytes (16 blocks each) that are summed at a time."""

HELD_BLOCKS = 1024
"""Codes of a query that stay in registers during the search. More codes would leave too few registers for other
programs."""

MAX_REGISTERS = 96
"""Register cap per thread with which five programs of ``_floor_kernel`` fit a multiprocessor."""

ROUND_BLOCKS = Constant(16)
"""Blocks whose bytes are stored together, for all queries of a tile (``hopper.py``)."""

UNIT = Constant(2.0**103)
"""Factor that turns a byte into an exponential. The byte becomes the middle bits of a float32: the lowest bits of the
exponent and the highest bits of the mantissa."""

BYTE_BITS = Constant(0x1FE00000)
"""The bits of that float32 that hold the byte: 21 to 28. Byte ``slot`` of a word of four moves there by a shift of
21 - 8 slot bits to the left, which is 3 bits to the right for the last byte."""

SHARE_UNIT = share_counts.UNIT
NUM_EDGES = Constant(len(share_counts.EDGES))

LEAST_HALF = Constant(0x400)
"""Code of the lowest finite half-precision number (see ``_load_codes``)."""


class FloorShares(NamedTuple):
    """Shares that each selected head and each of its queries keep, as arguments of a kernel."""

    kept_mass: Any  # [n] float32: p; heads with 1 or more keep everything and are left out
    floors: Any  # [n] float32, in [0, 1); heads with 0 are left out


class StoredShares(NamedTuple):
    """Shares of single queries in a run of tiles, as an engine stored them."""

    scratch: Any  # ``Scratch`` of the engine, filled by its ``masses``
    codes: torch.Tensor  # [n, tiles, rounds, SCORED, 16] uint8, or [n, tiles, blocks, SCORED] float16
    span_tokens: int  # keys of a span of ``scratch.parts``


class QueryCodes(NamedTuple):
    """The stored codes of one query for the blocks before its tile that are not always kept."""

    codes: Any  # pointer to the codes of the run
    marks: Any  # pointer to the marks of the tile and head
    i_head_tile: Any  # number of the (head, tile) in the run
    num_stored: Any  # rounds or blocks of each (head, tile) in ``codes``
    i_query: Any  # query of the tile
    begin: Any  # first block after those at the sequence's beginning that are always kept
    end: Any  # first block of those before the query that are always kept
    top: Any  # the query's largest score, which half-precision scores refer to
    scored: Any  # scored queries of a whole tile


class Histogram(NamedTuple):
    """Histogram of kept shares, as arguments of a kernel."""

    edges: Any  # [NUM_EDGES] float32, upper ends of all buckets but the last
    counts: Any  # [num_rows, SHARE_FIELDS] int64


def add_for_floor(
    stored: StoredShares, marks: torch.Tensor, kept_mass: torch.Tensor, floors: torch.Tensor, tiles: torch.Tensor,
    first_tile: int, sink_tokens: int, local_tokens: int,
) -> None:  # fmt: skip
    """Mark the blocks that are added by queries whose kept share is below their head's floor."""
    num_selected, num_tiles, width = marks.shape
    scratch, codes, span_tokens = stored
    _floor_kernel[(num_tiles, num_selected, scratch.parts.shape[-1] // QUERIES.value)](
        scratch, codes, marks, width, FloorShares(kept_mass, floors), tiles, first_tile, sink_tokens, local_tokens,
        scratch.parts.shape[2], codes.shape[2],
        SCORED=scratch.parts.shape[-1], STEP=STEP_ROUNDS if codes.dtype == torch.uint8 else STEP_BLOCKS,
        SPAN=span_tokens, CHUNK=HELD_BLOCKS, num_warps=4, maxnreg=MAX_REGISTERS,
    )  # fmt: skip


def count_kept_shares(
    stored: StoredShares, marks: torch.Tensor, shares: FloorShares, tiles: torch.Tensor, first_tile: int,
    counts: torch.Tensor,
) -> None:  # fmt: skip
    """Count the shares of their own estimated attention that queries keep, after ``add_for_floor``.

    A query keeps all blocks of its tile, including blocks that other queries have added. In each tile, the shares of
    one of ``share_counts.COUNT_EVERY`` heads are counted. Heads without a floor, and heads that keep everything, are
    left out.
    """
    num_selected, num_tiles, width = marks.shape
    scratch, codes, span_tokens = stored
    as_bytes = codes.dtype == torch.uint8
    every = share_counts.COUNT_EVERY
    _count_kernel[(num_tiles, ceil_div(num_selected, every), scratch.parts.shape[-1] // QUERIES.value)](
        scratch, marks, width, shares, tiles, first_tile, num_selected, scratch.parts.shape[2], codes.shape[2],
        Histogram(on_device(share_counts.EDGES, marks.device), counts),
        AS_BYTES=as_bytes, SCORED=scratch.parts.shape[-1], STEP=STEP_ROUNDS if as_bytes else STEP_BLOCKS,
        SPAN=span_tokens,
        EVERY=every, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["width", "first_tile", "sink", "local", "num_spans", "num_stored"])
def _floor_kernel(
    scratch, codes, marks, width, shares, tiles, first_tile, sink, local, num_spans, num_stored,
    SCORED: tl.constexpr, STEP: tl.constexpr, SPAN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Mark the blocks that QUERIES queries of one tile and head add to reach the floor.

    Grid: (tiles of the run, n, SCORED / QUERIES). Bound by memory if no query is below its target: it reads the stored
    shares of marked blocks until each query has reached its target. Otherwise bound by the search for each query's
    heaviest blocks, one query after another.

    Args:
        codes: Stored shares or scores: [n, tiles, rounds, SCORED, 16] uint8, or [n, tiles, blocks, SCORED] float16.
        marks: [n, tiles, width] uint8; written.
        tiles: [num_tiles, 4] int32, ``Rows.tiles``.
    """
    AS_BYTES: tl.constexpr = codes.dtype.element_ty == tl.uint8
    i_tile, i_selected, first_query = tl.program_id(0), tl.program_id(1), tl.program_id(2) * QUERIES
    _, _, length, position = load_tile(tiles, first_tile + i_tile)
    begin = (sink + KEY_BLOCK - 1) // KEY_BLOCK
    end = tl.maximum(position - local, 0) // KEY_BLOCK
    floor = tl.load(shares.floors + i_selected)
    has_floor = (floor > 0) & (tl.load(shares.kept_mass + i_selected) < 1)
    scored = num_scored(length, SCORED)
    if has_floor & (first_query < scored) & (begin < end):
        i_head_tile = i_selected.to(tl.int64) * tl.num_programs(0) + i_tile
        tile_marks = marks + i_head_tile * tl.multiple_of(width, 16)
        o_q = first_query + tl.arange(0, QUERIES)
        if AS_BYTES:
            b_top = tl.zeros([QUERIES], tl.float32)
            b_total = _total_of_bytes(scratch, i_head_tile, position, num_spans, o_q, SCORED, SPAN)
            b_target = tl.where(o_q < scored, b_total * floor, 0.0)
            b_chosen_sum = _chosen_sum_of_bytes(
                scratch, tile_marks, i_head_tile, position, num_stored, o_q, b_target, SCORED, STEP
            )
        else:
            reach = position + length
            b_top, b_total = _top_and_total_of_scores(scratch, i_head_tile, reach, num_spans, o_q, SCORED, SPAN)
            b_target = tl.where(o_q < scored, b_total * floor, 0.0)
            b_chosen_sum = _chosen_sum_of_scores(
                scratch, tile_marks, i_head_tile, reach, num_stored, o_q, b_top, b_target, SCORED, STEP
            )
        b_below = b_chosen_sum < b_target
        i_query = _next_query(b_below, o_q, -1)
        while i_query < TILE:
            top, total = _element_of(b_top, o_q, i_query), _element_of(b_total, o_q, i_query)
            chosen_sum = _element_of(b_chosen_sum, o_q, i_query)
            query = QueryCodes(codes, tile_marks, i_head_tile, num_stored, i_query, begin, end, top, SCORED)
            _mark_heaviest(query, total, chosen_sum, floor, AS_BYTES, CHUNK)
            i_query = _next_query(b_below, o_q, i_query)


@triton.jit
def _next_query(b_below, o_q, i_query):
    """Return the first query after ``i_query`` that is below its target, or TILE if there is none."""
    return tl.min(tl.where(b_below & (o_q > i_query), o_q, TILE), 0)


@triton.jit
def _element_of(b_x, o_q, i_query):
    """Return the element of b_x for query ``i_query``."""
    return tl.sum(tl.where(o_q == i_query, b_x, 0.0), 0)


@triton.jit
def _total_of_bytes(scratch, i_head_tile, position, num_spans, o_q, SCORED: tl.constexpr, SPAN: tl.constexpr):
    """Return the sum of exponentials of each query, before rounding."""
    b_total = tl.load(scratch.diagonal + i_head_tile * SCORED + o_q)
    for i in range((position // TILE * TILE + SPAN - 1) // SPAN):
        b_total += tl.load(scratch.parts + (i_head_tile * num_spans + i) * SCORED + o_q)
    return b_total


@triton.jit
def _chosen_sum_of_bytes(
    scratch, tile_marks, i_head_tile, position, num_rounds, o_q, b_target, SCORED: tl.constexpr, ROUNDS: tl.constexpr
):  # fmt: skip
    """Sum the exponentials of each query in the chosen blocks and in the tile's own keys.

    Begins with the first rounds, and continues from the last round backwards, because most attention is there. Stops
    when each query has reached its target. The sum is therefore complete only if a query is below its target.
    """
    b_chosen_sum = tl.load(scratch.diagonal + i_head_tile * SCORED + o_q)
    num_blocks = position // TILE * 4  # before the tile's own keys
    num_rounds_here = (num_blocks + ROUND_BLOCKS - 1) // ROUND_BLOCKS
    num_steps = (num_rounds_here + ROUNDS - 1) // ROUNDS
    o_t = tl.arange(0, 4)
    words = scratch.bytes + i_head_tile * num_rounds * (SCORED * 4) + o_q[None, :, None] * 4 + o_t[None, None, :]
    i, num_below = 0, tl.sum((b_chosen_sum < b_target).to(tl.int32), 0)
    b_chosen_bits = _load_chosen_bits(tile_marks, _visited_step(0, num_steps), num_blocks, ROUNDS)
    while (i < num_steps) & (num_below > 0):
        o_r = _visited_step(i, num_steps) * ROUNDS + tl.arange(0, ROUNDS)
        b_some = tl.max(b_chosen_bits, 1) != 0
        b_words = tl.load(words + o_r[:, None, None] * (SCORED * 4), mask=b_some[:, None, None], other=0)
        b_next = _load_chosen_bits(tile_marks, _visited_step(i + 1, num_steps), num_blocks, ROUNDS)
        b_sum = tl.zeros([ROUNDS, QUERIES, 4], tl.float32)
        for slot in tl.static_range(4):
            b_bits = (b_words << (21 - 8 * slot)) if slot < 3 else (b_words >> 3)
            b_x = (b_bits & BYTE_BITS).to(tl.float32, bitcast=True)
            b_sum += tl.where((b_chosen_bits[:, None, :] >> slot & 1) != 0, b_x, 0.0)
        b_chosen_sum += tl.sum(tl.sum(b_sum, 2), 0) * UNIT
        num_below = tl.sum((b_chosen_sum < b_target).to(tl.int32), 0)
        b_chosen_bits = b_next
        i += 1
    return b_chosen_sum


@triton.jit
def _visited_step(i, num_steps):
    """Return the step to process after ``i`` other steps: first step 0, then from the last step down to step 1."""
    return tl.where((i == 0) | (i >= num_steps), 0, num_steps - i)


@triton.jit
def _load_chosen_bits(tile_marks, i_step, num_blocks, ROUNDS: tl.constexpr):
    """Return a bit for each byte of each word, 1 if the whole tile keeps its block: [ROUNDS, 4] int32."""
    o_block = (i_step * ROUNDS + tl.arange(0, ROUNDS))[:, None] * ROUND_BLOCKS + tl.arange(0, 4)[None, :]
    b_chosen_bits = tl.zeros([ROUNDS, 4], tl.int32)
    for slot in tl.static_range(4):
        b_mark = tl.load(tile_marks + o_block + slot * 4, mask=o_block + slot * 4 < num_blocks, other=0)
        b_chosen_bits |= (b_mark == CHOSEN).to(tl.int32) << slot
    return b_chosen_bits


@triton.jit
def _top_and_total_of_scores(scratch, i_head_tile, reach, num_spans, o_q, SCORED: tl.constexpr, SPAN: tl.constexpr):
    """Return the largest score of each query, and its sum of exponentials relative to this score."""
    parts = scratch.parts + i_head_tile * num_spans * (2 * SCORED) + o_q
    b_top = tl.full([QUERIES], float("-inf"), tl.float32)
    for i in range((reach + SPAN - 1) // SPAN):
        b_top = tl.maximum(b_top, tl.load(parts + i * (2 * SCORED)))
    b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_total = tl.zeros([QUERIES], tl.float32)
    for i in range((reach + SPAN - 1) // SPAN):
        b_total += tl.load(parts + i * (2 * SCORED) + SCORED) * tl.exp2(tl.load(parts + i * (2 * SCORED)) - b_top)
    return b_top, b_total


@triton.jit
def _chosen_sum_of_scores(
    scratch, tile_marks, i_head_tile, reach, num_stored_blocks, o_q, b_top, b_target,
    SCORED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Sum the exponentials of each query in the chosen blocks, in the order of ``_chosen_sum_of_bytes``."""
    num_blocks = (reach + KEY_BLOCK - 1) // KEY_BLOCK
    num_steps = (num_blocks + BLOCKS - 1) // BLOCKS
    scores = scratch.scores + i_head_tile * num_stored_blocks * SCORED + o_q[None, :]
    b_chosen_sum = tl.zeros([QUERIES], tl.float32)
    i, num_below = 0, tl.sum((b_chosen_sum < b_target).to(tl.int32), 0)
    while (i < num_steps) & (num_below > 0):
        o_b = _visited_step(i, num_steps) * BLOCKS + tl.arange(0, BLOCKS)
        b_chosen = tl.load(tile_marks + o_b, mask=o_b < num_blocks, other=0) == CHOSEN
        b_u = tl.load(scores + o_b[:, None] * SCORED, mask=b_chosen[:, None], other=float("-inf")).to(tl.float32)
        b_chosen_sum += tl.sum(tl.exp2(b_u - b_top[None, :]), 0)
        num_below = tl.sum((b_chosen_sum < b_target).to(tl.int32), 0)
        i += 1
    return b_chosen_sum


@triton.jit
def _mark_heaviest(query, total, chosen_sum, floor, AS_BYTES: tl.constexpr, CHUNK: tl.constexpr):
    """Mark the fewest blocks of [begin, end), heaviest first, with which a query reaches the floor.

    Codes of chosen blocks are 0. ``total`` and ``chosen_sum`` are the query's sums of exponentials, over all keys and
    over chosen blocks. The search is a bisection over codes, as in ``choice.search_threshold``.
    """
    LEAST: tl.constexpr = 1 if AS_BYTES else LEAST_HALF
    b_first = _load_codes(query, 0, AS_BYTES, CHUNK)
    low, highest = LEAST, tl.max(b_first, 0)
    for first in range(CHUNK, query.end, CHUNK):
        b_codes = _load_codes(query, first, AS_BYTES, CHUNK)
        highest = tl.maximum(highest, tl.max(b_codes, 0))
    other_sum = _sum_from(query, b_first, low, AS_BYTES, CHUNK)
    missing = floor * tl.minimum(total, chosen_sum + other_sum) - chosen_sum
    if (missing > 0) & (highest >= low):
        high = highest + 1
        while high - low > 1:
            middle = (low + high) // 2
            enough = _sum_from(query, b_first, middle, AS_BYTES, CHUNK) >= missing
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        above = _sum_from(query, b_first, low + 1, AS_BYTES, CHUNK)
        smallest = _exponential_of(low, query.top, AS_BYTES)
        num_equal = tl.ceil(tl.minimum((missing - above) / tl.maximum(smallest, 1e-37), 1e9)).to(tl.int32)
        num_seen = 0
        for first in range(0, query.end, CHUNK):
            b_codes = b_first
            if first > 0:
                b_codes = _load_codes(query, first, AS_BYTES, CHUNK)
            b_equal = (b_codes == low).to(tl.int32)
            b_added = (b_codes > low) | ((b_equal != 0) & (num_seen + tl.cumsum(b_equal, 0) <= num_equal))
            num_seen += tl.sum(b_equal, 0)
            tl.store(query.marks + first + tl.arange(0, CHUNK), tl.full([CHUNK], ADDED, tl.uint8), mask=b_added)


@triton.jit
def _sum_from(query, b_first, least, AS_BYTES: tl.constexpr, CHUNK: tl.constexpr):
    """Sum the exponentials of one query in blocks whose codes are at least ``least``.

    ``b_first`` [CHUNK] int32 are its first codes, which stay in registers.
    """
    total = tl.sum(tl.where(b_first >= least, _exponential_of(b_first, query.top, AS_BYTES), 0.0), 0)
    for first in range(CHUNK, query.end, CHUNK):
        b_codes = _load_codes(query, first, AS_BYTES, CHUNK)
        total += tl.sum(tl.where(b_codes >= least, _exponential_of(b_codes, query.top, AS_BYTES), 0.0), 0)
    return total


@triton.jit
def _load_codes(query, first, AS_BYTES: tl.constexpr, CHUNK: tl.constexpr):
    """Load the codes of one query for blocks from ``first`` on, 0 for chosen blocks: [CHUNK] int32.

    A byte is its own code. The code of a half-precision number is its bits, mapped so that codes and numbers have the
    same order.
    """
    o_b = first + tl.arange(0, CHUNK)
    b_inner = (o_b >= query.begin) & (o_b < query.end)
    b_free = tl.load(query.marks + o_b, mask=b_inner, other=CHOSEN) != CHOSEN
    if AS_BYTES:
        # A word for each place in a step, a byte for each step.
        o_byte = query.i_query * 16 + o_b % 4 * 4 + o_b % 16 // 4
        first_byte = query.i_head_tile * query.num_stored * (query.scored * 16)
        source = query.codes + first_byte + o_b // ROUND_BLOCKS * (query.scored * 16) + o_byte
        return tl.where(b_free, tl.load(source, mask=b_inner, other=0).to(tl.int32), 0)
    else:
        source = query.codes + query.i_head_tile * query.num_stored * query.scored + o_b * query.scored + query.i_query
        b_u = tl.load(source, mask=b_inner, other=float("-inf"))
        b_u = tl.where(b_u == 0.0, 0.0, b_u).to(tl.float16)  # turn -0 into 0
        b_bits = b_u.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        # Numbers with a sign bit have lower codes, in inverse order of their bits.
        return tl.where(b_free, tl.where(b_bits < 0x8000, b_bits + 0x8000, 0xFFFF - b_bits), 0)


@triton.jit
def _exponential_of(code, top, AS_BYTES: tl.constexpr):
    """Return the exponential of a code, or of each code of a block."""
    if AS_BYTES:
        return tl.cast(code << 21, tl.float32, bitcast=True) * UNIT
    else:
        bits = tl.where(code < 0x8000, 0xFFFF - code, code - 0x8000).to(tl.int16)
        value = tl.exp2(tl.cast(bits, tl.float16, bitcast=True).to(tl.float32) - top)
        return tl.where(code < LEAST_HALF, 0.0, value)


@triton.jit(do_not_specialize=["width", "first_tile", "num_selected", "num_spans", "num_stored"])
def _count_kernel(
    scratch, marks, width, shares, tiles, first_tile, num_selected, num_spans, num_stored, histogram,
    AS_BYTES: tl.constexpr, SCORED: tl.constexpr, STEP: tl.constexpr, SPAN: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Count the kept shares of QUERIES queries of one tile, for the head that is counted in this tile.

    Grid: (tiles of the run, ⌈n / EVERY⌉, SCORED / QUERIES). Bound by memory: it reads the stored shares of all blocks.

    Args:
        marks: [n, tiles, width] uint8.
        tiles: [num_tiles, 4] int32, ``Rows.tiles``.
    """
    i_tile, first_query = tl.program_id(0), tl.program_id(2) * QUERIES
    i_row, _, length, position = load_tile(tiles, first_tile + i_tile)
    i_selected = tl.program_id(1) * EVERY + counted_head(position, TILE, EVERY)
    is_head = i_selected < num_selected
    floor = tl.load(shares.floors + i_selected, mask=is_head, other=0.0)
    has_floor = (floor > 0) & (tl.load(shares.kept_mass + i_selected, mask=is_head, other=1.0) < 1)
    scored = num_scored(length, SCORED)
    if has_floor & (first_query < scored):
        i_head_tile = i_selected.to(tl.int64) * tl.num_programs(0) + i_tile
        tile_marks = marks + i_head_tile * tl.multiple_of(width, 16)
        o_q = first_query + tl.arange(0, QUERIES)
        if AS_BYTES:
            b_total = _total_of_bytes(scratch, i_head_tile, position, num_spans, o_q, SCORED, SPAN)
            b_all, b_chosen, b_kept = _sums_of_bytes(
                scratch, tile_marks, i_head_tile, position, num_stored, o_q, SCORED, STEP
            )
        else:
            reach = position + length
            b_top, b_total = _top_and_total_of_scores(scratch, i_head_tile, reach, num_spans, o_q, SCORED, SPAN)
            b_all, b_chosen, b_kept = _sums_of_scores(
                scratch, tile_marks, i_head_tile, reach, num_stored, o_q, b_top, SCORED, STEP
            )
        b_whole = tl.minimum(b_total, b_all)  # the sum that the target refers to
        b_share = tl.minimum(b_kept / b_whole, 1.0)
        b_counted = (o_q < scored) & (b_kept / b_whole >= 0)  # false for NaN
        b_lifted = (b_counted & (b_chosen < b_whole * floor)).to(tl.int32)
        b_units = (tl.where(b_counted, b_share, 0.0) * SHARE_UNIT + 0.5).to(tl.int32)
        o_f = tl.arange(0, SHARE_FIELDS)
        b_edges = tl.load(histogram.edges + o_f, mask=o_f < NUM_EDGES, other=2.0)
        b_bucket = tl.sum((b_share[:, None] > b_edges[None, :]).to(tl.int32), 1)
        b_counts = tl.sum((b_counted[:, None] & (b_bucket[:, None] == o_f[None, :])).to(tl.int32), 0)
        b_counts = tl.where(o_f == SUM, tl.sum(b_units, 0), b_counts)
        b_counts = tl.where(o_f == LIFTED, tl.sum(b_lifted, 0), b_counts)
        target = histogram.counts + i_row * SHARE_FIELDS + o_f
        tl.atomic_add(target, b_counts.to(tl.int64), mask=b_counts != 0, sem="relaxed")
        lost = tl.max(tl.where(b_counted, SHARE_UNIT - b_units, 0), 0)
        b_lost = tl.where(o_f == LOST, lost, 0)
        tl.atomic_max(target, b_lost.to(tl.int64), mask=b_lost > 0, sem="relaxed")


@triton.jit
def _sums_of_bytes(
    scratch, tile_marks, i_head_tile, position, num_rounds, o_q, SCORED: tl.constexpr, ROUNDS: tl.constexpr
):  # fmt: skip
    """Sum the exponentials of each query in all blocks, in chosen blocks, and in chosen or added blocks."""
    b_own = tl.load(scratch.diagonal + i_head_tile * SCORED + o_q)  # sum over the tile's own keys, which are kept
    b_all = tl.zeros([ROUNDS, QUERIES, 4], tl.float32)
    b_chosen, b_kept = b_all, b_all
    num_blocks = position // TILE * 4  # before the tile's own keys
    num_rounds_here = (num_blocks + ROUND_BLOCKS - 1) // ROUND_BLOCKS
    o_t = tl.arange(0, 4)
    words = scratch.bytes + i_head_tile * num_rounds * (SCORED * 4) + o_q[None, :, None] * 4 + o_t[None, None, :]
    for first in range(0, num_rounds_here, ROUNDS):
        o_r = first + tl.arange(0, ROUNDS)
        b_words = tl.load(
            words + o_r[:, None, None] * (SCORED * 4), mask=(o_r < num_rounds_here)[:, None, None], other=0
        )
        for slot in tl.static_range(4):
            o_block = o_r[:, None] * ROUND_BLOCKS + slot * 4 + o_t[None, :]
            b_inside = o_block < num_blocks
            b_mark = tl.load(tile_marks + o_block, mask=b_inside, other=0)[:, None, :]
            b_bits = (b_words << (21 - 8 * slot)) if slot < 3 else (b_words >> 3)
            b_x = (b_bits & BYTE_BITS).to(tl.float32, bitcast=True)
            b_all += tl.where(b_inside[:, None, :], b_x, 0.0)
            b_chosen += tl.where(b_mark == CHOSEN, b_x, 0.0)
            b_kept += tl.where(b_mark != 0, b_x, 0.0)
    return b_own + _sum_per_query(b_all), b_own + _sum_per_query(b_chosen), b_own + _sum_per_query(b_kept)


@triton.jit
def _sum_per_query(b_x):
    """Sum bytes as floats, [rounds, queries, 4], over all but the queries."""
    return tl.sum(tl.sum(b_x, 2), 0) * UNIT


@triton.jit
def _sums_of_scores(
    scratch, tile_marks, i_head_tile, reach, num_stored_blocks, o_q, b_top, SCORED: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Sum the exponentials of each query as ``_sums_of_bytes`` does."""
    num_blocks = (reach + KEY_BLOCK - 1) // KEY_BLOCK
    scores = scratch.scores + i_head_tile * num_stored_blocks * SCORED + o_q[None, :]
    b_all = tl.zeros([QUERIES], tl.float32)
    b_chosen, b_kept = b_all, b_all
    for first in range(0, num_blocks, BLOCKS):
        o_b = first + tl.arange(0, BLOCKS)
        b_mark = tl.load(tile_marks + o_b, mask=o_b < num_blocks, other=0)[:, None]
        b_u = tl.load(scores + o_b[:, None] * SCORED, mask=(o_b < num_blocks)[:, None], other=float("-inf"))
        b_x = tl.exp2(b_u.to(tl.float32) - b_top[None, :])
        b_all += tl.sum(b_x, 0)
        b_chosen += tl.sum(tl.where(b_mark == CHOSEN, b_x, 0.0), 0)
        b_kept += tl.sum(tl.where(b_mark != 0, b_x, 0.0), 0)
    return b_all, b_chosen, b_kept
