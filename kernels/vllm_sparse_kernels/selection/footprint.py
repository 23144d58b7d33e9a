# SPDX-License-Identifier: Apache-2.0
"""Upper bounds, on the host, of the workspace memory of selection. A test checks every method against them.

Methods allocate tensors by key, or by pair of blocks, for one slab of rows or keys at a time. Long steps therefore need
little more memory than short steps. All functions return bytes.
"""

from collections.abc import Sequence

from triton import next_power_of_2

from vllm_sparse_kernels.index import LayerShape
from vllm_sparse_kernels.rows import TILE_TOKENS, Rows, ceil_div
from vllm_sparse_kernels.selection.lines import slabs_of_rows
from vllm_sparse_kernels.selection.slabs import SLAB_BYTES, padded, rows_of_slabs
from vllm_sparse_kernels.workspace import SPARE_BYTES


def most_bytes(rows: Rows, shape: LayerShape, num_selected: int, stripe_capacity: int, num_columns: int = 0) -> int:
    """Return a bound that is sufficient for any of the methods below."""
    ways = (
        line_bytes(rows, num_selected, num_columns),
        rounded_bytes(rows, shape, num_selected),
        pooled_bytes(rows, shape, num_selected),
        voted_bytes(rows, shape, stripe_capacity),
    )
    return max(ways) + SPARE_BYTES


def line_bytes(rows: Rows, num_selected: int, num_columns: int) -> int:
    """Bound the memory of vertical-slash: sums by key and by distance, counts of kept lines, histograms and columns."""

    def of_slab(seq_lens: Sequence[int]) -> int:
        num_rows, longest = len(seq_lens), max(seq_lens)
        row_head = (64 << 10) + (14 << 10) * min(16, ceil_div(longest, 4096)) + 4 * min(longest, num_columns)
        return num_selected * (21 * (sum(seq_lens) + 64 * num_rows) + num_rows * row_head) + num_rows * (512 << 10)

    return max(of_slab(rows.seq_lens[first:end]) for first, end in slabs_of_rows(rows, num_selected))


def rounded_bytes(rows: Rows, shape: LayerShape, num_selected: int) -> int:
    """Bound the memory of SALE: 8-bit queries, a slab of keys with scales, flags, and float32 sums of queries."""
    dim = next_power_of_2(shape.head_dim)
    num_keys = max(sum(map(padded, rows.seq_lens[first:end])) for first, end in rows_of_slabs(rows))
    keys = num_keys * (shape.num_kv_heads * (dim + 1) + 7 * num_selected)
    queries = num_selected * rows.num_tiles * TILE_TOKENS * (dim + 12)
    sums = 8 * dim * (shape.num_heads * (rows.num_tiles + rows.num_rows) + shape.num_kv_heads * 2 * rows.num_rows)
    splits = 8 * dim * shape.num_kv_heads * sum(ceil_div(n, 512) for n in rows.seq_lens)
    flags = 2 * num_selected * sum(rows.block_capacities(shape.block_tokens))
    return keys + queries + sums + splits + flags


def pooled_bytes(rows: Rows, shape: LayerShape, num_selected: int) -> int:
    """Bound the memory of SpargeAttn and block-sparse: mean queries, mean keys and products of a slab, flags."""
    of_tile = 8 * num_selected * 64 * ceil_div(max(rows.seq_lens), 64 * 64)  # the width of the longest row
    products = min(rows.num_tiles * of_tile, max(SLAB_BYTES, of_tile))
    of_rows = [mean_key_bytes(n, shape) for n in rows.seq_lens]
    means = min(sum(of_rows), max(SLAB_BYTES, *of_rows)) + 8 * num_selected * rows.num_tiles * (shape.head_dim + 1)
    return products + means + 2 * num_selected * sum(rows.block_capacities(64))


def averaged_bytes(rows: Rows, shape: LayerShape, num_selected: int) -> int:
    """Bound the memory of SharePrefill: mean keys, last queries and their scores, histograms of the pivots' maps.

    The maps themselves belong to the step (``Pivots``) and are not counted here.
    """
    blocks = sum(ceil_div(n, shape.block_tokens) for n in rows.seq_lens)
    means = 4 * shape.head_dim * (shape.num_kv_heads * blocks + shape.num_heads * rows.num_rows)
    scores = 4 * blocks * (shape.num_heads + num_selected)
    decisions = 16 * num_selected * rows.num_rows
    of_tiles = num_selected * 4 * rows.num_tiles * (256 + 2)
    return means + scores + decisions + of_tiles + SPARE_BYTES


def mean_key_bytes(seq_len: int, shape: LayerShape) -> int:
    """Bound the memory of one row's mean keys: float32 means of 64 keys, their similarity, and sums of splits."""
    return 6 * shape.num_kv_heads * (ceil_div(seq_len, 64) + 1) * (next_power_of_2(shape.head_dim) + 1)


def voted_bytes(rows: Rows, shape: LayerShape, num_candidates: int, tile_voters: int = 1) -> int:
    """Bound the memory of AnchorAttention: voting queries, their thresholds, and a bit for each candidate key."""
    voter = next_power_of_2(shape.head_dim) * shape.element_bytes + 8
    voters = shape.num_heads * rows.num_tiles * tile_voters * voter
    return voters + shape.num_heads * (num_candidates // 8 + 64)
