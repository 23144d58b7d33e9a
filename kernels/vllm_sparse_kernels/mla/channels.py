# SPDX-License-Identifier: Apache-2.0
"""Estimates from fewer channels: those of each row and head that affect scores most.

The weight of a channel is its effect on scores: the variance of its keys times the second moment of its queries, of a
sample. A score is estimated as s (q·m + Σ q_c (k_c - m_c)), over the kept channels c, with the mean m of the sampled
keys over all channels. So estimates of different calls refer to the same scores, whatever channels the calls keep.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.methods.top_p.rounding import LARGEST, TINY, in_e4m3
from vllm_sparse_kernels.methods.top_p.scored import num_scored, scored_offsets
from vllm_sparse_kernels.mla.calls import BLOCK_TOKENS, ROW_FIELDS, Tensors
from vllm_sparse_kernels.selection.channels import keep_heaviest

SAMPLED_KEYS = 2048
"""Maximum number of sampled keys, and of sampled queries, of a row. They are equally far apart."""

BLOCK = Constant(BLOCK_TOKENS)


class Moments(NamedTuple):
    """Mean keys and kept channels of each row and head."""

    means: Any  # [rows, heads, BLOCK_D] float32
    channels: Any  # [rows, heads, KEPT_D] int32, ascending


class Vectors(NamedTuple):
    """Queries or keys of a call."""

    data: Any  # [tokens, heads, head_dim]
    stride_token: int
    stride_head: int


class RoundedVectors(NamedTuple):
    """Queries or keys of some heads in e4m3, at the same tokens as in the call. Only scored queries are written."""

    data: Any  # [heads, num_places, channels]
    scales: Any  # [heads, num_places] float32; those of keys at the first key of each block
    shifts: Any  # [heads, num_places] float32, addends of queries' scores, 0 with all channels; None for keys
    num_places: int


class Rounded(NamedTuple):
    """Queries and keys of some heads in e4m3.

    A score, as a logarithm to base 2, is the product times the query's and the key's scale, plus the query's shift.
    """

    queries: RoundedVectors
    keys: RoundedVectors


def fill_moments(tensors: Tensors, rows: torch.Tensor, moments: Moments, head_dim: int, kept_d: int) -> None:
    """Compute mean keys, and choose channels."""
    _moments_kernel[(len(rows), tensors.q.shape[1])](
        tensors, rows, moments, HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), KEPT_D=kept_d,
        SAMPLE=SAMPLED_KEYS, num_warps=8,
    )  # fmt: skip


@triton.jit
def _moments_kernel(
    tensors, rows, moments,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, KEPT_D: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Compute the mean key of one row and head, and its KEPT_D channels with the largest weights.

    Grid: (rows, heads). Bound by latency: it reads up to SAMPLE keys and queries.

    Args:
        rows: [num_rows, 4] int32, ``Call.rows``.
    """
    i_head = tl.program_id(1).to(tl.int64)
    fields = rows + tl.program_id(0) * ROW_FIELDS
    q = tensors.q + tl.load(fields).to(tl.int64) * tensors.stride_q_token + i_head * tensors.stride_q_head
    k = tensors.k + tl.load(fields + 2).to(tl.int64) * tensors.stride_k_token + i_head * tensors.stride_k_head
    num_queries, num_keys = tl.load(fields + 1), tl.load(fields + 3)
    _, b_query_square, _ = _sums(q, tensors.stride_q_token, num_queries, HEAD_DIM, BLOCK_D, SAMPLE)
    b_sum, b_square, count = _sums(k, tensors.stride_k_token, num_keys, HEAD_DIM, BLOCK_D, SAMPLE)
    count = tl.maximum(count, 1).to(tl.float32)
    b_mean = b_sum / count
    b_weight = tl.maximum(b_square / count - b_mean * b_mean, 0.0) * b_query_square
    i_moments = tl.program_id(0) * tl.num_programs(1) + i_head
    tl.store(moments.means + i_moments * BLOCK_D + tl.arange(0, BLOCK_D), b_mean)
    keep_heaviest(moments.channels + i_moments * KEPT_D, b_weight, HEAD_DIM, KEPT_D)


