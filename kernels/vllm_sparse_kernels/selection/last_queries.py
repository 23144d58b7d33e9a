# SPDX-License-Identifier: Apache-2.0
"""The estimate of MInference (arXiv:2407.02490, Algorithm 2).

Â is the softmax of a few of a row's queries over all keys: its last queries, or queries that are spread over its chunk.

What is kept of Â are its column sums, and its sums over diagonals: of keys, one by one, or of blocks of 64. K is read
twice, the first time for the log-sum-exp of each query, the second for the sums, so that Â itself is never stored.
Query heads that share keys are stacked and share what is read. All sums have a fixed order, and how a row's keys are
split among programs depends on its own length and on the number of heads alone.
"""

from typing import Any, NamedTuple

import torch
import triton

from vllm_sparse_kernels.cards import shared_bytes
from vllm_sparse_kernels.compile_time import compile_time
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import ROW_FIELDS, Rows, ceil_div
from vllm_sparse_kernels.selection.last_query_kernels import (
    LAST,
    LastArgs,
    StackShape,
    SumArgs,
    block_diagonals_kernel,
    split_lse_kernel,
    sums_kernel,
)

LOG2_E = 1.4426950408889634

MOST_QUERIES = 256
"""The most queries where diagonals of blocks are summed: as many rows as a program stacks."""

QUERY_BYTES = 64 * 1024
"""Stacked queries of one program, at most; those of one head may be more."""

JOIN_BYTES = 8 * 1024
"""Upper bound of the shared memory in which a program joins sums of threads, as compiled by Triton 3.9."""

PROGRAMS = 264
"""Programs for a long row: as many as an H200 runs at a time, two on each multiprocessor. Each begins by loading what
it needs, which in a second wave of programs nothing would hide."""

LANES = 4
"""Threads that a row of the matrix instruction's result lies in."""

JOINED = 64
"""Splits whose log-sum-exps are loaded at a time."""


class Sums(NamedTuple):
    """Sums of Â over the rows [first_row, end_row) of a step, for n heads. Kernels locate them by ``sums_of``.

    ``values`` [n · (capacity + capacity / band)] float32: column sums [n, capacity], row i's from
    ``key_starts[i] - key_starts[first_row]`` on; then the sums of diagonals by their offset, in the same places, or
    those of blocks by theirs (``band`` 64), each place divided by 64.

    ``by_block`` [n, capacity / 64, queries] float32, for ``band`` 64: what each of the queries gives to each block.
    """

    values: torch.Tensor
    patterns: torch.Tensor | None
    capacity: int
    num_entries: int
    band: int
    first_row: int
    end_row: int
    by_block: torch.Tensor | None = None

    def args(self, rows: Rows) -> tuple[Any, ...]:
        """Return the arguments by which kernels locate sums (``sums_of``).

        The numbers are separate arguments because they change from step to step: Triton would compile a kernel anew for
        each value in a tuple.

        Args:
            rows: The rows of the step.

        Returns:
            (``SumArgs``, number of heads, first row, number of rows, capacity).
        """
        places = self.num_entries, self.first_row, rows.num_rows, self.capacity
        return SumArgs(self.values, rows.row_table, self.patterns), *places


class Estimate(NamedTuple):
    """The queries from which Â is computed, and the kind of its diagonals.

    Diagonals are those of keys (``band`` 1, at most 64 queries) or of blocks of 64 keys (``band`` 64, at most 256
    queries).

    ``spread``, for the latter alone: not the last queries but as many, evenly spread over the chunk.
    """

    last_queries: int
    band: int
    spread: bool = False


