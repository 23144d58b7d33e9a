# SPDX-License-Identifier: Apache-2.0
"""``select/last_tiles.py`` in plain torch."""

import torch

from vllm_sparse_kernels.index import SparseIndex


def keep_last_tiles(index: SparseIndex, heads: torch.Tensor) -> None:
    """Of ``heads``, once they are selected: every causal block and no stripe for the last tile of each row."""
    for i_tile in (end - 1 for end in index.rows.tile_starts[1:]):
        every = torch.ones(index.num_causal_blocks(index.rows.tile_list[i_tile]), dtype=torch.bool)
        for head in heads.tolist():
            index.set_blocks(head, i_tile, every.to(index.rows.device))
            index.stripe_counts[head, i_tile] = 0
