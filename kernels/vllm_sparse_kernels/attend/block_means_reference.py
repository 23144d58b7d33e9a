# SPDX-License-Identifier: Apache-2.0
"""Means in place of dropped blocks, as ``attend/block_means.py`` states them, in plain torch."""

from itertools import product

import torch

from vllm_sparse_kernels.attend.block_means import mean_tokens
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache


def attend_to_means(
    q: torch.Tensor,
    cache: PagedCache,
    index: SparseIndex,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
    mean_heads: torch.Tensor,
) -> None:
    """Add the means to out and lse, which hold the attention over the index, in heads where ``mean_heads`` is set.

    Softmax over what is kept and the means together: the former has the weight exp(lse) in it.
    """
    rows, group, heads = index.rows, index.num_heads // cache.num_kv_heads, mean_heads.nonzero().flatten().tolist()
    for row in range(rows.num_rows):
        gathered = cache.gather(rows.block_table[row], rows.seq_lens[row])
        keys, values = (mean_blocks(x.to(dtype), index.block_tokens) for x in gathered)
        values = values * cache.value_scale
        for i_tile, head in product(range(rows.tile_starts[row], rows.tile_starts[row + 1]), heads):
            dropped, tile = dropped_keys(index, head, i_tile), rows.tile_list[i_tile]
            if not bool(dropped.any()):
                continue
            b_k, b_v = (x[: len(dropped), head // group] for x in (keys, values))
            tokens = slice(tile.token, tile.token + tile.length_tokens)
            scores = q[tokens, head].to(dtype) @ b_k.T * scale + dropped.to(dtype).log()
            weights = torch.cat((lse[head, tokens, None].to(dtype), scores), 1)
            p = weights.softmax(-1)
            kept = p[:, :1] * out[tokens, head].to(dtype)
            out[tokens, head] = (kept + p[:, 1:] @ b_v).to(out.dtype)
            lse[head, tokens] = weights.logsumexp(-1).to(lse.dtype)


def mean_blocks(x: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """Means [num_means, heads, head_dim] of the whole mean blocks of one row's x [seq_len, heads, head_dim]."""
    width = mean_tokens(block_tokens)
    num_means = len(x) // width
    return x[: num_means * width].unflatten(0, (num_means, width)).mean(1)


def dropped_keys(index: SparseIndex, head: int, i_tile: int) -> torch.Tensor:
    """How many keys a tile drops of each mean block before its diagonal: int64 [num_means]."""
    width = mean_tokens(index.block_tokens)
    num_keys = index.first_diagonal_block(index.rows.tile_list[i_tile]) * index.block_tokens
    kept = index.tile_keys(head, i_tile)[:num_keys]
    return (~kept).unflatten(0, (num_keys // width, width)).sum(1)
