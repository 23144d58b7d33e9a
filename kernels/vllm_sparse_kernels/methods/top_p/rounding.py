# SPDX-License-Identifier: Apache-2.0
"""Queries and keys of ``top_p`` in e4m3, reduced to the channels of the estimate.

The mean of the row's keys is subtracted from each key, which shifts all scores of a query equally. Because any vector
is valid here, the mean is taken over a sample, and so are the moments by which channels are chosen. Samples depend on
the position in the row and in the step, so the rounding of a row depends only on that row.

Channels are picked by weight. The weight of a channel of a kv head is its effect on scores: the variance of its keys
times the second moment, about zero, of the queries of all heads that read it.

The largest element of a block of 32 keys, and of a query, becomes 15. Sums of products are then at most 15 · 15 · 256,
which is in the range of half precision.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.cards import shared_bytes
from vllm_sparse_kernels.compile_time import LOG2_E, Constant
from vllm_sparse_kernels.methods.top_p.choice import KEY_BLOCK
from vllm_sparse_kernels.methods.top_p.scored import SCORED, num_scored, scored_offsets
from vllm_sparse_kernels.paged import (
    key_args,
    load_keys,
    load_queries,
    load_queries_at,
    padded_dim,
    query_args,
    widen,
)
from vllm_sparse_kernels.rows import ceil_div
from vllm_sparse_kernels.selection.channels import keep_heaviest
from vllm_sparse_kernels.selection.key_sums import GROUP_TOKENS, key_sums
from vllm_sparse_kernels.selection.lists import load_tile
from vllm_sparse_kernels.selection.slabs import KeySlab
from vllm_sparse_kernels.vectors import load_vector, store_vector, vector_pointers

LARGEST = Constant(15.0)
MAGIC = Constant(12582912.0)  # 1.5 · 2^23: a float32 of that size has no fraction
TINY = Constant(1e-20)  # replaces the largest magnitude of zeros

GROUP_PERIOD = Constant(8)
"""Out of this many consecutive groups of keys, the first belongs to the sample."""

SPLIT_GROUPS = 4
"""Groups of the sample that one program adds up."""

SAMPLED_QUERIES = Constant(32)
"""Queries of each tile that belong to the sample."""

LEAST_CHANNELS = 64
"""Minimum number of channels. With fewer, the product no longer dominates the time, and only quality would drop."""


class Moments(NamedTuple):
    """Mean keys of each row and kv head, and the channels that are kept."""

    means: Any  # [num_rows, num_kv_heads, BLOCK_D] float32
    channels: Any  # [num_rows, num_kv_heads, KEPT_D] int32, ascending; not read where all are kept


class RoundedFormat(NamedTuple):
    """Format of rounded queries and keys."""

    kept_d: int  # channels that are multiplied
    dtype: torch.dtype


class Rounded(NamedTuple):
    """Queries and keys of a slab in e4m3.

    A score, as an exponent of two, is the product times the scale of its query and the scale of its key's block.
    """

    queries: Any  # [num_selected, num_queries, KEPT_D], of scored queries
    query_scales: Any  # [num_selected, num_queries] float32, times the softmax's scale; 0 past the row's end
    num_queries: int  # whole tiles
    keys: Any  # [num_kv_heads, num_keys, KEPT_D]
    key_scales: Any  # [num_kv_heads, num_keys / 32] float32
    num_keys: int  # a multiple of 128


def row_moments(call: Call, storage: RoundedFormat) -> Moments:
    """Compute the mean key of each row and kv head, and the channels that the estimate multiplies."""
    q, cache, rows, workspace = call.q, call.cache, call.rows, call.index.workspace
    num_heads, num_kv_heads, head_dim = q.shape[1], cache.num_kv_heads, cache.head_dim
    block_d, kept_d = padded_dim(head_dim), storage.kept_d
    means = workspace.empty(rows.num_rows, num_kv_heads, block_d)
    chooses = kept_d < block_d
    channels = workspace.empty(rows.num_rows, num_kv_heads, kept_d, dtype=torch.int32)
    with workspace.frame():
        num_warps = max(block_d // 16, 4)
        sums, splits = key_sums(
            cache, rows, workspace, moments=2, period=GROUP_PERIOD.value, groups=SPLIT_GROUPS, num_warps=num_warps
        )
        squares = workspace.empty(rows.num_tiles, num_heads, block_d) if chooses else None
        shape = {"HEAD_DIM": head_dim, "BLOCK_D": block_d}
        if chooses:
            _query_squares_kernel[(rows.num_tiles, num_heads)](query_args(q), rows.tiles, squares, **shape)
        _moments_kernel[(rows.num_rows, num_kv_heads)](
            sums, splits.device_starts, squares, rows.device_tile_starts, rows.device_seq_lens, means, channels,
            GROUP=call.group, **shape, KEPT_D=kept_d, num_warps=max(block_d // 8, 4),
        )  # fmt: skip
    return Moments(means, channels)


def round_queries(call: Call, moments: Moments, storage: RoundedFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Round the scored queries of all rows."""
    q, rows, workspace = call.q, call.rows, call.index.workspace
    num_queries = rows.num_tiles * SCORED.value
    num_selected = len(call.heads)
    values = workspace.empty(num_selected, num_queries, storage.kept_d, dtype=storage.dtype)
    scales = workspace.empty(num_selected, num_queries)
    block_d = padded_dim(q.shape[2])
    num_rounded = min(vectors_at_once(block_d, storage.kept_d, shared_bytes(q.device)), SCORED.value)
    _round_queries_kernel[(rows.num_tiles * (SCORED.value // num_rounded), num_selected)](
        query_args(q), rows.tiles, moments, call.head_ids, call.scale * LOG2_E.value, values, scales, num_queries,
        HEAD_DIM=q.shape[2], BLOCK_D=block_d, KEPT_D=storage.kept_d, GROUP=call.group,
        KV_HEADS=moments.means.shape[1], ROUNDED=num_rounded, num_warps=8,
    )  # fmt: skip
    return values, scales


def round_keys(
    call: Call, slab: KeySlab, moments: Moments, storage: RoundedFormat, permuted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round the keys of a slab's rows. The keys of row i begin at ``slab.key_starts[i]``."""
    cache, rows, workspace = call.cache, call.rows, call.index.workspace
    values = workspace.empty(cache.num_kv_heads, slab.num_keys, storage.kept_d, dtype=storage.dtype)
    scales = workspace.empty(cache.num_kv_heads, slab.num_keys // KEY_BLOCK.value)
    block_d = padded_dim(cache.head_dim)
    num_rounded = vectors_at_once(block_d, storage.kept_d, shared_bytes(cache.keys.device))
    num_programs = ceil_div(slab.longest, 128) * (128 // num_rounded)
    _round_keys_kernel[(num_programs, cache.num_kv_heads, slab.key_starts.shape[0])](
        key_args(cache, rows.block_table), rows.device_seq_lens, slab.first_row, slab.key_starts, moments, values,
        scales, slab.num_keys,
        HEAD_DIM=cache.head_dim, BLOCK_D=block_d, KEPT_D=storage.kept_d, PERMUTED=permuted, ROUNDED=num_rounded,
        num_warps=4,
    )  # fmt: skip
    return values, scales


def vectors_at_once(block_d: int, kept_d: int, limit_bytes: int) -> int:
    """Return the queries or keys that one program rounds."""
    num_vectors = 128
    while num_vectors > KEY_BLOCK.value and rounding_bytes(block_d, kept_d, num_vectors) > limit_bytes:
        num_vectors //= 2
    return num_vectors


def rounding_bytes(block_d: int, kept_d: int, num_vectors: int = KEY_BLOCK.value) -> int:
    """Return the shared memory of a program that rounds."""
    return 2 * block_d * (num_vectors + max(kept_d, 64)) if kept_d < block_d else 0


@triton.jit
def _query_squares_kernel(queries, tiles, squares, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Compute the mean square of the first queries of one tile and head.

    Grid: (tiles, heads). Bound by memory: it reads each query of the sample once.

    Args:
        tiles: [num_tiles, 4] int32, ``Rows.tiles``.
        squares: [num_tiles, heads, BLOCK_D] float32; written.
    """
    i_tile, i_head = tl.program_id(0), tl.program_id(1)
    _, token, length, _ = load_tile(tiles, i_tile)
    length = tl.minimum(length, SAMPLED_QUERIES)
    b_q = load_queries(queries, i_head, token, length, SAMPLED_QUERIES, HEAD_DIM, BLOCK_D).to(tl.float32)
    store_vector(squares, i_tile * tl.num_programs(1) + i_head, tl.sum(b_q * b_q, 0) / length)


@triton.jit
def _moments_kernel(
    sums, starts, squares, tile_starts, seq_lens, means, channels,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, KEPT_D: tl.constexpr,
):  # fmt: skip
    """Compute the mean key of one row and kv head, and its KEPT_D channels with the largest weights.

    Ties go to lower channels.

    Grid: (rows, kv heads). Bound by latency: a few KB per program.

    Args:
        sums: [splits of all rows, kv heads, 2, BLOCK_D] float32.
        starts: [num_rows + 1] int32, a row's first split.
        squares: [num_tiles, heads, BLOCK_D] float32, or None.
        tile_starts: [num_rows + 1] int32, each row's first tile.
        seq_lens: [num_rows] int32, each row's keys.
        means: [num_rows, kv heads, BLOCK_D] float32; written.
        channels: [num_rows, kv heads, KEPT_D] int32, ascending; written.
    """
    i_row, num_kv_heads = tl.program_id(0), tl.num_programs(1)
    i_kv = i_row * num_kv_heads + tl.program_id(1)
    seq_len = tl.load(seq_lens + i_row)
    o_d, o_s = tl.arange(0, BLOCK_D), tl.arange(0, 32)
    end = tl.load(starts + i_row + 1)
    b_sum = tl.zeros([32, BLOCK_D], tl.float32)
    b_square = tl.zeros([32, BLOCK_D], tl.float32)
    for i in range(tl.load(starts + i_row), end, 32):
        at = sums + ((i + o_s) * num_kv_heads + tl.program_id(1))[:, None] * (2 * BLOCK_D) + o_d[None, :]
        b_sum += tl.load(at, mask=(i + o_s < end)[:, None], other=0.0)
        b_square += tl.load(at + BLOCK_D, mask=(i + o_s < end)[:, None], other=0.0)
    whole = seq_len // (GROUP_TOKENS * GROUP_PERIOD) * GROUP_TOKENS
    count = (whole + tl.minimum(seq_len % (GROUP_TOKENS * GROUP_PERIOD), GROUP_TOKENS)).to(tl.float32)
    b_mean = tl.sum(b_sum, 0) / count
    store_vector(means, i_kv, b_mean)
    if KEPT_D < BLOCK_D:
        b_weight = tl.maximum(tl.fma(-b_mean, b_mean, tl.sum(b_square, 0) / count), 0.0)  # variance of the keys
        b_weight *= _mean_square(
            squares, tile_starts + i_row, tl.program_id(1) * GROUP, num_kv_heads * GROUP, GROUP, BLOCK_D
        )
        keep_heaviest(channels + i_kv * KEPT_D, b_weight, HEAD_DIM, KEPT_D)


@triton.jit
def _mean_square(squares, tile_starts, first_head, num_heads, GROUP: tl.constexpr, BLOCK_D: tl.constexpr):
    """Compute the mean square of the row's queries in GROUP heads, up to a factor: [BLOCK_D]."""
    o_s = tl.arange(0, 32)
    begin, end = tl.load(tile_starts) * GROUP, tl.load(tile_starts + 1) * GROUP
    b_square = tl.zeros([32, BLOCK_D], tl.float32)
    for i in range(begin, end, 32):
        o_i = i + o_s  # tile by tile, and by head within a tile
        at = vector_pointers(squares, o_i // GROUP * num_heads + first_head + o_i % GROUP, BLOCK_D)
        b_square += tl.load(at, mask=(o_i < end)[:, None], other=0.0)
    return tl.sum(b_square, 0)


@triton.jit
def kept_of(b_x, channels, i_moments, KEPT_D: tl.constexpr):
    """Return the kept channels of some vectors."""
    BLOCK_D: tl.constexpr = b_x.shape[1]
    if KEPT_D == BLOCK_D:
        return b_x.to(tl.float32)
    else:
        b_columns = load_vector(channels, i_moments, KEPT_D)
        # A product with a 0/1 matrix that has a single 1 in each column moves elements without changing them.
        b_ones = (tl.arange(0, BLOCK_D)[:, None] == b_columns[None, :]).to(b_x.dtype)
        return tl.dot(b_x, b_ones, input_precision="ieee")


@triton.jit
def load_kept_mean(row_moments, i_moments, BLOCK_D: tl.constexpr, KEPT_D: tl.constexpr):
    """Load the kept channels of a mean key."""
    if KEPT_D == BLOCK_D:
        return load_vector(row_moments.means, i_moments, KEPT_D)
    else:
        b_columns = load_vector(row_moments.channels, i_moments, KEPT_D)
        return tl.load(row_moments.means + i_moments * BLOCK_D + b_columns)


@triton.jit
def in_e4m3(b_x, dtype: tl.constexpr):
    """Round to e4m3, ties to even."""
    if dtype == tl.float8e4nv:
        return b_x.to(dtype)
    else:
        # Three bits of mantissa, and steps of at least 2^-9.
        b_power = ((b_x.to(tl.int32, bitcast=True) >> 23) & 255) - 3
        b_power = tl.maximum(b_power, 127 - 9)
        b_step = (b_power << 23).to(tl.float32, bitcast=True)
        b_inverse = ((254 - b_power) << 23).to(tl.float32, bitcast=True)
        return (((b_x * b_inverse + MAGIC) - MAGIC) * b_step).to(dtype)


@triton.jit(do_not_specialize=["num_queries"])
def _round_queries_kernel(
    queries, tiles, row_moments, heads, softmax_scale, values, scales, num_queries,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, KEPT_D: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    ROUNDED: tl.constexpr,
):  # fmt: skip
    """Round ROUNDED of the scored queries of one tile and head to e4m3.

    Grid: (tiles · SCORED / ROUNDED, n). Bound by memory: it reads each scored query once and writes half as much.

    Args:
        tiles: [num_tiles, 4] int32, ``Rows.tiles``.
        heads: [n] int32 on the device, numbers of the selected query heads.
        values: [n, num_tiles · SCORED, KEPT_D]; written.
        scales: [n, num_tiles · SCORED] float32, times ``softmax_scale``; 0 past the row's end; written.
    """
    i_selected = tl.program_id(1)
    i_head = tl.load(heads + i_selected)
    i_row, token, length, _ = load_tile(tiles, tl.program_id(0) // (SCORED // ROUNDED))
    o_m = tl.arange(0, ROUNDED)
    o_s = tl.program_id(0) % (SCORED // ROUNDED) * ROUNDED + o_m
    in_row = o_s < num_scored(length)
    b_q = widen(load_queries_at(queries, i_head, token + scored_offsets(o_s, length), in_row, HEAD_DIM, BLOCK_D))
    i_moments = i_row * KV_HEADS + i_head // GROUP
    b_q = kept_of(b_q, row_moments.channels, i_moments, KEPT_D)
    b_scale = tl.maximum(tl.max(tl.abs(b_q), 1), TINY) / LARGEST
    o_r = i_selected.to(tl.int64) * num_queries + tl.program_id(0) * ROUNDED + o_m
    b_q = b_q * (1.0 / b_scale)[:, None]
    tl.store(vector_pointers(values, o_r, KEPT_D), in_e4m3(b_q, values.dtype.element_ty))
    tl.store(scales + o_r, tl.where(in_row, b_scale * softmax_scale, 0.0))


@triton.jit(do_not_specialize=["first_row"])
def _round_keys_kernel(
    keys, seq_lens, first_row, key_starts, row_moments, values, scales, num_keys,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, KEPT_D: tl.constexpr, PERMUTED: tl.constexpr,
    ROUNDED: tl.constexpr,
):  # fmt: skip
    """Round ROUNDED keys of one row and kv head to e4m3.

    Grid: (steps of 128 keys of the longest row · 128 / ROUNDED, kv heads, rows of the slab). Bound by memory: it reads
    each key once and writes half as much.

    Args:
        seq_lens: [num_rows] int32, each row's keys.
        key_starts: [rows of the slab] int32, where a row's keys begin: multiples of 128.
        values: [kv heads, num_keys, KEPT_D]; written.
        scales: [kv heads, num_keys / 32] float32; written.
    """
    i_part, i_kv, i_slab_row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_row = first_row + i_slab_row
    seq_len = tl.load(seq_lens + i_row)
    i_step = i_part // (128 // ROUNDED)
    if i_step * 128 < seq_len:
        o_n = i_part % (128 // ROUNDED) * ROUNDED + tl.arange(0, ROUNDED)  # within the step
        o_key = i_step * 128 + o_n
        b_k = widen(load_keys(keys, i_row, i_kv, o_key, seq_len, HEAD_DIM, BLOCK_D))
        i_moments = i_row * tl.num_programs(1) + i_kv
        b_mean = load_kept_mean(row_moments, i_moments, BLOCK_D, KEPT_D)
        b_k = kept_of(b_k, row_moments.channels, i_moments, KEPT_D)
        b_k = tl.where((o_key < seq_len)[:, None], b_k - b_mean[None, :], 0.0)
        b_scale = tl.max(tl.reshape(tl.max(tl.abs(b_k), 1), [ROUNDED // 32, 32]), 1)
        b_scale = tl.maximum(b_scale, TINY) / LARGEST
        first = i_kv.to(tl.int64) * num_keys + tl.load(key_starts + i_slab_row) + i_step * 128
        o_scale = i_part % (128 // ROUNDED) * (ROUNDED // 32) + tl.arange(0, ROUNDED // 32)
        tl.store(scales + first // 32 + o_scale, b_scale)
        b_k = tl.reshape(b_k, [ROUNDED // 32, 32, KEPT_D]) * (1.0 / b_scale)[:, None, None]
        b_k = tl.reshape(b_k, [ROUNDED, KEPT_D])
        o_slot = o_n
        if PERMUTED:
            o_slot = o_n % 32 // 2 * 8 + o_n // 32 * 2 + o_n % 2
        tl.store(vector_pointers(values, first + o_slot, KEPT_D), in_e4m3(b_k, values.dtype.element_ty))
