# SPDX-License-Identifier: Apache-2.0
"""SALE's third step: which blocks between sink and local region hold an element that passes. method.py has the
paper's part.

A program takes two tiles of one head and a span of keys. Flags lie as ``compact_blocks`` wants them; they are 0 before,
and a program stores a 1 for each block with an element that passes, so that spans may be of any length.
"""

import logging
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.sale.rounding import (
    QUERY_BLOCK,
    Regions,
    RoundedKeys,
    RoundedQueries,
    Selected,
    local_start,
)
from vllm_sparse_kernels.rows import TILE_TOKENS, ceil_div
from vllm_sparse_kernels.select import slabs
from vllm_sparse_kernels.select.lists import load_tile, tile_blocks

TEST_TILES = 2
"""Tiles that one program tests together: keys are read half as often as with one. L2 could not keep up otherwise."""

TEST_WARPS = 4
"""A warp group's: a thread then holds 128 registers of scores, and two programs run on one multiprocessor."""

SPAN_TOKENS = 8192
"""Keys that one program tests: enough that its start (256 queries to load) does not show, few enough to fill a card."""

PAIR_FIELDS = tl.constexpr(slabs.PAIR_FIELDS)

logger = logging.getLogger(__name__)

try:
    from vllm_sparse_kernels.gluon_names import bulk_steps
    from vllm_sparse_kernels.methods.sale import hopper as sale_hopper

    HOPPER = True
    """Whether ``sale_hopper`` tests what fits half precision, where it can."""
except (ImportError, AttributeError):  # this Triton's Gluon lacks a name
    HOPPER = False

UNUSABLE: list[str] = []
"""Why ``sale_hopper`` is not used in this process, once it has failed to compile: at start-up, when kernels warm up."""


def marks_bytes(num_selected: int, reach: int) -> int:
    """Of one tile: a mark for each span that is left to ``_test_kernel``."""
    return num_selected * ceil_div(reach, SPAN_TOKENS)


def first_flags(kept: torch.Tensor, index: SparseIndex, selected: Selected, regions: Regions) -> None:
    """1 for sink and local region and for all blocks of heads that keep everything, 0 for blocks to be tested."""
    _first_flags_kernel[(index.rows.num_tiles, selected.num_selected)](
        kept, index.args, selected.log_taus, *regions, INDEX_N=index.block_tokens, CHUNK=2048
    )


def flag_blocks(
    queries: RoundedQueries, keys: RoundedKeys, kept: torch.Tensor, index: SparseIndex, selected: Selected,
    regions: Regions, group: int, run: slabs.Run,
) -> None:  # fmt: skip
    """Set the flags of the blocks in which an element passes, of a run of a slab's tiles."""
    num_pairs, num_spans, num_heads = len(run.pairs), ceil_div(run.reach, SPAN_TOKENS), selected.num_selected
    args = (*selected[:2], kept, index.args, run.pairs, *regions)
    shape = {"GROUP": group, "INDEX_N": index.block_tokens, "SPAN": SPAN_TOKENS}
    shape |= {"num_warps": TEST_WARPS}
    hopper = adds_up_in_half(kept.device)
    with index.workspace.frame():
        left = index.workspace.empty(num_heads, num_pairs, num_spans, dtype=torch.uint8)
        if hopper:
            hopper = _test_on_hopper((num_pairs, num_spans, num_heads), queries, keys, args, left, shape)
        _test_kernel[(num_pairs, 1 if hopper else num_spans, num_heads)](
            queries, keys, *args, left, num_spans, **shape, BLOCK_D=keys.integers.shape[2], TILE=TILE_TOKENS,
            TILES=TEST_TILES, WARPS=TEST_WARPS, REST=hopper,
        )  # fmt: skip


