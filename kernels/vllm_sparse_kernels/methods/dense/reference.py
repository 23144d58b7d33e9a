# SPDX-License-Identifier: Apache-2.0
"""Every causal block."""

import torch

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.paged import PagedCache


def select_dense(
    method: Method, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float
) -> None:
    """Fill the lists of ``heads`` in plain torch, as ``Dense.select`` does by kernels.

    Args:
        method: the method and its parameters.
        q: [num_tokens, num_heads, head_dim], in the cache's dtype.
        cache: keys and values, pages of [page_size, num_kv_heads, head_dim].
        index: the SparseIndex that is filled.
        heads: [n] int32 on the device, the query heads that are selected.
        scale: takes products of elements to scores, in natural units; > 0.
    """
    for i_tile, tile in enumerate(index.rows.tile_list):
        for head in heads.tolist():
            index.set_blocks(head, i_tile, torch.ones(index.num_causal_blocks(tile), dtype=torch.bool))
