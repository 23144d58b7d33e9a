# SPDX-License-Identifier: Apache-2.0
"""Selection of ``top_p`` for MLA: which blocks of 64 keys each tile of 128 queries keeps, by running sums.

Launches for some heads and tiles of a call:

1. ``_round_kernel`` rounds scored queries and keys to e4m3, all 192 channels. A query and a block of keys have a scale
   each. With fewer ``channels``, ``channels.py`` chooses and rounds those that affect scores most.
2. ``products.py`` multiplies them, and stores the largest product of each query and block in half precision.
3. ``_sums_kernel`` adds the estimates e, the exponentials of the scores, to each query's running sum Z.
4. ``_masses_kernel`` averages e / Z over the tile's scored queries: the mass of a block.
5. ``_choose_kernel`` lists the fewest blocks with which the dropped mass is within the tile's budget.
6. ``_drop_kernel`` adds the e of the dropped blocks to D.

Only scored queries have products, estimates and sums: all of a tile, or half of them (``methods.top_p.scored``).

Estimates of several calls must refer to the same scores, because they are added. So unlike in ``methods.top_p``, no
constant is left out of a query's scores.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.compile_time import LOG2_E, Constant
from vllm_sparse_kernels.engine_choice import capability_of
from vllm_sparse_kernels.methods.top_p.choice import (
    HELD_BLOCKS,
    LISTED_BLOCKS,
    MAX_REGISTERS,
    NUM_WARPS,
    search_threshold,
)
from vllm_sparse_kernels.methods.top_p.rounding import LARGEST, TINY, in_e4m3
from vllm_sparse_kernels.methods.top_p.scored import ALL_SCORED, num_scored, scored_offsets
from vllm_sparse_kernels.mla.attention import BlockLists, run_attention
from vllm_sparse_kernels.mla.calls import (
    BLOCK_TOKENS,
    ROW_FIELDS,
    SINK_TOKENS,
    TILE_FIELDS,
    Call,
    MlaLimits,
    MlaTopP,
    Run,
    Tensors,
)
from vllm_sparse_kernels.mla.channels import Moments, Rounded, RoundedVectors, Vectors, fill_moments, round_kept_kernel
from vllm_sparse_kernels.mla.products import load_reach, product_sizes, run_products
from vllm_sparse_kernels.mla.reference import RunningSums
from vllm_sparse_kernels.rows import TILE_TOKENS, ceil_div
from vllm_sparse_kernels.selection.lists import append

SCRATCH_BYTES = 224 << 20
"""Limit of the scratch memory, which decides how many heads are selected at a time. One head is always possible."""

MOST_ROWS = 64
"""Rows that are selected at a time."""

SPARE_TILES = MOST_ROWS
"""Tiles of a run beyond those that whole tiles of all queries would be: rows end in partial tiles."""

BLOCK = Constant(BLOCK_TOKENS)
SINK = Constant(SINK_TOKENS)

LOADED_PRODUCTS = 8192
"""Products of a step of the kernels that read them: 64 bytes per thread are in flight."""


class Scratch(NamedTuple):
    """Tensors that launches pass to each other. The last dimensions are laid out for the run."""

    products: Any  # [heads, tiles, width, SCORED] float16, largest of a block; undefined past a tile's reach
    masses: Any  # [heads, tiles, width] float32
    marks: Any  # [heads, tiles, width] uint8, 1 for kept blocks


class Sums(NamedTuple):
    """``RunningSums`` of some heads as an argument of kernels."""

    top: Any  # [heads, tokens] float32
    total: Any
    dropped: Any
    stride_head: int


class Selection:
    """Selection and attention of ``top_p``, with the memory that they need."""

    def __init__(self, num_heads: int, head_dim: int, limits: MlaLimits, device: torch.device) -> None:
        """Allocate the scratch memory."""
        max_query_tokens, max_key_tokens, most_scored = limits
        self.num_heads, self.head_dim = num_heads, head_dim
        self.most_blocks = ceil_div(max_query_tokens, TILE_TOKENS) * ceil_div(max_key_tokens, BLOCK_TOKENS)
        self.most_tiles = ceil_div(max_query_tokens, TILE_TOKENS) + SPARE_TILES
        dtype = stored_dtype(device)
        vector_bytes = head_dim * dtype.itemsize + 8
        head_bytes = vector_bytes * (max_query_tokens + max_key_tokens) + (2 * most_scored + 4 + 1) * self.most_blocks
        list_bytes = 4 * num_heads * (self.most_blocks + self.most_tiles)
        most_heads = min(max((SCRATCH_BYTES - list_bytes) // head_bytes, 1), num_heads)
        self.heads_at_once = ceil_div(num_heads, ceil_div(num_heads, most_heads))  # parts of similar size
        num = self.heads_at_once

        def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(*sizes, dtype=dtype, device=device)

        self.rounded = Rounded(
            RoundedVectors(
                empty(num, max_query_tokens, head_dim, dtype=dtype), empty(num, max_query_tokens),
                empty(num, max_query_tokens), max_query_tokens,
            ),
            RoundedVectors(
                empty(num, max_key_tokens, head_dim, dtype=dtype), empty(num, max_key_tokens), None, max_key_tokens
            ),
        )  # fmt: skip
        self.scratch = Scratch(
            empty(num * self.most_blocks * most_scored, dtype=torch.float16), empty(num * self.most_blocks),
            empty(num * self.most_blocks, dtype=torch.uint8),
        )  # fmt: skip
        block_d, most_kept = triton.next_power_of_2(head_dim), triton.next_power_of_2(head_dim) // 2
        self.moments = Moments(
            empty(MOST_ROWS, num_heads, block_d), empty(MOST_ROWS * num_heads * most_kept, dtype=torch.int32)
        )
        self.ids = empty(num_heads * self.most_blocks, dtype=torch.int32)
        self.counts = empty(num_heads * self.most_tiles, dtype=torch.int32)

    def attend(
        self,
        method: MlaTopP,
        tensors: Tensors,
        call: Call,
        sums: RunningSums,
        scale: float,
        is_causal: bool,
        kept_pairs: torch.Tensor | None,
    ) -> None:
        """Select the blocks of a call, and attend to them."""
        for run in call.runs(self.most_tiles, self.most_blocks):
            lists = self.select(method, tensors, call, run, sums, scale, is_causal, kept_pairs)
            run_attention(tensors, run, scale, is_causal, lists=lists)

    def select(
        self,
        method: MlaTopP,
        tensors: Tensors,
        call: Call,
        run: Run,
        sums: RunningSums,
        scale: float,
        is_causal: bool,
        kept_pairs: torch.Tensor | None,
    ) -> BlockLists:
        """Select the blocks of some tiles, and update the running sums of their queries."""
        lists, scored = BlockLists(self.ids, self.counts), method.num_scored
        sizes = {"CAUSAL": is_causal, "SCORED": scored}
        step = LOADED_PRODUCTS // scored
        for first in range(0, self.num_heads, self.heads_at_once):
            num_heads = min(self.heads_at_once, self.num_heads - first)
            top, total, dropped = (x[first : first + num_heads] for x in sums)
            part = Sums(top, total, dropped, top.stride(0))
            if call.longest_keys > 0:
                self._round(method, tensors, call, first, num_heads, scale)
                run_products(method, run, is_causal, call.longest_keys, num_heads, self.rounded, self.scratch.products)
            grid = (run.num_tiles, num_heads)
            _sums_kernel[grid](self.rounded, self.scratch, run.tiles, part, run.width, STEP=step, num_warps=8, **sizes)
            _masses_kernel[(ceil_div(run.width, step), *grid)](
                self.rounded, self.scratch, run.tiles, part, run.width, BLOCKS=step, num_warps=8, **sizes
            )
            _choose_kernel[grid](
                self.scratch, run.tiles, part, lists, kept_pairs, first, run.width, method.kept_mass,
                method.most_share,
                CHUNK=HELD_BLOCKS, num_warps=NUM_WARPS, maxnreg=MAX_REGISTERS, **sizes,
            )  # fmt: skip
            _drop_kernel[grid](self.rounded, self.scratch, run.tiles, part, run.width, STEP=step, num_warps=8, **sizes)
        return lists

    def _round(self, method: MlaTopP, tensors: Tensors, call: Call, first: int, num_heads: int, scale: float) -> None:
        """Round the scored queries and the keys of some heads."""
        channels, scored = method.channels, method.num_scored
        queries = Vectors(tensors.q, tensors.stride_q_token, tensors.stride_q_head)
        keys = Vectors(tensors.k, tensors.stride_k_token, tensors.stride_k_head)
        softmax_scale, num_rows = scale * LOG2_E.value, len(call.rows)
        longest_scored = ceil_div(call.longest_queries, TILE_TOKENS // scored)
        query_grid = (ceil_div(longest_scored, BLOCK_TOKENS), num_rows, num_heads)
        key_grid = (ceil_div(call.longest_keys, BLOCK_TOKENS), num_rows, num_heads)
        if channels < self.head_dim:
            if first == 0:
                fill_moments(tensors, call.rows, self.moments, self.head_dim, channels)
            block_d = triton.next_power_of_2(self.head_dim)
            kept_sizes = {"HEAD_DIM": self.head_dim, "BLOCK_D": block_d, "KEPT_D": channels, "num_warps": 4}
            round_kept_kernel[query_grid](
                queries, call.rows, first, self.num_heads, softmax_scale, self.moments, self.rounded.queries,
                FIELD=0, BY_BLOCK=False, SCORED=scored, **kept_sizes,
            )  # fmt: skip
            round_kept_kernel[key_grid](
                keys, call.rows, first, self.num_heads, 1.0, self.moments, self.rounded.keys,
                FIELD=2, BY_BLOCK=True, SCORED=ALL_SCORED, **kept_sizes,
            )  # fmt: skip
            return
        main_d, extra_d = product_sizes(self.head_dim, channels)
        sizes = {"MAIN_D": main_d, "EXTRA_D": extra_d, "num_warps": 4}
        _round_kernel[query_grid](
            queries, call.rows, first, softmax_scale, self.rounded.queries,
            FIELD=0, BY_BLOCK=False, SCORED=scored, **sizes,
        )  # fmt: skip
        _round_kernel[key_grid](
            keys, call.rows, first, 1.0, self.rounded.keys, FIELD=2, BY_BLOCK=True, SCORED=ALL_SCORED, **sizes
        )


def stored_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which e4m3 numbers are stored and multiplied."""
    return torch.float8_e4m3fn if capability_of(device) >= (8, 9) else torch.float16