def adds_up_in_half(device: torch.device) -> bool:
    """Whether ``sale_hopper`` tests what fits half precision: it knows of Hopper that e4m3 products are added up so
    without loss, where the sums fit."""
    return HOPPER and not UNUSABLE and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _test_on_hopper(
    grid: tuple[int, int, int], queries: RoundedQueries, keys: RoundedKeys, args: tuple[Any, ...], left: torch.Tensor,
    shape: dict[str, int],
) -> bool:  # fmt: skip
    """Whether ``sale_hopper`` took it. A compiler that can't have it costs speed, never the server."""
    try:
        sale_hopper.half_kernel[grid](
            queries, keys, bulk_steps(queries.integers), bulk_steps(keys.integers), *args, left, **shape
        )  # fmt: skip
    except Exception as error:  # whatever a compiler or a launch raises is the reason
        UNUSABLE.append(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        logger.warning("SALE's test runs without its Hopper kernel, slower: %s", UNUSABLE[-1])
    return not UNUSABLE


@triton.jit
def _tested(tiles, i_tile, sink_tokens, local_tokens, INDEX_N: tl.constexpr):
    """Index blocks of tiles [begin, end) between sink and local region.

    Of a tile's two query blocks the first one's local region begins no later than the second one's.
    """
    _, _, length, position = load_tile(tiles, i_tile)
    stop = local_start(position + tl.minimum(length, QUERY_BLOCK), sink_tokens, local_tokens)
    return (sink_tokens + INDEX_N - 1) // INDEX_N, stop // INDEX_N


@triton.jit(do_not_specialize=["sink_tokens", "local_tokens"])
def _first_flags_kernel(kept, index, log_taus, sink_tokens, local_tokens, INDEX_N: tl.constexpr, CHUNK: tl.constexpr):
    """Flags uint8 of one (tile, head)'s causal blocks: 1 in sink, local region and diagonal, 0 where step 3 decides.

    A head with τ = 0 (ln τ = −∞) keeps every block.
    """
    i_tile, i_group = tl.program_id(0), tl.program_id(1)
    begin, end = _tested(index.tiles, i_tile, sink_tokens, local_tokens, INDEX_N)
    if tl.load(log_taus + i_group) == float("-inf"):
        end = 0
    num_causal = tile_blocks(index.tiles, i_tile, INDEX_N)[1]
    target = kept + i_group.to(tl.int64) * index.stride_blocks + tl.load(index.block_offsets + i_tile)
    for first in range(0, num_causal, CHUNK):
        o_n = first + tl.arange(0, CHUNK)
        tl.store(target + o_n, ((o_n < begin) | (o_n >= end)).to(tl.uint8), mask=o_n < num_causal)


@triton.jit(do_not_specialize=["sink_tokens", "local_tokens", "num_spans"])
def _test_kernel(
    queries, keys, heads, log_taus, kept, index, pairs, sink_tokens, local_tokens, left, num_spans,
    GROUP: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, INDEX_N: tl.constexpr,
    SPAN: tl.constexpr, WARPS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Step 3 for up to TILES tiles of one head and one span; with REST for those spans that are ``left``."""
    args = (queries, keys, heads, log_taus, kept, index, pairs, sink_tokens, local_tokens)
    if REST:
        marks = left + (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * num_spans
        num_left = 0
        for i in range(0, num_spans, 64):
            o_s = i + tl.arange(0, 64)
            num_left += tl.sum(tl.load(marks + o_s, mask=o_s < num_spans, other=0).to(tl.int32), 0)
        if num_left > 0:
            for i_span in range(num_spans):
                if tl.load(marks + i_span) != 0:
                    _test_pair(args, i_span, GROUP, BLOCK_D, TILE, TILES, INDEX_N, SPAN, WARPS)
    else:
        _test_pair(args, tl.program_id(1), GROUP, BLOCK_D, TILE, TILES, INDEX_N, SPAN, WARPS)


@triton.jit
def _test_pair(
    args, i_span, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    INDEX_N: tl.constexpr, SPAN: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Step 3 for up to TILES tiles of one head and up to SPAN keys."""
    queries, keys, heads, log_taus, kept, index, pairs, sink_tokens, local_tokens = args
    i_group = tl.program_id(2)
    pair = pairs + tl.program_id(0) * PAIR_FIELDS
    i_tile = tl.load(pair)
    num_tiles = tl.load(pair + 1)
    o_t = tl.minimum(tl.arange(0, TILES), num_tiles - 1) + i_tile
    first_block, b_end_block = _tested(index.tiles, o_t, sink_tokens, local_tokens, INDEX_N)
    begin = tl.maximum(first_block * INDEX_N, i_span * SPAN)
    end = tl.minimum(tl.max(b_end_block, 0) * INDEX_N, (i_span + 1) * SPAN)
    if (begin < end) & (tl.load(log_taus + i_group) > float("-inf")):
        shift = tl.multiple_of(tl.load(pair + 2), 128)
        i_kv = tl.load(heads + i_group) // GROUP
        where = (i_group, i_kv, i_tile, num_tiles, begin, end, shift)
        b_flags = kept + i_group.to(tl.int64) * index.stride_blocks + tl.load(index.block_offsets + o_t)
        _test_span(queries, keys, where, b_flags, b_end_block, BLOCK_D, TILE, TILES, INDEX_N, WARPS)


@triton.jit
def _test_span(
    queries, keys, where, b_flags, b_end_block, BLOCK_D: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    INDEX_N: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Store a 1 at ``b_flags`` [TILES] + b for each index block b < ``b_end_block`` of the span that passes."""
    i_group, i_kv, i_tile, num_tiles, begin, end, shift = where
    BLOCK_M: tl.constexpr = TILES * TILE
    BLOCK_N: tl.constexpr = 64
    BLOCKS: tl.constexpr = BLOCK_N // INDEX_N if BLOCK_N > INDEX_N else 1  # index blocks of a step
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_n = tl.arange(0, BLOCK_N)
    o_step = tl.arange(0, BLOCK_N // 32)[:, None] * 4 + tl.arange(0, 4)[None, :]
    in_tiles = o_m < num_tiles * TILE
    o_q = i_group.to(tl.int64) * queries.num_queries + i_tile * TILE + o_m
    b_q = tl.load(queries.integers + o_q[:, None] * BLOCK_D + o_d[None, :], mask=in_tiles[:, None], other=0.0)
    b_threshold = tl.load(queries.thresholds + o_q, mask=in_tiles, other=float("inf"))
    b_inverse = tl.load(queries.inverse_steps + o_q, mask=in_tiles, other=0.0)
    integers = keys.integers + (i_kv.to(tl.int64) * keys.num_keys + shift) * BLOCK_D
    steps = keys.steps + (i_kv.to(tl.int64) * keys.num_keys + shift) // 8
    biases = keys.biases + i_group.to(tl.int64) * keys.num_keys + shift
    o_block = tl.arange(0, BLOCKS)
    for i in tl.range(begin // BLOCK_N, (end + BLOCK_N - 1) // BLOCK_N, num_stages=4):
        b_k = tl.load(integers + (i * BLOCK_N + o_n)[:, None] * BLOCK_D + o_d[None, :])
        b_bias = tl.load(biases + i * BLOCK_N + o_n)
        b_step = tl.load(steps + i * (BLOCK_N // 8) + o_step)
        b_s = tl.fma(b_inverse[:, None], b_bias[None, :], tl.dot(b_q, tl.trans(b_k)).to(tl.float32))
        # Largest of the eight scores that share a key step: [queries, BLOCK_N // 32, 4]. One thread has them.
        b_s = tl.max(tl.reshape(b_s, [BLOCK_M, BLOCK_N // 32, 4, 4, 2]), 2)
        b_top = tl.max(b_s, 3) * b_step[None, :, :]
        b_top = tl.max(tl.reshape(b_top, [BLOCK_M, BLOCKS, BLOCK_N // 32 // BLOCKS, 4]), 2)
        # Axes 1 and 3 lie in one thread: queries 8 apart of the 16 that a warp holds of every 16 · WARPS.
        b_over = b_top - b_threshold[:, None, None]
        b_over = tl.reshape(b_over, [TILES, TILE // (16 * WARPS), WARPS, 2, 8, BLOCKS, 4])
        b_over = tl.max(tl.max(b_over, 3), 1)
        o_b = i * BLOCK_N // INDEX_N + o_block
        b_at = b_flags[:, None] + o_b[None, :]
        b_passes = (b_over >= 0) & (o_b[None, :] < b_end_block[:, None])[:, None, None, :, None]
        b_at = tl.broadcast_to(b_at[:, None, None, :, None], b_passes.shape)
        tl.store(b_at, tl.full(b_passes.shape, 1, tl.uint8), mask=b_passes)
