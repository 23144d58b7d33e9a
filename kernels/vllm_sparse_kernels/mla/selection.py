# SPDX-License-Identifier: Apache-2.0
"""Selection of ``top_p`` for MLA: which blocks of 64 keys each tile of 128 queries keeps, by running sums.

Launches for some heads and tiles of a call:

1. ``_round_kernel`` rounds queries and keys to e4m3, all 192 channels. A query and a block of keys have a scale each.
   With fewer ``channels``, ``channels.py`` chooses and rounds those that affect scores most.
2. ``_scores_kernel`` multiplies them, and stores the largest score of each query and block in half precision.
3. ``_sums_kernel`` adds the estimates e, the exponentials of these scores, to each query's running sum Z.
4. ``_masses_kernel`` averages e / Z over the tile's queries: the mass of a block.
5. ``_choose_kernel`` lists the fewest blocks with which the dropped mass is within the tile's budget.
6. ``_drop_kernel`` adds the e of the dropped blocks to D.

Estimates of several calls must refer to the same scores, because they are added. So unlike in ``methods.top_p``, no
constant is left out of a query's scores.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.cards import shared_bytes
from vllm_sparse_kernels.compile_time import LOG2_E, Constant
from vllm_sparse_kernels.engine_choice import capability_of
from vllm_sparse_kernels.methods.top_p.choice import HELD_BLOCKS, LISTED_BLOCKS, MAX_REGISTERS, search_threshold
from vllm_sparse_kernels.methods.top_p.rounding import LARGEST, TINY, in_e4m3
from vllm_sparse_kernels.mla.attention import BlockLists, run_attention
from vllm_sparse_kernels.mla.calls import (
    BLOCK_TOKENS,
    ROW_FIELDS,
    SINK_TOKENS,
    TILE_FIELDS,
    Call,
    MlaTopP,
    Run,
    Tensors,
)
from vllm_sparse_kernels.mla.channels import Moments, RoundedVectors, Vectors, fill_moments, round_kept_kernel
from vllm_sparse_kernels.mla.reference import RunningSums
from vllm_sparse_kernels.rows import TILE_TOKENS, ceil_div
from vllm_sparse_kernels.selection.lists import append

SCRATCH_BYTES = 224 << 20
"""Limit of the scratch memory, which decides how many heads are selected at a time. One head is always possible."""

MOST_ROWS = 64
"""Rows that are selected at a time."""

SPARE_TILES = MOST_ROWS
"""Tiles of a run beyond those that whole tiles of all queries would be: rows end in partial tiles."""

TILE = Constant(TILE_TOKENS)
BLOCK = Constant(BLOCK_TOKENS)
SINK = Constant(SINK_TOKENS)

SPAN_TOKENS = 8192
"""Keys that one program scores."""

MASS_BLOCKS = 64
"""Blocks of one program of ``_masses_kernel``."""

SUM_BLOCKS = 32
"""Blocks of a step of the kernels that add up estimates."""

MOST = Constant(60000.0)
"""Limit of the absolute value of scores: half precision cannot represent much larger numbers."""


class Rounded(NamedTuple):
    """Queries and keys of some heads in e4m3. They are scaled so that scores are logarithms to base 2."""

    queries: RoundedVectors
    keys: RoundedVectors


class Scratch(NamedTuple):
    """Tensors that launches pass to each other. The last dimensions are laid out for the run."""

    scores: Any  # [heads, tiles, width, 128] float16; undefined past a tile's reach
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

    def __init__(
        self, num_heads: int, max_query_tokens: int, max_key_tokens: int, head_dim: int, device: torch.device
    ) -> None:
        """Allocate the scratch memory.

        Args:
            num_heads: Heads of this worker.
            max_query_tokens: Most new tokens of a step.
            max_key_tokens: Most keys of a call.
            head_dim: Channels of queries and keys.
            device: The device.
        """
        self.num_heads, self.head_dim = num_heads, head_dim
        self.most_blocks = ceil_div(max_query_tokens, TILE_TOKENS) * ceil_div(max_key_tokens, BLOCK_TOKENS)
        self.most_tiles = ceil_div(max_query_tokens, TILE_TOKENS) + SPARE_TILES
        dtype = stored_dtype(device)
        vector_bytes = head_dim * dtype.itemsize + 8
        head_bytes = vector_bytes * (max_query_tokens + max_key_tokens) + (2 * TILE_TOKENS + 4 + 1) * self.most_blocks
        list_bytes = 4 * num_heads * (self.most_blocks + self.most_tiles)
        most_heads = min(max((SCRATCH_BYTES - list_bytes) // head_bytes, 1), num_heads)
        self.heads_at_once = ceil_div(num_heads, ceil_div(num_heads, most_heads))  # parts of similar size
        num = self.heads_at_once

        def room(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(*sizes, dtype=dtype, device=device)

        self.rounded = Rounded(
            RoundedVectors(
                room(num, max_query_tokens, head_dim, dtype=dtype), room(num, max_query_tokens),
                room(num, max_query_tokens), max_query_tokens,
            ),
            RoundedVectors(
                room(num, max_key_tokens, head_dim, dtype=dtype), room(num, max_key_tokens), None, max_key_tokens
            ),
        )  # fmt: skip
        self.scratch = Scratch(
            room(num * self.most_blocks * TILE_TOKENS, dtype=torch.float16), room(num * self.most_blocks),
            room(num * self.most_blocks, dtype=torch.uint8),
        )  # fmt: skip
        block_d, most_kept = triton.next_power_of_2(head_dim), triton.next_power_of_2(head_dim) // 2
        self.moments = Moments(
            room(MOST_ROWS, num_heads, block_d), room(MOST_ROWS * num_heads * most_kept, dtype=torch.int32)
        )
        self.ids = room(num_heads * self.most_blocks, dtype=torch.int32)
        self.counts = room(num_heads * self.most_tiles, dtype=torch.int32)

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
        """Select the blocks of a call, and attend to them.

        Args:
            method: The method; its ``kept_mass`` is below 1.
            tensors: Queries, keys, values and results.
            call: The rows.
            sums: Running sums of the step.
            scale: Factor from q·k to scores.
            is_causal: Whether the keys are the rows' new tokens.
            kept_pairs: [1] int64 counter of kept pairs, or None.
        """
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
        """Select the blocks of some tiles, and update the running sums of their queries.

        Args:
            method: The method; its ``kept_mass`` is below 1.
            tensors: Queries and keys.
            call: The rows.
            run: The tiles, which fit the scratch memory.
            sums: Running sums of the step.
            scale: Factor from q·k to scores.
            is_causal: Whether the keys are the rows' new tokens.
            kept_pairs: [1] int64 counter of kept pairs, or None.

        Returns:
            The kept blocks, in memory that the next call reuses.
        """
        lists = BlockLists(self.ids, self.counts)
        for first in range(0, self.num_heads, self.heads_at_once):
            num_heads = min(self.heads_at_once, self.num_heads - first)
            top, total, dropped = (x[first : first + num_heads] for x in sums)
            part = Sums(top, total, dropped, top.stride(0))
            if call.longest_keys > 0:
                self._round(tensors, call, first, num_heads, scale, method.channels)
            self._score(run, part, num_heads, is_causal, call.longest_keys, method.channels)
            grid = (run.num_tiles, num_heads)
            _choose_kernel[grid](
                self.scratch, run.tiles, part, lists, kept_pairs, first, run.width, method.kept_mass,
                method.most_share,
                CAUSAL=is_causal, CHUNK=HELD_BLOCKS, num_warps=8, maxnreg=MAX_REGISTERS,
            )  # fmt: skip
            _drop_kernel[grid](self.scratch, run.tiles, part, run.width, CAUSAL=is_causal, STEP=SUM_BLOCKS, num_warps=8)
        return lists

    def _round(self, tensors: Tensors, call: Call, first: int, num_heads: int, scale: float, channels: int) -> None:
        """Round the queries and keys of some heads."""
        queries = Vectors(tensors.q, tensors.stride_q_token, tensors.stride_q_head)
        keys = Vectors(tensors.k, tensors.stride_k_token, tensors.stride_k_head)
        factor, num_rows = scale * LOG2_E.value, len(call.rows)
        query_grid = (ceil_div(call.longest_queries, BLOCK_TOKENS), num_rows, num_heads)
        key_grid = (ceil_div(call.longest_keys, BLOCK_TOKENS), num_rows, num_heads)
        if channels < self.head_dim:
            if first == 0:
                fill_moments(tensors, call.rows, self.moments, self.head_dim, channels)
            block_d = triton.next_power_of_2(self.head_dim)
            kept_sizes = {"HEAD_DIM": self.head_dim, "BLOCK_D": block_d, "KEPT_D": channels, "num_warps": 4}
            round_kept_kernel[query_grid](
                queries, call.rows, first, self.num_heads, factor, self.moments, self.rounded.queries,
                FIELD=0, BY_BLOCK=False, **kept_sizes,
            )  # fmt: skip
            round_kept_kernel[key_grid](
                keys, call.rows, first, self.num_heads, 1.0, self.moments, self.rounded.keys,
                FIELD=2, BY_BLOCK=True, **kept_sizes,
            )  # fmt: skip
            return
        main_d, extra_d = self._product_sizes(channels)
        sizes = {"MAIN_D": main_d, "EXTRA_D": extra_d, "num_warps": 4}
        _round_kernel[query_grid](
            queries, call.rows, first, factor, self.rounded.queries, FIELD=0, BY_BLOCK=False, **sizes
        )
        _round_kernel[key_grid](keys, call.rows, first, 1.0, self.rounded.keys, FIELD=2, BY_BLOCK=True, **sizes)

    def _product_sizes(self, channels: int) -> tuple[int, int]:
        """Return the channels of the products whose sum is a score: powers of two. The second may be 0."""
        if channels < self.head_dim:
            return channels, 0
        main_d = triton.next_power_of_2(self.head_dim + 1) // 2
        return main_d, self.head_dim - main_d

    def _score(self, run: Run, sums: Sums, num_heads: int, is_causal: bool, longest_keys: int, channels: int) -> None:
        """Estimate the masses of blocks, and add the estimates to the running sums."""
        main_d, extra_d = self._product_sizes(channels)
        keys = self.rounded.keys.data
        step = _step_tokens(channels * keys.element_size(), shared_bytes(keys.device))
        _scores_kernel[(run.num_tiles, max(ceil_div(longest_keys, SPAN_TOKENS), 1), num_heads)](
            self.rounded, self.scratch, run.tiles, run.width,
            MAIN_D=main_d, EXTRA_D=extra_d, CAUSAL=is_causal, SPAN=SPAN_TOKENS, STEP=step,
            WIDEN=_must_widen(keys), num_warps=8, num_stages=3 if step == 128 else 2,
        )  # fmt: skip
        _sums_kernel[(run.num_tiles, num_heads)](
            self.scratch, run.tiles, sums, run.width, CAUSAL=is_causal, STEP=SUM_BLOCKS, num_warps=8
        )
        _masses_kernel[(ceil_div(run.width, MASS_BLOCKS), run.num_tiles, num_heads)](
            self.scratch, run.tiles, sums, run.width, CAUSAL=is_causal, BLOCKS=MASS_BLOCKS, num_warps=8
        )


def stored_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which e4m3 numbers are stored and multiplied.

    Args:
        device: The device.

    Returns:
        e4m3, or fp16 where products of e4m3 have no instructions.
    """
    return torch.float8_e4m3fn if capability_of(device) >= (8, 9) else torch.float16


