# SPDX-License-Identifier: Apache-2.0
"""The softmax mass of every key block, exact and averaged over a tile's queries: SharePrefill's maps from attention.

Two passes over QK, as in the authors' code, whose attention kernel makes such maps of pivots: the log-sum-exp of each
query, then the sums of the probabilities within each block. A tile's keys are split among programs, as few heads are
pivots; how, depends on its own number of keys alone, and all sums have a fixed order.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.share_prefill.block_average import QueryArgs, load_queries
from vllm_sparse_kernels.paged import PagedCache, key_args, load_keys
from vllm_sparse_kernels.rows import TILE_FIELDS, TILE_TOKENS, Rows, ceil_div

LOG2_E = 1.4426950408889634

MOST_SPLITS = tl.constexpr(16)

SPLIT_KEYS = tl.constexpr(2048)
"""A split has no fewer keys: each begins with loading the tile's queries."""


class MassArgs(NamedTuple):
    """Job j is about head ``heads[places[j, row]]``: none if the place is −1. Its masses go to row ``out_rows[j]``."""

    heads: Any
    places: Any
    tiles: Any
    out: Any
    out_rows: Any
    out_offsets: Any
    partial: Any


def num_splits(rows: Rows) -> int:
    """Most splits that a tile's keys have."""
    return min(MOST_SPLITS.value, ceil_div(max(rows.seq_lens), SPLIT_KEYS.value))


def block_masses(
    q: torch.Tensor,
    cache: PagedCache,
    index: SparseIndex,
    heads: torch.Tensor,
    scale: float,
    places: torch.Tensor,
    out: torch.Tensor,
    out_rows: torch.Tensor,
) -> None:
    """Of all tiles of the heads at ``places``, into out [.., block_capacity] float32, laid out as block_ids.

    places [jobs, num_rows] int32 point into ``heads``; where one is −1, nothing is computed. out_rows [jobs] int32.
    Each tile's masses sum to 1.
    """
    rows, room, num_jobs = index.rows, index.workspace.empty, len(places)
    splits, group, head_dim = num_splits(rows), q.shape[1] // cache.num_kv_heads, cache.head_dim
    with index.workspace.frame():
        partial = room(num_jobs, rows.num_tiles, splits, TILE_TOKENS)
        grid = (rows.num_tiles, splits, num_jobs)
        arguments = (
            QueryArgs(q, q.stride(0), q.stride(1), scale * LOG2_E), key_args(cache, rows.block_table),
            MassArgs(heads, places, rows.tiles, out, out_rows, index.block_offsets, partial),
            rows.num_rows, out.stride(0),
        )  # fmt: skip
        is_float32, block_d = q.dtype == torch.float32, triton.next_power_of_2(head_dim)
        options = {
            "HEAD_DIM": head_dim,
            "BLOCK_D": block_d,
            "FIELDS": TILE_FIELDS,
            "GROUP": group,
            "BLOCK_M": TILE_TOKENS,
            "BLOCK_N": index.block_tokens,
            "STEP": max(index.block_tokens, 64 if is_float32 or block_d > 128 else 128),
            "PRECISION": "ieee" if is_float32 else "tf32",
            "num_warps": 8,
        }
        # Two programs on a multiprocessor at a time: one's exponentials hide behind the other's products.
        options |= {"num_stages": 2} if is_float32 else {"num_stages": 3, "maxnreg": 128}
        _tile_lse_kernel[grid](*arguments, **options)
        _masses_kernel[grid](*arguments, **options)


@triton.jit
def _head_of(heads, places, num_rows, i_job, i_row):
    """The query head that job ``i_job`` is about in a row, or −1."""
    place = tl.load(places + i_job * num_rows + i_row)
    return tl.load(heads + place, mask=place >= 0, other=-1)