@triton.jit(do_not_specialize=["first_head"])
def _round_kernel(
    vectors, rows, first_head, softmax_scale, target,
    FIELD: tl.constexpr, BY_BLOCK: tl.constexpr, SCORED: tl.constexpr, MAIN_D: tl.constexpr, EXTRA_D: tl.constexpr,
):  # fmt: skip
    """Round 64 keys or scored queries of one row and head to e4m3. The largest magnitude becomes 15.

    Grid: (parts of the longest row, rows, heads of the part). Bound by memory: it reads each vector once and writes
    half as much.

    Args:
        rows: [num_rows, 4] int32, ``Call.rows``.
    """
    fields = rows + tl.program_id(1) * ROW_FIELDS + FIELD
    start, count = tl.load(fields).to(tl.int64), tl.load(fields + 1)
    first = tl.program_id(0) * BLOCK
    num_vectors = num_scored(count, SCORED)  # tiles are whole, except for the last one, so rows have the rule of tiles
    if first < num_vectors:
        o_n = first + tl.arange(0, BLOCK)
        o_main, o_extra = tl.arange(0, MAIN_D)[None, :], tl.arange(0, EXTRA_D)[None, :] + MAIN_D
        in_row = (o_n < num_vectors)[:, None]
        i_head = tl.program_id(2).to(tl.int64)
        o_x = start + scored_offsets(o_n, count, SCORED)
        source = vectors.data + o_x[:, None] * vectors.stride_token
        source += (first_head + i_head) * vectors.stride_head
        b_main = tl.load(source + o_main, mask=in_row, other=0.0).to(tl.float32)
        b_extra = tl.load(source + o_extra, mask=in_row, other=0.0).to(tl.float32)
        b_largest = tl.maximum(tl.max(tl.abs(b_main), 1), tl.max(tl.abs(b_extra), 1))
        o_place = i_head * target.num_places + o_x
        if BY_BLOCK:
            scale = tl.maximum(tl.max(b_largest, 0), TINY) / LARGEST
            tl.store(target.scales + i_head * target.num_places + start + first, scale * softmax_scale)
            b_main, b_extra = b_main * (1.0 / scale), b_extra * (1.0 / scale)
        else:
            b_scale = tl.maximum(b_largest, TINY) / LARGEST
            tl.store(target.scales + o_place, b_scale * softmax_scale, mask=o_n < num_vectors)
            tl.store(target.shifts + o_place, tl.zeros([BLOCK], tl.float32), mask=o_n < num_vectors)
            b_main, b_extra = b_main * (1.0 / b_scale)[:, None], b_extra * (1.0 / b_scale)[:, None]
        b_values = target.data + o_place[:, None] * (MAIN_D + EXTRA_D)
        tl.store(b_values + o_main, in_e4m3(b_main, target.data.dtype.element_ty), mask=in_row)
        tl.store(b_values + o_extra, in_e4m3(b_extra, target.data.dtype.element_ty), mask=in_row)


