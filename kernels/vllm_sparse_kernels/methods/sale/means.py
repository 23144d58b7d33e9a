# SPDX-License-Identifier: Apache-2.0
"""Mean keys and mean queries of rows, which SALE subtracts before it rounds."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.paged import load_queries, query_args
from vllm_sparse_kernels.rows import TILE
from vllm_sparse_kernels.selection.key_sums import mean_keys, means_kernel
from vllm_sparse_kernels.selection.lists import load_tile
from vllm_sparse_kernels.vectors import store_vector


class Means(NamedTuple):
    """Float32 means of each row's keys and new queries, padded with zeros."""

    keys: Any  # [num_rows, num_kv_heads, BLOCK_D]
    queries: Any  # [num_rows, num_heads, BLOCK_D]


def row_means(call: Call) -> Means:
    """Average the keys and the queries of each row."""
    q, cache, rows, workspace = call.q, call.cache, call.rows, call.workspace
    num_heads, block_d = q.shape[1], cache.padded_head_dim
    means = Means(mean_keys(cache, rows, workspace), workspace.empty(rows.num_rows, num_heads, block_d))
    with workspace.frame():
        sums = workspace.empty(rows.num_tiles, num_heads, block_d)
        _query_sums_kernel[(rows.num_tiles, num_heads)](
            query_args(q), rows.tiles, sums, HEAD_DIM=cache.head_dim, BLOCK_D=block_d
        )
        means_kernel[(rows.num_rows, num_heads)](
            sums, rows.device_tile_starts, rows.row_table, means.queries, BLOCK_D=block_d, COUNT=1
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
    b_q = load_queries(queries, i_head, token, length, TILE, HEAD_DIM, BLOCK_D).to(tl.float32)
    store_vector(sums, i_tile * tl.num_programs(1) + i_head, tl.sum(b_q, 0))