def _must_widen(keys: torch.Tensor) -> bool:
    """Return whether products must be computed in float32: the interpreter's products are wrong in lower precision."""
    return not keys.is_cuda


def _step_tokens(vector_bytes: int, limit_bytes: int) -> int:
    """Return the keys of a product in ``_scores_kernel``: 128 if two buffers fit next to the queries, otherwise 64."""
    return 128 if (TILE_TOKENS + 2 * 128) * vector_bytes <= limit_bytes else BLOCK_TOKENS


@triton.jit(do_not_specialize=["first_head"])
def _round_kernel(
    vectors, rows, first_head, factor, target,
    FIELD: tl.constexpr, BY_BLOCK: tl.constexpr, MAIN_D: tl.constexpr, EXTRA_D: tl.constexpr,
):  # fmt: skip
    """Round 64 vectors of one row and head to e4m3. The largest magnitude becomes 15.

    Grid: (blocks of the longest row, rows, heads of the part). Bound by memory: it reads each vector once and writes
    half as much.

    Args:
        vectors: ``Vectors``.
        rows: [num_rows, 4] int32, ``Call.rows``.
        first_head: First head of the part.
        factor: Factor of the stored steps.
        target: ``RoundedVectors``; values and steps are written.
        FIELD: Place in ``rows`` of the row's first vector, before their number.
        BY_BLOCK: Whether the vectors of a block share a scale.
        MAIN_D: The first channels, a power of two.
        EXTRA_D: The other channels, a power of two.
    """
    fields = rows + tl.program_id(1) * ROW_FIELDS + FIELD
    start, count = tl.load(fields).to(tl.int64), tl.load(fields + 1)
    first = tl.program_id(0) * BLOCK
    if first < count:
        o_n = tl.arange(0, BLOCK)
        o_main, o_extra = tl.arange(0, MAIN_D)[None, :], tl.arange(0, EXTRA_D)[None, :] + MAIN_D
        in_row = (first + o_n < count)[:, None]
        i_head = tl.program_id(2).to(tl.int64)
        source = vectors.data + (start + first + o_n)[:, None] * vectors.stride_token
        source += (first_head + i_head) * vectors.stride_head
        b_main = tl.load(source + o_main, mask=in_row, other=0.0).to(tl.float32)
        b_extra = tl.load(source + o_extra, mask=in_row, other=0.0).to(tl.float32)
        b_largest = tl.maximum(tl.max(tl.abs(b_main), 1), tl.max(tl.abs(b_extra), 1))
        place = i_head * target.num_places + start + first
        if BY_BLOCK:
            step = tl.maximum(tl.max(b_largest, 0), TINY) / LARGEST
            tl.store(target.steps + place, step * factor)
            b_main, b_extra = b_main * (1.0 / step), b_extra * (1.0 / step)
        else:
            b_step = tl.maximum(b_largest, TINY) / LARGEST
            tl.store(target.steps + place + o_n, b_step * factor, mask=first + o_n < count)
            b_main, b_extra = b_main * (1.0 / b_step)[:, None], b_extra * (1.0 / b_step)[:, None]
        b_values = target.data + (place + o_n)[:, None] * (MAIN_D + EXTRA_D)
        tl.store(b_values + o_main, in_e4m3(b_main, target.data.dtype.element_ty), mask=in_row)
        tl.store(b_values + o_extra, in_e4m3(b_extra, target.data.dtype.element_ty), mask=in_row)


