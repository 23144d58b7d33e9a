# SPDX-License-Identifier: Apache-2.0
"""Sparse prefill attention over a paged key-value cache: torch and triton only, nothing of vLLM.

The way of the data, which ``layer.run`` goes: ``Rows`` (which queries, which cached keys) → ``methods`` (a folder each,
with a reference in plain float32 torch) → ``SparseIndex`` → ``attend`` (one contract, several engines).
"""

from vllm_sparse_kernels.attention import shared_bytes, widest_block
from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.index import IndexLayout, LayerShape, SparseIndex, StripeLayout
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import TILE_TOKENS, Rows
from vllm_sparse_kernels.workspace import Workspace

__all__ = [
    "TILE_TOKENS",
    "AttendOptions",
    "IndexLayout",
    "LayerShape",
    "PagedCache",
    "Rows",
    "SparseIndex",
    "StripeLayout",
    "Workspace",
    "shared_bytes",
    "widest_block",
]