@triton.jit
def _sums(x, stride_token, num_tokens, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SAMPLE: tl.constexpr):
    """Return the sum and the sum of squares of sampled vectors, and their number."""
    every = tl.maximum((num_tokens + SAMPLE - 1) // SAMPLE, 1)
    count = (num_tokens + every - 1) // every
    o_n, o_d = tl.arange(0, 32), tl.arange(0, BLOCK_D)
    b_sum = tl.zeros([32, BLOCK_D], tl.float32)
    b_square = tl.zeros([32, BLOCK_D], tl.float32)
    for i in range(0, count, 128):
        for j in tl.static_range(4):  # four loads in flight
            o_i = i + 32 * j + o_n
            o_x = (o_i * every).to(tl.int64)[:, None] * stride_token + o_d[None, :]
            b_x = tl.load(x + o_x, mask=(o_i < count)[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
            b_sum += b_x
            b_square += b_x * b_x
    return tl.sum(b_sum, 0), tl.sum(b_square, 0), count


@triton.jit(do_not_specialize=["first_head", "num_heads"])
def round_kept_kernel(
    vectors, rows, first_head, num_heads, softmax_scale, moments, target,
    FIELD: tl.constexpr, BY_BLOCK: tl.constexpr, SCORED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    KEPT_D: tl.constexpr,
):  # fmt: skip
    """Round the kept channels of 64 keys or scored queries of one row and head. The largest magnitude becomes 15.

    Grid: (parts of the longest row, rows, heads of the part). Bound by memory: it reads each vector once.

    Args:
        rows: [num_rows, 4] int32, ``Call.rows``.
    """
    fields = rows + tl.program_id(1) * ROW_FIELDS + FIELD
    start, count = tl.load(fields).to(tl.int64), tl.load(fields + 1)
    first = tl.program_id(0) * BLOCK
    num_vectors = num_scored(count, SCORED)  # tiles are whole, except for the last one, so rows have the rule of tiles
    if first < num_vectors:
        o_n, o_c = first + tl.arange(0, BLOCK), tl.arange(0, KEPT_D)
        in_row = (o_n < num_vectors)[:, None]
        i_head = tl.program_id(2).to(tl.int64)
        o_x = start + scored_offsets(o_n, count, SCORED)
        source = vectors.data + o_x[:, None] * vectors.stride_token
        source += (first_head + i_head) * vectors.stride_head
        i_moments = tl.program_id(1) * num_heads + first_head + i_head
        b_channels = tl.load(moments.channels + i_moments * KEPT_D + o_c)
        b_x = tl.load(source + b_channels[None, :], mask=in_row, other=0.0).to(tl.float32)
        o_place = i_head * target.num_places + o_x
        if BY_BLOCK:
            b_mean = tl.load(moments.means + i_moments * BLOCK_D + b_channels)
            b_x = tl.where(in_row, b_x - b_mean[None, :], 0.0)
            scale = tl.maximum(tl.max(tl.max(tl.abs(b_x), 1), 0), TINY) / LARGEST
            tl.store(target.scales + i_head * target.num_places + start + first, scale * softmax_scale)
            b_x *= 1.0 / scale
        else:
            o_d = tl.arange(0, BLOCK_D)
            b_mean = tl.load(moments.means + i_moments * BLOCK_D + o_d)
            b_whole = tl.load(source + o_d[None, :], mask=in_row & (o_d < HEAD_DIM)[None, :], other=0.0)
            b_shift = tl.sum(b_whole.to(tl.float32) * b_mean[None, :], 1) * softmax_scale
            tl.store(target.shifts + o_place, b_shift, mask=o_n < num_vectors)
            b_scale = tl.maximum(tl.max(tl.abs(b_x), 1), TINY) / LARGEST
            tl.store(target.scales + o_place, b_scale * softmax_scale, mask=o_n < num_vectors)
            b_x *= (1.0 / b_scale)[:, None]
        o_target = o_place[:, None] * KEPT_D + o_c[None, :]
        tl.store(target.data + o_target, in_e4m3(b_x, target.data.dtype.element_ty), mask=in_row)
