# SPDX-License-Identifier: Apache-2.0
"""What a step gives to one layer."""

from typing import NamedTuple

import torch

from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows


class LayerInputs(NamedTuple):
    """Queries, the cache with their keys and values, and the rows that belong to both."""

    q: torch.Tensor  # [num_tokens, num_heads, head_dim]
    cache: PagedCache
    rows: Rows
    scale: float
    """Takes products of queries' and keys' elements to scores: the softmax's times ``cache.score_scale``."""

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.q.shape[1] // self.cache.num_kv_heads
