# SPDX-License-Identifier: Apache-2.0
"""Queries and keys in e4m3, of the 128 channels of each row and head that affect scores most.

The weight of a channel is its effect on scores: the variance of its keys times the second moment of its queries, of a
sample. A score is estimated as s (q·m + Σ q_c (k_c - m_c)), over the kept channels c, with the mean m of the sampled
keys over all channels. So estimates of different calls refer to the same scores, whatever channels the calls keep.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.methods.top_p.rounding import LARGEST, TINY, in_e4m3
from vllm_sparse_kernels.methods.top_p.scored import SCORED, num_scored, scored_offsets
from vllm_sparse_kernels.mla.calls import BLOCK, KEY_D, Part, Tensors
from vllm_sparse_kernels.rows import TILE, ceil_div
from vllm_sparse_kernels.selection.channels import keep_heaviest
from vllm_sparse_kernels.selection.lists import load_row
from vllm_sparse_kernels.vectors import load_vector, padded_mask, store_vector, vector_pointers

KEPT_D = Constant(128)
"""Channels that estimates multiply."""

BLOCK_D = Constant(triton.next_power_of_2(KEY_D.value))

SAMPLE = Constant(2048)
"""Maximum number of sampled keys, and of sampled queries, of a row. They are equally far apart."""


class Moments(NamedTuple):
    """Mean keys and kept channels of each row and head."""

    means: Any  # [rows, heads, BLOCK_D] float32
    channels: Any  # [rows, heads, KEPT_D] int32, ascending


class Rounded(NamedTuple):
    """Scored queries and keys of some heads in e4m3, at the same tokens as in the call.

    A score, as a logarithm to base 2, is the product times the query's and the key's scale, plus the query's shift.
    """

    queries: Any  # [heads, num_queries, KEPT_D]
    query_scales: Any  # [heads, num_queries] float32, times the softmax's scale
    query_shifts: Any  # [heads, num_queries] float32
    num_queries: int
    keys: Any  # [heads, num_keys, KEPT_D]
    key_scales: Any  # [heads, num_keys] float32, at the first key of each block
    num_keys: int


def fill_moments(tensors: Tensors, part: Part, moments: Moments) -> None:
    """Compute mean keys, and choose channels."""
    _moments_kernel[(len(part.rows), tensors.q.shape[1])](tensors, part.rows, moments, num_warps=8)


def round_vectors(
    tensors: Tensors, part: Part, moments: Moments, heads: range, softmax_scale: float, rounded: Rounded
) -> None:
    """Round the scored queries and the keys of some heads. ``softmax_scale`` is the factor from q·k to base 2."""
    num_heads, num_rows = tensors.q.shape[1], len(part.rows)
    _round_queries_kernel[(ceil_div(part.most_queries, TILE.value), num_rows, len(heads))](
        tensors, part.rows, heads.start, num_heads, softmax_scale, moments, rounded, num_warps=4
    )
    _round_keys_kernel[(ceil_div(part.most_keys, BLOCK.value), num_rows, len(heads))](
        tensors, part.rows, heads.start, num_heads, moments, rounded, num_warps=4
    )


@triton.jit
def _moments_kernel(tensors, rows, moments):
    """Compute the mean key of one row and head, and its KEPT_D channels with the largest weights.

    Grid: (rows, heads). Bound by latency: it reads up to SAMPLE keys and queries.

    Args:
        rows: [num_rows, 4] int32, ``Part.rows``.
    """
    i_head = tl.program_id(1).to(tl.int64)
    first_query, num_queries, first_key, num_keys = load_row(rows, tl.program_id(0))
    q = tensors.q + first_query.to(tl.int64) * tensors.stride_q_token + i_head * tensors.stride_q_head
    k = tensors.k + first_key.to(tl.int64) * tensors.stride_k_token + i_head * tensors.stride_k_head
    _, b_query_square, _ = _sums(q, tensors.stride_q_token, num_queries)
    b_sum, b_square, count = _sums(k, tensors.stride_k_token, num_keys)
    count = count.to(tl.float32)
    b_mean = b_sum / count
    b_weight = tl.maximum(b_square / count - b_mean * b_mean, 0.0) * b_query_square
    i_moments = tl.program_id(0) * tl.num_programs(1) + i_head
    store_vector(moments.means, i_moments, b_mean)
    keep_heaviest(moments.channels + i_moments * KEPT_D, b_weight, KEY_D, KEPT_D)


@triton.jit
def _sums(x, stride_token, num_tokens):
    """Return the sum and the sum of squares of sampled vectors, and their number."""
    every = tl.cdiv(num_tokens, SAMPLE)
    count = tl.cdiv(num_tokens, every)
    o_n, o_d = tl.arange(0, 32), tl.arange(0, BLOCK_D)
    b_sum = tl.zeros([32, BLOCK_D], tl.float32)
    b_square = tl.zeros([32, BLOCK_D], tl.float32)
    for i in range(0, count, 128):
        for j in tl.static_range(4):  # four loads in flight
            o_i = i + 32 * j + o_n
            o_x = (o_i * every).to(tl.int64)[:, None] * stride_token + o_d[None, :]
            b_x = tl.load(x + o_x, mask=padded_mask(o_i < count, KEY_D, BLOCK_D), other=0.0).to(tl.float32)
            b_sum += b_x
            b_square += b_x * b_x
    return tl.sum(b_sum, 0), tl.sum(b_square, 0), count


@triton.jit(do_not_specialize=["first_head", "num_heads"])
def _round_queries_kernel(tensors, rows, first_head, num_heads, softmax_scale, moments, rounded):
    """Round the kept channels of the scored queries of one tile and head. The largest magnitude becomes 15.

    Grid: (tiles of the longest row, rows, heads of the part). Bound by memory: it reads each scored query once.

    Args:
        rows: [num_rows, 4] int32, ``Part.rows``.
    """
    start, count, _, _ = load_row(rows, tl.program_id(1))
    o_s = tl.program_id(0) * SCORED + tl.arange(0, SCORED)
    is_scored = o_s < num_scored(count)  # tiles are whole, except for the last: rows have the rule of tiles
    i_head = tl.program_id(2).to(tl.int64)
    i_moments = tl.program_id(1) * num_heads + first_head + i_head
    o_q = start.to(tl.int64) + scored_offsets(o_s, count)
    q = tensors.q + o_q[:, None] * tensors.stride_q_token + (first_head + i_head) * tensors.stride_q_head
    b_channels = load_vector(moments.channels, i_moments, KEPT_D)
    b_kept = tl.load(q + b_channels[None, :], mask=is_scored[:, None], other=0.0).to(tl.float32)
    b_scale = tl.maximum(tl.max(tl.abs(b_kept), 1), TINY) / LARGEST
    b_mean = load_vector(moments.means, i_moments, BLOCK_D)
    b_q = tl.load(q + tl.arange(0, BLOCK_D)[None, :], mask=padded_mask(is_scored, KEY_D, BLOCK_D), other=0.0)
    b_shift = tl.sum(b_q.to(tl.float32) * b_mean[None, :], 1) * softmax_scale
    o_target = i_head * rounded.num_queries + o_q
    tl.store(rounded.query_shifts + o_target, b_shift, mask=is_scored)
    tl.store(rounded.query_scales + o_target, b_scale * softmax_scale, mask=is_scored)
    target = vector_pointers(rounded.queries, o_target, KEPT_D)
    b_kept *= (1.0 / b_scale)[:, None]
    tl.store(target, in_e4m3(b_kept, rounded.queries.dtype.element_ty), mask=is_scored[:, None])


@triton.jit(do_not_specialize=["first_head", "num_heads"])
def _round_keys_kernel(tensors, rows, first_head, num_heads, moments, rounded):
    """Round the kept channels of one block of keys and head. The largest magnitude becomes 15.

    Grid: (blocks of the longest row, rows, heads of the part). Bound by memory: it reads each key once.

    Args:
        rows: [num_rows, 4] int32, ``Part.rows``.
    """
    _, _, start, count = load_row(rows, tl.program_id(1))
    start = start.to(tl.int64)
    first = tl.program_id(0) * BLOCK
    if first < count:
        o_n = first + tl.arange(0, BLOCK)
        in_row = (o_n < count)[:, None]
        i_head = tl.program_id(2).to(tl.int64)
        i_moments = tl.program_id(1) * num_heads + first_head + i_head
        k = tensors.k + (start + o_n)[:, None] * tensors.stride_k_token
        k += (first_head + i_head) * tensors.stride_k_head
        b_channels = load_vector(moments.channels, i_moments, KEPT_D)
        b_mean = tl.load(moments.means + i_moments * BLOCK_D + b_channels)
        b_k = tl.load(k + b_channels[None, :], mask=in_row, other=0.0).to(tl.float32)
        b_k = tl.where(in_row, b_k - b_mean[None, :], 0.0)
        scale = tl.maximum(tl.max(tl.max(tl.abs(b_k), 1), 0), TINY) / LARGEST
        o_target = i_head * rounded.num_keys + start + o_n
        tl.store(rounded.key_scales + i_head * rounded.num_keys + start + first, scale)
        target = vector_pointers(rounded.keys, o_target, KEPT_D)
        tl.store(target, in_e4m3(b_k * (1.0 / scale), rounded.keys.dtype.element_ty), mask=in_row)
