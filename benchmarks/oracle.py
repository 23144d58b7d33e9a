# SPDX-License-Identifier: Apache-2.0
"""The oracle: the share of exact attention that a selection keeps, and its density.

A tile's queries keep the same keys, so a selection's recall depends only on each key's share of the exact mass, summed
over the tile's queries. ``exact_masses`` computes these shares once, in float32, a slab of tiles at a time (a GPU
handles 32K queries and keys in seconds and under 1 GB, a CPU 8K). Any number of selections is then compared with them
by lookups. The recall of single queries has to be summed while their shares are in memory, so ``exact_masses`` accepts
the indices for which it is needed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tests.helpers.structured import Structured
from vllm_sparse_kernels.index import SparseIndex, causal_pairs
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows, Tile

SLAB_TILES = 32


class Quality(NamedTuple):
    """Recall and density of each query head, over all queries of all rows: [num_heads] float64."""

    recall: torch.Tensor
    """Share of a query's exact softmax mass on its kept keys, mean over queries."""

    density: torch.Tensor
    """Kept (query, key) pairs over causal pairs."""


@dataclass(frozen=True)
class ExactMass:
    """Exact attention of up to ``SLAB_TILES`` tiles of one row."""

    rows: Rows
    tiles: range
    """Numbers of the tiles in ``rows.tile_list``."""

    keys: torch.Tensor  # [num_heads, len(tiles), num_keys] float32, mass of each key summed over a tile's queries

    query_recalls: tuple[torch.Tensor, ...] = ()
    """For each given index, [num_heads, queries of these tiles] float32: the mass that each query keeps."""

    def pairs(self) -> torch.Tensor:
        """Return [len(tiles), num_keys] int64: the number of a tile's queries that see each key."""
        device = self.keys.device
        tiles = [self.rows.tile_list[i] for i in self.tiles]
        last = torch.tensor([tile.last_position for tile in tiles], device=device)[:, None]
        length = torch.tensor([tile.length_tokens for tile in tiles], device=device)[:, None]
        seen_by = last + 1 - torch.arange(self.keys.shape[2], device=device)
        return torch.minimum(seen_by.clamp(min=0), length)


def exact_masses(
    q: torch.Tensor, cache: PagedCache, rows: Rows, scale: float, indices: Sequence[SparseIndex] = ()
) -> Iterator[ExactMass]:
    """Yield the exact masses of all tiles of all rows, slab by slab.

    q [num_tokens, num_heads, head_dim] has the queries of ``rows``, and the cache their keys; ``scale`` multiplies q·k.
    ``query_recalls`` are computed for ``indices``, whose heads are all selected and whose rows equal ``rows``.
    """
    group = q.shape[1] // cache.num_kv_heads
    for row in range(rows.num_rows):
        all_keys = cache.gather(rows.block_table[row], rows.seq_lens[row])[0].float()
        end = rows.tile_starts[row + 1]
        for first in range(rows.tile_starts[row], end, SLAB_TILES):
            tiles = range(first, min(first + SLAB_TILES, end))
            num_keys = rows.tile_list[tiles[-1]].last_position + 1
            masses = torch.zeros(q.shape[1], len(tiles), num_keys, device=q.device)
            flags = [[kept_keys(index, i_tile) for i_tile in tiles] for index in indices]
            starts = [0, *accumulate(rows.tile_list[i_tile].length_tokens for i_tile in tiles)]
            recalls = tuple(torch.empty(q.shape[1], starts[-1], device=q.device) for _ in indices)
            for kv_head in range(cache.num_kv_heads):
                heads = slice(kv_head * group, (kv_head + 1) * group)
                keys = all_keys[:num_keys, kv_head].T.contiguous()
                for place, i_tile in enumerate(tiles):
                    tile = rows.tile_list[i_tile]
                    weights = tile_weights(q, keys, tile, heads, scale)
                    masses[heads, place, : tile.last_position + 1] = weights.sum(1)
                    for of_tiles, recall in zip(flags, recalls):
                        kept = (weights @ of_tiles[place][heads, :, None].float()).squeeze(2)
                        recall[heads, starts[place] : starts[place + 1]] = kept
            yield ExactMass(rows, tiles, masses, recalls)


