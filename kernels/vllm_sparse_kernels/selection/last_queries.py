# SPDX-License-Identifier: Apache-2.0
"""The estimate of MInference (arXiv:2407.02490, Algorithm 2).

Â is the softmax of a few of a row's queries over all keys: its last queries, or queries that are spread over its chunk.

The results are the column sums of Â and its sums over diagonals, of single keys or of blocks of 64. K is read twice,
first for the log-sum-exp of each query and then for the sums, so Â itself is never stored. Query heads that share keys
are stacked and share their reads. All sums have a fixed order. The split of a row's keys among programs depends only on
its length and on the number of heads.
"""

from typing import Any, NamedTuple

import torch
import triton

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.cards import shared_bytes
from vllm_sparse_kernels.compile_time import compile_time
from vllm_sparse_kernels.paged import padded_dim, query_args
from vllm_sparse_kernels.rows import Rows, ceil_div
from vllm_sparse_kernels.selection.last_query_kernels import (
    KEY_TILE,
    LastArgs,
    StackShape,
    SumArgs,
    block_diagonals_kernel,
    split_lse_kernel,
    sums_kernel,
)

MOST_QUERIES = 256
"""Maximum number of queries for diagonals of blocks: as many rows as a program stacks."""

QUERY_BYTES = 64 * 1024
"""Maximum bytes of the stacked queries of a program, unless those of a single head are more."""

JOIN_BYTES = 8 * 1024
"""Upper bound of the shared memory in which a program joins sums of threads, as compiled by Triton 3.9."""

WIDE_TILE_BYTES = 32 * 1024
"""Size above which a tile of keys takes three buffers in a pipeline of three stages, as compiled for Hopper. This
applies to head dims above 256."""

PROGRAMS = 264
"""Programs for a long row: as many as an H200 runs at a time, two per SM. Each program begins with loads, and nothing
would hide these loads in a second wave of programs."""


class Sums(NamedTuple):
    """Sums of Â over the rows [first_row, end_row) of a step, for n heads. Kernels locate them by ``sums_of``.

    ``values`` begins with the column sums [n, capacity], in which row i begins at ``key_starts[i] -
    key_starts[first_row]``. The sums of diagonals follow, by offset: at the same places or, for diagonals of blocks, at
    these places divided by 64.
    """

    values: torch.Tensor  # [n · (capacity + capacity / band)] float32
    patterns: torch.Tensor | None  # [n, num_rows] int32: entries other than 0 have no sums; None: all have sums
    capacity: int  # keys of these rows, each row padded to a multiple of 64
    num_selected: int  # n
    band: int  # 1: diagonals of keys; 64: of blocks of 64 keys
    first_row: int
    end_row: int

    def args(self, rows: Rows) -> tuple[Any, ...]:
        """Return the arguments by which kernels locate sums (``sums_of``).

        The numbers are separate arguments because they change from step to step: Triton would compile a new variant for
        each value in a tuple.
        """
        places = self.num_selected, self.first_row, rows.num_rows, self.capacity
        return SumArgs(self.values, rows.row_table, self.patterns), *places


class Estimate(NamedTuple):
    """The queries from which Â is computed, and the kind of its diagonals.

    Diagonals are those of keys (``band`` 1, at most 64 queries) or of blocks of 64 keys (``band`` 64, at most 256
    queries).

    With ``spread``, which needs ``band`` 64, the queries are evenly spread over the chunk instead of at its end.
    """

    last_queries: int
    band: int
    spread: bool = False


