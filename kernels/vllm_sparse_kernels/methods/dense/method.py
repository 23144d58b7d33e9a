# SPDX-License-Identifier: Apache-2.0
"""Every causal block: exact attention on the sparse path, the baseline of all methods."""

from dataclasses import dataclass

import torch

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.selection.lists import compact_blocks


@dataclass(frozen=True)
class Dense(Method):
    """Dense attention; the method has no parameters."""

    block_tokens = 128

    def select(self, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float) -> None:
        """Fill the lists of ``heads``: see ``Method.select``.

        Args:
            q: [num_tokens, num_heads, head_dim], in the cache's dtype.
            cache: Keys and values of the layer, in pages of [page_size, num_kv_heads, head_dim].
            index: The index, whose lists of ``heads`` are overwritten.
            heads: [n] int32 on the device, numbers of the selected query heads.
            scale: Factor from q·k to scores, usually 1/√head_dim; above 0.
        """
        compact_blocks(None, index, heads)