class ScoredTile(NamedTuple):
    """The scored queries of a tile and head, and the blocks in their reach."""

    products: Any  # pointer to [blocks, SCORED]
    key_scales: Any  # pointer to the scale of the first block; those of blocks are BLOCK apart
    num_blocks: Any
    num_scored: Any
    o_sum: Any  # [SCORED], places of the queries in running sums
    b_query_scale: Any  # [SCORED] float32, times the softmax's scale; 0 past the tile
    b_shift: Any  # [SCORED] float32, addends of scores; 0 past the tile


@triton.jit
def _load_tile(
    rounded, scratch, tiles, sums, i_tile, num_tiles, i_head, width, CAUSAL: tl.constexpr, SCORED: tl.constexpr
):
    """Load the scales of a tile's queries, and locate its products."""
    fields = tiles + i_tile * TILE_FIELDS
    length = tl.load(fields + 1)
    o_s = tl.arange(0, SCORED)
    number = num_scored(length, SCORED)
    b_place = scored_offsets(o_s, length, SCORED)
    o_query = i_head * rounded.queries.num_places + tl.load(fields) + b_place
    return ScoredTile(
        scratch.products + (i_head * num_tiles + i_tile) * width * SCORED,
        rounded.keys.scales + i_head * rounded.keys.num_places + tl.load(fields + 5),
        (load_reach(fields, CAUSAL) + BLOCK - 1) // BLOCK,
        number,
        i_head * sums.stride_head + tl.load(fields + 4) + b_place,
        tl.load(rounded.queries.scales + o_query, mask=o_s < number, other=0.0),
        tl.load(rounded.queries.shifts + o_query, mask=o_s < number, other=0.0),
    )


