# SPDX-License-Identifier: Apache-2.0
"""Selection of ``top_p`` for MLA: which blocks of 64 keys each tile of 128 queries keeps, by running sums.

Launches for some heads of a call, of which only scored queries have products, estimates and sums:

1. ``rounding.py`` rounds scored queries and keys to e4m3, in the channels that affect scores most.
2. ``products.py`` multiplies them, and stores the largest product of each query and block in half precision.
3. ``_sums_kernel`` adds the estimates e, the exponentials of the scores, to each query's running sum Z, and averages
   e / Z over the tile's scored queries: the mass of a block.
4. ``_choose_kernel`` lists the fewest blocks that keep the dropped mass within the tile's budget.
5. ``_drop_kernel`` adds the e of the dropped blocks to D.

Estimates of several calls must refer to the same scores, because they are added. So unlike in ``methods.top_p``, no
constant is left out of a query's scores.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.compile_time import LOG2_E, Constant
from vllm_sparse_kernels.methods.top_p import TopP
from vllm_sparse_kernels.methods.top_p.choice import (
    HELD_BLOCKS,
    LISTED_BLOCKS,
    MAX_REGISTERS,
    NUM_WARPS,
    load_candidates,
    search_threshold,
    sum_and_count,
)
from vllm_sparse_kernels.methods.top_p.method import stored_dtype
from vllm_sparse_kernels.methods.top_p.scored import SCORED, num_scored, scored_offsets
from vllm_sparse_kernels.mla.attention import BlockLists
from vllm_sparse_kernels.mla.calls import BLOCK, MOST_ROWS, SINK, MlaCall, Part, Tensors, load_fields
from vllm_sparse_kernels.mla.products import reach_of, run_products
from vllm_sparse_kernels.mla.reference import RunningSums
from vllm_sparse_kernels.mla.rounding import BLOCK_D, KEPT_D, Moments, Rounded, fill_moments, round_vectors
from vllm_sparse_kernels.online_softmax import finite_maximum
from vllm_sparse_kernels.rows import TILE_TOKENS, ceil_div
from vllm_sparse_kernels.selection.lists import above_threshold, append
from vllm_sparse_kernels.vectors import vector_pointers

SCRATCH_BYTES = 224 << 20
"""Limit of the scratch memory, which decides how many heads are selected at a time. One head is always possible."""

STEP = Constant(128)
"""Blocks of a step of the kernels that read products: 64 bytes per thread are in flight."""


class Scratch(NamedTuple):
    """Tensors that launches pass to each other. The last dimensions are laid out for the part of the call."""

    products: Any  # [heads, tiles, width, SCORED] float16, largest of a block; undefined past a tile's reach
    masses: Any  # [heads, tiles, width] float32
    marks: Any  # [heads, tiles, width] uint8, 1 for kept blocks


class Selection:
    """Selection of ``top_p``, with the memory that it needs."""

    def __init__(self, sums: RunningSums, scale: float, max_query_tokens: int, max_key_tokens: int) -> None:
        """Allocate the scratch memory."""
        self.sums, self.scale = sums, scale
        num_heads, device = len(sums.top), sums.top.device
        num_tiles = ceil_div(max_query_tokens, TILE_TOKENS) + MOST_ROWS  # rows end in partial tiles
        num_blocks = num_tiles * ceil_div(max_key_tokens, BLOCK.value)
        dtype = stored_dtype(device)
        vector_bytes = KEPT_D.value * dtype.itemsize + 8
        head_bytes = vector_bytes * (max_query_tokens + max_key_tokens) + (2 * SCORED.value + 4 + 1) * num_blocks
        list_bytes = 4 * num_heads * (num_blocks + num_tiles)
        most_heads = min(max((SCRATCH_BYTES - list_bytes) // head_bytes, 1), num_heads)
        self.heads_at_once = num = ceil_div(num_heads, ceil_div(num_heads, most_heads))  # parts of similar size

        def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(*sizes, dtype=dtype, device=device)

        self.rounded = Rounded(
            empty(num, max_query_tokens, KEPT_D.value, dtype=dtype), empty(num, max_query_tokens),
            empty(num, max_query_tokens), max_query_tokens,
            empty(num, max_key_tokens, KEPT_D.value, dtype=dtype), empty(num, max_key_tokens), max_key_tokens,
        )  # fmt: skip
        self.scratch = Scratch(
            empty(num * num_blocks * SCORED.value, dtype=torch.float16), empty(num * num_blocks),
            empty(num * num_blocks, dtype=torch.uint8),
        )  # fmt: skip
        self.moments = Moments(
            empty(MOST_ROWS, num_heads, BLOCK_D.value), empty(MOST_ROWS, num_heads, KEPT_D.value, dtype=torch.int32)
        )
        self.lists = BlockLists(
            empty(num_heads * num_blocks, dtype=torch.int32), empty(num_heads * num_tiles, dtype=torch.int32)
        )

    def select(self, tensors: Tensors, call: MlaCall, part: Part, kept_pairs: torch.Tensor) -> BlockLists:
        """Select the blocks of some rows, and update the running sums of their queries."""
        num_heads, method = len(self.sums.top), call.method
        assert isinstance(method, TopP)
        fill_moments(tensors, part, self.moments)
        for first in range(0, num_heads, self.heads_at_once):
            heads = range(first, min(first + self.heads_at_once, num_heads))
            round_vectors(tensors, part, self.moments, heads, self.scale * LOG2_E.value, self.rounded)
            run_products(call, part, len(heads), self.rounded, self.scratch.products)
            grid, sums = (len(part.tiles), len(heads)), RunningSums(*(x[heads.start : heads.stop] for x in self.sums))
            args = (self.rounded, self.scratch, part.tiles, sums, sums.top.stride(0), part.width)
            _sums_kernel[grid](*args, CAUSAL=call.is_causal, num_warps=8)
            _choose_kernel[grid](
                *args, self.lists, kept_pairs, first, method.kept_mass, call.most_blocks,
                CAUSAL=call.is_causal, CHUNK=HELD_BLOCKS, num_warps=NUM_WARPS, maxnreg=MAX_REGISTERS,
            )  # fmt: skip
            _drop_kernel[grid](*args, CAUSAL=call.is_causal, num_warps=8)
        return self.lists


class ScoredTile(NamedTuple):
    """The scored queries of a tile and head, and the blocks in their reach."""

    products: Any  # pointer to [blocks, SCORED]
    masses: Any  # pointer to [blocks]
    marks: Any  # pointer to [blocks]
    key_scales: Any  # pointer to the scale of the first block; those of blocks are BLOCK apart
    num_blocks: Any
    num_scored: Any
    b_is_scored: Any  # [SCORED]
    o_sum: Any  # [SCORED], places of the queries in running sums
    b_query_scale: Any  # [SCORED] float32, times the softmax's scale; 0 past the tile
    b_shift: Any  # [SCORED] float32, addends of scores; 0 past the tile


@triton.jit
def _load_tile(rounded, scratch, tiles, stride_sums, width, CAUSAL: tl.constexpr):
    """Load the scales of the queries of this program's tile and head, and locate its products."""
    i_head = tl.program_id(1).to(tl.int64)
    i_list = i_head * tl.num_programs(0) + tl.program_id(0)
    fields = load_fields(tiles, tl.program_id(0))
    o_s = tl.arange(0, SCORED)
    number = num_scored(fields.length)
    b_place = scored_offsets(o_s, fields.length)
    o_query = i_head * rounded.num_queries + fields.query + b_place
    return ScoredTile(
        scratch.products + i_list * width * SCORED,
        scratch.masses + i_list * width,
        scratch.marks + i_list * width,
        rounded.key_scales + i_head * rounded.num_keys + fields.key_start,
        tl.cdiv(reach_of(fields, CAUSAL), BLOCK),
        number,
        o_s < number,
        i_head * stride_sums + fields.state + b_place,
        tl.load(rounded.query_scales + o_query, mask=o_s < number, other=0.0),
        tl.load(rounded.query_shifts + o_query, mask=o_s < number, other=0.0),
    )