def last_query_sums(
    q: torch.Tensor,
    cache: PagedCache,
    index: SparseIndex,
    rows: tuple[int, int],
    heads: torch.Tensor,
    scale: float,
    estimate: Estimate,
    patterns: torch.Tensor | None = None,
) -> Sums:
    """Sum Â of some rows over columns and diagonals.

    Args:
        q: [num_tokens, num_heads, head_dim], in the cache's dtype.
        cache: Keys and values of the layer, in pages of [page_size, num_kv_heads, head_dim].
        index: The index, whose rows and workspace are used.
        rows: First row, and the row after the last one.
        heads: [n] int32 on the device, numbers of the selected query heads.
        scale: Factor from q·k to scores, usually 1/√head_dim; above 0.
        estimate: The queries from which Â is computed.
        patterns: [n, num_rows] int32, 0 for the heads and rows to process; None to process all.

    Returns:
        The sums, in the index's workspace.
    """
    step, room, (last_queries, band, spread) = index.rows, index.workspace.empty, estimate
    first_row, end_row = rows
    num_rows, num_entries = end_row - first_row, len(heads)
    capacity = step.key_starts[end_row] - step.key_starts[first_row]
    group, block_d = q.shape[1] // cache.num_kv_heads, triton.next_power_of_2(cache.head_dim)
    num_queries = max(LAST.value, triton.next_power_of_2(last_queries))
    bytes_a_head = num_queries * block_d * q.element_size()
    members = min(triton.next_power_of_2(group), MOST_QUERIES // num_queries, max(1, QUERY_BYTES // bytes_a_head))
    stacks = cache.num_kv_heads * ceil_div(group, members)
    # Fewer programs where one would be shorter than what it begins with.
    most_splits, least_tiles = max(PROGRAMS // 8, min(256, PROGRAMS // stacks)), max(4, min(16, 2 * stacks))
    num_tiles = [ceil_div(seq_len, LAST.value) for seq_len in step.seq_lens[first_row:end_row]]
    # The longest row's splits may be longer, and so fewer than a shorter one's.
    num_splits = max(ceil_div(n, max(least_tiles, ceil_div(n, most_splits))) for n in num_tiles)

    values = room(num_entries * (capacity + capacity // band))
    partial = room(num_rows, num_entries, most_splits, num_queries)
    by_block = room(num_entries, capacity // band, num_queries) if band > 1 else None
    args = LastArgs(
        q, q.stride(0), q.stride(1), cache.keys, *cache.strides, step.block_table, step.row_table, heads,
        num_entries, last_queries, patterns, partial, by_block, most_splits, least_tiles, scale * LOG2_E,
    )  # fmt: skip
    where = (step.block_table.stride(0), step.num_rows, first_row)
    shape = compile_time(
        StackShape(
            GROUP=group,
            MEMBERS=members,
            QUERIES=num_queries,
            SPREAD=spread,
            BAND=band,
            HEAD_DIM=cache.head_dim,
            BLOCK_D=block_d,
            PAGE=cache.page_size,
            ENTRIES=triton.next_power_of_2(num_entries),
            FIELDS=ROW_FIELDS,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        )
    )
    grid = (num_splits, stacks, num_rows)
    stacked = members * num_queries
    tile_bytes = LAST.value * block_d * q.element_size()
    num_stages = _num_stages(members * bytes_a_head, tile_bytes, shared_bytes(q.device))
    # Two programs on a multiprocessor at a time, as one's exponentials hide behind the other's products: of many warps
    # with few registers in the one pass; in the other of one group, with a warp for each of four stacked heads, within
    # which columns are summed. Diagonals of keys always are summed within a warp.
    lse_registers = 64 if stacked > LAST.value and q.dtype != torch.float32 else None
    split_lse_kernel[grid](
        args, *where, shape, LANES=LANES, num_warps=stacked // 16, maxnreg=lse_registers, num_stages=num_stages
    )
    sums_kernel[grid](
        args, *where, capacity, values, shape, JOINED=JOINED, num_warps=4 if band > 1 else members,
        num_stages=num_stages,
    )  # fmt: skip
    sums = Sums(values, patterns, capacity, num_entries, band, first_row, end_row, by_block)
    if by_block is not None:
        _sum_block_diagonals(sums, by_block, index, max(num_tiles), last_queries, spread)
    return sums


def _num_stages(stack_bytes: int, tile_bytes: int, limit_bytes: int) -> int:
    """Return the pipeline stages of both passes over the keys.

    Args:
        stack_bytes: Stacked queries of a program.
        tile_bytes: A tile of keys.
        limit_bytes: Shared memory of a program.

    Returns:
        3 for two buffered tiles, or 2 for one if the queries are many or two do not fit the GPU.
    """
    fits = stack_bytes + 2 * tile_bytes + JOIN_BYTES <= limit_bytes
    return 3 if fits and stack_bytes <= QUERY_BYTES else 2


def _sum_block_diagonals(
    sums: Sums, by_block: torch.Tensor, index: SparseIndex, most_tiles: int, last_queries: int, spread: bool
) -> None:
    """Sum diagonals of blocks from the weight that each query gives to each block.

    ``most_tiles``: blocks of the longest row.
    """
    num_queries = by_block.shape[2]
    block = 4096 // num_queries
    block_diagonals_kernel[(ceil_div(most_tiles, block), sums.num_entries, sums.end_row - sums.first_row)](
        by_block, *sums.args(index.rows), last_queries,
        QUERIES=num_queries, SPREAD=spread, BAND=sums.band, FIELDS=ROW_FIELDS, BLOCK=block,
    )  # fmt: skip
