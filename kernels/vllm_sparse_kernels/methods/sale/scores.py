# SPDX-License-Identifier: Apache-2.0
"""SALE's third step: find the blocks between sink and local region with an element that passes.

The docstring of ``method.py`` describes the paper's algorithm.

A program handles two tiles of one head and a span of keys. Flags have the layout of ``compact_blocks`` and start at 0.
A program stores a 1 for each block with an element that passes, so that spans may have any length.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.cards import shared_bytes
from vllm_sparse_kernels.compile_time import Constant, compile_time
from vllm_sparse_kernels.engine_choice import MISSING_GLUON
from vllm_sparse_kernels.methods.sale.rounding import QUERY_BLOCK, RoundedKeys, RoundedQueries, local_start
from vllm_sparse_kernels.rows import TILE, ceil_div
from vllm_sparse_kernels.selection.lists import list_place, load_tile, tile_blocks
from vllm_sparse_kernels.selection.slabs import SET_FIELDS, Run
from vllm_sparse_kernels.vectors import load_vectors, vector_pointers

TILES = Constant(2)
"""Tiles that a program tests together, so keys are read half as often as for a single tile. L2 could not keep up
otherwise."""

WARPS = Constant(4)
"""Warps of one warp group: a thread then holds 128 registers of scores, and two programs run on one multiprocessor."""

SPAN_TOKENS = 8192
"""Keys that a program tests: enough to hide its start (256 queries to load), and few enough to fill a card."""

FLAGS_AT_ONCE = Constant(2048)
"""Flags that ``_first_flags_kernel`` writes per step."""

if MISSING_GLUON is None:
    from vllm_sparse_kernels.gluon_compat import bulk_steps
    from vllm_sparse_kernels.methods.sale import hopper as sale_hopper


class ScoreShape(NamedTuple):
    """Compile-time sizes of ``_test_kernel``; every field is a ``tl.constexpr``."""

    GROUP: Any  # query heads of a kv head
    BLOCK_D: Any  # head_dim rounded up to a power of two
    INDEX_N: Any  # keys of a block of the index
    SPAN: Any  # keys of a program
    STAGES: Any  # pipeline stages of the loop over keys


class ScoreArgs(NamedTuple):
    """Inputs and outputs of ``_test_kernel``."""

    queries: Any  # RoundedQueries
    keys: Any  # RoundedKeys
    heads: Any  # [n] int32, numbers of the selected query heads
    log_taus: Any  # [n] float32, ln τ; −∞ for heads that keep everything
    kept: Any  # [n, block_capacity] uint8, laid out as ``block_ids``; 1 is stored for blocks that pass
    index: Any  # IndexArgs
    tile_sets: Any  # [num_sets, SET_FIELDS] int32: first tile, tiles, where the row's keys begin in the slab
    sink_tokens: Any  # as in ``Sale``
    local_tokens: Any


class Work(NamedTuple):
    """Tiles of a head, and the keys between sink and local region of at least one of these tiles."""

    i_selected: Any  # place among the selected heads
    i_kv: Any
    i_tile: Any  # the first tile
    num_tiles: Any
    begin: Any  # position of the first key
    end: Any
    key_start: Any  # where the row's keys begin in the slab


def marks_bytes(num_selected: int, reach: int) -> int:
    """Return the memory of one tile's marks: a byte for each span, 1 if ``half_kernel`` leaves the span untested."""
    return num_selected * ceil_div(reach, SPAN_TOKENS)