@triton.jit
def _load_scores(tile, o_b, should_load):
    """Return the scores [blocks, SCORED] of blocks ``o_b``, in base 2.

    They are -inf where not ``should_load``, or where the block has no key up to the query.
    """
    b_key_scale = tl.load(tile.key_scales + o_b * BLOCK, mask=o_b < tile.num_blocks, other=0.0)
    is_score = should_load[:, None] & tile.b_is_scored[None, :]
    b_s = tl.load(vector_pointers(tile.products, o_b, SCORED), mask=is_score, other=float("-inf")).to(tl.float32)
    b_u = b_s * (b_key_scale[:, None] * tile.b_query_scale[None, :]) + tile.b_shift[None, :]
    return tl.where(b_s == float("-inf"), b_s, b_u)


@triton.jit(do_not_specialize=["width"])
def _sums_kernel(rounded, scratch, tiles, sums, stride_sums, width, CAUSAL: tl.constexpr):
    """Add the estimates of one tile and head to the scored queries' running sums, and average e / Z over the queries.

    The rows' new tokens start the sums.

    Grid: (tiles, heads). Bound by memory: it reads 2 bytes for each scored query and block, twice.

    Args:
        tiles: [num_tiles, 8] int32, ``TileFields``.
    """
    tile = _load_tile(rounded, scratch, tiles, stride_sums, width, CAUSAL)
    is_scored = tile.b_is_scored
    if CAUSAL:
        b_top = tl.full([SCORED], float("-inf"), tl.float32)
        b_total = tl.zeros([SCORED], tl.float32)
        b_dropped = tl.zeros([SCORED], tl.float32)
    else:
        b_top = tl.load(sums.top + tile.o_sum, mask=is_scored, other=float("-inf"))
        b_total = tl.load(sums.total + tile.o_sum, mask=is_scored, other=0.0)
        b_dropped = tl.load(sums.dropped + tile.o_sum, mask=is_scored, other=0.0)
    for i in range(0, tile.num_blocks, STEP):
        o_b = i + tl.arange(0, STEP)
        b_u = _load_scores(tile, o_b, o_b < tile.num_blocks)
        b_new = tl.maximum(b_top, tl.max(b_u, 0))
        b_finite = finite_maximum(b_new)
        b_decay = tl.exp2(b_top - b_finite)
        b_total = b_total * b_decay + tl.sum(tl.exp2(b_u - b_finite[None, :]), 0)
        b_dropped *= b_decay
        b_top = b_new
    tl.store(sums.top + tile.o_sum, b_top, mask=is_scored)
    tl.store(sums.total + tile.o_sum, b_total, mask=is_scored)
    tl.store(sums.dropped + tile.o_sum, b_dropped, mask=is_scored)
    b_weight = tl.where(is_scored, 1 / tl.where(is_scored, b_total * tile.num_scored, 1.0), 0.0)
    b_finite = tl.where(is_scored, b_top, 0.0)
    for i in range(0, tile.num_blocks, STEP):
        o_b = i + tl.arange(0, STEP)
        b_e = tl.exp2(_load_scores(tile, o_b, o_b < tile.num_blocks) - b_finite[None, :])
        tl.store(tile.masses + o_b, tl.sum(b_e * b_weight[None, :], 1), mask=o_b < tile.num_blocks)


