"""The oracle: how much of exact attention a selection keeps, and at what price.

Exact scores in float32, for one tile of queries and the query heads of one kv head at a time: a GPU does 32K queries on
32K keys in seconds and 1 GB, a CPU 8K on 8K.
"""

from typing import NamedTuple

import torch

from vllm_sparse_kernels.index import SparseIndex, causal_pairs
from vllm_sparse_kernels.paged import PagedCache


class Quality(NamedTuple):
    """What each query head keeps, over all queries of all rows: [num_heads] float64."""

    recall: torch.Tensor
    """Share of a query's exact softmax mass that its kept keys carry, mean over queries."""

    density: torch.Tensor
    """Kept (query, key) pairs over causal pairs."""


def measure(q: torch.Tensor, cache: PagedCache, index: SparseIndex, scale: float) -> Quality:
    """Recall and density of an index whose heads are all selected. Reads the device.

    q [num_tokens, num_heads, head_dim] holds the queries at the tokens that ``index.rows`` names, the cache their keys;
    ``scale`` multiplies q·k.
    """
    rows, group = index.rows, q.shape[1] // cache.num_kv_heads
    mass = torch.zeros(index.num_heads, dtype=torch.float64, device=q.device)
    pairs = torch.zeros(index.num_heads, dtype=torch.int64, device=q.device)
    for row in range(rows.num_rows):
        keys, _ = cache.gather(rows.block_table[row], rows.seq_lens[row])
        for kv_head in range(cache.num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            head_keys = keys[:, kv_head].float()
            for i_tile in range(rows.tile_starts[row], rows.tile_starts[row + 1]):
                kept_mass, kept_pairs = _measure_tile(q, head_keys, index, heads, i_tile, scale)
                mass[heads] += kept_mass
                pairs[heads] += kept_pairs
    return Quality(mass / sum(rows.query_lens), pairs.double() / causal_pairs(rows))


def _measure_tile(
    q: torch.Tensor, keys: torch.Tensor, index: SparseIndex, heads: slice, i_tile: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Kept shares of the mass, summed over a tile's queries, and kept pairs, of heads that share keys."""
    tile = index.rows.tile_list[i_tile]
    queries = q[tile.token : tile.token + tile.length_tokens, heads].float().transpose(0, 1)
    num_keys = tile.last_position + 1
    unseen = torch.ones(tile.length_tokens, num_keys, dtype=torch.bool, device=q.device).triu_(tile.position + 1)
    kept = torch.stack([index.tile_keys(head, i_tile) for head in range(heads.start, heads.stop)])[:, None] & ~unseen
    scores = (queries @ keys[:num_keys].T).mul_(scale).masked_fill_(unseen, -torch.inf)
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    total = weights.sum(-1)
    shares = weights.mul_(kept).sum(-1) / total
    return shares.sum(-1, dtype=torch.float64), kept.sum((1, 2))
