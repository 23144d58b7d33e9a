# SPDX-License-Identifier: Apache-2.0
"""Statistics of a row for SALE's rounding: mean keys, mean queries and, if only half are kept, the kept channels.

The weight of a kv head's channel is its effect on scores: the variance of the row's keys in this channel, times the
second moment of the step's queries about the mean query, over all heads that read the kv head. The heavier half of the
channels is kept. The two channels that rotary embedding rotates together are chosen independently: keeping both or
neither lost more on trained attention at every density.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.paged import load_queries, query_args
from vllm_sparse_kernels.rows import ROW_FIELDS, TILE
from vllm_sparse_kernels.selection.channels import keep_heaviest
from vllm_sparse_kernels.selection.key_sums import key_sums
from vllm_sparse_kernels.selection.lists import load_tile

MEAN = 0
"""Place of the mean among a row's moments; the mean square follows it."""

LEAST_CHANNELS = 32
"""Minimum number of channels of an 8-bit product, given by the matrix instructions."""


class Means(NamedTuple):
    """Float32 means of each row's keys and new queries, padded with zeros, and the channels of the estimate."""

    keys: Any  # [num_rows, num_kv_heads, BLOCK_D]
    queries: Any  # [num_rows, num_heads, BLOCK_D]
    channels: Any  # [num_rows, num_kv_heads, KEPT_D] int32, ascending
    left_out: Any  # [num_rows, num_kv_heads, BLOCK_D] float32, variance of keys in channels left out, 0 in the others


def row_means(call: Call, kept_d: int) -> Means:
    """Average keys and queries of each row and, if only half the channels are kept, choose them."""
    q, cache, rows, workspace = call.q, call.cache, call.rows, call.index.workspace
    num_heads, num_kv_heads, head_dim = q.shape[1], cache.num_kv_heads, cache.head_dim
    block_d = triton.next_power_of_2(head_dim)
    moments = 2 if kept_d < block_d else 1  # the second moment is needed to choose channels
    keys = workspace.empty(moments, rows.num_rows, num_kv_heads, block_d)
    queries = workspace.empty(moments, rows.num_rows, num_heads, block_d)
    with workspace.frame():
        sums = workspace.empty(rows.num_tiles, num_heads, moments, block_d)
        _query_sums_kernel[(rows.num_tiles, num_heads)](
            query_args(q), rows.tiles, sums, HEAD_DIM=head_dim, BLOCK_D=block_d, MOMENTS=moments
        )
        _means_kernel[(rows.num_rows, num_heads, moments)](
            sums, rows.device_tile_starts, rows.row_table, queries, BLOCK_D=block_d, COUNT=1
        )
    with workspace.frame():
        sums, splits = key_sums(cache, rows, workspace, moments=moments, period=1, groups=8, num_warps=4 * moments)
        _means_kernel[(rows.num_rows, num_kv_heads, moments)](
            sums, splits.device_starts, rows.row_table, keys, BLOCK_D=block_d, COUNT=2
        )
    mean_keys, mean_queries = keys[MEAN], queries[MEAN]
    if kept_d == block_d:
        return Means(mean_keys, mean_queries, channels=mean_keys, left_out=mean_keys)  # the last two are not read
    channels = workspace.empty(rows.num_rows, num_kv_heads, kept_d, dtype=torch.int32)
    left_out = workspace.empty(rows.num_rows, num_kv_heads, block_d)
    _channels_kernel[(rows.num_rows, num_kv_heads)](
        keys, queries, channels, left_out,
        GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_D=block_d, KEPT_D=kept_d, num_warps=block_d // 8,
    )  # fmt: skip
    return Means(mean_keys, mean_queries, channels, left_out)


