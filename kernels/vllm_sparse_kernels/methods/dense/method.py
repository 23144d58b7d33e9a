# SPDX-License-Identifier: Apache-2.0
"""Every causal block: exact attention through the sparse way, the baseline that all methods are held against."""

from dataclasses import dataclass

import torch

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.selection.lists import compact_blocks


@dataclass(frozen=True)
class Dense(Method):
    """No parameters: nothing is left out."""

    block_tokens = 128

    def select(self, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float) -> None:
        """Fill the lists of ``heads``: see ``Method.select``.

        Args:
            q: [num_tokens, num_heads, head_dim], in the cache's dtype.
            cache: keys and values, pages of [page_size, num_kv_heads, head_dim].
            index: the SparseIndex that is filled.
            heads: [n] int32 on the device, the query heads that are selected.
            scale: takes products of elements to scores, in natural units; > 0.
        """
        compact_blocks(None, index, heads)
