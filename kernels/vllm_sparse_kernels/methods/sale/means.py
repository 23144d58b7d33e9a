# SPDX-License-Identifier: Apache-2.0
"""Mean keys and mean queries of rows, which SALE subtracts before it rounds."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.paged import load_queries, padded_dim, query_args
from vllm_sparse_kernels.rows import ROW_FIELDS, TILE
from vllm_sparse_kernels.selection.key_sums import key_sums
from vllm_sparse_kernels.selection.lists import load_tile


class Means(NamedTuple):
    """Float32 means of each row's keys and new queries, padded with zeros."""

    keys: Any  # [num_rows, num_kv_heads, BLOCK_D]
    queries: Any  # [num_rows, num_heads, BLOCK_D]


def row_means(call: Call) -> Means:
    """Average the keys and the queries of each row."""
    q, cache, rows, workspace = call.q, call.cache, call.rows, call.index.workspace
    num_heads, num_kv_heads, head_dim = q.shape[1], cache.num_kv_heads, cache.head_dim
    block_d = padded_dim(head_dim)
    means = Means(
        keys=workspace.empty(rows.num_rows, num_kv_heads, block_d),
        queries=workspace.empty(rows.num_rows, num_heads, block_d),
    )
    with workspace.frame():
        sums = workspace.empty(rows.num_tiles, num_heads, block_d)
        _query_sums_kernel[(rows.num_tiles, num_heads)](
            query_args(q), rows.tiles, sums, HEAD_DIM=head_dim, BLOCK_D=block_d
        )
        _means_kernel[(rows.num_rows, num_heads)](
            sums, rows.device_tile_starts, rows.row_table, means.queries, BLOCK_D=block_d, COUNT=1
        )
    with workspace.frame():
        sums, splits = key_sums(cache, rows, workspace, moments=1, period=1, groups=8, num_warps=4)
        _means_kernel[(rows.num_rows, num_kv_heads)](
            sums, splits.device_starts, rows.row_table, means.keys, BLOCK_D=block_d, COUNT=2
        )
    return means


@triton.jit
def _query_sums_kernel(queries, tiles, sums, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Sum the queries of a tile and head.

    Grid: (tiles, heads). Bound by memory: it reads each query once.

    Args:
        tiles: [num_tiles, 4] int32, ``Rows.tiles``.
        sums: [num_tiles, heads, BLOCK_D] float32; written.
    """
    i_tile, i_head = tl.program_id(0), tl.program_id(1)
    _, token, length, _ = load_tile(tiles, i_tile)
    o_d = tl.arange(0, BLOCK_D)
    b_q = load_queries(queries, i_head, token, length, TILE, HEAD_DIM, BLOCK_D).to(tl.float32)
    i_sum = i_tile * tl.num_programs(1) + i_head
    tl.store(sums + i_sum * BLOCK_D + o_d, tl.sum(b_q, 0))


@triton.jit
def _means_kernel(sums, starts, rows, means, BLOCK_D: tl.constexpr, COUNT: tl.constexpr):
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
    o_d = tl.arange(0, BLOCK_D)
    end = tl.load(starts + i_row + 1)
    b_sum = tl.zeros([32, BLOCK_D], tl.float32)
    for i in range(tl.load(starts + i_row), end, 32):
        o_s = i + tl.arange(0, 32)
        o_sum = (o_s[:, None] * num_heads + i_head) * BLOCK_D + o_d[None, :]
        b_sum += tl.load(sums + o_sum, mask=(o_s < end)[:, None], other=0.0)
    b_mean = tl.sum(b_sum, 0) / tl.load(rows + i_row * ROW_FIELDS + COUNT).to(tl.float32)
    tl.store(means + (i_row * num_heads + i_head) * BLOCK_D + o_d, b_mean)
