# SPDX-License-Identifier: Apache-2.0
"""Upper bound of the workspace memory of ``top_p``, in bytes, for any of its engines."""

from collections.abc import Sequence

from triton import next_power_of_2

from vllm_sparse_kernels.index import LayerShape
from vllm_sparse_kernels.methods.top_p.rounding import SPLIT_TOKENS, Storage
from vllm_sparse_kernels.rows import Rows, ceil_div
from vllm_sparse_kernels.selection.slabs import TileBytes, most_run_bytes, padded, rows_of_slabs
from vllm_sparse_kernels.workspace import SPARE_BYTES


def most_bytes(rows: Rows, shape: LayerShape, num_selected: int, storage: Storage, engines: Sequence[TileBytes]) -> int:
    """Return an upper bound of the memory of selection. The bound never decreases as tiles or keys are added."""
    dim, kept_d = next_power_of_2(shape.head_dim), storage.kept_d
    queries = num_selected * rows.num_tiles * storage.num_scored * (2 * kept_d + 4)
    splits = ceil_div(max(rows.seq_lens), SPLIT_TOKENS)
    moments = 4 * rows.num_rows * shape.num_kv_heads * (dim + kept_d)
    sums = 4 * dim * (2 * rows.num_rows * shape.num_kv_heads * splits + rows.num_tiles * shape.num_heads)
    slab_bytes = []
    for first_row, end_row in rows_of_slabs(rows):
        seq_lens = rows.seq_lens[first_row:end_row]
        num_tiles = rows.tile_starts[end_row] - rows.tile_starts[first_row]
        keys = shape.num_kv_heads * sum(map(padded, seq_lens)) * (2 * kept_d + 1)
        runs = [most_run_bytes(num_tiles, num_selected, max(seq_lens), tile_bytes) for tile_bytes in engines]
        slab_bytes.append(keys + max(runs))
    return moments + max(sums, queries + max(slab_bytes)) + SPARE_BYTES
