# SPDX-License-Identifier: Apache-2.0
"""Every causal block: exact attention through the sparse way, the baseline that all methods are held against."""

from dataclasses import dataclass

import torch

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.select.lists import compact_blocks


@dataclass(frozen=True)
class Dense(Method):
    """No parameters: nothing is left out."""

    block_tokens = 128

    def select(self, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float) -> None:
        compact_blocks(None, index, heads)