@triton.jit
def _split(tiles, i_tile, STEP: tl.constexpr, FIELDS: tl.constexpr):
    """(first key of the program's split, its end, where keys begin that not all queries see, number of splits)."""
    first = tl.load(tiles + i_tile * FIELDS + 3)
    steps = (first + tl.load(tiles + i_tile * FIELDS + 2) + STEP - 1) // STEP
    taken = tl.maximum((SPLIT_KEYS + STEP - 1) // STEP, (steps + MOST_SPLITS - 1) // MOST_SPLITS)
    begin = tl.program_id(1) * taken
    end = tl.minimum(begin + taken, steps)
    whole = tl.minimum(tl.maximum((first + 1) // STEP, begin), end)
    return begin * STEP, end * STEP, whole * STEP, (steps + taken - 1) // taken


@triton.jit
def _scores(
    b_q, queries, keys, i_row, i_kv, start, first, end, IS_WHOLE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of a tile, whose first query stands at ``first``, on STEP keys, in powers of two; −inf where unseen."""
    o_n = start + tl.arange(0, STEP)
    b_k = load_keys(keys, i_row, i_kv, o_n, end, HEAD_DIM, BLOCK_D)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * queries.scale
    if not IS_WHOLE:
        b_s = tl.where(o_n[None, :] <= first + tl.arange(0, BLOCK_M)[:, None], b_s, float("-inf"))
    return b_s


@triton.jit
def _join(b_max, b_sum, b_s):
    """Running maxima and sums of exponentials relative to them, with the scores of one more step."""
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)  # queries may see none of the split's keys
    return b_new, b_sum * tl.exp2(b_max - b_shift) + tl.sum(tl.exp2(b_s - b_shift[:, None]), 1)


@triton.jit(do_not_specialize=["num_rows", "stride_out"])
def _tile_lse_kernel(
    queries, keys, jobs, num_rows, stride_out,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, FIELDS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp of each query of one (tile, job) over one split of its keys."""
    i_tile, i_job = tl.program_id(0), tl.program_id(2)
    i_row = tl.load(jobs.tiles + i_tile * FIELDS)
    i_head = _head_of(jobs.heads, jobs.places, num_rows, i_job, i_row).to(tl.int64)
    begin, end, whole, _ = _split(jobs.tiles, i_tile, STEP, FIELDS)
    if (i_head < 0) | (begin >= end):
        return
    token, length = tl.load(jobs.tiles + i_tile * FIELDS + 1), tl.load(jobs.tiles + i_tile * FIELDS + 2)
    first = tl.load(jobs.tiles + i_tile * FIELDS + 3)
    b_q = load_queries(queries, i_head, token, length, BLOCK_M, HEAD_DIM, BLOCK_D)
    b_max, b_sum = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    for i in tl.static_range(2):
        for start in range(begin if i == 0 else whole, whole if i == 0 else end, STEP):
            b_s = _scores(
                b_q, queries, keys, i_row, i_head // GROUP, start, first, first + length, i == 0,
                HEAD_DIM, BLOCK_D, BLOCK_M, STEP, PRECISION,
            )  # fmt: skip
            b_max, b_sum = _join(b_max, b_sum, b_s)
    i_partial = (i_job * tl.num_programs(0) + i_tile) * tl.num_programs(1) + tl.program_id(1)
    target = jobs.partial + i_partial.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(target, b_max + tl.log2(b_sum))


@triton.jit
def _joined_lse(jobs, i_tile, splits, length, BLOCK_M: tl.constexpr):
    """Splits joined, for each query; +inf, of which no probability is left, from ``length`` on."""
    o_m, o_split = tl.arange(0, BLOCK_M), tl.arange(0, MOST_SPLITS)
    i_first = (tl.program_id(2) * tl.num_programs(0) + i_tile).to(tl.int64) * tl.num_programs(1)
    b_lse = tl.load(
        jobs.partial + (i_first + o_split)[None, :] * BLOCK_M + o_m[:, None],
        mask=(o_split < splits)[None, :], other=float("-inf"),
    )  # fmt: skip
    b_max = tl.max(b_lse, 1)
    b_lse = b_max + tl.log2(tl.sum(tl.exp2(b_lse - b_max[:, None]), 1))
    return tl.where(o_m < length, b_lse, float("inf"))


@triton.jit
def _store_masses(
    target, b_s, b_lse, start, length, end, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr
):
    """Mean probability of the queries that each block of the step's has; the tile has keys up to ``end``."""
    b_p = tl.reshape(tl.exp2(b_s - b_lse[:, None]), [BLOCK_M, STEP // BLOCK_N, BLOCK_N])
    b_block = tl.sum(tl.sum(b_p, 2), 0)
    o_block = start // BLOCK_N + tl.arange(0, STEP // BLOCK_N)
    tl.store(target + o_block, b_block / length, mask=o_block * BLOCK_N < end)


@triton.jit(do_not_specialize=["num_rows", "stride_out"])
def _masses_kernel(
    queries, keys, jobs, num_rows, stride_out,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, FIELDS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The masses of the blocks of one split of one (tile, job)."""
    i_tile, i_job = tl.program_id(0), tl.program_id(2)
    i_row = tl.load(jobs.tiles + i_tile * FIELDS)
    i_head = _head_of(jobs.heads, jobs.places, num_rows, i_job, i_row).to(tl.int64)
    begin, end, whole, splits = _split(jobs.tiles, i_tile, STEP, FIELDS)
    if (i_head < 0) | (begin >= end):
        return
    token, length = tl.load(jobs.tiles + i_tile * FIELDS + 1), tl.load(jobs.tiles + i_tile * FIELDS + 2)
    first = tl.load(jobs.tiles + i_tile * FIELDS + 3)
    b_lse = _joined_lse(jobs, i_tile, splits, length, BLOCK_M)
    b_q = load_queries(queries, i_head, token, length, BLOCK_M, HEAD_DIM, BLOCK_D)
    i_out = tl.load(jobs.out_rows + i_job).to(tl.int64)
    target = jobs.out + i_out * stride_out + tl.load(jobs.out_offsets + i_tile)
    for i in tl.static_range(2):
        for start in range(begin if i == 0 else whole, whole if i == 0 else end, STEP):
            b_s = _scores(
                b_q, queries, keys, i_row, i_head // GROUP, start, first, first + length, i == 0,
                HEAD_DIM, BLOCK_D, BLOCK_M, STEP, PRECISION,
            )  # fmt: skip
            _store_masses(target, b_s, b_lse, start, length, first + length, BLOCK_M, BLOCK_N, STEP)