def tile_weights(q: torch.Tensor, keys: torch.Tensor, tile: Tile, heads: slice, scale: float) -> torch.Tensor:
    """Return exact weights [heads, queries, last_position + 1]; ``heads`` share the keys [head_dim, num_keys]."""
    queries = q[tile.token : tile.token + tile.length_tokens, heads].float().transpose(0, 1) * scale
    scores = queries @ keys[:, : tile.last_position + 1]
    unseen = torch.ones(tile.length_tokens, tile.length_tokens, dtype=torch.bool, device=q.device).triu_(1)
    scores[:, :, tile.position :].masked_fill_(unseen, -torch.inf)
    return scores.softmax(-1)


def kept_keys(index: SparseIndex, i_tile: int) -> torch.Tensor:
    """Return ``masks.tile_keys`` of all heads: bool [num_heads, last_position + 1]."""
    tile = index.rows.tile_list[i_tile]
    num_keys = tile.last_position + 1
    blocks = _block_flags(index, range(i_tile, i_tile + 1), index.num_causal_blocks(tile))[:, 0]
    keys = blocks.repeat_interleave(index.block_tokens, 1)[:, :num_keys]
    if longest := int(index.stripe_counts[:, i_tile].max()):
        rank = torch.arange(longest, device=keys.device)
        listed = rank < index.stripe_counts[:, i_tile, None]
        places = (index.stripe_offsets[:, i_tile, None] + rank).clamp(max=len(index.stripe_positions) - 1)
        positions = torch.where(listed, index.stripe_positions[places], num_keys).long()
        keys = F.pad(keys, (0, 1)).scatter_(1, positions, True)[:, :num_keys]
    return keys


class Tally(NamedTuple):
    """Counts of an index per query head: [num_heads]."""

    kept: torch.Tensor  # float64, kept mass
    total: torch.Tensor  # float64, all mass
    pairs: torch.Tensor  # int64, kept pairs

    def plus(self, other: "Tally") -> "Tally":
        return Tally(*(a + b for a, b in zip(self, other, strict=True)))

    def quality(self, num_causal_pairs: int) -> Quality:
        return Quality(self.kept / self.total, self.pairs.double() / num_causal_pairs)


def tally(index: SparseIndex, mass: ExactMass) -> Tally:
    """Return the counts of ``index`` for these tiles. All its heads are selected; its rows are those of ``mass``."""
    blocks = _pool(mass.keys, index.block_tokens)  # [num_heads, tiles, num_blocks]
    pairs = _pool(mass.pairs(), index.block_tokens)
    flags = _block_flags(index, mass.tiles, blocks.shape[2])
    kept = (blocks * flags).sum((1, 2), dtype=torch.float64)
    num_pairs = (pairs * flags).sum((1, 2))
    counts = index.stripe_counts[:, mass.tiles.start : mass.tiles.stop]
    if longest := int(counts.max()):
        lengths = torch.tensor([index.rows.tile_list[i].length_tokens for i in mass.tiles], device=counts.device)
        num_pairs = num_pairs + (counts * lengths).sum(1)
        kept = kept + torch.stack([_stripe_mass(index, mass, head, longest) for head in range(index.num_heads)])
    return Tally(kept, blocks.sum((1, 2), dtype=torch.float64), num_pairs)


