# SPDX-License-Identifier: Apache-2.0
"""Sums of a row's keys, and of their squares, in splits: for mean keys, and for the variance of channels."""

from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.paged import PagedCache, key_args, load_keys
from vllm_sparse_kernels.rows import ROW_FIELDS, Rows, ceil_div
from vllm_sparse_kernels.vectors import load_vectors, store_vector
from vllm_sparse_kernels.workspace import Workspace

GROUP_TOKENS = Constant(64)
"""Consecutive keys that are loaded together."""


class Splits(NamedTuple):
    """Splits of the keys of all rows."""

    starts: list[int]  # [num_rows + 1] first split of each row; the last entry is the number of all splits
    device_starts: torch.Tensor  # [num_rows + 1] int32: ``starts``
    most: int  # splits of the longest row


def key_sums(
    cache: PagedCache, rows: Rows, workspace: Workspace, *, moments: int, period: int, groups: int, num_warps: int
) -> tuple[torch.Tensor, Splits]:
    """Sum keys and, with two ``moments``, their squares: those of the first of every ``period`` groups of 64 keys.

    A split has ``groups`` such groups. The sums are [splits of all rows, num_kv_heads, moments, BLOCK_D] float32.
    """
    block_d, split_tokens = cache.padded_head_dim, GROUP_TOKENS.value * period * groups
    splits = rows.once(_splits, split_tokens)
    sums = workspace.empty(splits.starts[-1], cache.num_kv_heads, moments, block_d)
    _key_sums_kernel[(splits.most, cache.num_kv_heads, rows.num_rows)](
        key_args(cache, rows.block_table), splits.device_starts, rows.device_seq_lens, sums,
        HEAD_DIM=cache.head_dim, BLOCK_D=block_d, MOMENTS=moments, PERIOD=period, GROUPS=groups, num_warps=num_warps,
    )  # fmt: skip
    return sums, splits


def mean_keys(cache: PagedCache, rows: Rows, workspace: Workspace) -> torch.Tensor:
    """Average the keys of each row: [num_rows, num_kv_heads, BLOCK_D] float32."""
    means = workspace.empty(rows.num_rows, cache.num_kv_heads, cache.padded_head_dim)
    with workspace.frame():
        sums, splits = key_sums(cache, rows, workspace, moments=1, period=1, groups=8, num_warps=4)
        means_kernel[(rows.num_rows, cache.num_kv_heads)](
            sums, splits.device_starts, rows.row_table, means, BLOCK_D=means.shape[2], COUNT=2
        )
    return means


def _splits(rows: Rows, split_tokens: int) -> Splits:
    counts = [ceil_div(seq_len, split_tokens) for seq_len in rows.seq_lens]
    starts = [*accumulate(counts, initial=0)]
    return Splits(starts, rows.to_device(starts), max(counts))


@triton.jit
def _key_sums_kernel(
    keys, starts, seq_lens, sums,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MOMENTS: tl.constexpr, PERIOD: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Sum the keys of one split and kv head, and their squares.

    Grid: (splits of the longest row, kv heads, rows). Bound by memory: it reads each key of the sample once.

    Args:
        starts: [num_rows + 1] int32, a row's first split.
        seq_lens: [num_rows] int32, each row's keys.
        sums: [splits of all rows, kv heads, MOMENTS, BLOCK_D] float32; written.
    """
    i_kv, i_row = tl.program_id(1), tl.program_id(2)
    i_split = tl.load(starts + i_row) + tl.program_id(0)
    if i_split < tl.load(starts + i_row + 1):
        seq_len = tl.load(seq_lens + i_row)
        b_sum = tl.zeros([GROUP_TOKENS, BLOCK_D], tl.float32)
        b_square = tl.zeros([GROUP_TOKENS if MOMENTS == 2 else 1, BLOCK_D], tl.float32)
        for i in tl.static_range(GROUPS):
            first = (tl.program_id(0) * GROUPS + i) * (GROUP_TOKENS * PERIOD)
            o_n = first + tl.arange(0, GROUP_TOKENS)
            b_k = load_keys(keys, i_row, i_kv, o_n, seq_len, HEAD_DIM, BLOCK_D).to(tl.float32)
            b_sum += b_k
            if MOMENTS == 2:
                b_square += b_k * b_k
        i_sum = (i_split * tl.num_programs(1) + i_kv) * MOMENTS
        store_vector(sums, i_sum, tl.sum(b_sum, 0))
        if MOMENTS == 2:
            store_vector(sums, i_sum + 1, tl.sum(b_square, 0))


@triton.jit
def means_kernel(sums, starts, rows, means, BLOCK_D: tl.constexpr, COUNT: tl.constexpr):
    """Average one row and head from the sums [starts[row], starts[row + 1]) of rows[row, COUNT] vectors.

    Grid: (rows, heads). Bound by latency: a few KB per program.

    Args:
        sums: [sums of all rows, heads, BLOCK_D] float32.
        starts: [num_rows + 1] int32, a row's first sum.
        rows: [num_rows + 1, 4] int32, ``Rows.row_table``.
        means: [num_rows, heads, BLOCK_D] float32; written.
    """
    i_row, i_head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    end = tl.load(starts + i_row + 1)
    b_sum = tl.zeros([32, BLOCK_D], tl.float32)
    for i in range(tl.load(starts + i_row), end, 32):
        o_s = i + tl.arange(0, 32)
        b_sum += load_vectors(sums, o_s * num_heads + i_head, o_s < end, BLOCK_D)
    b_mean = tl.sum(b_sum, 0) / tl.load(rows + i_row * ROW_FIELDS + COUNT).to(tl.float32)
    store_vector(means, i_row * num_heads + i_head, b_mean)