@triton.jit(
    do_not_specialize=["first_head", "width", "kept_mass", "most_blocks"],
    do_not_specialize_on_alignment=["kept_pairs"],  # an element of a tensor of counters, at an even or an odd place
)
def _choose_kernel(
    rounded, scratch, tiles, sums, stride_sums, width, lists, kept_pairs, first_head, kept_mass, most_blocks,
    CAUSAL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """List and mark the blocks of one tile and head: the fewest with which D stays within 1 - p of Z, on average.

    The average is that of scored queries. Sinks and the diagonal are always kept.

    Grid: (tiles, heads). Bound by latency: up to 30 bisection steps on masses in registers.

    Args:
        tiles: [num_tiles, 8] int32, ``TileFields``.
        kept_pairs: [1] int64, to which the number of kept pairs is added.
    """
    tile = _load_tile(rounded, scratch, tiles, stride_sums, width, CAUSAL)
    fields = load_fields(tiles, tl.program_id(0))
    num_blocks = tile.num_blocks
    end = tl.minimum(fields.offset // BLOCK, num_blocks) if CAUSAL else num_blocks
    begin = tl.minimum(tl.cdiv(tl.maximum(SINK - fields.key_position, 0), BLOCK), num_blocks)

    b_total = tl.load(sums.total + tile.o_sum, mask=tile.b_is_scored, other=1.0)
    b_dropped = tl.load(sums.dropped + tile.o_sum, mask=tile.b_is_scored, other=0.0)
    budget = tl.maximum(1 - kept_mass - tl.sum(b_dropped / b_total, 0) / tile.num_scored, 0.0)
    b_first = load_candidates(tile.masses, 0, begin, end, CHUNK)
    candidate_mass, _ = sum_and_count(b_first, tile.masses, begin, end, 1, CHUNK)
    bits, num_equal = search_threshold(b_first, tile.masses, begin, end, candidate_mass - budget, most_blocks, CHUNK)

    i_list = (first_head + tl.program_id(1).to(tl.int64)) * tl.num_programs(0) + tl.program_id(0)
    count, num_seen, num_keys = 0, 0, 0
    for first in range(0, num_blocks, LISTED_BLOCKS):
        o_n = first + tl.arange(0, LISTED_BLOCKS)
        b_mass = load_candidates(tile.masses, first, begin, end, LISTED_BLOCKS)
        b_chosen, num_seen = above_threshold(b_mass, bits, num_equal, num_seen)
        b_kept = (b_chosen | (o_n < begin) | (o_n >= end)) & (o_n < num_blocks)
        tl.store(tile.marks + o_n, b_kept.to(tl.uint8), mask=o_n < num_blocks)
        count = append(lists.ids + i_list * width, count, o_n, b_kept)
        num_keys += tl.sum(tl.where(b_kept, tl.minimum(reach_of(fields, CAUSAL) - o_n * BLOCK, BLOCK), 0), 0)
    tl.store(lists.counts + i_list, count)
    num_pairs = fields.length.to(tl.int64) * num_keys
    if CAUSAL:  # queries keep fewer keys of the diagonal, on which the tile's reach ends
        num_pairs -= fields.length * (fields.length - 1) // 2
    tl.atomic_add(kept_pairs, num_pairs, sem="relaxed")


@triton.jit(do_not_specialize=["width"])
def _drop_kernel(rounded, scratch, tiles, sums, stride_sums, width, CAUSAL: tl.constexpr):
    """Add the estimates of one tile and head in unmarked blocks to D.

    Grid: (tiles, heads). Bound by memory: it reads 2 bytes for each scored query and dropped block.

    Args:
        tiles: [num_tiles, 8] int32, ``TileFields``.
    """
    tile = _load_tile(rounded, scratch, tiles, stride_sums, width, CAUSAL)
    b_top = tl.load(sums.top + tile.o_sum, mask=tile.b_is_scored, other=0.0)
    b_dropped = tl.load(sums.dropped + tile.o_sum, mask=tile.b_is_scored, other=0.0)
    for i in range(0, tile.num_blocks, STEP):
        o_b = i + tl.arange(0, STEP)
        b_mark = tl.load(tile.marks + o_b, mask=o_b < tile.num_blocks, other=1)
        b_dropped += tl.sum(tl.exp2(_load_scores(tile, o_b, b_mark == 0) - b_top[None, :]), 0)
    tl.store(sums.dropped + tile.o_sum, b_dropped, mask=tile.b_is_scored)