@triton.jit
def _query_sums_kernel(queries, tiles, sums, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MOMENTS: tl.constexpr):
    """Sum the queries of a tile and head, and their squares.

    Grid: (tiles, heads). Bound by memory: it reads each query once.

    Args:
        tiles: [num_tiles, 4] int32, ``Rows.tiles``.
        sums: [num_tiles, heads, MOMENTS, BLOCK_D] float32; written.
    """
    i_tile, i_head = tl.program_id(0), tl.program_id(1)
    _, token, length, _ = load_tile(tiles, i_tile)
    b_q = load_queries(queries, i_head, token, length, TILE, HEAD_DIM, BLOCK_D).to(tl.float32)
    target = sums + (i_tile * tl.num_programs(1) + i_head) * (MOMENTS * BLOCK_D) + tl.arange(0, BLOCK_D)
    tl.store(target, tl.sum(b_q, 0))
    if MOMENTS == 2:
        tl.store(target + BLOCK_D, tl.sum(b_q * b_q, 0))


@triton.jit
def _means_kernel(sums, starts, rows, means, BLOCK_D: tl.constexpr, COUNT: tl.constexpr):
    """Average one row, head and moment from the sums [starts[row], starts[row + 1]) of rows[row, COUNT] vectors.

    Grid: (rows, heads, moments). Bound by latency: a few KB per program.

    Args:
        sums: [sums of all rows, heads, moments, BLOCK_D] float32.
        starts: [num_rows + 1] int32, a row's first sum.
        rows: [num_rows + 1, 4] int32, ``Rows.row_table``.
        means: [moments, num_rows, heads, BLOCK_D] float32; written.
    """
    i_row, i_head, i_moment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1)
    o_d = tl.arange(0, BLOCK_D)
    end = tl.load(starts + i_row + 1)
    b_sum = tl.zeros([32, BLOCK_D], tl.float32)
    for i in range(tl.load(starts + i_row), end, 32):
        o_s = i + tl.arange(0, 32)
        o_sum = ((o_s[:, None] * num_heads + i_head) * tl.num_programs(2) + i_moment) * BLOCK_D + o_d[None, :]
        b_sum += tl.load(sums + o_sum, mask=(o_s < end)[:, None], other=0.0)
    b_mean = tl.sum(b_sum, 0) / tl.load(rows + i_row * ROW_FIELDS + COUNT).to(tl.float32)
    tl.store(means + ((i_moment * tl.num_programs(0) + i_row) * num_heads + i_head) * BLOCK_D + o_d, b_mean)


@triton.jit
def _channels_kernel(
    keys, queries, channels, left_out,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, KEPT_D: tl.constexpr,
):  # fmt: skip
    """Store the KEPT_D channels with the largest weight, for a row and kv head.

    Grid: (rows, kv heads). Bound by latency: a few KB per program.

    Args:
        keys: [2, num_rows, kv heads, BLOCK_D] float32, means and mean squares.
        queries: [2, num_rows, heads, BLOCK_D] float32.
        channels: [num_rows, kv heads, KEPT_D] int32, ascending; written.
        left_out: [num_rows, kv heads, BLOCK_D] float32, variance of channels left out; written.
    """
    num_rows, num_kv_heads = tl.num_programs(0), tl.num_programs(1)
    i_kv = tl.program_id(0) * num_kv_heads + tl.program_id(1)
    o_d = tl.arange(0, BLOCK_D)
    b_keys = _variances(keys + i_kv * BLOCK_D + o_d, num_rows * num_kv_heads * BLOCK_D)
    b_queries = tl.zeros([BLOCK_D], tl.float32)
    for i in range(GROUP):
        b_queries += _variances(queries + (i_kv * GROUP + i) * BLOCK_D + o_d, num_rows * num_kv_heads * GROUP * BLOCK_D)
    b_kept = keep_heaviest(channels + i_kv * KEPT_D, b_keys * b_queries, HEAD_DIM, KEPT_D)
    tl.store(left_out + i_kv * BLOCK_D + o_d, tl.where(b_kept, 0.0, b_keys))


@triton.jit
def _variances(means, to_second):
    """Compute variances of channels from the mean and, ``to_second`` elements further, the second moment.

    The explicit ``fma`` makes the rounding the same everywhere.
    """
    b_mean = tl.load(means)
    return tl.maximum(tl.fma(-b_mean, b_mean, tl.load(means + to_second)), 0.0)