def _test_stages(block_d: int, limit_bytes: int) -> int:
    """Return the pipeline stages of ``_test_kernel``'s loop over keys."""
    query_bytes, step_bytes = TILES.value * TILE.value * block_d, 64 * (block_d + 4) + 32
    return max(2, min(4, 1 + (limit_bytes - query_bytes) // step_bytes))


def first_flags(call: Call, kept: torch.Tensor) -> None:
    """Set flags to 1 for sink, local region and all blocks of heads that keep everything, and to 0 for the others."""
    index, method = call.index, call.method
    _first_flags_kernel[(index.rows.num_tiles, call.num_selected)](
        kept, index.args, call.parameters("log_tau"), method.sink_tokens, method.local_tokens,
        INDEX_N=index.block_tokens,
    )  # fmt: skip


def flag_blocks(
    call: Call, queries: RoundedQueries, keys: RoundedKeys, kept: torch.Tensor, run: Run, in_half: bool
) -> None:
    """Set the flags of the blocks in which an element passes, for a run of a slab's tiles."""
    index, method = call.index, call.method
    num_sets, num_spans, num_heads = len(run.tile_sets), ceil_div(run.reach, SPAN_TOKENS), call.num_selected
    args = (
        call.head_ids, call.parameters("log_tau"), kept, index.args, run.tile_sets, method.sink_tokens,
        method.local_tokens,
    )  # fmt: skip
    block_d = keys.integers.shape[2]
    test = ScoreShape(
        GROUP=call.group,
        BLOCK_D=block_d,
        INDEX_N=index.block_tokens,
        SPAN=SPAN_TOKENS,
        STAGES=_test_stages(block_d, shared_bytes(keys.integers.device)),
    )
    with index.workspace.frame():
        untested = index.workspace.empty(num_heads, num_sets, num_spans, dtype=torch.uint8)
        if in_half:
            sale_hopper.half_kernel[num_sets, num_spans, num_heads](
                queries, keys, bulk_steps(queries.integers), bulk_steps(keys.integers), *args, untested,
                GROUP=call.group, INDEX_N=index.block_tokens, SPAN=SPAN_TOKENS, num_warps=WARPS.value,
            )  # fmt: skip
        _test_kernel[(num_sets, 1 if in_half else num_spans, num_heads)](
            queries, keys, *args, untested, num_spans, compile_time(test), MARKED=in_half, num_warps=WARPS.value,
        )  # fmt: skip


@triton.jit
def _tested_blocks(tiles, i_tile, sink_tokens, local_tokens, INDEX_N: tl.constexpr):
    """Return the index blocks of tiles [begin, end) between sink and local region.

    The local region of a tile's first query block begins no later than that of its second.
    """
    _, _, length, position = load_tile(tiles, i_tile)
    stop = local_start(position + tl.minimum(length, QUERY_BLOCK), sink_tokens, local_tokens)
    return tl.cdiv(sink_tokens, INDEX_N), stop // INDEX_N


@triton.jit(do_not_specialize=["sink_tokens", "local_tokens"])
def _first_flags_kernel(kept, index, log_taus, sink_tokens, local_tokens, INDEX_N: tl.constexpr):
    """Write uint8 flags of one (tile, head)'s causal blocks.

    A flag is 1 in sink, local region and diagonal, and 0 for blocks to test. A head with τ = 0 (ln τ = −∞) keeps every
    block.

    Grid: (tiles, n). Bound by memory: it writes a byte for each causal block.

    Args:
        kept: [n, block_capacity] uint8, flags of blocks, laid out as ``block_ids``.
        log_taus: [n] float32, ln τ; −∞ for heads that keep everything.
    """
    i_tile, i_selected = tl.program_id(0), tl.program_id(1)
    begin, end = _tested_blocks(index.tiles, i_tile, sink_tokens, local_tokens, INDEX_N)
    if tl.load(log_taus + i_selected) == float("-inf"):
        end = 0
    _, num_causal = tile_blocks(index.tiles, i_tile, INDEX_N)
    target = kept + list_place(index, i_selected.to(tl.int64), i_tile)
    for first in range(0, num_causal, FLAGS_AT_ONCE):
        o_n = first + tl.arange(0, FLAGS_AT_ONCE)
        tl.store(target + o_n, ((o_n < begin) | (o_n >= end)).to(tl.uint8), mask=o_n < num_causal)


@triton.jit(do_not_specialize=["sink_tokens", "local_tokens", "num_spans"])
def _test_kernel(
    queries, keys, heads, log_taus, kept, index, tile_sets, sink_tokens, local_tokens, untested, num_spans, SHAPE,
    MARKED: tl.constexpr,
):  # fmt: skip
    """Run step 3 for up to TILES tiles of one head and one span; with MARKED, only for ``untested`` spans.

    Grid: (tile sets, spans, n), or (tile sets, 1, n) where MARKED. Bound by the matrix units, and by the maxima of the
    products.

    Args:
        heads: [n] int32 on the device, numbers of the selected query heads.
        log_taus: [n] float32, ln τ; −∞ for heads that keep everything.
        kept: [n, block_capacity] uint8, flags of blocks, laid out as ``block_ids``.
        tile_sets: [num_sets, SET_FIELDS] int32: first tile, tiles, where the row's keys begin in the slab.
        untested: [n, tile sets, spans] uint8, 1 for spans that ``half_kernel`` has not tested.
    """
    args = ScoreArgs(queries, keys, heads, log_taus, kept, index, tile_sets, sink_tokens, local_tokens)
    if MARKED:
        marks = untested + (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * num_spans
        num_untested = 0
        for i in range(0, num_spans, 64):
            o_s = i + tl.arange(0, 64)
            num_untested += tl.sum(tl.load(marks + o_s, mask=o_s < num_spans, other=0).to(tl.int32), 0)
        if num_untested > 0:
            for i_span in range(num_spans):
                if tl.load(marks + i_span) != 0:
                    _test_tile_set(args, i_span, SHAPE)
    else:
        _test_tile_set(args, tl.program_id(1), SHAPE)


@triton.jit
def _test_tile_set(args, i_span, SHAPE):
    """Run step 3 for up to TILES tiles of one head and up to SPAN keys."""
    index = args.index
    i_selected = tl.program_id(2)
    tile_set = args.tile_sets + tl.program_id(0) * SET_FIELDS
    i_tile = tl.load(tile_set)
    num_tiles = tl.load(tile_set + 1)
    o_t = tl.minimum(tl.arange(0, TILES), num_tiles - 1) + i_tile
    first_block, b_end_block = _tested_blocks(index.tiles, o_t, args.sink_tokens, args.local_tokens, SHAPE.INDEX_N)
    begin = tl.maximum(first_block * SHAPE.INDEX_N, i_span * SHAPE.SPAN)
    end = tl.minimum(tl.max(b_end_block, 0) * SHAPE.INDEX_N, (i_span + 1) * SHAPE.SPAN)
    if (begin < end) & (tl.load(args.log_taus + i_selected) > float("-inf")):
        key_start = tl.multiple_of(tl.load(tile_set + 2), 128)
        i_kv = tl.load(args.heads + i_selected) // SHAPE.GROUP
        work = Work(i_selected, i_kv, i_tile, num_tiles, begin, end, key_start)
        b_flags = args.kept + list_place(index, i_selected.to(tl.int64), o_t)
        _test_span(args.queries, args.keys, work, b_flags, b_end_block, SHAPE)


@triton.jit
def _test_span(queries, keys, work, b_flags, b_end_block, SHAPE):
    """Store a 1 at ``b_flags`` [TILES] + b for each index block b < ``b_end_block`` of the span that passes."""
    BLOCK_M: tl.constexpr = TILES * TILE
    BLOCK_N: tl.constexpr = 64
    BLOCKS: tl.constexpr = BLOCK_N // SHAPE.INDEX_N if BLOCK_N > SHAPE.INDEX_N else 1  # index blocks of a step
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_scale = tl.arange(0, BLOCK_N // 32)[:, None] * 4 + tl.arange(0, 4)[None, :]
    in_tiles = o_m < work.num_tiles * TILE
    o_q = work.i_selected.to(tl.int64) * queries.num_queries + work.i_tile * TILE + o_m
    b_q = load_vectors(queries.integers, o_q, in_tiles, SHAPE.BLOCK_D)
    b_threshold = tl.load(queries.thresholds + o_q, mask=in_tiles, other=float("inf"))
    b_inverse = tl.load(queries.inverse_scales + o_q, mask=in_tiles, other=0.0)
    first_key = work.i_kv.to(tl.int64) * keys.num_keys + work.key_start
    integers = keys.integers + first_key * SHAPE.BLOCK_D
    scales = keys.scales + first_key // 8
    biases = keys.biases + work.i_selected.to(tl.int64) * keys.num_keys + work.key_start
    for i in tl.range(work.begin // BLOCK_N, tl.cdiv(work.end, BLOCK_N), num_stages=SHAPE.STAGES):
        b_k = tl.load(vector_pointers(integers, i * BLOCK_N + o_n, SHAPE.BLOCK_D))
        b_bias = tl.load(biases + i * BLOCK_N + o_n)
        b_scale = tl.load(scales + i * (BLOCK_N // 8) + o_scale)
        b_s = tl.fma(b_inverse[:, None], b_bias[None, :], tl.dot(b_q, tl.trans(b_k)).to(tl.float32))
        # Largest of the eight scores that share a key scale: [queries, BLOCK_N // 32, 4]. They are in one thread.
        b_s = tl.max(tl.reshape(b_s, [BLOCK_M, BLOCK_N // 32, 4, 4, 2]), 2)
        b_top = tl.max(b_s, 3) * b_scale[None, :, :]
        b_top = tl.max(tl.reshape(b_top, [BLOCK_M, BLOCKS, BLOCK_N // 32 // BLOCKS, 4]), 2)
        # Axes 1 and 3 are in one thread. A warp has 16 of each 16 · WARPS queries, and a thread two of these, 8 apart.
        b_excess = b_top - b_threshold[:, None, None]
        b_excess = tl.reshape(b_excess, [TILES, TILE // (16 * WARPS), WARPS, 2, 8, BLOCKS, 4])
        b_excess = tl.max(tl.max(b_excess, 3), 1)
        o_b = i * BLOCK_N // SHAPE.INDEX_N + tl.arange(0, BLOCKS)
        b_at = b_flags[:, None] + o_b[None, :]
        b_passes = (b_excess >= 0) & (o_b[None, :] < b_end_block[:, None])[:, None, None, :, None]
        b_at = tl.broadcast_to(b_at[:, None, None, :, None], b_passes.shape)
        tl.store(b_at, tl.full(b_passes.shape, 1, tl.uint8), mask=b_passes)
