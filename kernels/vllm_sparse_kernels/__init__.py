# SPDX-License-Identifier: Apache-2.0
"""Sparse prefill attention over a paged key-value cache. Depends on torch and triton only, not on vLLM.

The data flow of ``layer.run``: ``Rows`` (the queries and cached keys) → ``methods`` (one folder each, with a reference
in plain float32 torch) → ``SparseIndex`` → ``attend`` (one contract, several engines).
"""

from vllm_sparse_kernels.index import IndexLayout, SparseIndex, StripeLayout
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import TILE_TOKENS, Rows
from vllm_sparse_kernels.workspace import Workspace

__all__ = [
    "TILE_TOKENS",
    "IndexLayout",
    "PagedCache",
    "Rows",
    "SparseIndex",
    "StripeLayout",
    "Workspace",
]