def _pool(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """Sum every ``tokens`` keys along the last axis."""
    return F.pad(x, (0, -x.shape[-1] % tokens)).unflatten(-1, (-1, tokens)).sum(-1)


def _block_flags(index: SparseIndex, tiles: range, num_blocks: int) -> torch.Tensor:
    """Return flags of the listed blocks: bool [num_heads, len(tiles), num_blocks]."""
    span = slice(tiles.start, tiles.stop)
    rank = torch.arange(num_blocks, device=index.block_ids.device)
    places = (index.block_offsets[span, None] + rank).clamp(max=index.block_ids.shape[1] - 1)
    listed = rank < index.block_counts[:, span, None]
    ids = torch.where(listed, index.block_ids[:, places], num_blocks).long()
    flags = torch.zeros(*ids.shape[:2], num_blocks + 1, dtype=torch.bool, device=ids.device)
    return flags.scatter_(2, ids, True)[:, :, :num_blocks]


def _stripe_mass(index: SparseIndex, mass: ExactMass, head: int, longest: int) -> torch.Tensor:
    """Return the mass of one head's stripes, a float64 scalar. No tile has more than ``longest`` stripes."""
    span = slice(mass.tiles.start, mass.tiles.stop)
    rank = torch.arange(longest, device=index.block_ids.device)
    places = (index.stripe_offsets[head, span, None] + rank).clamp(max=len(index.stripe_positions) - 1)
    listed = rank < index.stripe_counts[head, span, None]
    positions = torch.where(listed, index.stripe_positions[places], 0).long()
    return (mass.keys[head].gather(1, positions) * listed).sum(dtype=torch.float64)


def measure(q: torch.Tensor, cache: PagedCache, index: SparseIndex, scale: float) -> Quality:
    """Return recall and density of an index whose heads are all selected. For the arguments, see ``exact_masses``."""
    counted = None
    for mass in exact_masses(q, cache, index.rows, scale):
        part = tally(index, mass)
        counted = part if counted is None else counted.plus(part)
    if counted is None:
        raise ValueError("measure: given an index without rows, expected at least one")
    return counted.quality(causal_pairs(index.rows))


class Bound:
    """The largest recall of any choice of blocks of ``block_tokens`` keys at a density, with these tiles.

    Blocks are ranked over all heads and tiles by mass per pair, the best first. With ``block_tokens`` 64 or 128, blocks
    on a tile's diagonal are always kept. Ranks are rounded to an eighth of an octave.
    """

    BINS = 320

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.mass = torch.zeros(self.BINS, dtype=torch.float64)
        self.pairs = torch.zeros(self.BINS, dtype=torch.float64)

    def add(self, mass: ExactMass) -> None:
        blocks = _pool(mass.keys, self.block_tokens)
        pairs = _pool(mass.pairs(), self.block_tokens).double()
        bins = ((blocks / pairs).log2() * -8).clamp(0, self.BINS - 1)
        if self.block_tokens > 1:
            starts = torch.tensor([mass.rows.tile_list[i].position for i in mass.tiles], device=bins.device)
            ids = torch.arange(bins.shape[2], device=bins.device)
            bins.masked_fill_(ids >= starts[:, None] // self.block_tokens, 0)
        # Blocks without pairs lie past the tile and add nothing to any bin.
        bins = bins.nan_to_num().int().flatten()
        for counted, weights in ((self.mass, blocks.double()), (self.pairs, pairs.expand_as(blocks))):
            counted += torch.bincount(bins, weights.flatten(), self.BINS).cpu()

    def curve(self) -> tuple[list[float], list[float]]:
        """Return densities and recalls of the best choices, ascending."""
        recall = self.mass.cumsum(0) / self.mass.sum()
        density = self.pairs.cumsum(0) / self.pairs.sum()
        return density.tolist(), recall.tolist()


def oracle_density(data: Structured, mass: float = 0.95, num_queries: int = 64, seed: int = 0) -> torch.Tensor:
    """Return the smallest share of causal keys that keeps ``mass`` of a query's exact softmax, averaged over queries.

    The result is [num_heads] float64 on the CPU, from ``num_queries`` random queries of the row, the same for all
    heads. It is exact for each query, computed in float32 a head at a time.
    """
    query_len, num_heads, _ = data.q.shape
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randperm(query_len, generator=generator)[:num_queries].to(data.q.device)
    positions = tokens + data.context_len
    hidden = torch.arange(len(data.k), device=data.k.device) > positions[:, None]
    group = num_heads // data.k.shape[1]
    shares = []
    for head in range(num_heads):
        keys = data.k[:, head // group].float()
        scores = (data.q[tokens, head].float() @ keys.T * data.scale).masked_fill_(hidden, -torch.inf)
        kept = scores.softmax(-1).sort(descending=True).values.double().cumsum(-1)
        needed = (kept < mass).sum(-1) + 1
        shares.append((needed / (positions + 1)).mean())
    return torch.stack(shares).double().cpu()
