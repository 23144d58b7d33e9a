# SPDX-License-Identifier: Apache-2.0
"""Density at a paper's granularity, which may be finer than our tiles of 128 queries.

It is known for methods that also select per tile of 128 queries in their papers, and for methods whose blocks can be
counted: SALE's blocks of 64 queries by 32 keys, and MInference's block-sparse blocks of 64 by 64. MInference's kernel
merges vertical-slash lines into blocks, so the lines have no separate density.
"""

from collections.abc import Sequence

import torch

from vllm_sparse_kernels.index import causal_pairs
from vllm_sparse_kernels.methods.anchor_attention.method import AnchorAttention
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.minference.block_sparse import BlockSparse
from vllm_sparse_kernels.methods.minference.reference import POOL_TOKENS
from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.methods.sale.reference import KEY_BLOCK, last_positions, paper_blocks
from vllm_sparse_kernels.methods.sparge_attn.method import SpargeAttn
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows

SAME = (AnchorAttention, Dense, SpargeAttn)
"""Methods whose tiles are the same as ours."""


def paper_density(
    method: Method,
    head: int,
    real: float,
    queries: Sequence[torch.Tensor],
    cache: PagedCache,
    chunks: Sequence[Rows],
    scale: float,
) -> float | None:
    """Return one query head's kept blocks over all blocks with a causal pair, with chunks weighted by their pairs.

    ``real`` is the density of our index, and ``queries[i]`` belong to ``chunks[i]``. None if there is no such density.
    """
    if isinstance(method, SAME):
        return real
    if isinstance(method, Sale):
        heads = torch.tensor([head], dtype=torch.int32, device=queries[0].device)
        densities = [sale_density(method, q, cache, rows, heads, scale) for q, rows in zip(queries, chunks)]
        weights = [causal_pairs(rows) for rows in chunks]
        return sum(density * weight for density, weight in zip(densities, weights)) / sum(weights)
    if isinstance(method, BlockSparse):
        reach = [last // POOL_TOKENS + 1 for rows in chunks for last in _last_queries(rows)]
        return sum(min(method.top_blocks, blocks) for blocks in reach) / sum(reach)
    return None


def sale_density(
    method: Sale, q: torch.Tensor, cache: PagedCache, rows: Rows, heads: torch.Tensor, scale: float
) -> float:
    """Return kept blocks of 64 queries × 32 keys over all blocks with a causal pair."""
    kept = total = 0
    for _, i_tile, blocks in paper_blocks(method, q, cache, rows, heads, scale):
        kept += int(blocks.sum())
        total += sum(last // KEY_BLOCK + 1 for last in last_positions(rows.tile_list[i_tile]))
    return kept / total


def _last_queries(rows: Rows) -> list[int]:
    """Return the position of the last query of each block of 64, of all rows."""
    return [
        context + min(first + POOL_TOKENS, length) - 1
        for context, length in zip(rows.context_lens, rows.query_lens)
        for first in range(0, length, POOL_TOKENS)
    ]
