# SPDX-License-Identifier: Apache-2.0
"""Every causal block."""

import torch

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.paged import PagedCache


def select_dense(
    method: Method, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float
) -> None:
    """Fill the lists of ``heads`` in plain torch, as ``Dense.select`` does with kernels."""
    for i_tile, tile in enumerate(index.rows.tile_list):
        for head in heads.tolist():
            index.set_blocks(head, i_tile, torch.ones(index.num_causal_blocks(tile), dtype=torch.bool))
