# SPDX-License-Identifier: Apache-2.0
"""The three patterns of MInference (arXiv:2407.02490) in plain torch: section 3, Algorithms 2 to 4.

The patterns' files list the deviations. The arithmetic is the paper's.
"""

import torch

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.methods.references import (
    block_means,
    diagonal_sums,
    future_blocks,
    heads_of_rows,
    set_lines,
    set_tiles,
    softmax_of,
    ten_bits,
)
from vllm_sparse_kernels.rows import split_blocks

POOL_TOKENS = 64


def top(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Flag the k largest along the last axis, with ties in order of index."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)


def select_a_shape(call: Call) -> None:
    """Select global tokens and a local window (section 3.2)."""
    index = call.index
    for i_tile, tile in enumerate(index.rows.tile_list):
        keys = torch.arange(tile.last_position + 1, device=call.q.device)
        for head, method in call.heads.pairs:
            kept = (keys < method.sink_tokens) | (keys > tile.position - method.local_tokens)
            index.set_blocks(head, i_tile, kept, tokens=1)


def select_vertical_slash(call: Call) -> None:
    """Select by Algorithms 2 and 4."""
    for row, head, method, queries, keys in heads_of_rows(call):
        vertical, slash = vertical_slash_sums(queries[-method.last_queries :], keys, call.scale)
        verticals = keep(vertical, method.vertical_tokens, method.forced_verticals)
        slashes = keep(slash, method.slash_tokens, method.forced_slashes)
        for i_tile in call.rows.tiles_of(row):
            set_lines(call.index, head, i_tile, verticals, slashes, band=1)


def vertical_slash_sums(last_q: torch.Tensor, keys: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the sums of Algorithm 2: Â = softmax(Q[-last_q:] Kᵀ / √d + m_causal), then sum_v(Â) and sum_s(Â)."""
    positions = torch.arange(len(keys) - len(last_q), len(keys), device=keys.device)
    weights = softmax_of(last_q, keys, positions, scale)
    return weights.sum(0), diagonal_sums(weights, positions, 1)


def keep(sums: torch.Tensor, k: int, forced: int) -> torch.Tensor:
    """Flag the argtopk of Algorithm 2. The first ``forced`` sums are infinite; sums of equal ten bits are equal."""
    sums = sums.clone()
    sums[:forced] = torch.inf
    return top(ten_bits(sums), k)


def select_block_sparse(call: Call) -> None:
    """Select by Algorithm 3."""
    for row, head, method, queries, keys in heads_of_rows(call):
        kept = tile_blocks(block_scores(queries, keys, call.scale), method.top_blocks)
        set_tiles(call.index, row, head, kept, POOL_TOKENS)


def block_scores(q: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute Q̂ K̂ᵀ / √d + m_causal of Algorithm 3."""
    scores = (block_means(q, POOL_TOKENS) @ block_means(keys, POOL_TOKENS).T) * scale
    return scores.masked_fill_(future_blocks(q, keys, POOL_TOKENS, POOL_TOKENS), -torch.inf)


def tile_blocks(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Flag the kept blocks of tiles of two query blocks, [tiles, key blocks] bool; k is k_b."""
    return split_blocks(top(scores, k) & (scores > -torch.inf), 2).any(1)
