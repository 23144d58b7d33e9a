# SPDX-License-Identifier: Apache-2.0
"""What ``top_p`` takes from its workspace at most, in bytes, for any engine."""

from triton import next_power_of_2

from vllm_sparse_kernels.index import LayerShape
from vllm_sparse_kernels.methods.top_p import portable
from vllm_sparse_kernels.methods.top_p.rounding import SPLIT_TOKENS
from vllm_sparse_kernels.rows import TILE_TOKENS, Rows, ceil_div
from vllm_sparse_kernels.select.slabs import padded, rows_of_slabs, tiles_of_runs
from vllm_sparse_kernels.workspace import SPARE_BYTES


def most_bytes(rows: Rows, shape: LayerShape, num_selected: int, kept_d: int) -> int:
    """``kept_d``: channels that are multiplied. Elements of e4m3 may be stored in two bytes."""
    dim = next_power_of_2(shape.head_dim)
    queries = num_selected * rows.num_tiles * TILE_TOKENS * (2 * kept_d + 4)
    splits = ceil_div(max(rows.seq_lens), SPLIT_TOKENS)
    found = 4 * rows.num_rows * shape.num_kv_heads * (dim + kept_d)
    sums = 4 * dim * (2 * rows.num_rows * shape.num_kv_heads * splits + rows.num_tiles * shape.num_heads)
    of_slabs = []
    for first, end in rows_of_slabs(rows):
        keys = shape.num_kv_heads * sum(map(padded, rows.seq_lens[first:end])) * (2 * kept_d + 1)
        tiles = rows.tile_starts[first], rows.tile_starts[end]
        runs = tiles_of_runs(rows, *tiles, num_selected, portable.scratch_bytes)
        of_slabs.append(keys + max(_run_bytes(*run, num_selected) for run in runs))
    return found + max(sums, queries + max(of_slabs)) + SPARE_BYTES


def _run_bytes(first_tile: int, end_tile: int, reach: int, num_selected: int) -> int:
    """Scores and masses; other engines' scores take less, and so may more tiles' masses."""
    num_tiles = end_tile - first_tile
    return num_tiles * (portable.scratch_bytes(num_selected, reach) + 2 * num_selected * ceil_div(reach, 512) * 64)