@triton.jit
def _load_reach(fields, CAUSAL: tl.constexpr):
    """Return the number of keys up to a tile's last query."""
    num_keys = tl.load(fields + 6)
    if CAUSAL:
        return tl.minimum(num_keys, tl.load(fields + 2) + tl.load(fields + 1))
    else:
        return num_keys


@triton.jit(do_not_specialize=["width"])
def _scores_kernel(
    rounded, scratch, tiles, width,
    MAIN_D: tl.constexpr, EXTRA_D: tl.constexpr, CAUSAL: tl.constexpr, SPAN: tl.constexpr, STEP: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Score one tile and span of keys of one head: the largest score of each query and block.

    Grid: (tiles, spans, heads). Bound by the matrix units, and by the maxima of the products.

    Args:
        rounded: ``Rounded``.
        scratch: ``Scratch``; the scores are written.
        tiles: [num_tiles, 8] int32, ``TileFields``.
        width: Blocks of a tile's scores.
        MAIN_D: Channels of the first product.
        EXTRA_D: Channels of the second product; 0 if there is none, because only some channels are kept.
        CAUSAL: Whether the keys are the rows' new tokens.
        SPAN: Keys of a program.
        STEP: Keys of a product.
        WIDEN: Whether to multiply in float32, as the interpreter does.
    """
    HEAD_D: tl.constexpr = MAIN_D + EXTRA_D
    i_head = tl.program_id(2).to(tl.int64)
    fields = tiles + tl.program_id(0) * TILE_FIELDS
    length, offset = tl.load(fields + 1), tl.load(fields + 2)
    reach = _load_reach(fields, CAUSAL)
    begin = tl.program_id(1) * SPAN
    end = tl.minimum(begin + SPAN, reach)
    if begin < end:
        o_m = tl.arange(0, TILE)
        i_query = i_head * rounded.queries.num_places + tl.load(fields) + o_m
        queries = rounded.queries.data + i_query[:, None] * HEAD_D
        in_tile = (o_m < length)[:, None]
        b_q = tl.load(queries + tl.arange(0, MAIN_D)[None, :], mask=in_tile, other=0.0)
        b_extra, b_shift = None, None
        if EXTRA_D > 0:
            b_extra = tl.load(queries + (tl.arange(0, EXTRA_D) + MAIN_D)[None, :], mask=in_tile, other=0.0)
        else:
            b_shift = tl.load(rounded.queries.shifts + i_query, mask=o_m < length, other=0.0)
        b_step = tl.load(rounded.queries.steps + i_query, mask=o_m < length, other=0.0)
        first_key = i_head * rounded.keys.num_places + tl.load(fields + 5)
        place = (i_head * tl.num_programs(0) + tl.program_id(0)) * width
        whole = offset if CAUSAL else reach
        whole = tl.minimum(tl.maximum(whole // STEP * STEP, begin), end)
        for i in range(begin, whole, STEP):
            b_u = _block_maxima(
                b_q, b_extra, b_step, b_shift, rounded, first_key, i, offset, reach, False, CAUSAL, STEP, WIDEN
            )
            o_block = i // BLOCK + tl.arange(0, STEP // BLOCK)
            tl.store(scratch.scores + (place + o_block)[None, :] * TILE + o_m[:, None], b_u)
        for i in range(whole, end, STEP):
            b_u = _block_maxima(
                b_q, b_extra, b_step, b_shift, rounded, first_key, i, offset, reach, True, CAUSAL, STEP, WIDEN
            )
            o_block = i // BLOCK + tl.arange(0, STEP // BLOCK)
            in_reach = (o_block * BLOCK < reach)[None, :]
            tl.store(scratch.scores + (place + o_block)[None, :] * TILE + o_m[:, None], b_u, mask=in_reach)


@triton.jit
def _block_maxima(
    b_q, b_extra, b_step, b_shift, rounded, first_key, i, offset, reach,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, STEP: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Return the largest scores [128, STEP / BLOCK] of queries in the blocks from key i on, -inf without keys."""
    MAIN_D: tl.constexpr = b_q.shape[1]
    EXTRA_D: tl.constexpr = 0 if b_extra is None else b_extra.shape[1]
    o_n = i + tl.arange(0, STEP)
    keys = rounded.keys.data + (first_key + o_n)[:, None] * (MAIN_D + EXTRA_D)
    o_main = tl.arange(0, MAIN_D)[None, :]
    o_block = i + tl.arange(0, STEP // BLOCK) * BLOCK
    if MASKED:
        b_k = tl.load(keys + o_main, mask=(o_n < reach)[:, None], other=0.0)
        if EXTRA_D > 0:
            o_extra = tl.arange(0, EXTRA_D)[None, :] + MAIN_D
            b_k_extra = tl.load(keys + o_extra, mask=(o_n < reach)[:, None], other=0.0)
        b_key_step = tl.load(rounded.keys.steps + first_key + o_block, mask=o_block < reach, other=0.0)
    else:
        b_k = tl.load(keys + o_main)
        if EXTRA_D > 0:
            b_k_extra = tl.load(keys + (tl.arange(0, EXTRA_D)[None, :] + MAIN_D))
        b_key_step = tl.load(rounded.keys.steps + first_key + o_block)
    if WIDEN:
        b_s = tl.dot(b_q.to(tl.float32), tl.trans(b_k.to(tl.float32)), input_precision="ieee")
        if EXTRA_D > 0:
            b_s = tl.dot(b_extra.to(tl.float32), tl.trans(b_k_extra.to(tl.float32)), b_s, input_precision="ieee")
    else:
        b_s = tl.dot(b_q, tl.trans(b_k))
        if EXTRA_D > 0:
            b_s = tl.dot(b_extra, tl.trans(b_k_extra), b_s)
    if MASKED:
        b_s = tl.where((o_n < reach)[None, :], b_s, float("-inf"))
        if CAUSAL:
            b_s = tl.where(o_n[None, :] <= (offset + tl.arange(0, TILE))[:, None], b_s, float("-inf"))
    b_s = tl.max(tl.reshape(b_s, [TILE, STEP // BLOCK, BLOCK]), 2)
    # No product with minus infinity, because factors past the tile's end are 0.
    b_u = tl.maximum(b_s, -65504.0) * (b_step[:, None] * b_key_step[None, :])
    if b_shift is not None:
        b_u += b_shift[:, None]
    b_u = tl.minimum(tl.maximum(b_u, -MOST), MOST)
    return tl.where(b_s == float("-inf"), b_s, b_u).to(tl.float16)


@triton.jit
def _load_estimates(scores, first, num_blocks, length, b_top, STEP: tl.constexpr):
    """Return e / 2^top of blocks from ``first`` on: [STEP, 128], 0 past the blocks and past the tile."""
    o_b, o_m = first + tl.arange(0, STEP), tl.arange(0, TILE)
    is_score = (o_b < num_blocks)[:, None] & (o_m < length)[None, :]
    b_u = tl.load(scores + o_b[:, None] * TILE + o_m[None, :], mask=is_score, other=float("-inf")).to(tl.float32)
    return tl.exp2(b_u - tl.where(b_top == float("-inf"), 0.0, b_top)[None, :])


@triton.jit(do_not_specialize=["width"])
def _sums_kernel(scratch, tiles, sums, width, CAUSAL: tl.constexpr, STEP: tl.constexpr):
    """Add the estimates of one tile and head to the running sums. The rows' new tokens start them.

    Grid: (tiles, heads). Bound by memory: it reads 2 bytes for each query and block.

    Args:
        scratch: ``Scratch``.
        tiles: [num_tiles, 8] int32, ``TileFields``.
        sums: ``Sums``; written.
        width: Blocks of a tile's scores.
        CAUSAL: Whether the keys are the rows' new tokens.
        STEP: Blocks of a step.
    """
    i_head = tl.program_id(1).to(tl.int64)
    fields = tiles + tl.program_id(0) * TILE_FIELDS
    length = tl.load(fields + 1)
    num_blocks = (_load_reach(fields, CAUSAL) + BLOCK - 1) // BLOCK
    scores = scratch.scores + (i_head * tl.num_programs(0) + tl.program_id(0)) * width * TILE
    o_m = tl.arange(0, TILE)
    in_tile = o_m < length
    o_sum = i_head * sums.stride_head + tl.load(fields + 4) + o_m
    if CAUSAL:
        b_top = tl.full([TILE], float("-inf"), tl.float32)
        b_total = tl.zeros([TILE], tl.float32)
        b_dropped = tl.zeros([TILE], tl.float32)
    else:
        b_top = tl.load(sums.top + o_sum, mask=in_tile, other=float("-inf"))
        b_total = tl.load(sums.total + o_sum, mask=in_tile, other=0.0)
        b_dropped = tl.load(sums.dropped + o_sum, mask=in_tile, other=0.0)
    for i in range(0, num_blocks, STEP):
        o_b = i + tl.arange(0, STEP)
        is_score = (o_b < num_blocks)[:, None] & in_tile[None, :]
        b_u = tl.load(scores + o_b[:, None] * TILE + o_m[None, :], mask=is_score, other=float("-inf")).to(tl.float32)
        b_new = tl.maximum(b_top, tl.max(b_u, 0))
        b_finite = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_decay = tl.exp2(b_top - b_finite)
        b_total = b_total * b_decay + tl.sum(tl.exp2(b_u - b_finite[None, :]), 0)
        b_dropped *= b_decay
        b_top = b_new
    tl.store(sums.top + o_sum, b_top, mask=in_tile)
    tl.store(sums.total + o_sum, b_total, mask=in_tile)
    tl.store(sums.dropped + o_sum, b_dropped, mask=in_tile)


@triton.jit(do_not_specialize=["width"])
def _masses_kernel(scratch, tiles, sums, width, CAUSAL: tl.constexpr, BLOCKS: tl.constexpr):
    """Average e / Z over the queries of one tile and head, for some blocks.

    Grid: (width / BLOCKS, tiles, heads). Bound by memory: it reads 2 bytes for each query and block.

    Args:
        scratch: ``Scratch``; the masses are written.
        tiles: [num_tiles, 8] int32, ``TileFields``.
        sums: ``Sums``.
        width: Blocks of a tile's scores.
        CAUSAL: Whether the keys are the rows' new tokens.
        BLOCKS: Blocks of a program.
    """
    i_head = tl.program_id(2).to(tl.int64)
    fields = tiles + tl.program_id(1) * TILE_FIELDS
    length = tl.load(fields + 1)
    num_blocks = (_load_reach(fields, CAUSAL) + BLOCK - 1) // BLOCK
    first = tl.program_id(0) * BLOCKS
    if first < num_blocks:
        place = (i_head * tl.num_programs(1) + tl.program_id(1)) * width
        o_m = tl.arange(0, TILE)
        o_sum = i_head * sums.stride_head + tl.load(fields + 4) + o_m
        b_top = tl.load(sums.top + o_sum, mask=o_m < length, other=0.0)
        b_total = tl.load(sums.total + o_sum, mask=o_m < length, other=0.0)
        b_weight = tl.where(b_total > 0, 1 / tl.where(b_total > 0, b_total * length, 1.0), 0.0)
        b_e = _load_estimates(scratch.scores + place * TILE, first, num_blocks, length, b_top, BLOCKS)
        o_b = first + tl.arange(0, BLOCKS)
        tl.store(scratch.masses + place + o_b, tl.sum(b_e * b_weight[None, :], 1), mask=o_b < num_blocks)


@triton.jit(
    do_not_specialize=["first_head", "width", "kept_mass", "most_share"],
    do_not_specialize_on_alignment=["kept_pairs"],  # an element of a tensor of counters, at an even or an odd place
)
def _choose_kernel(
    scratch, tiles, sums, lists, kept_pairs, first_head, width, kept_mass, most_share,
    CAUSAL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """List and mark the blocks of one tile and head: the fewest with which D stays within 1 - p of Z, on average.

    Sinks and the diagonal are always kept.

    Grid: (tiles, heads). Bound by latency: up to 30 halvings over masses in registers.

    Args:
        scratch: ``Scratch``; the marks are written.
        tiles: [num_tiles, 8] int32, ``TileFields``.
        sums: ``Sums`` before this call's drops.
        lists: ``BlockLists`` of all heads; written.
        kept_pairs: [1] int64, to which the number of kept pairs is added; or None.
        first_head: First head of the part.
        width: Blocks of a tile's masses, and of its list.
        kept_mass: p, below 1.
        most_share: Largest share of the tile's blocks that are kept for their mass.
        CAUSAL: Whether the keys are the rows' new tokens.
        CHUNK: Masses that stay in registers.
    """
    i_tile, i_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    fields = tiles + i_tile * TILE_FIELDS
    length, offset, key_position = tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 7)
    reach = _load_reach(fields, CAUSAL)
    num_blocks = (reach + BLOCK - 1) // BLOCK
    end = tl.minimum(offset // BLOCK, num_blocks) if CAUSAL else num_blocks
    begin = tl.minimum((tl.maximum(SINK - key_position, 0) + BLOCK - 1) // BLOCK, num_blocks)

    o_m = tl.arange(0, TILE)
    o_sum = i_head * sums.stride_head + tl.load(fields + 4) + o_m
    b_total = tl.load(sums.total + o_sum, mask=o_m < length, other=0.0)
    b_dropped = tl.load(sums.dropped + o_sum, mask=o_m < length, other=0.0)
    dropped = tl.sum(tl.where(b_total > 0, b_dropped / tl.where(b_total > 0, b_total, 1.0), 0.0), 0) / length
    budget = tl.maximum(1 - kept_mass - dropped, 0.0)
    row = scratch.masses + (i_head * tl.num_programs(0) + i_tile) * width
    o_first = tl.arange(0, CHUNK)
    b_first = tl.load(row + o_first, mask=(o_first >= begin) & (o_first < end), other=0.0)
    inner = tl.sum(b_first, 0)
    for i in range(CHUNK, end, CHUNK):
        o_n = i + o_first
        inner += tl.sum(tl.load(row + o_n, mask=(o_n >= begin) & (o_n < end), other=0.0), 0)
    most = tl.ceil(most_share * num_blocks).to(tl.int32)
    bits, num_equal = search_threshold(b_first, row, begin, end, inner - budget, most, CHUNK)

    i_list = (first_head + i_head) * tl.num_programs(0) + i_tile
    ids, marks = lists.ids + i_list * width, scratch.marks + (i_head * tl.num_programs(0) + i_tile) * width
    count, seen, num_keys = 0, 0, 0
    for first in range(0, num_blocks, LISTED_BLOCKS):
        o_n = first + tl.arange(0, LISTED_BLOCKS)
        b_mass = tl.load(row + o_n, mask=(o_n >= begin) & (o_n < end), other=0.0)
        b_bits = b_mass.to(tl.int32, bitcast=True)
        b_equal = (b_bits == bits).to(tl.int32)
        b_kept = (b_bits > bits) | ((b_equal != 0) & (seen + tl.cumsum(b_equal, 0) <= num_equal))
        seen += tl.sum(b_equal, 0)
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
def _drop_kernel(scratch, tiles, sums, width, CAUSAL: tl.constexpr, STEP: tl.constexpr):
    """Add the estimates of one tile and head in unmarked blocks to D.

    Grid: (tiles, heads). Bound by memory: it reads 2 bytes for each query and dropped block.

    Args:
        scratch: ``Scratch``.
        tiles: [num_tiles, 8] int32, ``TileFields``.
        sums: ``Sums``; D is written.
        width: Blocks of a tile's scores.
        CAUSAL: Whether the keys are the rows' new tokens.
        STEP: Blocks of a step.
    """
    i_head = tl.program_id(1).to(tl.int64)
    fields = tiles + tl.program_id(0) * TILE_FIELDS
    length = tl.load(fields + 1)
    num_blocks = (_load_reach(fields, CAUSAL) + BLOCK - 1) // BLOCK
    place = (i_head * tl.num_programs(0) + tl.program_id(0)) * width
    o_m = tl.arange(0, TILE)
    in_tile = o_m < length
    o_sum = i_head * sums.stride_head + tl.load(fields + 4) + o_m
    b_top = tl.load(sums.top + o_sum, mask=in_tile, other=0.0)
    b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_dropped = tl.load(sums.dropped + o_sum, mask=in_tile, other=0.0)
    for i in range(0, num_blocks, STEP):
        o_b = i + tl.arange(0, STEP)
        b_mark = tl.load(scratch.marks + place + o_b, mask=o_b < num_blocks, other=1)
        is_dropped = (b_mark == 0)[:, None] & in_tile[None, :]
        scores = scratch.scores + (place + o_b)[:, None] * TILE + o_m[None, :]
        b_u = tl.load(scores, mask=is_dropped, other=float("-inf")).to(tl.float32)
        b_dropped += tl.sum(tl.exp2(b_u - b_top[None, :]), 0)
    tl.store(sums.dropped + o_sum, b_dropped, mask=in_tile)