def last_query_sums(
    call: Call, row_range: tuple[int, int], estimate: Estimate, patterns: torch.Tensor | None = None
) -> Sums:
    """Sum Â of some rows over columns and diagonals: one pass for the log-sum-exps, and one for the sums."""
    rows, empty, (first_row, end_row) = call.rows, call.workspace.empty, row_range
    num_rows, num_selected, band = end_row - first_row, call.num_selected, estimate.band
    stacks = _Stacks.of(call, row_range, estimate)
    capacity = rows.key_starts[end_row] - rows.key_starts[first_row]
    values = empty(num_selected * (capacity + capacity // band))
    by_block = empty(num_selected, capacity // band, stacks.num_queries) if band > 1 else None
    sums = Sums(values, patterns, capacity, num_selected, band, first_row, end_row)
    partial = empty(num_rows, num_selected, stacks.most_splits, stacks.num_queries)
    args = LastArgs(
        query_args(call.q), call.key_args, call.head_ids, estimate.last_queries, partial,
        by_block, stacks.most_splits, stacks.least_tiles, call.scale_in_base_2,
    )  # fmt: skip
    shape = compile_time(
        StackShape(
            GROUP=call.group,
            MEMBERS=stacks.members,
            QUERIES=stacks.num_queries,
            SPREAD=estimate.spread,
            BAND=band,
            HEAD_DIM=call.cache.head_dim,
            BLOCK_D=call.cache.padded_head_dim,
            PAGE=call.cache.page_size,
            SELECTED=triton.next_power_of_2(num_selected),
        )
    )
    grid = (stacks.num_splits, stacks.num_stacks, num_rows)
    # Two programs run on an SM at a time, so that the exponentials of one hide behind the products of the other. In the
    # first pass they have many warps with few registers. In the second they have one warp group, with a warp for each
    # of 4 stacked heads, and sum columns. Diagonals of keys are always summed within a warp.
    stacked = stacks.members * stacks.num_queries
    lse_registers = 64 if stacked > KEY_TILE.value and call.q.dtype != torch.float32 else None
    split_lse_kernel[grid](
        args, *sums.args(rows)[:-1], shape,
        num_warps=stacked // 16, maxnreg=lse_registers, num_stages=stacks.num_stages,
    )  # fmt: skip
    sums_kernel[grid](
        args, *sums.args(rows), shape, num_warps=4 if band > 1 else stacks.members,
        num_stages=stacks.num_stages,
    )  # fmt: skip
    if by_block is not None:
        block = 4096 // stacks.num_queries
        most_blocks = ceil_div(max(rows.seq_lens[first_row:end_row]), KEY_TILE.value)
        block_diagonals_kernel[(ceil_div(most_blocks, block), num_selected, num_rows)](
            by_block, *sums.args(rows), estimate.last_queries,
            QUERIES=stacks.num_queries, SPREAD=estimate.spread, BLOCK=block,
        )  # fmt: skip
    return sums


class _Stacks(NamedTuple):
    """Division of both passes among programs, which each take a stack of query heads and a split of the keys."""

    num_queries: int  # rows of one head in a stack, a multiple of 64
    members: int  # query heads of a stack, a power of two
    num_stacks: int  # of all kv heads
    most_splits: int  # maximum number of splits of a row's keys
    least_tiles: int  # minimum number of key tiles of a split
    num_splits: int  # largest number of splits among the rows
    num_stages: int  # pipeline stages

    @staticmethod
    def of(call: Call, row_range: tuple[int, int], estimate: Estimate) -> "_Stacks":
        """Divide the passes over the keys of some rows."""
        num_kv_heads = call.cache.num_kv_heads
        vector_bytes = call.cache.padded_head_dim * call.q.element_size()
        num_queries = max(KEY_TILE.value, triton.next_power_of_2(estimate.last_queries))
        head_bytes = num_queries * vector_bytes
        members = min(
            triton.next_power_of_2(call.group), MOST_QUERIES // num_queries, max(1, QUERY_BYTES // head_bytes)
        )
        num_stacks = num_kv_heads * ceil_div(call.group, members)
        # Use fewer programs if a program would otherwise be shorter than its start.
        most_splits, least_tiles = max(PROGRAMS // 8, min(256, PROGRAMS // num_stacks)), max(4, min(16, 2 * num_stacks))
        # The longest row's splits may be longer, and therefore fewer, than those of a shorter row.
        num_tiles = [ceil_div(seq_len, KEY_TILE.value) for seq_len in call.rows.seq_lens[slice(*row_range)]]
        num_splits = max(ceil_div(n, max(least_tiles, ceil_div(n, most_splits))) for n in num_tiles)
        num_stages = _num_stages(members * head_bytes, KEY_TILE.value * vector_bytes, shared_bytes(call.q.device))
        return _Stacks(num_queries, members, num_stacks, most_splits, least_tiles, num_splits, num_stages)


def least_shared_bytes(last_queries: int, head_dim: int) -> int:
    """Return the shared memory that the passes over the keys need, without buffers for keys."""
    num_queries = max(KEY_TILE.value, triton.next_power_of_2(last_queries))
    return num_queries * padded_dim(head_dim) * 2 + JOIN_BYTES


def _num_stages(stack_bytes: int, tile_bytes: int, limit_bytes: int) -> int:
    """Return the pipeline stages of both passes over the keys."""
    free_bytes = limit_bytes - stack_bytes - JOIN_BYTES
    if free_bytes < tile_bytes:
        return 1
    num_tiles = 2 if tile_bytes <= WIDE_TILE_BYTES else 3
    return 3 if num_tiles * tile_bytes <= free_bytes and stack_bytes <= QUERY_BYTES else 2