@triton.jit
def _load_scores(tile, o_b, should_load):
    """Return the scores [blocks, SCORED] of blocks ``o_b``, in base 2.

    They are -inf where not ``should_load``, or where the block has no key up to the query.
    """
    o_s = tl.arange(0, tile.b_query_scale.shape[0])
    b_key_scale = tl.load(tile.key_scales + o_b * BLOCK, mask=o_b < tile.num_blocks, other=0.0)
    is_score = should_load[:, None] & (o_s < tile.num_scored)[None, :]
    products = tile.products + o_b[:, None] * tile.b_query_scale.shape[0] + o_s[None, :]
    b_s = tl.load(products, mask=is_score, other=float("-inf")).to(tl.float32)
    b_u = b_s * (b_key_scale[:, None] * tile.b_query_scale[None, :]) + tile.b_shift[None, :]
    return tl.where(b_s == float("-inf"), b_s, b_u)


@triton.jit(do_not_specialize=["width"])
def _sums_kernel(
    rounded, scratch, tiles, sums, width, CAUSAL: tl.constexpr, SCORED: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Add the estimates of one tile and head to the scored queries' running sums. The rows' new tokens start them.

    Grid: (tiles, heads). Bound by memory: it reads 2 bytes for each scored query and block.

    Args:
        tiles: [num_tiles, 8] int32, ``TileFields``.
    """
    i_head = tl.program_id(1).to(tl.int64)
    tile = _load_tile(
        rounded, scratch, tiles, sums, tl.program_id(0), tl.num_programs(0), i_head, width, CAUSAL, SCORED
    )
    in_tile = tl.arange(0, SCORED) < tile.num_scored
    if CAUSAL:
        b_top = tl.full([SCORED], float("-inf"), tl.float32)
        b_total = tl.zeros([SCORED], tl.float32)
        b_dropped = tl.zeros([SCORED], tl.float32)
    else:
        b_top = tl.load(sums.top + tile.o_sum, mask=in_tile, other=float("-inf"))
        b_total = tl.load(sums.total + tile.o_sum, mask=in_tile, other=0.0)
        b_dropped = tl.load(sums.dropped + tile.o_sum, mask=in_tile, other=0.0)
    for i in range(0, tile.num_blocks, STEP):
        o_b = i + tl.arange(0, STEP)
        b_u = _load_scores(tile, o_b, o_b < tile.num_blocks)
        b_new = tl.maximum(b_top, tl.max(b_u, 0))
        b_finite = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_decay = tl.exp2(b_top - b_finite)
        b_total = b_total * b_decay + tl.sum(tl.exp2(b_u - b_finite[None, :]), 0)
        b_dropped *= b_decay
        b_top = b_new
    tl.store(sums.top + tile.o_sum, b_top, mask=in_tile)
    tl.store(sums.total + tile.o_sum, b_total, mask=in_tile)
    tl.store(sums.dropped + tile.o_sum, b_dropped, mask=in_tile)


@triton.jit(do_not_specialize=["width"])
def _masses_kernel(
    rounded, scratch, tiles, sums, width, CAUSAL: tl.constexpr, SCORED: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Average e / Z over the scored queries of one tile and head, for some blocks.

    Grid: (width / BLOCKS, tiles, heads). Bound by memory: it reads 2 bytes for each scored query and block.

    Args:
        tiles: [num_tiles, 8] int32, ``TileFields``.
    """
    i_head = tl.program_id(2).to(tl.int64)
    tile = _load_tile(
        rounded, scratch, tiles, sums, tl.program_id(1), tl.num_programs(1), i_head, width, CAUSAL, SCORED
    )
    first = tl.program_id(0) * BLOCKS
    if first < tile.num_blocks:
        in_tile = tl.arange(0, SCORED) < tile.num_scored
        b_top = tl.load(sums.top + tile.o_sum, mask=in_tile, other=0.0)
        b_total = tl.load(sums.total + tile.o_sum, mask=in_tile, other=0.0)
        b_weight = tl.where(b_total > 0, 1 / tl.where(b_total > 0, b_total * tile.num_scored, 1.0), 0.0)
        o_b = first + tl.arange(0, BLOCKS)
        b_u = _load_scores(tile, o_b, o_b < tile.num_blocks)
        b_e = tl.exp2(b_u - tl.where(b_top == float("-inf"), 0.0, b_top)[None, :])
        masses = scratch.masses + (i_head * tl.num_programs(1) + tl.program_id(1)) * width
        tl.store(masses + o_b, tl.sum(b_e * b_weight[None, :], 1), mask=o_b < tile.num_blocks)


@triton.jit(
    do_not_specialize=["first_head", "width", "kept_mass", "most_share"],
    do_not_specialize_on_alignment=["kept_pairs"],  # an element of a tensor of counters, at an even or an odd place
)
def _choose_kernel(
    scratch, tiles, sums, lists, kept_pairs, first_head, width, kept_mass, most_share,
    CAUSAL: tl.constexpr, SCORED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """List and mark the blocks of one tile and head: the fewest with which D stays within 1 - p of Z, on average.

    The average is that of scored queries. Sinks and the diagonal are always kept.

    Grid: (tiles, heads). Bound by latency: up to 30 halvings over masses in registers.

    Args:
        tiles: [num_tiles, 8] int32, ``TileFields``.
        kept_pairs: [1] int64, to which the number of kept pairs is added; or None.
    """
    i_tile, i_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    fields = tiles + i_tile * TILE_FIELDS
    length, offset, key_position = tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 7)
    reach = load_reach(fields, CAUSAL)
    num_blocks = (reach + BLOCK - 1) // BLOCK
    end = tl.minimum(offset // BLOCK, num_blocks) if CAUSAL else num_blocks
    begin = tl.minimum((tl.maximum(SINK - key_position, 0) + BLOCK - 1) // BLOCK, num_blocks)

    o_s = tl.arange(0, SCORED)
    in_tile = o_s < num_scored(length, SCORED)
    o_sum = i_head * sums.stride_head + tl.load(fields + 4) + scored_offsets(o_s, length, SCORED)
    b_total = tl.load(sums.total + o_sum, mask=in_tile, other=0.0)
    b_dropped = tl.load(sums.dropped + o_sum, mask=in_tile, other=0.0)
    dropped = tl.sum(tl.where(b_total > 0, b_dropped / tl.where(b_total > 0, b_total, 1.0), 0.0), 0)
    dropped /= num_scored(length, SCORED)
    budget = tl.maximum(1 - kept_mass - dropped, 0.0)
    tile_masses = scratch.masses + (i_head * tl.num_programs(0) + i_tile) * width
    o_first = tl.arange(0, CHUNK)
    b_first = tl.load(tile_masses + o_first, mask=(o_first >= begin) & (o_first < end), other=0.0)
    candidate_mass = tl.sum(b_first, 0)
    for i in range(CHUNK, end, CHUNK):
        o_n = i + o_first
        candidate_mass += tl.sum(tl.load(tile_masses + o_n, mask=(o_n >= begin) & (o_n < end), other=0.0), 0)
    max_blocks = tl.ceil(most_share * num_blocks).to(tl.int32)
    bits, num_equal = search_threshold(b_first, tile_masses, begin, end, candidate_mass - budget, max_blocks, CHUNK)

    i_list = (first_head + i_head) * tl.num_programs(0) + i_tile
    ids, marks = lists.ids + i_list * width, scratch.marks + (i_head * tl.num_programs(0) + i_tile) * width
    count, num_seen, num_keys = 0, 0, 0
    for first in range(0, num_blocks, LISTED_BLOCKS):
        o_n = first + tl.arange(0, LISTED_BLOCKS)
        b_mass = tl.load(tile_masses + o_n, mask=(o_n >= begin) & (o_n < end), other=0.0)
        b_bits = b_mass.to(tl.int32, bitcast=True)
        b_equal = (b_bits == bits).to(tl.int32)
        b_kept = (b_bits > bits) | ((b_equal != 0) & (num_seen + tl.cumsum(b_equal, 0) <= num_equal))
        num_seen += tl.sum(b_equal, 0)
        b_kept = (b_kept | (o_n < begin) | (o_n >= end)) & (o_n < num_blocks)
        tl.store(marks + o_n, b_kept.to(tl.uint8), mask=o_n < num_blocks)
        count = append(ids, count, o_n, b_kept)
        b_keys = tl.minimum(tl.maximum(reach - o_n * BLOCK, 0), BLOCK)
        if CAUSAL:
            b_keys = tl.where(o_n < offset // BLOCK, b_keys, 0)
        num_keys += tl.sum(tl.where(b_kept, b_keys, 0), 0)
    tl.store(lists.counts + i_list, count)
    if kept_pairs is not None:
        num_pairs = length.to(tl.int64) * num_keys
        if CAUSAL:  # the diagonal
            num_pairs += length * (length + 1) // 2
        tl.atomic_add(kept_pairs, num_pairs, sem="relaxed")


@triton.jit(do_not_specialize=["width"])
def _drop_kernel(
    rounded, scratch, tiles, sums, width, CAUSAL: tl.constexpr, SCORED: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Add the estimates of one tile and head in unmarked blocks to D.

    Grid: (tiles, heads). Bound by memory: it reads 2 bytes for each scored query and dropped block.

    Args:
        tiles: [num_tiles, 8] int32, ``TileFields``.
    """
    i_head = tl.program_id(1).to(tl.int64)
    tile = _load_tile(
        rounded, scratch, tiles, sums, tl.program_id(0), tl.num_programs(0), i_head, width, CAUSAL, SCORED
    )
    marks = scratch.marks + (i_head * tl.num_programs(0) + tl.program_id(0)) * width
    in_tile = tl.arange(0, SCORED) < tile.num_scored
    b_top = tl.load(sums.top + tile.o_sum, mask=in_tile, other=0.0)
    b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_dropped = tl.load(sums.dropped + tile.o_sum, mask=in_tile, other=0.0)
    for i in range(0, tile.num_blocks, STEP):
        o_b = i + tl.arange(0, STEP)
        b_mark = tl.load(marks + o_b, mask=o_b < tile.num_blocks, other=1)
        b_dropped += tl.sum(tl.exp2(_load_scores(tile, o_b, b_mark == 0) - b_top[None, :]), 0)
    tl.store(sums.dropped + tile.o_sum, b_dropped, mask=in_tile)
