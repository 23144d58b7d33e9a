"""Recall query by query: a mean hides the few queries that lose all of what they look for.

The exact weights of a tile's queries are computed once, and any number of selections held against them by one product.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.testing.oracle import tile_weights


def recalls_by_query(
    q: torch.Tensor, cache: PagedCache, indices: Sequence[SparseIndex], scale: float
) -> Iterator[torch.Tensor]:
    """Of each tile in turn [len(indices), num_heads, queries] float32: the share of exact mass that each query keeps.

    The indices are of rows that are alike, and all of their heads are selected. q [num_tokens, num_heads, head_dim]
    holds the queries at the tokens that the rows name, the cache their keys. Reads the device.
    """
    rows, group = indices[0].rows, q.shape[1] // cache.num_kv_heads
    for row in range(rows.num_rows):
        all_keys = cache.gather(rows.block_table[row], rows.seq_lens[row])[0].float()
        for i_tile in range(rows.tile_starts[row], rows.tile_starts[row + 1]):
            tile = rows.tile_list[i_tile]
            kept = torch.stack([kept_keys(index, i_tile) for index in indices], -1)  # [num_heads, keys, indices]
            found = q.new_empty(len(indices), q.shape[1], tile.length_tokens, dtype=torch.float32)
            for kv_head in range(cache.num_kv_heads):
                heads = slice(kv_head * group, (kv_head + 1) * group)
                weights = tile_weights(q, all_keys[:, kv_head].T, tile, heads, scale)
                found[:, heads] = (weights @ kept[heads].float()).permute(2, 0, 1)
            yield found


def kept_keys(index: SparseIndex, i_tile: int) -> torch.Tensor:
    """Bool [num_heads, last_position + 1]: ``SparseIndex.tile_keys`` of all heads."""
    tile = index.rows.tile_list[i_tile]
    num_heads, num_blocks, num_keys = index.num_heads, index.num_causal_blocks(tile), tile.last_position + 1
    rank = torch.arange(num_blocks, device=index.block_ids.device)
    ids = index.block_ids[:, int(index.block_offsets[i_tile]) + rank]
    ids = torch.where(rank < index.block_counts[:, i_tile, None], ids, num_blocks).long()
    blocks = torch.zeros(num_heads, num_blocks + 1, dtype=torch.bool, device=ids.device).scatter_(1, ids, True)
    keys = blocks[:, :num_blocks].repeat_interleave(index.block_tokens, 1)[:, :num_keys]
    if longest := int(index.stripe_counts[:, i_tile].max()):
        rank = torch.arange(longest, device=ids.device)
        listed = rank < index.stripe_counts[:, i_tile, None]
        places = (index.stripe_offsets[:, i_tile, None] + rank).clamp(max=len(index.stripe_positions) - 1)
        positions = torch.where(listed, index.stripe_positions[places], num_keys).long()
        keys = torch.nn.functional.pad(keys, (0, 1)).scatter_(1, positions, True)[:, :num_keys]
    return keys


class Recalls:
    """Recalls of many queries under each of ``count`` selections, counted in steps of a ten-thousandth."""

    STEPS = 10_000

    def __init__(self, count: int) -> None:
        self.counts = torch.zeros(count, self.STEPS + 1, dtype=torch.int64)
        self.sums = torch.zeros(count, dtype=torch.float64)

    def add(self, recalls: torch.Tensor) -> None:
        """[count, ...], each in [0, 1] but for rounding."""
        flat = recalls.flatten(1)
        bins = (flat * self.STEPS + 0.01).long().clamp(0, self.STEPS)  # float32 rounds sums of 1 to less
        self.counts += torch.stack([torch.bincount(b, minlength=self.STEPS + 1) for b in bins]).cpu()
        self.sums += flat.sum(1, dtype=torch.float64).cpu()

    @property
    def num_queries(self) -> int:
        return int(self.counts[0].sum())

    def mean(self) -> list[float]:
        return (self.sums / self.num_queries).tolist()

    def worst(self, share: float) -> list[float]:
        """The most that every query but ``share`` of them keeps, rounded down to a step; 0 asks for the worst one."""
        passed_over = math.floor(share * self.num_queries)
        bins = (self.counts.cumsum(1) > passed_over).int().argmax(1)
        return [b / self.STEPS for b in bins.tolist()]
